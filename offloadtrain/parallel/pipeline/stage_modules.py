"""Cuts a model into pipeline stages; each is the model without the other stages' modules.

Layers of lists are divided evenly, in order. Modules that are registered before the first layer
(embeddings) belong to the first stage, those after the last layer (final norm, head) to the last.
Modules of other stages become None, and are removed from lists, so names stay those of the complete
model. The model's forward must skip modules that are None; a `Sequential` needs no change.
Decoders of transformers are cut in `decoder_stages`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from offloadtrain.config.errors import PipelineError
from offloadtrain.config.offload import OffloadConfig
from offloadtrain.config.ranks_options import evenly
from offloadtrain.engine.autograd.casting import attach_casts
from offloadtrain.engine.checks import keeps_fp32
from offloadtrain.engine.partition import Part, layers_of, partition
from offloadtrain.engine.weights import ParamInit, materialise
from offloadtrain.runtime.dtypes import PRECISIONS
from offloadtrain.runtime.grouped_products import Described
from offloadtrain.runtime.tensor_parts import is_distributed, local, rebuilt


class StandIn(nn.Module):
    """Replaces a module of another stage that the model's forward calls."""


def is_stage(model: nn.Module) -> bool:
    """Return True for a pipeline stage in which stand-ins replace other stages' modules."""
    return any(isinstance(module, StandIn) for module in model.modules())


def divide(model: nn.Module, stages: int, layers_per_stage: Sequence[int] = ()) -> list[list[Part]]:
    """Return the parts of each stage.

    Args:
        layers_per_stage: number of layers of each stage; (): equal numbers, as far as possible.

    Raises:
        PipelineError: there are too few layers, or the numbers do not add up to them, or two stages
            would hold the same parameter.
    """
    parts = partition(model)
    layers = [number for number, part in enumerate(parts) if part.repeated]
    if len(layers) < stages:
        raise PipelineError(
            f"{stages} stages for {len(layers)} layers: a pipeline divides the layers of a "
            "ModuleList or Sequential, and each stage needs one. Take fewer stages"
        )
    _check_nesting(parts)
    if stages > 1:
        _check_once(model, parts)
    each = tuple(layers_per_stage) or evenly(len(layers), stages)
    if len(each) != stages or sum(each) != len(layers) or min(each) < 1:
        raise PipelineError(
            f"layers_per_stage = {list(each)} for {stages} stages and {len(layers)} layers: give "
            f"each stage a number above 0, that add up to {len(layers)}"
        )
    bounds = [0, *(layers[sum(each[:index])] for index in range(1, stages)), len(parts)]
    stage_parts = [parts[lo:hi] for lo, hi in pairwise(bounds)]
    _check_tied(stage_parts)
    _check_trained(stage_parts)
    return stage_parts


def _check_nesting(parts: Sequence[Part]) -> None:
    """Raise PipelineError for a module that owns parameters and contains layers."""
    layers = [part.name for part in parts if part.repeated]
    for part in parts:
        inside = part.name + "." if part.name else ""
        if not part.repeated and any(layer.startswith(inside) for layer in layers):
            raise PipelineError(
                f"'{part.name or type(part.module).__name__}' owns '{part.parameters[0][0]}' and "
                "contains layers, so that all stages would hold it: move it into a module of its "
                "own"
            )


def _check_once(model: nn.Module, parts: Sequence[Part]) -> None:
    """Raise PipelineError for a part that is registered under two names: a cut removes only one."""
    names = {part.module: part.name for part in parts}
    for name, module in model.named_modules(remove_duplicate=False):
        first = names.get(module, name)
        # Modules around a part may be registered under two names, too.
        if first != name:
            raise PipelineError(
                f"'{first}' and '{name}' are one module, which stages would each hold and update "
                "for themselves: register it once, and use each layer once"
            )


def _check_tied(stages: Sequence[Sequence[Part]]) -> None:
    first: dict[nn.Parameter, tuple[int, str]] = {}
    for number, parts in enumerate(stages):
        for name, param in (pair for part in parts for pair in part.parameters):
            stage, other = first.setdefault(param, (number, name))
            if stage != number:
                raise PipelineError(
                    f"'{other}' and '{name}' are one tied parameter, and would be in stages "
                    f"{stage} and {number}: untie them (model.tie_embeddings = false; of "
                    "transformers tie_word_embeddings of its config.json), since each stage "
                    "updates its own parameters"
                )


def _check_trained(stages: Sequence[Sequence[Part]]) -> None:
    """Raise PipelineError if a stage has no trainable parameter. Every stage raises it, since the
    others would wait for a stage that raises alone."""
    for number, parts in enumerate(stages):
        if not any(param.requires_grad for part in parts for _, param in part.parameters):
            raise PipelineError(
                f"stage {number} has nothing to train: no parameter of '{parts[0].name}' to "
                f"'{parts[-1].name}' has requires_grad=True. Give it layers that are trained "
                "(layers_per_stage, or fewer stages)"
            )


def cut(model: nn.Module, own: Sequence[str], parts: Sequence[str]) -> None:
    """Remove all modules in `parts` that are not in `own` from the model. Both contain names."""
    removed = [name for name in parts if name not in own]
    for name in removed + _between_layers(model, set(own), set(parts)):
        path, _, key = name.rpartition(".")
        parent = model.get_submodule(path)
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            del parent._modules[key]
        else:
            setattr(parent, key, None)


def _between_layers(model: nn.Module, stage_names: set[str], parts: set[str]) -> list[str]:
    """Return the parameterless modules in a `Sequential` of layers that belong to other stages.
    Each belongs to the stage of the layer before it."""
    removed = []
    for path, module in model.named_modules():
        names = [f"{path}.{key}" if path else key for key, _ in module.named_children()]
        if not isinstance(module, nn.Sequential) or parts.isdisjoint(names):
            continue
        keeps = next(name for name in names if name in parts) in stage_names
        for name in names:
            keeps = name in stage_names if name in parts else keeps
            removed += [] if keeps or name in parts else [name]
    return removed


class InitInOrder:
    """Calls `param_init_fn` on all modules of a model in order, including those of other stages.

    An initialiser may draw from one generator, so a module's values can depend on earlier modules.
    A module of another stage is allocated, initialised and dropped.
    """

    def __init__(self, model: nn.Module, param_init_fn: ParamInit) -> None:
        """`model`: the complete model, before it is cut."""
        self._init = param_init_fn
        self._left = dict(model.named_modules())
        self._stage_names: dict[nn.Module, str] = {}

    def follow(self, stage: nn.Module) -> None:
        """Initialise this stage's modules next. Must be called for the stages in order."""
        named = stage.named_modules()
        self._stage_names = {
            module: name for name, module in named if not isinstance(module, StandIn)
        }

    def __call__(self, module: nn.Module) -> None:
        names = set(self._stage_names.values())
        # Modules that have only buffers may come after the layers of all stages, and draw nothing.
        has_weights = next(module.parameters(recurse=False), None) is not None
        while has_weights and self._stage_names[module] in self._left:
            first = next(iter(self._left))
            other = self._left.pop(first)
            if first not in names:
                # Initialise and drop it, so that later modules draw the same numbers as undivided.
                materialise(other, self._init)
                for param in other.parameters(recurse=False):
                    meta = torch.empty_like(param, device="meta")
                    torch.utils.swap_tensors(param, nn.Parameter(meta, param.requires_grad))
                other._apply(lambda tensor: tensor.to("meta"), recurse=False)
        self._init(module)


@torch.no_grad()
def output_of(
    stage: nn.Module, inputs: tuple[Tensor, ...], config: OffloadConfig, *, faked: bool = False
) -> tuple[Tensor, ...]:
    """Return the outputs of a stage's forward without allocating memory, with the dtypes of the
    offloaded stage.

    Args:
        inputs: inputs of the stage, on the meta device.
        faked: use fake tensors on the host instead of meta tensors: forwards of transformers test
            for them before they branch on values.

    Raises:
        PipelineError: its forward fails.
    """
    # Entered last, so that `Described` sees grouped products before the fake mode does.
    fake = FakeTensorMode(allow_non_fake_inputs=True) if faked else nullcontext()
    with fake, Described() if faked else nullcontext():  # type: ignore[no-untyped-call]
        device = "cpu" if faked else "meta"
        fakes = tuple(_without_values(tensor, device) for tensor in inputs)
        return _output_of_twin(stage, fakes, config, device)


def twin_of(stage: nn.Module, config: OffloadConfig, device: str) -> nn.Module:
    """Return a copy without values, with the dtypes and casts of the offloaded stage."""
    dtype, full = PRECISIONS[config.precision], keeps_fp32(stage, config.weights.keep_fp32)
    twins: dict[int, object] = {
        id(buffer): _without_values(buffer, device) for buffer in stage.buffers()
    }
    for param in stage.parameters():
        narrow = param.is_floating_point() and param not in full
        made = _without_values(local(param), device, dtype if narrow else None)
        # Hooks of tensor parallelism expect products of DTensors.
        made = rebuilt(param, made) if is_distributed(param) else made
        twins[id(param)] = nn.Parameter(made, False)
    model_copy: nn.Module = copy.deepcopy(stage, twins)
    attach_casts(
        model_copy, layers_of(model_copy), dtype, cast_inputs=config.activations.cast_inputs
    )
    return model_copy


def _output_of_twin(
    stage: nn.Module, inputs: tuple[Tensor, ...], config: OffloadConfig, device: str
) -> tuple[Tensor, ...]:
    model_copy = twin_of(stage, config, device)
    try:
        result = model_copy(*inputs)
    except Exception as error:
        raise PipelineError(
            f"a stage's forward failed on inputs of {_shapes(inputs)}: {error}. Modules of other "
            "stages are None: the model's forward must pass its first input on in their place"
        ) from error
    outputs = result if isinstance(result, tuple) else (result,)
    if not all(isinstance(output, Tensor) for output in outputs):
        kinds = ", ".join(type(output).__name__ for output in outputs)
        raise PipelineError(f"a stage returns {kinds}: return a tensor, or a tuple of them")
    for output in outputs:
        if not output.is_contiguous():
            raise PipelineError(
                f"a stage returns {_shapes([output])} with strides {output.stride()}: stages send "
                "each other contiguous tensors. End its last layer with x.contiguous()"
            )
    return outputs


def _without_values(tensor: Tensor, device: str, dtype: torch.dtype | None = None) -> Tensor:
    # Not `empty_like`: a fake tensor would keep a weak reference, which prevents swap_tensors.
    copy_dtype = tensor.dtype if dtype is None else dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=copy_dtype, device=device)


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in tensors)


def check_alone(stages: Sequence[Sequence[Part]], config: OffloadConfig, replicas: int) -> None:
    """Raise PipelineError if a stage has one layer: recompute and streaming need two at least."""
    streams = config.streams_among(replicas)
    if not (config.activations.recomputes or streams):
        return
    for number, parts in enumerate(stages):
        if sum(part.repeated for part in parts) == 1:
            raise PipelineError(
                f"stage {number} has one layer, and activation = {config.activations.mode!r}, "
                f"working = {config.weights.tier!r} and zero_stage = 3 are for lists of layers, "
                "two at least: take fewer stages"
            )
