"""A pipeline in this process: the schedule that runs its stages, and the steps of their optimizers.

[Note: Without a flush]
No stage knows the norm of a step, and with it the clip coefficient, before the first stage's last
backward has ended. By then the last stage is several microbatches into the next step. To wait there
would be the flush that PipeDream-2BW avoids. So a stage sends its squares when its own backwards of
a step are over, and decides the step before a certain forward of the next one. Of p stages, stage 0
ends step t after forward p - 2 of step t + 1. So what any stage receives for forward p - 1 was
sent after all squares of step t: none waits longer for these than for its input. Until then
gradients of step t + 1 are added elsewhere, on all stages but the first. Adam has the other
forwards of step t + 1: its weights are shown before the first one of step t + 2.

To save or to evaluate, a stage may end all that is in flight (`drain`) and keep the delay. Step t
is decided then, and its weights wait as they would have within step t + 1, whose forwards read
those of step t - 1 as ever. So no later step has other bits, and a checkpoint holds what one of
`update="delayed"` of one process does: the state, and the weights in use.

A microbatch in flight when the next step begins has read the version of the weights before it.
Saved weights are views of that version, or handles that load it again. What its backward runs again
(recompute, the engine's or a user's) reads parameters: they are views of that version, too, while
such a backward runs.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from offloadtrain.config.errors import PipelineError
from offloadtrain.engine.engine import Engine
from offloadtrain.engine.norm import EngineError, Norm
from offloadtrain.engine.optimizer import OffloadOptimizer
from offloadtrain.engine.step_report import Phase
from offloadtrain.parallel.mesh import Mesh
from offloadtrain.parallel.norm import DividedNorm
from offloadtrain.parallel.pipeline.schedule import (
    Forward,
    LossFn,
    Schedule,
    StageSpec,
    Unflushed,
)
from offloadtrain.parallel.pipeline.stage_optimizers import StageModules, StageOptimizers
from offloadtrain.parallel.pipeline.two_versions import close_sums
from offloadtrain.runtime.process_group import Ranks, telling


class Pipeline:
    """This process's stages of a model, and the schedule that runs them. Made by `pipeline()`.

    Attributes:
        optimizers: of this process's stages, in their order.
        optimizer: all of them, as one.
        stages: the ranks of this pipeline, in order.
    """

    def __init__(
        self,
        optimizers: Sequence[OffloadOptimizer],
        axes: Mesh,
        shapes: Sequence[tuple[Tensor, ...]],
        schedule: str,
        microbatches: int,
        norm: DividedNorm,
        loss_fn: LossFn,
    ) -> None:
        """
        Args:
            shapes: the inputs of every stage and the output of the last, on the meta device.
            norm: adds the squares of all stages.
        """
        self.optimizers = tuple(optimizers)
        several = len(self.optimizers) > 1
        self.optimizer: OffloadOptimizer | StageOptimizers = (
            StageOptimizers(self.optimizers) if several else self.optimizers[0]
        )
        self.stages = axes.stages
        self._loss_fn, self._microbatches, self._norm = loss_fn, microbatches, norm
        self._example = shapes[0]
        self._losses: list[Tensor] = []
        self._divide = True
        self._is_broken = False
        """An exception has left microbatches that other stages wait for."""
        size, rank = axes.stages.size, axes.stages.rank
        self.indices = tuple(range(rank, size * len(optimizers), size))
        """The numbers of this process's stages."""
        self._specs = [
            StageSpec(
                optimizer.model, index, shapes[index], shapes[index + 1], optimizer.micro_step
            )
            for index, optimizer in zip(self.indices, optimizers, strict=True)
        ]
        self._where: dict[str, Any] = {
            "count": size * len(optimizers),
            "group": axes.stages_group,
            "loss_fn": self._loss,
        }
        self._begin(schedule)
        self._forward = Forward(self._specs, device=self.optimizers[0].device, **self._where)

    def _begin(self, schedule: str) -> None:
        """Make the schedule of training."""
        self._training = self._schedule(schedule, self._microbatches)

    def _schedule(self, kind: str, microbatches: int) -> Schedule:
        try:
            return Schedule(
                kind,
                self._specs,
                microbatches=microbatches,
                device=self.optimizers[0].device,
                **self._where,
            )
        except ValueError as error:
            raise PipelineError(f"schedule {kind!r}: {error}") from error

    @property
    def _who(self) -> str:
        """This process, for messages."""
        count = self.stages.size * len(self.indices)
        numbers = " and ".join(str(index + 1) for index in self.indices)
        return f"rank {self.stages.world_rank} (stage {numbers} of {count})"

    @property
    def replicas(self) -> Ranks:
        """The ranks that share the state of these stages."""
        return self.optimizers[0].ranks

    @property
    def module(self) -> nn.Module:
        """This process's stages, as one."""
        models = [optimizer.model for optimizer in self.optimizers]
        return models[0] if len(models) == 1 else StageModules(models)

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
            PipelineError: a batch that is not `microbatches` times the example; or an exception has
                left microbatches of earlier runs in flight.
            RankError: another stage has failed: which, and why.
            EngineError, GradientError: as `OffloadOptimizer.backward`.
        """
        self._check_batch(inputs, target, more, self._microbatches)
        self._require_intact()
        phases = {optimizer.phase for optimizer in self.optimizers}
        if phases & {Phase.BACKWARD, Phase.ACCUMULATED}:
            raise EngineError("run() between run() and step(): end the step first")
        self._losses, self._divide = [], divide
        with self._exchanging():
            self._training.run(inputs, target, more)
            return self._of_last_stage(self._microbatches)

    @torch.no_grad()
    def evaluate(self, *inputs: Tensor, target: Tensor | None = None, **more: Any) -> Tensor:
        """Run one microbatch forward; returns its loss, fp32 on the host, on every stage.

        Raises:
            PipelineError: it has not the example's size.
        """
        self._check_batch(inputs, target, more, 1)
        self._require_intact()
        self._losses = []
        with self._exchanging():
            self._forward.run(inputs, target, more)
            return self._of_last_stage(1)[0]

    def step(self, *, skip: bool = False) -> None:
        """Update every stage of this process; all processes call it. See `OffloadOptimizer.step`.

        Raises:
            RankError: stages disagree about the step.
            PipelineError: an exception has left the run.
        """
        self._require_intact()
        with telling(self._who):
            self.optimizer.step(skip=skip)

    def drain(self, *, newest: bool = True) -> Tensor | None:
        """End what is in flight between two runs; only `schedule="2bw"` leaves anything. All
        processes call it. Afterwards parameters hold the newest weights.

        Args:
            newest: False: parameters hold the weights that the next run's forwards use, older ones
                than the state's; no step has other bits than without this call. A checkpoint made
                here holds both, see `docs/checkpoints.md`.

        Returns:
            (microbatches,) fp32 on the host: the losses of the last step, on every stage; None
            where `run` has returned them.
        """
        return None

    def close(self) -> None:
        """Close the stages of this process. Idempotent."""
        for optimizer in self.optimizers:
            optimizer.close()
        self.stages.close()

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Microbatches of all stages run inside: after an exception others wait for some of them,
        or have sent some, which would meet those of the next run."""
        self._require_intact()
        self._is_broken = True
        with telling(self._who):
            yield
        self._is_broken = False

    def _require_intact(self) -> None:
        if self._is_broken:
            raise PipelineError(
                "an exception has left run() or evaluate() with microbatches in flight, which "
                "other stages wait for: end every process, and go on from a checkpoint"
            )

    def _loss(self, output: Any, target: Any) -> Tensor:
        """Return the loss to differentiate, and keep it as it is."""
        loss = self._loss_fn(output, target)
        self._losses.append(loss.detach())
        return self.optimizers[-1].scaled(loss, divide=self._divide)

    def _of_last_stage(self, count: int) -> Tensor:
        losses = torch.stack(self._losses).float().cpu() if self._losses else torch.zeros(count)
        # Every stage waits for the last one's losses here; the norm, next, would wait for as much.
        return self.stages.all_gather_host(losses)[-1].float()

    def _check_batch(
        self,
        inputs: Sequence[Tensor],
        target: Tensor | None,
        more: Mapping[str, Any],
        microbatches: int,
    ) -> None:
        """Raises PipelineError, on every stage alike, for what would not fill the buffers that
        stages send each other: one would wait for the other, or torch would end the process."""
        shapes = [tuple(tensor.shape) for tensor in inputs]
        each = [tuple(tensor.shape) for tensor in self._example]
        if shapes != [(rows * microbatches, *rest) for rows, *rest in each]:
            raise PipelineError(
                f"inputs of {_listed(shapes)} for {_count_text(microbatches)} of {_listed(each)}: "
                "each has the size of the example that pipeline() was given, as stages send each "
                "other buffers of one size. Drop a last, smaller batch (drop_last=True), or pad it"
            )
        if target is not None and not isinstance(target, Tensor):
            raise PipelineError(
                f"target is a {type(target).__name__}: give a tensor, whose first dimension is "
                "divided; several can be its columns"
            )
        if target is not None and (target.ndim == 0 or target.shape[0] % microbatches):
            raise PipelineError(
                f"a target of {_rows(target)} for {_count_text(microbatches)}: their number must "
                "divide it"
            )
        for name, value in more.items():
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor) and (leaf.ndim == 0 or leaf.shape[0] != shapes[0][0]):
                    raise PipelineError(
                        f"'{name}' of {_rows(leaf)} beside inputs of {shapes[0][0]}: tensors are "
                        "divided along their first dimension, as inputs are. Expand it to as many "
                        "rows, or pass a number"
                    )


def _rows(tensor: Tensor) -> str:
    return f"{tensor.shape[0]} rows" if tensor.ndim else "no dimension"


def _count_text(microbatches: int) -> str:
    return "a microbatch" if microbatches == 1 else f"{microbatches} microbatches"


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes)) or "nothing"


IN_FLIGHT = (
    "microbatches are between forward and backward (schedule = '2bw'): call pipeline.drain() on "
    "every process first"
)


class SplitStep:
    """Ends the steps of one stage, each in several moments of the next one."""

    def __init__(
        self,
        engine: Engine,
        check: Callable[[], None],
        groups: Sequence[dict[str, Any]],
    ) -> None:
        """
        Args:
            check: raises where the model or a hyperparameter cannot be updated.
            groups: those of the optimizer.
        """
        self._engine, self._check, self._groups = engine, check, groups
        self._requested: tuple[list[dict[str, Any]], bool] | None = None
        """Hyperparameters and `skip` of a step that is not decided."""
        self._is_over = self._samples = False
        self._decide_sent: Callable[[], None] = lambda: None
        """Decides the step whose squares are sent; nothing if there is none."""
        self._in_flight: deque[int] = deque()
        """For each microbatch between forward and backward, the version of its weights."""

    @property
    def is_asked(self) -> bool:
        """step() was called for the last microbatches."""
        return self._requested is not None

    def require_asked(self, what: str) -> None:
        """Raises EngineError if step() was not called for the last microbatches."""
        if self._engine.guard.in_flight and self._requested is None:
            raise EngineError(f"{what} between run() and step(): end the step first")

    def run_begins(self) -> None:
        """A step's microbatches are about to run; nothing is sent yet that other stages would wait
        for.

        Raises:
            EngineError: step() was not called for the last microbatches.
            LossScaleError: gradients overflow at the smallest loss scale; on every stage.
        """
        self.require_asked("run()")
        if self._engine.guard.in_flight:
            self._engine.counter.begin_next_step()

    def ask(self, *, skip: bool) -> None:
        """Record the hyperparameters when step() is called: the user may change them next.

        Raises:
            EngineError: no microbatch was run since the last call.
            ModelError: a parameter was changed by others since `offload()`.
        """
        if self._requested is not None:
            raise EngineError("step() twice: run() the microbatches of the next step first")
        if not self._engine.guard.in_flight:
            raise EngineError("step() without run(): run() the microbatches of a step first")
        self._check()
        now = [{k: v for k, v in group.items() if k != "params"} for group in self._groups]
        self._requested = now, skip
        self._send()

    def backwards_end(self) -> None:
        """The last backward of a step is over on this stage."""
        self._is_over = True
        self._send()

    def begin(self) -> None:
        """The first forward of a step is about to begin: parameters become the newest weights."""
        self._engine.guard.in_flight = IN_FLIGHT
        if not self._engine.guard.delay_goes_on:
            self._engine.publish_weights()
        self._engine.guard.delay_goes_on = False

    def forward_begins(self) -> None:
        """The forward of a microbatch is about to run."""
        self._in_flight.append(self._engine.program.mode.version)

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        """The backward of the oldest microbatch in flight runs inside."""
        is_old = self._in_flight.popleft() != self._engine.program.mode.version
        if is_old:
            self._engine.switch_version(to_previous=True)
        with self._engine.micro_step():
            yield
        # Not after a failure: with microbatches in flight nothing but close() follows.
        if is_old:
            self._engine.switch_version(to_previous=False)

    def sample_timeline(self) -> None:
        """Follow the lanes from the next decision on, until the one after it."""
        self._samples = True

    def decide(self) -> None:
        """Decide the last step, if there is one; see [Note: Without a flush].

        Raises:
            RankError: stages disagree about the step.
        """
        self._decide_sent()
        if self._samples:
            self._samples = False
            self._engine.reports.sample_timeline()

    def _decide(
        self,
        receive: Callable[[], Norm],
        micro_steps: int,
        hyperparameters: list[dict[str, Any]],
        skip: bool,
    ) -> None:
        self._requested, self._decide_sent = None, lambda: None
        now = [dict(group) for group in self._groups]
        for group, then in zip(self._groups, hyperparameters, strict=True):
            group.update(then)
        try:
            # All have sent before the microbatch came that is about to run here.
            norm = receive()
            decision = self._engine.launch_update(norm, skip=skip)
            self._engine.conclude(norm, decision, micro_steps)
        finally:
            for group, current in zip(self._groups, now, strict=True):
                group.update(current)

    def drain(self, *, newest: bool) -> None:
        """No microbatch is in flight any more, and the last step is decided.

        Args:
            newest: parameters become the newest weights; otherwise those that the next step's
                forwards read.
        """
        if not newest:
            # The last step's backwards, which read the version before, are over.
            self._engine.publish_weights()
        self._decide_sent()
        self._engine.guard.in_flight = ""
        self._engine.guard.delay_goes_on = not newest
        if newest:
            self._engine.publish_weights()

    def _send(self) -> None:
        """Send the squares once the backwards are over and step() was called, whichever is last."""
        if self._is_over and self._requested is not None:
            engine = self._engine
            engine.guard.require_open("step")
            # Waits for the host's last norm here, and not for any other rank.
            receive = engine.step_gradients.send_squares("step")
            micro_steps = engine.gradients.micro_steps
            engine.gradients.drop(in_flight=False)
            close_sums(engine.program)
            self._decide_sent = partial(self._decide, receive, micro_steps, *self._requested)
            self._is_over = False


class UnflushedPipeline(Pipeline):
    """A pipeline without flushes: see [Note: Without a flush]."""

    def _begin(self, schedule: str) -> None:
        if self._microbatches < self.stages.size:
            raise PipelineError(
                f"schedule = {schedule!r} with {self._microbatches} microbatches and "
                f"{self.stages.size} stages: it needs as many microbatches as stages, or a third "
                "version of the weights"
            )
        groups = self.optimizers[0].param_groups
        self._step = self.optimizers[0].split(partial(SplitStep, groups=groups))
        self._last: Callable[[], Tensor] | None = None
        """Waits for the losses of the last step."""
        self._unflushed = Unflushed(
            replace(self._specs[0], micro_step=self._step.micro_step),
            microbatches=self._microbatches,
            device=self.optimizers[0].device,
            moments=self,
            **self._where,
        )
        # All stages wait for each other here, and nowhere later.
        self._norm.agree_on_names()

    def run(
        self,
        *inputs: Tensor,
        target: Tensor | None = None,
        divide: bool = True,
        **more: Any,
    ) -> Tensor:
        self._check_batch(inputs, target, more, self._microbatches)
        self._require_intact()
        if not torch.is_grad_enabled():
            raise PipelineError(
                "run() without gradients: schedule = '2bw' has no forwards alone. Take evaluate()"
            )
        self._step.run_begins()
        self._losses, self._divide = [], divide
        with self._exchanging():
            self._unflushed.run(inputs, target, more)
        losses = torch.stack(self._losses).float().cpu() if self._losses else None
        before, self._last = self._last, self._send_losses(losses)
        # The last stage has sent these before it sent the gradients that this stage has received.
        return self._received(before)

    def step(self, *, skip: bool = False) -> None:
        """End a step: what `param_groups` hold now is its update's. Stages have microbatches of it
        left, and decide it in the next `run`."""
        self._require_intact()
        self._step.ask(skip=skip)

    def evaluate(self, *inputs: Tensor, target: Tensor | None = None, **more: Any) -> Tensor:
        # Stages are at different microbatches: some would send squares where others send losses.
        if self._last is not None:
            raise PipelineError("evaluate() with microbatches in flight: call drain() first")
        return super().evaluate(*inputs, target=target, **more)

    def drain(self, *, newest: bool = True) -> Tensor | None:
        if self._last is None:
            return None
        self._require_intact()
        self._step.require_asked("drain()")
        with telling(self._who):
            self._unflushed.drain()
            self._step.drain(newest=newest)
        last, self._last = self._last, None
        return self._received(last)

    def close(self) -> None:
        # Other stages have sent what this one would receive in its next run: they would wait for it
        # for ever. After an exception they may have sent less, and nobody can say what.
        if self._last is not None and not self._is_broken and sys.exc_info()[0] is None:
            if not self._step.is_asked:
                self.step(skip=True)
            self.drain()
        super().close()

    def before_forward(self, number: int) -> None:
        if number == 0:
            self._step.begin()
        if number == self.stages.size - 1:
            self._step.decide()
        self._step.forward_begins()

    def after_backward(self, number: int) -> None:
        if number == self._microbatches - 1:
            self._step.backwards_end()

    def _send_losses(self, losses: Tensor | None) -> Callable[[], Tensor]:
        return self.stages.send_host(torch.zeros(self._microbatches) if losses is None else losses)

    def _received(self, wait: Callable[[], Tensor] | None) -> Tensor:
        if wait is None:
            return torch.full((self._microbatches,), torch.nan)
        return wait()[-1].float()
