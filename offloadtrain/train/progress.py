"""Progress of a run: the counters saved in a checkpoint, and the clock of a step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Progress:
    """Counters of a run over all its starts.

    Attributes:
        step: completed optimizer steps. The learning rate depends on it, so a skipped step does
            not change the rate.
        tokens: tokens trained on, including those of skipped steps.
        skipped: number of skipped steps.
        skipped_in_a_row: skipped steps since the last completed one.
        seconds: time in the loop, including evaluations and checkpoints.
        val_loss: loss of the last evaluation, nats per token.
    """

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    seconds: float = 0.0
    val_loss: float | None = None

    def count(self, *, tokens: int, skipped: bool, seconds: float) -> None:
        """Count one attempted step."""
        self.tokens += tokens
        self.seconds += seconds
        if skipped:
            self.skipped += 1
            self.skipped_in_a_row += 1
        else:
            self.step += 1
            self.skipped_in_a_row = 0

    def go_back(self, earlier: Progress) -> None:
        """Restore the counters of an earlier step, except the time spent."""
        self.step, self.tokens = earlier.step, earlier.tokens
        self.skipped, self.skipped_in_a_row = earlier.skipped, earlier.skipped_in_a_row
        self.val_loss = earlier.val_loss


@dataclass(slots=True)
class StepClock:
    """Splits the wall time of a step into phases, as the training thread sees them.

    On a GPU forward and backward only launch work; the thread waits for it in "optimizer". The
    clock never synchronizes.
    """

    milliseconds: dict[str, float] = field(default_factory=dict)
    _lap: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to `phase`."""
        now = time.perf_counter()
        self.milliseconds[phase] = self.milliseconds.get(phase, 0.0) + 1e3 * (now - self._lap)
        self._lap = now

    @property
    def total_ms(self) -> float:
        return sum(self.milliseconds.values())


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of a step, combined from all ranks.

    Attributes:
        loss: mean over ranks.
        own_ms: step time of each rank without its waits for slower ranks in collectives.
        asks: rank 0 has requests from outside.
        saves: a rank was asked to save a checkpoint.
        written: every rank has written its part of the current checkpoint.
        stops: a rank was asked to stop.
    """

    loss: float
    own_ms: tuple[float, ...]
    asks: bool
    saves: bool
    written: bool
    stops: bool = False

    @classmethod
    def of(cls, rows: Iterable[Sequence[float]], *, replicas: int, parts: int = 1) -> StepStats:
        """Combine (loss, step_ms, comm_ms, stop, asks, saves, written) of each rank.

        Args:
            replicas: replicas of the model; the first `replicas * parts` ranks have their losses,
                and further ranks are other stages for the same batches.
            parts: tensor-parallel ranks of one replica, which have the same loss.
        """
        columns = zip(*(map(float, row) for row in rows), strict=True)
        losses, steps, comms, stops, asks, saves, written = columns
        least = min(comms)
        own_ms = tuple(step - (comm - least) for step, comm in zip(steps, comms, strict=True))
        of_replicas = losses[: replicas * parts : parts]
        loss = sum(of_replicas) / replicas
        return cls(loss, own_ms, any(asks), any(saves), all(written), any(stops))
