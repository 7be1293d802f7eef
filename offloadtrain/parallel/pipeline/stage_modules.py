"""A model cut into the stages of a pipeline, each the model without the other stages' modules.

Layers of lists are divided evenly, in order. Modules that are registered before the first layer
(embeddings) belong to the first stage, those after the last one (final norm, head) to the last.
The modules of other stages are None, and missing from lists, so names stay those of the whole
model. Its forward passes over modules that are None; that of a `Sequential` does so by itself.
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
    """In the place of another stage's module, where the model's forward calls one."""


def is_stage(model: nn.Module) -> bool:
    """Whether it is a stage of a model that has stand-ins for the others' modules."""
    return any(isinstance(module, StandIn) for module in model.modules())


def divide(model: nn.Module, stages: int, layers_per_stage: Sequence[int] = ()) -> list[list[Part]]:
    """Return the parts of each stage.

    Args:
        layers_per_stage: (): the same number, as far as they divide.

    Raises:
        PipelineError: there are too few layers, or other numbers than they add up to, or two stages
            would hold one parameter.
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
    """Raises PipelineError for a module that owns parameters and contains layers."""
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
    """Raises PipelineError for a part with two names: of these a cut would take one away."""
    names = {part.module: part.name for part in parts}
    for name, module in model.named_modules(remove_duplicate=False):
        first = names.get(module, name)
        # Those around it may have two names, too.
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
    """Raises PipelineError for a stage without a gradient; on every stage, not on that one alone,
    which the others would wait for."""
    for number, parts in enumerate(stages):
        if not any(param.requires_grad for part in parts for _, param in part.parameters):
            raise PipelineError(
                f"stage {number} has nothing to train: no parameter of '{parts[0].name}' to "
                f"'{parts[-1].name}' has requires_grad=True. Give it layers that are trained "
                "(layers_per_stage, or fewer stages)"
            )


def cut(model: nn.Module, own: Sequence[str], parts: Sequence[str]) -> None:
    """Take the modules of all other `parts` than `own` out of the model; all by name."""
    removed = [name for name in parts if name not in own]
    for name in removed + _between_layers(model, set(own), set(parts)):
        path, _, key = name.rpartition(".")
        parent = model.get_submodule(path)
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            del parent._modules[key]
        else:
            setattr(parent, key, None)


def _between_layers(model: nn.Module, stage_names: set[str], parts: set[str]) -> list[str]:
    """Return the modules without parameters in a `Sequential` of layers that belong to other
    stages: each goes with the layer before it."""
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
    """Calls `param_init_fn` on all modules of a model in order, though most are in other stages.

    An initialiser may draw from one generator, so that a module's values depend on those before it.
    Another stage's module is created, filled and dropped.
    """

    def __init__(self, model: nn.Module, param_init_fn: ParamInit) -> None:
        """`model`: before it is cut."""
        self._init = param_init_fn
        self._left = dict(model.named_modules())
        self._stage_names: dict[nn.Module, str] = {}

    def follow(self, stage: nn.Module) -> None:
        """The next modules to fill are this stage's; stages are followed in order."""
        named = stage.named_modules()
        self._stage_names = {
            module: name for name, module in named if not isinstance(module, StandIn)
        }

    def __call__(self, module: nn.Module) -> None:
        names = set(self._stage_names.values())
        # Modules with buffers only may come after the layers of all stages, and draw nothing.
        has_weights = next(module.parameters(recurse=False), None) is not None
        while has_weights and self._stage_names[module] in self._left:
            first = next(iter(self._left))
            other = self._left.pop(first)
            if first not in names:
                # Drawn, so that later ones draw as in the whole model, and dropped.
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
    """Return what a stage's forward makes, as it computes once offloaded, without any memory.

    Args:
        inputs: on the meta device.
        faked: in place of meta tensors with fake ones on the host, of which forwards of
            transformers know that they have no values to decide by.

    Raises:
        PipelineError: its forward fails.
    """
    # Entered last, the description of grouped products sees them first.
    fake = FakeTensorMode(allow_non_fake_inputs=True) if faked else nullcontext()
    with fake, Described() if faked else nullcontext():  # type: ignore[no-untyped-call]
        device = "cpu" if faked else "meta"
        fakes = tuple(_without_values(tensor, device) for tensor in inputs)
        return _output_of_twin(stage, fakes, config, device)


def twin_of(stage: nn.Module, config: OffloadConfig, device: str) -> nn.Module:
    """Return a copy without values that computes as the stage does once offloaded."""
    dtype, full = PRECISIONS[config.precision], keeps_fp32(stage, config.weights.keep_fp32)
    twins: dict[int, object] = {
        id(buffer): _without_values(buffer, device) for buffer in stage.buffers()
    }
    for param in stage.parameters():
        narrow = param.is_floating_point() and param not in full
        made = _without_values(local(param), device, dtype if narrow else None)
        # A plan of tensor parallel has hooks that take its products for those of DTensors.
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
    # Not `empty_like`: a fake tensor would keep a weak reference, and no such parameter is swapped.
    copy_dtype = tensor.dtype if dtype is None else dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=copy_dtype, device=device)


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in tensors)


def check_alone(stages: Sequence[Sequence[Part]], config: OffloadConfig, replicas: int) -> None:
    """Raises PipelineError where options for the layers of lists would not reach a single one."""
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
