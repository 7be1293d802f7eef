"""The public function `offload()`: it resolves the device, checks that the processes of one model
get the same arguments, and constructs the optimizer."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from inspect import cleandoc
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from offloadtrain.config.errors import ModelError
from offloadtrain.config.offload import (
    OPTIONS,
    OffloadConfig,
    OffloadOptions,
    chosen_options,
)
from offloadtrain.config.option import described
from offloadtrain.engine.checks import (
    check_arguments,
    check_compiled,
    check_model,
    check_rule,
    check_run_again,
    check_wrapped,
    offloaded,
    warn_of_no_layers,
    warn_of_small_shares,
    warn_of_views,
)
from offloadtrain.engine.division import Division
from offloadtrain.engine.optimizer import OffloadOptimizer
from offloadtrain.engine.param_groups import normalise_groups
from offloadtrain.engine.weights import ParamInit
from offloadtrain.hardware.cpus import local_plan
from offloadtrain.optim import AdamW, AnyRule
from offloadtrain.runtime import kernels
from offloadtrain.runtime.arena import Ledger
from offloadtrain.runtime.cuda_driver import pci_address
from offloadtrain.runtime.dtypes import PRECISIONS
from offloadtrain.runtime.lanes import lanes_for
from offloadtrain.runtime.process_group import Group, RankError, Ranks, tell_of_long_waits
from offloadtrain.runtime.tensor_parts import is_distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def resolve_device(device: str | torch.device, precision: str) -> torch.device:
    """Return the device to compute on, and bind this process to its NUMA node.

    Raises:
        ValueError: the device does not exist, or does not support this precision.
    """
    on = _named_device(device)
    if precision == "auto":
        raise ValueError(f"precision = 'auto' is not one of {', '.join(map(repr, PRECISIONS))}")
    if on.type == "cuda" and precision == "bf16":
        with torch.cuda.device(on):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                name = torch.cuda.get_device_name(on)
                raise ValueError(f"{name} has no bf16 arithmetic: use precision = 'fp16'")
    # Before any host memory is mapped: Linux puts a page on the node that touches it first.
    _place_kernels(on)
    return on


def _named_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = torch.device(device)
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device = '{device}': offload to the host works for 'cuda' and 'cpu'")
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device = '{device}', but this torch sees no CUDA GPU: use 'cpu'")
        index = torch.cuda.current_device() if resolved.index is None else resolved.index
        resolved = torch.device("cuda", index)
    return resolved


def _place_kernels(device: torch.device) -> None:
    """Bind kernels and host memory to the NUMA node of the GPU; local ranks share its cores."""
    if device.type != "cuda":
        return
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), rank + 1)
    count = torch.cuda.device_count()
    gpus = [pci_address(index % count) for index in range(ranks)]
    gpus[rank] = pci_address(device.index or 0)
    kernels.place(local_plan(gpus, rank))


_OF_ONE_HOST = (
    *("pin_memory", "host_memory_limit", "scratch_dir", "scratch_in_memory"),
    "activation_policy",  # a function has no name that is equal on all ranks
)
_OF_ONE_STAGE = (
    *_OF_ONE_HOST,
    "device_memory_limit",
    "resident_blocks",
    "recompute_blocks",
    "checkpoint_spill",
)


def check_alike(ranks: Ranks, values: Mapping[str, Any], each: str, remedy: str = "") -> None:
    """Check that values are equal on all processes; a collective.

    Args:
        values: name → a value of a JSON type.
        each: noun for a process in the message, such as "rank".
        remedy: replaces the description of the first difference in the message.

    Raises:
        RankError: a process has other values than process 0.
    """
    for number, values_there in enumerate(of_each := ranks.gather(values)):
        for what, value in values_there.items():
            if value != (first := of_each[0][what]):
                raise RankError(
                    f"{each} {number} and {each} 0 differ in {what}: "
                    f"{remedy or _difference(value, first)}"
                )


def check_same_model(
    model: nn.Module,
    groups: list[dict[str, Any]],
    config: OffloadConfig,
    division: Division,
) -> None:
    """Raises RankError unless all ranks have the same model, groups and options, and all
    tensor-parallel parts the same model and groups."""
    ranks = division.replicas
    names = {param: name for name, param in model.named_parameters()}
    shapes = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for p, n in names.items()]
    grouped = [[names[param] for param in group["params"]] for group in groups]
    options = _options(config, but=_OF_ONE_HOST)
    options["zero_stage"] = str(config.zero_stage_among(ranks.size))
    description = {"model": shapes, "groups": grouped}
    check_alike(ranks.everyone, description | {"options": options}, "rank")
    check_alike(division.parts, description, "part")


def check_same_options(config: OffloadConfig, rule: AnyRule, division: Division) -> None:
    """Raises RankError unless all pipeline stages, and all tensor-parallel parts of this stage,
    have the same options and rule; their parameters differ."""
    for ranks, each, but in (
        (division.stages, "stage", _OF_ONE_STAGE),
        (division.parts, "part", _OF_ONE_HOST),
    ):
        options = _options(config, but=but) | {"rule": type(rule).__name__}
        check_alike(ranks, {"options": options}, each)


def _options(config: OffloadConfig, *, but: Sequence[str]) -> dict[str, str]:
    return {name: str(value) for name, value in config.options().items() if name not in but}


def _difference(value: Any, first: Any) -> str:
    """Describe the first entry that differs."""
    pairs = zip_longest(*(list(x.items()) if isinstance(x, dict) else x for x in (value, first)))
    a, b = next(pair for pair in pairs if pair[0] != pair[1])
    return f"{a} and {b}"


_Params = Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]] | Iterable[dict[str, Any]]


class OffloadArguments(OffloadOptions, total=False):
    """The keywords of `offload()`, for editors and type checkers: arguments of this process and the
    options of `OffloadConfig`. `offload()` documents them."""

    params: _Params | None
    device: str | torch.device
    process_group: Group | None
    mesh: DeviceMesh | Division | None
    param_init_fn: ParamInit | None


def offload(
    model: nn.Module,
    rule: AnyRule | None = None,
    config: OffloadConfig | None = None,
    **options: Unpack[OffloadArguments],
) -> OffloadOptimizer:
    """Put a model's optimizer state into host memory and return the optimizer that trains it.

    The model's parameters become views of flat buffers of the working dtype on the device; their
    original values become the fp32 master weights. Tied parameters stay tied. Frozen parameters are
    moved and cast like the others and have no state. Norms with running statistics keep fp32
    parameters; buffers keep their dtype. fp32 inputs are cast where they meet 16-bit weights (see
    `cast_inputs`), and losses that the model computes are fp32, as under `torch.autocast`. If the
    model returns 16-bit logits, and inside a `checkpoint` of your own, compute the loss of
    `logits.float()`.

    Gradients leave the device during backward. Between backward and `step()`, `.grad` is a view of
    the gradient in its present tier, usually the host, and `step()` uses what is written into it.
    torch's `clip_grad_norm_` of all parameters uses the norm that the engine has measured and is
    equivalent to `optimizer.clip_grad_norm_(max_norm)`. After `step()`, `.grad` is None.

    `optimizer.backward(loss)` divides by `grad_accum_steps` and scales fp16 losses. A plain
    `loss.backward()` does neither, as in every torch loop: divide the loss first. If the loss
    is divided already (Accelerate, the Trainer), call `optimizer.backward(loss, divide=False)`.
    Loops with consecutive backwards and no forward in between call
    `optimizer.end_micro_step()` after each plain `loss.backward()`. For pipelines see `pipeline`.

    `model.load_state_dict` keeps working: fp32 values become the master weights unchanged.

    Args:
        model: any module, not wrapped for data parallelism. Parameters may be on the meta device
            with `param_init_fn`: then a full copy of the model never exists.
        rule: `AdamW(...)`, `Adam`, `Lion`, `SGD`, `Adagrad`, `LAMB`, `Muon` or your own
            (docs/extending.md); default AdamW().
        config: the options in one object, as an alternative to their keywords.
        options: the keywords that follow.

    Keywords:
        params: parameters, named or not, or groups as for a torch optimizer; each
            trainable parameter in exactly one group. Default: all of them in one group.
        device: "auto" (CUDA if there is one), "cpu", "cuda", "cuda:1", or a torch.device.
            Default: "auto".
        process_group: process group of torch.distributed whose ranks share the state of this model:
            each stores and updates its shard. All of its ranks call `offload`, `step` and so on at
            the same point. Default: all ranks if torch.distributed is initialised, else only this
            process. All ranks start from the weights of rank 0.
        mesh: replaces `process_group`. Axis "dp": its ranks share the state (or "dp_replicate" and
            "dp_shard" of hybrid sharding: the ranks of a "dp_shard" group, usually those of a host,
            share the state, and all groups sum their gradients). "pp": its ranks hold the other
            stages of the model; the norm is that of all stages, and they skip steps together.
            `pipeline` makes the stages as well. "tp": the model's DTensors (of
            `parallelize_module`) are divided along it: each rank offloads its part, and the norm
            counts each part once. "dp" and "ep": `expert_parallel` has divided the experts along
            "ep": all ranks have different batches and share the state of the common parameters;
            the ranks of "dp" share that of their experts. "pp" or "tp" can be combined with these.
        param_init_fn: is called with each module that directly owns meta parameters or buffers, in
            the order of `model.modules()`, once they have memory without values, and fills them.
        weights, gradients, state, activations, sharding, memory: the options in groups, as in
            `OffloadConfig`, or each by its name.

    Raises:
        ModelError: a model that would not train correctly, naming the parameter.
        HostMemoryError, DeviceMemoryError, DiskError: before anything is allocated, if a limit, the
            available memory or the space on the disk is too small.
        RankError: ranks differ in model, groups or options.
        ValueError, TypeError: arguments out of range, contradictory or of a wrong type.
    """
    check_arguments(model, rule)
    on, mesh = options.pop("device", "auto"), options.pop("mesh", None)
    params, param_init_fn = options.pop("params", None), options.pop("param_init_fn", None)
    process_group = options.pop("process_group", None)
    chosen = chosen_options(config, options).checked()
    device = resolve_device(on, chosen.precision)
    tell_of_long_waits()
    if mesh is not None and process_group is not None:
        raise ValueError("process_group and mesh are both given: leave process_group out")
    if mesh is not None:
        division = _divided(mesh, device)
    else:
        division = Division(replicas=Ranks.of(process_group, device))
        if chosen.skip_unused or any(map(is_distributed, model.parameters())):
            division = _divided(division, device)
    # Weights made here are trained, even if the caller is in inference mode.
    with torch.inference_mode(False):
        return attach(model, rule, params, chosen, device, division, param_init_fn)


def _divided(mesh: DeviceMesh | Division, on: torch.device) -> Division:
    """Return the division of a model by a mesh."""
    # Imported by name: `offloadtrain.parallel` depends on this package.
    division: Division = import_module("offloadtrain.parallel.mesh").division_of(mesh, on)
    return division


def attach(
    model: nn.Module,
    rule: AnyRule | None,
    params: _Params | None,
    chosen: OffloadConfig,
    on: torch.device,
    division: Division,
    param_init_fn: ParamInit | None,
    ledger: Ledger | None = None,
) -> OffloadOptimizer:
    """Offload a model or a stage of it; the arguments are those of `offload`, resolved.

    Args:
        ledger: ledger that this process's engines share; None for a single engine.
    """
    ranks = division.replicas
    chosen.zero_stage_among(ranks.size)
    if optimizer_of(model) is not None:
        raise ModelError("the model is offloaded already: close() its optimizer first")
    check_model(model, may_be_meta=param_init_fn is not None)
    rule = rule or AdamW()
    check_rule(rule, chosen)
    groups = normalise_groups(model, params, rule)
    check_same_model(model, groups, chosen, division)
    check_compiled(model, chosen)
    check_run_again(model, chosen)
    check_wrapped(model, chosen)
    is_whole_model = ledger is None and division.stages.is_single
    division.check(model, rule, chosen, is_stage=not is_whole_model)
    check_same_options(chosen, rule, division)
    if division.stages.is_single:
        warn_of_no_layers(model, chosen, ranks)
    warn_of_views(model)
    lanes = lanes_for(on, among_ranks=not ranks.is_single)
    optimizer = OffloadOptimizer(
        model, rule, groups, chosen, on, division, lanes, param_init_fn, ledger
    )
    offloaded[model] = weakref.ref(optimizer)
    optimizer.warn_of_no_checkpoints()
    warn_of_small_shares(optimizer._engine.program.spec)
    return optimizer


def optimizer_of(model: nn.Module) -> OffloadOptimizer | None:
    """Return the optimizer of a model, or None if the model is not offloaded."""
    optimizer: OffloadOptimizer | None = offloaded[model]() if model in offloaded else None
    return optimizer


if offload.__doc__:  # None under python -OO
    _listed = f"Options:\n{described(OPTIONS.values())}\n\nRaises:"
    offload.__doc__ = cleandoc(offload.__doc__).replace("Raises:", _listed)
