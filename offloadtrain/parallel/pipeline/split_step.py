"""The halves of a step, and when a stage of a pipeline without flushes does them.

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

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from offloadtrain.engine.engine import Engine, PendingNorm
from offloadtrain.engine.norm import EngineError


class SplitStep:
    """Ends the steps of one stage, each in several moments of the next one."""

    def __init__(
        self,
        engine: Engine,
        check: Callable[[], None],
        step_tensor: Tensor,
        groups: Sequence[dict[str, Any]],
    ) -> None:
        """
        Args:
            check: raises where the model or a hyperparameter cannot be updated.
            step_tensor: 0-dim, gets the number of steps.
            groups: those of the optimizer.
        """
        self._engine, self._check, self._step_tensor = engine, check, step_tensor
        self._groups = groups
        self._requested: tuple[list[dict[str, Any]], bool] | None = None
        """Hyperparameters and `skip` of a step that is not decided."""
        self._is_over = self._samples = False
        self._pending: PendingNorm | None = None
        """The step whose squares are sent, and that is not decided."""
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
        self._engine.guard.in_flight = True
        if not self._engine.delay_goes_on:
            self._engine.publish_weights()
        self._engine.delay_goes_on = False

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
        self._decide()
        if self._samples:
            self._samples = False
            self._engine.sample_timeline()

    def _decide(self) -> None:
        if (pending := self._pending) is None:
            return
        assert self._requested is not None
        (hyperparameters, skip), self._requested, self._pending = self._requested, None, None
        now = [dict(group) for group in self._groups]
        for group, then in zip(self._groups, hyperparameters, strict=True):
            group.update(then)
        try:
            self._step_tensor.fill_(self._engine.decide(pending, skip=skip).step)
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
        self._decide()
        self._engine.guard.in_flight = False
        self._engine.delay_goes_on = not newest
        if newest:
            self._engine.publish_weights()

    def _send(self) -> None:
        """Send the squares once the backwards are over and step() was called, whichever is last."""
        if self._is_over and self._requested is not None:
            self._pending = self._engine.send_squares()
            self._is_over = False
