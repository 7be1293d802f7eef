"""A pipeline in this process: the schedule that runs its stages, and the steps of its optimizers.

[Note: Without a flush]
No stage knows the norm of a step, and the clip coefficient, before the first stage's last backward
has ended. By then the last stage is several microbatches into the next step. Waiting there would be
the flush that PipeDream-2BW avoids. So a stage sends its squares when its backwards of a step have
ended, and decides the step before a fixed forward of the next step. With p stages, stage 0 decides
step t after forward p - 2 of step t + 1. The input of forward p - 1 was therefore sent after all
squares of step t, on any stage, so no stage waits longer for the squares than for its input. Until
then gradients of step t + 1 are added to a second sum, on all stages except the first. Adam runs
during the remaining forwards of step t + 1: its weights are published before the first forward of
step t + 2.

To save or to evaluate, a stage may finish everything in flight (`drain`) and keep the delay. Step t
is then decided, and its weights are held back as they would be within step t + 1, whose forwards
still read the weights of step t - 1. So later steps have the same bits as without the call, and a
checkpoint contains the same as in a single process with `update="delayed"`: the state, and the
weights in use.

A microbatch in flight when the next step begins has read the previous version of the weights.
Saved weights are views of that version, or handles that load it again. Recompute in its backward,
by the engine or by a user, reads parameters, so these are also views of that version while such a
backward runs.
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
    """This process's stages of a model, with the schedule that runs them. Created by `pipeline()`.

    Attributes:
        optimizers: optimizers of this process's stages, in order.
        optimizer: all of them as one optimizer.
        stages: ranks of this pipeline, in order.
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
            shapes: inputs of every stage, and the output of the last, on the meta device.
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
        """True if an exception has left microbatches in flight that other stages wait for."""
        size, rank = axes.stages.size, axes.stages.rank
        self.indices = tuple(range(rank, size * len(optimizers), size))
        """Indices of this process's stages."""
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
        """Create the training schedule."""
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
        """Name of this process in messages."""
        count = self.stages.size * len(self.indices)
        numbers = " and ".join(str(index + 1) for index in self.indices)
        return f"rank {self.stages.world_rank} (stage {numbers} of {count})"

    @property
    def replicas(self) -> Ranks:
        """Ranks that share the state of these stages."""
        return self.optimizers[0].ranks

    @property
    def module(self) -> nn.Module:
        """This process's stages as one module."""
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

        Every process of a pipeline must call it with the same batch.

        Args:
            inputs, target: tensors of all microbatches, divided along their first dimension. The
                first stage's forward gets the inputs, the loss function of the last stage the
                target.
            divide: divide the loss by the number of microbatches, see `offload`.
            more: arguments of every stage's forward in this process; tensors are divided as well.

        Returns:
            (microbatches,) fp32 on the host: the losses of the microbatches, on every stage.

        Raises:
            PipelineError: the batch is not `microbatches` times the example; or an exception has
                left microbatches of earlier runs in flight.
            RankError: another stage has failed; the message says which, and why.
            EngineError, GradientError: as in `OffloadOptimizer.backward`.
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
        """Run one microbatch forward; return its loss, fp32 on the host, on every stage.

        Raises:
            PipelineError: the microbatch does not have the size of the example.
        """
        self._check_batch(inputs, target, more, 1)
        self._require_intact()
        self._losses = []
        with self._exchanging():
            self._forward.run(inputs, target, more)
            return self._of_last_stage(1)[0]

    def step(self, *, skip: bool = False) -> None:
        """Update every stage of this process; all processes must call it. See
        `OffloadOptimizer.step`.

        Raises:
            RankError: stages disagree about the step.
            PipelineError: an exception has interrupted a run.
        """
        self._require_intact()
        with telling(self._who):
            self.optimizer.step(skip=skip)

    def drain(self, *, newest: bool = True) -> Tensor | None:
        """Finish everything in flight between two runs; only `schedule="2bw"` leaves anything. All
        processes must call it. Afterwards parameters hold the newest weights.

        Args:
            newest: False: parameters hold the weights that the next run's forwards use, which are
                older than the state; later steps have the same bits as without this call. A
                checkpoint made here contains both, see `docs/checkpoints.md`.

        Returns:
            (microbatches,) fp32 on the host: the losses of the last step, on every stage; None if
            `run` has returned them.
        """
        return None

    def close(self) -> None:
        """Close the stages of this process. Idempotent."""
        for optimizer in self.optimizers:
            optimizer.close()
        self.stages.close()

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Context in which microbatches of all stages run. After an exception others wait for
        microbatches, or have sent some, which would be mixed up with those of the next run."""
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
        """Return the scaled loss to differentiate, and store the unscaled loss."""
        loss = self._loss_fn(output, target)
        self._losses.append(loss.detach())
        return self.optimizers[-1].scaled(loss, divide=self._divide)

    def _of_last_stage(self, count: int) -> Tensor:
        losses = torch.stack(self._losses).float().cpu() if self._losses else torch.zeros(count)
        # Every stage waits here for the last one's losses. The norm, which follows, would wait as
        # long.
        return self.stages.all_gather_host(losses)[-1].float()

    def _check_batch(
        self,
        inputs: Sequence[Tensor],
        target: Tensor | None,
        more: Mapping[str, Any],
        microbatches: int,
    ) -> None:
        """Raise PipelineError, on every stage, for inputs that do not fill the buffers which stages
        send: a stage would wait for ever, or torch would abort the process."""
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
    """Decides the steps of one stage; each decision is split over several points of the next
    step."""

    def __init__(
        self,
        engine: Engine,
        check: Callable[[], None],
        groups: Sequence[dict[str, Any]],
    ) -> None:
        """
        Args:
            check: raises an error if the model or a hyperparameter does not allow an update.
            groups: parameter groups of the optimizer.
        """
        self._engine, self._check, self._groups = engine, check, groups
        self._requested: tuple[list[dict[str, Any]], bool] | None = None
        """Hyperparameters and `skip` of the undecided step; None without such a step."""
        self._is_over = self._samples = False
        self._decide_sent: Callable[[], None] = lambda: None
        """Decides the step whose squares were sent; does nothing without such a step."""
        self._in_flight: deque[int] = deque()
        """Version of the weights that each microbatch between forward and backward has read."""

    @property
    def is_asked(self) -> bool:
        """True if step() was called for the last microbatches."""
        return self._requested is not None

    def require_asked(self, what: str) -> None:
        """Raise EngineError if step() was not called for the last microbatches."""
        if self._engine.guard.in_flight and self._requested is None:
            raise EngineError(f"{what} between run() and step(): end the step first")

    def run_begins(self) -> None:
        """Begin a run. Called before any send, so that no stage waits for a stage that raises here.

        Raises:
            EngineError: step() was not called for the last microbatches.
            LossScaleError: gradients overflow at the smallest loss scale; raised on every stage.
        """
        self.require_asked("run()")
        if self._engine.guard.in_flight:
            self._engine.counter.begin_next_step()

    def ask(self, *, skip: bool) -> None:
        """Record the hyperparameters when step() is called: the user may change them next.

        Raises:
            EngineError: no microbatch was run since the last call.
            ModelError: a parameter was changed outside of the engine since `offload()`.
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
        """Called after a step's last backward on this stage."""
        self._is_over = True
        self._send()

    def begin(self) -> None:
        """Called before the first forward of a step; publishes the newest weights."""
        self._engine.guard.in_flight = IN_FLIGHT
        if not self._engine.guard.delay_goes_on:
            self._engine.publish_weights()
        self._engine.guard.delay_goes_on = False

    def forward_begins(self) -> None:
        """Called before the forward of a microbatch."""
        self._in_flight.append(self._engine.program.mode.version)

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        """Context for the backward of the oldest microbatch in flight."""
        is_old = self._in_flight.popleft() != self._engine.program.mode.version
        if is_old:
            self._engine.switch_version(to_previous=True)
        with self._engine.micro_step():
            yield
        # Skipped after a failure: with microbatches in flight only close() can follow.
        if is_old:
            self._engine.switch_version(to_previous=False)

    def sample_timeline(self) -> None:
        """Record the timeline from the next decision until the one after it."""
        self._samples = True

    def decide(self) -> None:
        """Decide the previous step, if it is undecided; see [Note: Without a flush].

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
            # Does not wait: all stages sent their squares before the input of the next forward
            # here.
            norm = receive()
            decision = self._engine.launch_update(norm, skip=skip)
            self._engine.conclude(norm, decision, micro_steps)
        finally:
            for group, current in zip(self._groups, now, strict=True):
                group.update(current)

    def drain(self, *, newest: bool) -> None:
        """Decide the last step. Called when no microbatch is in flight any more.

        Args:
            newest: publish the newest weights; False: publish the weights that the next step's
                forwards read.
        """
        if not newest:
            # The last step's backwards, which read the previous version, have ended.
            self._engine.publish_weights()
        self._decide_sent()
        self._engine.guard.in_flight = ""
        self._engine.guard.delay_goes_on = not newest
        if newest:
            self._engine.publish_weights()

    def _send(self) -> None:
        """Send the squares once the backwards have ended and step() was called, in either order."""
        if self._is_over and self._requested is not None:
            engine = self._engine
            engine.guard.require_open("step")
            # Waits for the squares of this stage, its replicas and parts, not for other stages.
            receive = engine.step_gradients.send_squares("step")
            micro_steps = engine.gradients.micro_steps
            engine.gradients.drop(in_flight=False)
            close_sums(engine.program)
            self._decide_sent = partial(self._decide, receive, micro_steps, *self._requested)
            self._is_over = False


class UnflushedPipeline(Pipeline):
    """A pipeline without flushes; see [Note: Without a flush]."""

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
        """Waits for and returns the losses of the last run; None if nothing is in flight."""
        self._unflushed = Unflushed(
            replace(self._specs[0], micro_step=self._step.micro_step),
            microbatches=self._microbatches,
            device=self.optimizers[0].device,
            moments=self,
            **self._where,
        )
        # All stages wait for each other here, so that they need not later.
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
        # Does not wait: the last stage sent these losses before the gradients received here.
        return self._received(before)

    def step(self, *, skip: bool = False) -> None:
        """End a step with the current hyperparameters of `param_groups`. Microbatches of the step
        remain in flight; stages decide it in the next `run`."""
        self._require_intact()
        self._step.ask(skip=skip)

    def evaluate(self, *inputs: Tensor, target: Tensor | None = None, **more: Any) -> Tensor:
        # Stages are at different microbatches: some would send squares while others send losses.
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
        # Finish first: other stages would wait for ever for receives of this stage's next run.
        # After an exception it is unknown what they have sent.
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
