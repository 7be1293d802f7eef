"""The weights of a Hugging Face folder, read on demand by the engine.

[Note: Deferred loading]
transformers' `from_pretrained` builds a model on the meta device, loads all weights into it, and
finishes: it ties weights, initialises those that the checkpoint lacks, computes buffers that no
checkpoint holds, and reports. `DeferredWeights` replaces only the second part. It plans the target
of each tensor with transformers' own renamings and conversions, run on the meta device, and marks
planned weights as loaded. transformers then finishes as usual, and leaves planned weights on the
meta device. `fill` reads them, one module at a time, as views of the file's pages: without a
conversion the engine's copy is the only one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.metadata import version
from inspect import signature
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from offloadtrain.engine import ModelError
from offloadtrain.runtime.tensor_parts import is_distributed, keep_part

_log = logging.getLogger(__name__)

_LISTED = 5
"""Number of names in an error message."""

_LOAD_TAKES = ["model", "state_dict", "checkpoint_files", "load_config"]
"""First parameters of the transformers method that is replaced."""

_MAPPED_BYTES = 256 << 20
"""Bytes read before the files are closed, so that pages already read are unmapped."""

_LFS_POINTER = b"version https://git-lfs"

_patching = threading.Lock()


class CannotDeferError(Exception):
    """A conversion of weights, or an initialisation, needs values and not only shapes."""


@dataclass(slots=True)
class _Recipe:
    """Makes one or more tensors of the model from tensors of a checkpoint.

    Attributes:
        target: name in the model; if it makes several, of the first.
        transform: a `WeightTransform` of transformers that has collected nothing yet.
        sources: pairs (pattern of the transform, name in the checkpoint).
    """

    target: str
    transform: Any
    sources: list[tuple[str, str]] = field(default_factory=list)

    def make(self, read: Callable[[str], Tensor], model: Any) -> dict[str, Tensor]:
        """Return name in the model → tensor."""
        transform = deepcopy(self.transform)
        for pattern, name in self.sources:
            transform.add_tensor(self.target, name, pattern, read(name))
        made = transform.convert(self.target, model=model, config=model.config)
        return {name: x[0] if isinstance(x, list) else x for name, x in made.items()}


class DeferredWeights:
    """Weights of a checkpoint, planned for a model on the meta device."""

    def __init__(self) -> None:
        self._files: SafetensorsFiles
        self._model: Any = None
        self._recipes: dict[str, _Recipe] = {}
        """Name in the model → the recipe that makes it."""
        self._made: dict[str, Tensor] = {}
        """Tensors that were made together with another one, and not requested yet."""
        self._dtypes: dict[str, torch.dtype] = {}
        """Name of a tensor → dtype, if the model stores it in a fixed dtype."""
        self._params: dict[nn.Parameter, str] = {}
        self._buffers: dict[tuple[nn.Module, str], str] = {}

    @property
    def dtype(self) -> torch.dtype | str:
        """The dtype with which transformers loads the files without rounding, if they cannot
        be planned."""
        wide = any(x.dtype == torch.float32 for x in self._files.shapes.values())
        return torch.float32 if wide else "auto"

    def plan(self, load: Callable[[], Any]) -> Any:
        """Call `from_pretrained` of a transformers class, and return its model, whose weights
        stay on the meta device until `fill`.

        Raises:
            CannotDeferError: the model must be loaded completely.
        """
        with self._replacing_load():
            try:
                model = load()
            except NotImplementedError as error:  # torch: values of a meta tensor were read
                raise CannotDeferError(str(error)) from error
        self._bind()
        return model

    @contextmanager
    def _replacing_load(self) -> Iterator[None]:
        """Plan instead of loading in calls of `from_pretrained` from this thread."""
        from transformers import PreTrainedModel

        thread_id, load = threading.get_ident(), _load_of(PreTrainedModel)

        def plan(model: Any, state_dict: Any, files: Any, config: Any, *rest: Any) -> Any:
            if threading.get_ident() != thread_id:
                return load(model, state_dict, files, config, *rest)
            self._dtypes = fixed_dtypes(model.state_dict(), config.dtype_plan or {})
            return self._plan(model, files, config.weight_mapping or []), None

        with _patching:
            PreTrainedModel._load_pretrained_model = staticmethod(plan)
            try:
                yield
            finally:
                PreTrainedModel._load_pretrained_model = staticmethod(load)

    def _bind(self) -> None:
        """Find the parameters and buffers to fill: all that are on the meta device. Their names may
        change later.

        Raises:
            ModelError: a meta tensor has no values in the checkpoint.
        """
        for name, param in self._planned(nn.Module.named_parameters):
            self._params[param] = name
        buffers = self._planned(nn.Module.named_buffers)
        for name, _ in buffers:
            path, _, key = name.rpartition(".")
            self._buffers[self._model.get_submodule(path), key] = name
        # A model may create tensors off the meta device, which the engine does not request.
        for module in self._model.modules():
            self._fill(module, lambda tensor: not tensor.is_meta)
        known = {*self._params, *(buffer for _, buffer in buffers)}
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if tensor.is_meta and tensor not in known:
                raise ModelError(f"'{name}' is on the meta device, and there are no values for it")

    def follow(self) -> None:
        """Fill the DTensors that have replaced parameters of the model, with this rank's part."""
        names = set(self._params.values())
        named = self._model.named_parameters(remove_duplicate=False)
        self._params = {param: name for name, param in named if name in names}

    def fill(self, module: nn.Module) -> None:
        """Fill a module's own planned parameters and buffers; a `param_init_fn`."""
        self._fill(module, lambda tensor: True)

    def fill_all(self) -> None:
        """Replace all planned parameters by parameters with values, in the dtypes in which
        transformers loads the model."""
        filled: dict[nn.Parameter, nn.Parameter] = {}
        for module in self._model.modules():
            for key, param in module.named_parameters(recurse=False):
                if (name := self._params.pop(param, None)) is not None:
                    value = self._take(name).to(self._dtypes.get(name, param.dtype))
                    filled[param] = nn.Parameter(value, param.requires_grad)
                if param in filled:
                    module.register_parameter(key, filled[param])
            self.fill(module)
        self.close()

    def _fill(self, module: nn.Module, chosen: Callable[[Tensor], bool]) -> None:
        for key, param in module.named_parameters(recurse=False):
            if param not in self._params or not chosen(param):
                continue
            value = self._take(self._params.pop(param))
            if is_distributed(param):
                keep_part(module, key, value)
            else:
                param.data = value.contiguous()
        for key, buffer in list(module.named_buffers(recurse=False)):
            if (module, key) in self._buffers and chosen(buffer):
                name = self._buffers.pop((module, key))
                dtype = self._dtypes.get(name, buffer.dtype)
                module._buffers[key] = self._take(name).to(dtype, copy=True)

    def close(self, *, partly: bool = False) -> None:
        """Raise ModelError if a planned weight was not requested; `partly`: other ranks hold
        some."""
        if self._params and not partly:
            raise ModelError(f"the engine did not ask for {_some(list(self._params.values()))}")
        del self._files, self._model

    def _planned(self, of: Callable[..., Iterator[tuple[str, Any]]]) -> list[tuple[str, Any]]:
        """Return planned tensors by name; tied tensors have the planned name."""
        planned = of(self._model, remove_duplicate=False)
        return [(name, tensor) for name, tensor in planned if name in self._recipes]

    def _take(self, name: str) -> Tensor:
        if name not in self._made:
            made = self._recipes[name].make(self._files.tensor, self._model)
            self._made.update((key, x) for key, x in made.items() if key in self._recipes)
        return self._made.pop(name)

    def _plan(self, model: Any, files: Sequence[str], conversions: Sequence[Any]) -> Any:
        """Plan the recipe of each tensor of the model; return transformers' record of loading.

        Raises:
            ModelError: shapes differ, or the checkpoint is of another model.
            CannotDeferError: a conversion needs values.
        """
        from transformers.utils.loading_report import LoadStateDictInfo

        if self._model is not None:
            raise CannotDeferError("the model loads another one while it is made")
        self._model, self._files = model, SafetensorsFiles(files)
        expected = model.state_dict()
        recipes, unexpected = _recipes(model, expected, self._files.shapes, conversions)
        shapes: dict[str, Tensor] = {}
        for recipe in recipes:
            for name, made in self._shapes_of(recipe).items():
                if expected.get(name) is None:
                    unexpected.add(name)
                else:
                    self._recipes[name], shapes[name] = recipe, made
        _check_shapes(model, expected, shapes)
        self._untie(model)
        _check_share(model, expected, self._recipes, self._files.shapes)
        for name in self._recipes:
            # transformers initialises tensors without this mark.
            model.get_parameter_or_buffer(name)._is_hf_initialized = True
        # `save_pretrained` reverts these conversions.
        model._weight_conversions = [
            conversion for conversion in conversions if conversion.was_used()
        ]
        return LoadStateDictInfo(
            missing_keys=set(expected) - set(self._recipes),
            unexpected_keys=unexpected,
            mismatched_keys=set(),
            error_msgs=[],
            conversion_errors={},
            skipped_pp_keys=set(),
        )

    def _shapes_of(self, recipe: _Recipe) -> dict[str, Tensor]:
        try:
            return recipe.make(self._files.shapes.__getitem__, self._model)
        # Any error: transformers raises it again while loading, or it is a limit of meta tensors.
        except Exception as error:
            raise CannotDeferError(f"{recipe.target}: {error}") from error

    def _untie(self, model: Any) -> None:
        """For two tied names that are both in the checkpoint: equal tensors are loaded once, and
        different ones are untied."""
        for name, source in list(model.all_tied_weights_keys.items()):
            if name not in self._recipes or source not in self._recipes:
                continue
            if torch.equal(self._take(name), self._take(source)):
                del self._recipes[name]
            else:
                _log.warning(
                    "'%s' and '%s' are tied by the model's configuration and differ in the "
                    "checkpoint: they are trained as two weights",
                    name,
                    source,
                )
                del model.all_tied_weights_keys[name]


def _load_of(model: Any) -> Callable[..., Any]:
    """Return the method that `plan` replaces; transformers has no public hook there.

    Raises:
        ModelError: this version of transformers loads differently.
    """
    load: Callable[..., Any] | None = getattr(model, "_load_pretrained_model", None)
    if load is not None and [*signature(load).parameters][: len(_LOAD_TAKES)] == _LOAD_TAKES:
        return load
    raise ModelError(
        f"transformers {version('transformers')} loads checkpoints in another way than 5.23, which "
        "ot.from_pretrained follows: install transformers==5.23.0; or load the model with "
        "transformers, and ot.offload it (the model is then in host memory twice)"
    )


def fixed_dtypes(names: Iterable[str], plan: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """Return name → dtype for names that match a pattern with a fixed dtype.

    Args:
        plan: result of `PreTrainedModel._get_dtype_plan`: pattern → dtype.
    """
    from transformers.core_model_loading import build_glob_alternation

    if not plan:
        return {}
    pattern, of_group, _ = build_glob_alternation(list(plan))
    matches = ((name, pattern.search(name)) for name in names)
    return {name: plan[of_group[match.lastgroup]] for name, match in matches if match}


def _recipes(
    model: Any,
    expected: Mapping[str, Any],
    names: Sequence[str] | Mapping[str, Tensor],
    conversions: Sequence[Any],
) -> tuple[list[_Recipe], set[str]]:
    """Plan from names alone; return recipes, and the names that the model does not have.

    Follows the order and rules of transformers' `convert_and_load_state_dict_in_model`.
    """
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [
        conversion for conversion in conversions if isinstance(conversion, WeightConverter)
    ]
    of_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    prefix = model.base_model_prefix
    recipes: dict[str, _Recipe] = {}
    unexpected: set[str] = set()
    for name in sorted(names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if renamed not in expected and name in expected:
            renamed, pattern = rename_source_key(name, [], [], prefix, expected)
        if renamed not in expected:
            unexpected.add(renamed)
            continue
        transform = WeightRenaming(name, renamed) if pattern is None else of_pattern[pattern]
        recipe = recipes.setdefault(renamed, _Recipe(renamed, deepcopy(transform)))
        recipe.sources.append((pattern or name, name))
    return list(recipes.values()), unexpected


def _check_shapes(model: Any, expected: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> None:
    wrong = [
        f"{name} {tuple(x.shape)}, not {tuple(expected[name].shape)}"
        for name, x in loaded.items()
        if x.shape != expected[name].shape
    ]
    if wrong:
        raise ModelError(
            f"the checkpoint does not have the shapes of {type(model).__name__} with this "
            f"configuration: {_some(wrong)}. Pass what differs in model_kwargs (num_labels, "
            "vocab_size, …), or correct config.json"
        )
    narrow = [name for name, x in loaded.items() if x.is_floating_point() and x.itemsize < 2]
    if narrow:
        raise ModelError(
            f"{_some(narrow)} {'has' if len(narrow) == 1 else 'have'} 8 bits and no scale: "
            "load an unquantized checkpoint"
        )


def _check_share(
    model: Any,
    expected: Mapping[str, Tensor],
    planned: Mapping[str, Any],
    names: Mapping[str, Tensor],
) -> None:
    """Raise ModelError if most of the model would be random, which is more than a missing head."""
    tied = model.all_tied_weights_keys
    sizes = {name: x.numel() for name, x in expected.items() if isinstance(x, Tensor)}
    missing = [name for name in sizes if name not in planned and name not in tied]
    if 2 * sum(sizes[name] for name in missing) > sum(sizes.values()):
        raise ModelError(
            f"the checkpoint has no weights for most of {type(model).__name__}: it lacks "
            f"{_some(missing)} and has {_some(list(names))}. Pass the class that it was saved "
            "from as auto_class"
        )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


class SafetensorsFiles:
    """The tensors of several safetensors files, as views of mapped pages."""

    def __init__(self, files: Sequence[str]) -> None:
        self._open: dict[str, Any] = {}
        self._read_bytes = 0
        self._file_of: dict[str, str] = {}
        self.shapes: dict[str, Tensor] = {}
        """Name → meta tensor with its shape and dtype."""
        for file in files:
            for name in self._opened(file).keys():
                self._file_of[name] = file
                self.shapes[name] = torch.empty_like(self.tensor(name), device="meta")
        self._open.clear()

    def tensor(self, name: str) -> Tensor:
        """Return a view of a tensor's pages, which stay mapped while the view is alive."""
        if self._read_bytes > _MAPPED_BYTES:
            self._open.clear()
            self._read_bytes = 0
        tensor: Tensor = self._opened(self._file_of[name]).get_tensor(name)
        self._read_bytes += tensor.nbytes
        return tensor

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except FileNotFoundError as error:
                raise ModelError(
                    f"'{file}' is not there, and the index beside it names it: copy or download "
                    "the missing shard"
                ) from error
            except SafetensorError as error:
                raise ModelError(_unreadable(file, error)) from error
        return self._open[file]


def _unreadable(file: str, error: SafetensorError) -> str:
    with open(file, "rb") as opened:
        begins = opened.read(len(_LFS_POINTER))
    if begins == _LFS_POINTER:
        return (
            f"'{file}' is a pointer of Git LFS and holds no weights: run `git lfs pull` in its "
            "clone, or `hf download`"
        )
    return f"'{file}' is damaged, or no safetensors file: {error}"
