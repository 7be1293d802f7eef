"""The public function `pipeline()`: a model whose layers are divided among processes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.config.offload import OffloadConfig
from offloadtrain.engine.agreement import check_alike
from offloadtrain.engine.api import attach
from offloadtrain.engine.checks import check_arguments
from offloadtrain.engine.compute_device import resolve_device
from offloadtrain.engine.load_weights import ParamInit
from offloadtrain.engine.norm import StagePlace, Stages
from offloadtrain.engine.optimizer import OffloadOptimizer
from offloadtrain.engine.stage_modules import (
    InitInOrder,
    PipelineError,
    check_alone,
    cut,
    divide,
    output_of,
)
from offloadtrain.optim import AnyRule
from offloadtrain.runtime.dtypes import name_of
from offloadtrain.runtime.mesh import DeviceMesh, Mesh
from offloadtrain.runtime.pipeline_schedule import SCHEDULES, LossFn, Schedule, StageSpec
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
    params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
    device: str | torch.device = "auto",
    config: OffloadConfig | None = None,
    param_init_fn: ParamInit | None = None,
    **options: Any,
) -> Pipeline:
    """Cut a model into the stages of a pipeline, and offload this process's.

    Afterwards the model holds this process's stage only (its last one): modules of other stages are
    None, and missing from lists of layers. Its forward must pass its first argument on where they
    are None; a `Sequential` does. Each stage gets as many layers as any other, the first one also
    what is registered before the layers, the last one what is registered behind them.

    A step has the bits of one process with the same microbatches: gradients are summed microbatch
    by microbatch, the norm is that of the whole model, and all stages clip and skip together.

    Args:
        model: the whole model, the same on every process; best on the meta device, with
            `param_init_fn`, so that only the stage is ever created.
        mesh: with an axis "pp", whose ranks hold the stages in order, and "dp", whose ranks share
            the state of a stage.
        rule, params, device, param_init_fn: as in `offload`.
        example: the inputs of one microbatch of this rank; only shapes and dtypes count.
        microbatches: of a step, on each replica.
        loss_fn: (output of the model, target of the microbatch) → loss, the mean over the
            microbatch. None: the output is the loss.
        schedule: "gpipe": all forwards, then all backwards; "1f1b": fewer microbatches in flight
            (PipeDream-Flush); "interleaved": 1F1B over `stages_per_rank` stages in each process,
            which makes the bubble shorter.
        config, options: as in `offload`, all but `process_group`, `mesh` and `grad_accum_steps`.

    Raises:
        PipelineError: a model that cannot be cut so, or numbers that the schedule cannot divide.
        RankError: processes have different models, options or schedules.
        ModelError, HostMemoryError, DeviceMemoryError, ValueError, TypeError: as `offload`.
    """
    check_arguments(model, rule)
    _check_schedule(schedule, stages_per_rank, config, options)
    chosen = _chosen(config, options, microbatches)
    on = resolve_device(device, chosen.precision)
    axes = mesh if isinstance(mesh, Mesh) else Mesh.of(mesh, on)
    if not axes.parts.is_single:
        raise PipelineError("mesh has the axes 'pp' and 'tp': a stage holds whole parameters")
    inputs = example if isinstance(example, tuple) else (example,)
    _check_same(axes.stages, model, inputs, schedule, microbatches, stages_per_rank)
    numbers = {param: number for number, param in enumerate(model.parameters())}
    modules, in_order = _own_stages(model, axes, stages_per_rank, chosen, param_init_fn)
    shapes = _shapes(modules, axes.stages, inputs, chosen)
    stages, optimizers = Stages(axes.stages), []
    groups = None if params is None else list(params)
    for module in modules:
        if in_order is not None:
            in_order.follow(module)
        own = _own_groups(groups, module)
        place = StagePlace(stages, min(numbers[param] for param in module.parameters()))
        optimizers.append(attach(module, rule, own, chosen, on, axes.replicas, in_order, place))
    return Pipeline(optimizers, axes, shapes, schedule, microbatches, loss_fn or _output)


def _output(output: Tensor, _: Tensor) -> Tensor:
    return output


def _check_schedule(
    schedule: str, stages_per_rank: int, config: OffloadConfig | None, options: dict[str, Any]
) -> None:
    if schedule not in SCHEDULES:
        raise PipelineError(
            f"schedule = {schedule!r} is not one of {', '.join(map(repr, SCHEDULES))}. Zero-bubble "
            "schedules divide a backward in two, and the second half delivers no gradients"
        )
    if (schedule == "interleaved") != (stages_per_rank > 1):
        raise PipelineError(
            f"schedule = {schedule!r} with stages_per_rank = {stages_per_rank}: 'interleaved' is "
            "for 2 and more stages in each process, the others for 1"
        )
    if config is not None and options:
        raise ValueError(f"config and {', '.join(options)} are both given: put all into the config")


def _chosen(
    config: OffloadConfig | None, options: dict[str, Any], microbatches: int
) -> OffloadConfig:
    """Return the options, whose number of microbatches is the schedule's."""
    given = OffloadConfig(**options) if config is None else config
    if given.grad_accum_steps not in (1, microbatches):
        raise ValueError(
            f"grad_accum_steps = {given.grad_accum_steps} and microbatches = {microbatches}: leave "
            "grad_accum_steps out"
        )
    return replace(given, grad_accum_steps=microbatches).checked()


def _check_same(
    stages: Ranks, model: nn.Module, inputs: Sequence[Tensor], *numbers: str | int
) -> None:
    """Raises RankError unless all stages are cut out of one model, for one schedule."""
    shapes = [(name, list(param.shape)) for name, param in model.named_parameters()]
    told = {"example": _described(inputs), "schedule": numbers, "model": shapes}
    remedy = (
        "every process passes the whole model, the same example and the same schedule to pipeline()"
    )
    check_alike(stages, told, "stage", remedy)


def _own_stages(
    model: nn.Module,
    axes: Mesh,
    per_rank: int,
    config: OffloadConfig,
    param_init_fn: ParamInit | None,
) -> tuple[list[nn.Module], InitInOrder | None]:
    """Cut this process's stages out of the model; all but the last one are copies that share its
    parameters."""
    count = axes.stages.size * per_rank
    of_stages = divide(model, count)
    check_alone(of_stages, config, axes.replicas.size)
    names = [[part.name for part in parts] for parts in of_stages]
    every = [name for own in names for name in own]
    in_order = None if param_init_fn is None else InitInOrder(model, param_init_fn)
    shared = {id(param): param for param in model.parameters()}
    found = [copy.deepcopy(model, dict(shared)) for _ in range(per_rank - 1)] + [model]
    own_names = names[axes.stages.rank :: axes.stages.size]
    for module, own in zip(found, own_names, strict=True):
        cut(module, own, every)
    return found, in_order


def _shapes(
    modules: Sequence[nn.Module], stages: Ranks, inputs: Sequence[Tensor], config: OffloadConfig
) -> list[tuple[Tensor, ...]]:
    """Return the inputs of every stage, and a scalar for the output of the last.

    Raises:
        PipelineError: a stage's forward fails; on every stage.
    """
    found, count = [_on_meta(_described(inputs))], stages.size * len(modules)
    for index in range(count - 1):
        own, told = index % stages.size == stages.rank, ""
        described: list[Any] = []
        if own:
            try:
                described = _described(output_of(modules[index // stages.size], found[-1], config))
            except PipelineError as error:
                told = str(error)
        # Each stage waits here for the shapes that the one before it makes.
        described, told = stages.gather((described, told))[index % stages.size]
        if told:
            raise PipelineError(f"stage {index}: {told}")
        found.append(_on_meta(described))
    return [*found, (torch.empty((), device="meta"),)]


def _described(tensors: Sequence[Tensor]) -> list[Any]:
    return [[list(x.shape), name_of(x.dtype)] for x in tensors]


def _on_meta(described: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in described
    )


def _own_groups(
    groups: Sequence[Any] | None, module: nn.Module
) -> list[nn.Parameter] | list[dict[str, Any]] | None:
    """Return the groups without other stages' parameters."""
    if groups is None:
        return None
    own = set(module.parameters())
    if not isinstance(groups[0], dict):
        return [param for param in groups if param in own]
    cut_down = [group | {"params": [p for p in group["params"] if p in own]} for group in groups]
    return [group for group in cut_down if group["params"]]


class Pipeline:
    """This process's stages of a model, and the schedule that runs them. Made by `pipeline()`.

    Attributes:
        optimizers: of this process's stages, in their order.
        replicas: the ranks that share the state of these stages.
        stages: the ranks of this pipeline, in order.
    """

    def __init__(
        self,
        optimizers: Sequence[OffloadOptimizer],
        axes: Mesh,
        shapes: Sequence[tuple[Tensor, ...]],
        schedule: str,
        microbatches: int,
        loss_fn: LossFn,
    ) -> None:
        """`shapes`: the inputs of every stage and the output of the last, on the meta device."""
        self.optimizers = tuple(optimizers)
        self.replicas, self.stages = axes.replicas, axes.stages
        self._loss_fn, self._microbatches = loss_fn, microbatches
        self._losses: list[Tensor] = []
        self._divide = True
        size, rank = axes.stages.size, axes.stages.rank
        self.indices = tuple(range(rank, size * len(optimizers), size))
        """The numbers of this process's stages."""
        self._specs = [
            StageSpec(one.model, index, shapes[index], shapes[index + 1], one.micro_step)
            for index, one in zip(self.indices, optimizers, strict=True)
        ]
        self._group = axes.stages_group
        self._training = self._schedule(schedule, microbatches)
        self._forward = self._schedule("gpipe", 1) if len(optimizers) == 1 else None

    def _schedule(self, kind: str, microbatches: int) -> Schedule:
        try:
            return Schedule(
                kind,
                self._specs,
                self.stages.size * len(self.optimizers),
                microbatches,
                device=self.optimizers[0].device,
                group=self._group,
                loss_fn=self._loss,
            )
        except ValueError as error:
            raise PipelineError(f"schedule {kind!r}: {error}") from error

    def run(
        self,
        *inputs: Tensor,
        target: Tensor | None = None,
        divide: bool = True,
        **more: Any,
    ) -> Tensor:
        """Run forward and backward of all microbatches of a step; `step()` comes next.

        Every process of a pipeline calls it with the same batch.

        Args:
            inputs, target: of all microbatches, divided along their first dimension. The first
                stage's forward gets the inputs, the loss function of the last one the target.
            divide: divide the loss by the number of microbatches, see `offload`.
            more: arguments of every stage's forward in this process; tensors are divided as well.

        Returns:
            (microbatches,) fp32 on the host: their losses, on every stage.

        Raises:
            PipelineError: a batch that cannot be divided into the microbatches.
            EngineError, GradientError: as `OffloadOptimizer.backward`.
        """
        self._check_batch((*inputs, *([] if target is None else [target])))
        self._losses, self._divide = [], divide
        self._training.run(inputs, target, more)
        return self._of_last_stage(self._microbatches)

    @torch.no_grad()
    def evaluate(self, *inputs: Tensor, target: Tensor | None = None, **more: Any) -> Tensor:
        """Run one microbatch forward; returns its loss, fp32 on the host, on every stage.

        Raises:
            PipelineError: with several stages in a process, whose schedule divides the batch.
        """
        if self._forward is None:
            raise PipelineError(
                "evaluate() with several stages in a process: evaluate with stages_per_rank = 1"
            )
        self._losses = []
        self._forward.run(inputs, target, more)
        return self._of_last_stage(1)[0]

    def step(self, *, skip: bool = False) -> None:
        """Update every stage of this process; all processes call it. See `OffloadOptimizer.step`.

        Raises:
            RankError: stages disagree about the step.
        """
        for optimizer in self.optimizers:
            optimizer.step(skip=skip)

    def close(self) -> None:
        """Close the stages of this process. Idempotent."""
        for optimizer in self.optimizers:
            optimizer.close()
        self.stages.close()

    def _loss(self, output: Any, target: Any) -> Tensor:
        """Return the loss to differentiate, and keep it as it is."""
        loss = self._loss_fn(output, target)
        self._losses.append(loss.detach())
        return self.optimizers[-1].scaled(loss, divide=self._divide)

    def _of_last_stage(self, count: int) -> Tensor:
        own = torch.stack(self._losses).float().cpu() if self._losses else torch.zeros(count)
        # Every stage waits for the last one's losses here; the norm, next, would wait for as much.
        return self.stages.all_gather_host(own)[-1].float()

    def _check_batch(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.shape[0] % self._microbatches:
                raise PipelineError(
                    f"a batch of {tensor.shape[0]} rows for {self._microbatches} microbatches: "
                    "their number must divide it"
                )
