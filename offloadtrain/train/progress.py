"""How far a run is: the counters that a checkpoint keeps, and the clock of a step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Progress:
    """Counters of a whole run, over all its starts.

    Attributes:
        step: optimizer steps done; the learning rate follows it: a skipped step repeats its rate.
        tokens: trained on, skipped steps included: their batches are used up.
        skipped: steps whose gradients were not finite.
        skipped_in_a_row: the last of these, if nothing good came after them.
        seconds: in the loop, evaluation and checkpoints included.
        val_loss: of the last evaluation, nats per token.
    """

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    seconds: float = 0.0
    val_loss: float | None = None

    def count(self, *, tokens: int, skipped: bool, seconds: float) -> None:
        """Account for one attempted step."""
        self.tokens += tokens
        self.seconds += seconds
        if skipped:
            self.skipped += 1
            self.skipped_in_a_row += 1
        else:
            self.step += 1
            self.skipped_in_a_row = 0


@dataclass(slots=True)
class StepClock:
    """Splits the wall time of a step into phases, as the training thread sees them.

    On a GPU forward and backward only launch work, and what is not finished by then shows up where
    the thread has to wait, in "optimizer". Nothing is synchronized for the sake of a clock.
    """

    milliseconds: dict[str, float] = field(default_factory=dict)
    _began: float = field(default_factory=time.perf_counter)
    _lap: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        """Book the time since the last lap to `phase`."""
        now = time.perf_counter()
        self.milliseconds[phase] = self.milliseconds.get(phase, 0.0) + 1e3 * (now - self._lap)
        self._lap = now

    @property
    def total_ms(self) -> float:
        return 1e3 * (self._lap - self._began)


@dataclass(frozen=True, slots=True)
class StepStats:
    """What the ranks have told each other of a step.

    Attributes:
        loss: mean over ranks.
        own_ms: by rank, what its step would have taken without waiting for slower ranks in
            collectives; the last to arrive waits least.
        asks: somebody has requests.
    """

    loss: float
    own_ms: tuple[float, ...]
    asks: bool

    @classmethod
    def of(cls, rows: Iterable[Sequence[float]]) -> StepStats:
        """From (loss, step_ms, comm_ms, stop, asks) of each rank."""
        losses, steps, comms, _, asks = zip(*(map(float, row) for row in rows), strict=True)
        least = min(comms)
        own = tuple(step - (comm - least) for step, comm in zip(steps, comms, strict=True))
        return cls(sum(losses) / len(losses), own, any(asks))
