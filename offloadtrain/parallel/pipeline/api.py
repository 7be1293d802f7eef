"""The public function `pipeline()`, which divides the layers of a model among processes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from offloadtrain.config.errors import PipelineError
from offloadtrain.config.offload import OffloadConfig, OffloadOptions, chosen_options
from offloadtrain.config.ranks_options import NO_FLUSH
from offloadtrain.engine.api import attach, check_alike, resolve_device
from offloadtrain.engine.checks import check_arguments
from offloadtrain.engine.param_groups import listed
from offloadtrain.engine.weights import ParamInit
from offloadtrain.optim import AnyRule, MatrixRule
from offloadtrain.parallel.mesh import DeviceMesh, Mesh
from offloadtrain.parallel.norm import DividedNorm
from offloadtrain.parallel.pipeline.decoder_probe import check_stages
from offloadtrain.parallel.pipeline.decoder_stages import check_dtype, cut_stage, is_of_transformers
from offloadtrain.parallel.pipeline.own_forward import WholeForward
from offloadtrain.parallel.pipeline.schedule import SCHEDULES, LossFn
from offloadtrain.parallel.pipeline.stage_modules import (
    InitInOrder,
    check_alone,
    divide,
    output_of,
)
from offloadtrain.parallel.pipeline.steps import Pipeline, UnflushedPipeline
from offloadtrain.parallel.pipeline.two_versions import rows_without_flush
from offloadtrain.parallel.unused_experts import check_names
from offloadtrain.runtime.arena import Ledger
from offloadtrain.runtime.dtypes import PRECISIONS, name_of
from offloadtrain.runtime.process_group import Ranks


def pipeline(
    model: nn.Module,
    mesh: DeviceMesh | Mesh,
    rule: AnyRule | None = None,
    *,
    example: Tensor | tuple[Tensor, ...],
    microbatches: int,
    loss_fn: LossFn | None = None,
    schedule: str = "1f1b",
    stages_per_rank: int = 1,
    layers_per_stage: Sequence[int] = (),
    params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
    device: str | torch.device = "auto",
    config: OffloadConfig | None = None,
    param_init_fn: ParamInit | None = None,
    init_in_order: bool = True,
    **options: Unpack[OffloadOptions],
) -> Pipeline:
    """Cut a model into the stages of a pipeline, and offload the stages of this process.

    Afterwards the model holds only this process's (last) stage: modules of other stages are None,
    and missing from lists of layers. Its forward must pass on its first argument where modules are
    None, and do nothing else to it outside of layers, as a `Sequential` does. Causal language
    models of transformers work unchanged: see [Note: Stages of a decoder] in `decoder_stages`.
    Their last stage returns logits, or the loss if `run` gets `labels=`. All stages get the same
    number of layers, unless `layers_per_stage` is given. The first stage also gets the modules
    registered before the layers, and the last stage those registered after them.

    A step has the same bits as one process with the same microbatches: gradients are summed
    microbatch by microbatch, the norm is that of the complete model, and all stages clip and skip
    together.

    Args:
        model: the complete model, the same on every process; preferably on the meta device, with
            `param_init_fn`, so that only the stage's parameters are created.
        mesh: has an axis "pp", whose ranks hold the stages in order, and optionally "dp", whose
            ranks share the state of a stage. It also has "tp" if `parallelize_module` has divided
            the model's matrices before this call, or "ep" if `expert_parallel` has divided its
            experts.
        rule, params, device, param_init_fn: as in `offload`.
        example: the inputs of one microbatch of this rank; only shapes and dtypes are used.
        microbatches: number of microbatches of a step, on each replica.
        loss_fn: (output of the model, target of the microbatch or None) → loss, the mean over
            the microbatch. None: the output is the loss.
        schedule: "gpipe": all forwards, then all backwards; "1f1b": fewer microbatches in flight
            (PipeDream-Flush); "interleaved": 1F1B over `stages_per_rank` stages in each process,
            which shortens the bubble; "2bw": no flush between steps, see below.
        layers_per_stage: number of layers of each stage, in order; fewer layers on the last stage
            balance a large head. (): equal numbers, as far as possible.
        init_in_order: True: `param_init_fn` may draw from one generator, so it is also called for
            modules of other stages, which are then dropped. False: its values depend on no earlier
            call, and it is called only for this process's stages.
        config, options: as in `offload`, except `process_group`, `mesh` and `grad_accum_steps`.

    With `schedule="2bw"` (PipeDream-2BW) the forwards of the next step follow without a bubble. The
    update equals `update="delayed"` of one process, bit for bit. `run` returns the losses of the
    previous step, NaN at first; `optimizers[0].last_step` is the last decided step. `drain()`
    finishes all work in flight, and must be called before weights or state are read. All stages
    except the last store a second version of their weights on the device (on the host for streamed
    blocks); all except the first store a second sum of gradients on the host. The schedule needs at
    least as many microbatches as stages.

    Raises:
        PipelineError: the model cannot be cut into these stages, or the schedule does not support
            these numbers of stages and microbatches, or an option.
        RankError: processes have different models, options or schedules.
        ModelError, HostMemoryError, DeviceMemoryError, ValueError, TypeError: as in `offload`.
    """
    check_arguments(model, rule)
    _check_schedule(schedule, stages_per_rank)
    chosen = _with_microbatches(chosen_options(config, options), microbatches)
    if schedule == NO_FLUSH:
        chosen = _delayed(chosen, rule)
    on = resolve_device(device, chosen.precision)
    axes = mesh if isinstance(mesh, Mesh) else Mesh.of(mesh, on)
    _check_axes(axes)
    inputs = example if isinstance(example, tuple) else (example,)
    each = [*layers_per_stage]
    _check_same(axes, model, inputs, [schedule, microbatches, stages_per_rank, each])
    check_names(model, chosen.skip_unused)
    in_order = None
    if param_init_fn is not None and init_in_order:
        in_order = InitInOrder(model, param_init_fn)
    numbers = {param: number for number, param in enumerate(model.parameters())}
    modules, whole_forward = _own_stages(model, axes, stages_per_rank, each, chosen, inputs)
    shapes = _shapes(modules, axes.stages, inputs, chosen, whole_forward)
    norm, optimizers, ledger = DividedNorm(axes.stages, axes.parts), [], Ledger()
    groups = None if params is None else [_listed(group) for group in params]
    for module in modules:
        if in_order is not None:
            in_order.follow(module)
        stage_groups = _own_groups(groups, module)
        first = min(numbers[param] for param in module.parameters())
        rows: dict[str, Any] = {}
        if schedule == NO_FLUSH:
            rows = rows_without_flush(axes.stages.rank, axes.stages.size)
        division = replace(axes, norm=norm, first=first, in_order=True, **rows)
        init = in_order or param_init_fn
        optimizers.append(attach(module, rule, stage_groups, chosen, on, division, init, ledger))
    kind = UnflushedPipeline if schedule == NO_FLUSH else Pipeline
    return kind(
        optimizers,
        axes,
        shapes,
        schedule,
        microbatches,
        norm,
        loss_fn or (lambda output, _: output),
    )


def _check_axes(axes: Mesh) -> None:
    if axes.experts is not None and not axes.parts.is_single:
        raise PipelineError(
            "mesh has the axes 'pp', 'ep' and 'tp': stages of a pipeline divide experts or "
            "matrices. Leave out one of 'ep' and 'tp'"
        )
    if axes.stages.is_single and not (axes.replicas.is_single and axes.parts.is_single):
        several = "parts" if axes.replicas.is_single else "replicas"
        raise PipelineError(
            f"the mesh has one rank along 'pp', or no such axis, and several {several}: there is "
            "one stage, the whole model. Take offload(model, mesh=mesh)"
        )


def _check_schedule(schedule: str, stages_per_rank: int) -> None:
    if schedule not in (*SCHEDULES, NO_FLUSH):
        raise PipelineError(
            f"schedule = {schedule!r} is not one of "
            f"{', '.join(map(repr, (*SCHEDULES, NO_FLUSH)))}. Zero-bubble "
            "schedules divide a backward in two, and the second half delivers no gradients"
        )
    if (schedule == "interleaved") != (stages_per_rank > 1):
        raise PipelineError(
            f"schedule = {schedule!r} with stages_per_rank = {stages_per_rank}: 'interleaved' is "
            "for 2 and more stages in each process, the others for 1"
        )


def _with_microbatches(config: OffloadConfig, microbatches: int) -> OffloadConfig:
    """Return the options with the schedule's number of microbatches as `grad_accum_steps`."""
    if config.grad_accum_steps not in (1, microbatches):
        raise ValueError(
            f"grad_accum_steps = {config.grad_accum_steps} and microbatches = {microbatches}: "
            "leave grad_accum_steps out"
        )
    return config.replace(grad_accum_steps=microbatches).checked()


def _delayed(chosen: OffloadConfig, rule: AnyRule | None) -> OffloadConfig:
    """Return the options for a pipeline without flushes.

    Raises:
        PipelineError: an option is not supported without flushes.
    """
    refused = {
        f"update = {chosen.update!r}": chosen.update not in ("exact", "delayed"),
        f"warmup_steps = {chosen.warmup_steps}": chosen.warmup_steps > 0,
        f"working = {chosen.weights.tier!r}": chosen.weights.tier == "disk",
        f"state_on = {chosen.state.tier!r}": chosen.state.tier not in ("host", "device"),
        f"skip_unused = {list(chosen.skip_unused)}": bool(chosen.skip_unused),
        type(rule).__name__: isinstance(rule, MatrixRule),
    }
    for what, applies in refused.items():
        if applies:
            raise PipelineError(
                f"schedule = '2bw' does not go with {what}: it updates as update = 'delayed' does "
                "from the first step on, and keeps two versions of the weights on the device or "
                "the host. Take schedule = '1f1b', or leave this out"
            )
    return chosen.replace(update="delayed").checked()


def _check_same(
    axes: Mesh, model: nn.Module, inputs: Sequence[Tensor], schedule: list[Any]
) -> None:
    """Raise RankError unless all stages and their parts pass the same model, example and
    schedule."""
    shapes = [(name, list(param.shape)) for name, param in model.named_parameters()]
    description = {"example": _described(inputs), "schedule": schedule, "model": shapes}
    remedy = (
        "every process passes the whole model, the same example and the same schedule to pipeline()"
    )
    check_alike(axes.stages, description, "stage", remedy)
    check_alike(axes.parts, description, "part", remedy)


def _own_stages(
    model: nn.Module,
    axes: Mesh,
    per_rank: int,
    layers_per_stage: Sequence[int],
    config: OffloadConfig,
    inputs: Sequence[Tensor],
) -> tuple[list[nn.Module], WholeForward | None]:
    """Cut this process's stages out of the model; all except the last are copies that share its
    parameters. Also return the record of the undivided forward; None for transformers models, whose
    stages are compared here."""
    count = axes.stages.size * per_rank
    of_stages = divide(model, count, layers_per_stage)
    check_alone(of_stages, config, axes.replicas.size)
    whole_forward = None
    if is_of_transformers(model):
        check_stages(model, of_stages)
    elif count > 1:
        whole_forward = WholeForward(model, of_stages, _on_meta(_described(inputs)), config)
    shared = {id(param): param for param in model.parameters()}
    stage_models = [copy.deepcopy(model, dict(shared)) for _ in range(per_rank - 1)] + [model]
    indices = range(axes.stages.rank, count, axes.stages.size)
    for module, index in zip(stage_models, indices, strict=True):
        cut_stage(module, of_stages, index)
    return stage_models, whole_forward


def _shapes(
    modules: Sequence[nn.Module],
    stages: Ranks,
    inputs: Sequence[Tensor],
    config: OffloadConfig,
    whole_forward: WholeForward | None,
) -> list[tuple[Tensor, ...]]:
    """Return the inputs of every stage, followed by a scalar, the output of the last stage.

    Raises:
        PipelineError: the forward of a stage fails, or computes something other than that of the
            undivided model; raised on every stage.
    """
    shapes, count = [_on_meta(_described(inputs))], stages.size * len(modules)
    for index in range(count):
        failure, described = "", list[Any]()
        if index % stages.size == stages.rank:
            stage, is_last = modules[index // stages.size], index == count - 1
            try:
                described = [] if is_last else _described(_output_of(stage, shapes[-1], config))
                if whole_forward is not None:
                    whole_forward.check(stage, index, shapes[-1])
            except PipelineError as error:
                failure = str(error)
        # Each stage waits here for the output shapes of the previous stage.
        described, failure = stages.gather((described, failure))[index % stages.size]
        if failure:
            raise PipelineError(f"stage {index}: {failure}")
        shapes.append(_on_meta(described))
    return [*shapes[:-1], (torch.empty((), device="meta"),)]


def _output_of(
    stage: nn.Module, inputs: tuple[Tensor, ...], config: OffloadConfig
) -> tuple[Tensor, ...]:
    of_transformers = is_of_transformers(stage)
    outputs = output_of(stage, inputs, config, faked=of_transformers)
    if of_transformers:
        check_dtype(stage, outputs, PRECISIONS[config.precision])
    return outputs


def _described(tensors: Sequence[Tensor]) -> list[Any]:
    return [[list(x.shape), name_of(x.dtype)] for x in tensors]


def _on_meta(described: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in described
    )


def _listed(group: Any) -> Any:
    """Return a parameter group, or a parameter, that can be read once per stage."""
    if isinstance(group, dict):
        return group | {"params": listed(group["params"])}
    return group[1] if isinstance(group, tuple) else group


def _own_groups(
    groups: Sequence[Any] | None, module: nn.Module
) -> list[nn.Parameter] | list[dict[str, Any]] | None:
    """Return the groups without parameters of other stages. Groups that become empty are retained,
    so that group indices are equal in every stage."""
    if groups is None:
        return None
    stage_params = set(module.parameters())
    if not isinstance(groups[0], dict):
        return [param for param in groups if param in stage_params]
    return [
        group | {"params": [p for p in group["params"] if p in stage_params]} for group in groups
    ]
