"""Progress of a run: the counters saved in a checkpoint, and the clock of a step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Progress:
    """Counters of a whole run, over all its starts.

    Attributes:
        step: optimizer steps done; the learning rate depends on it: a skipped step repeats its
            rate.
        tokens: tokens trained on, including those of skipped steps.
        skipped: steps whose gradients were not finite.
        skipped_in_a_row: skipped steps since the last good one.
        seconds: seconds in the loop, including evaluation and checkpoints.
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

    def go_back(self, earlier: Progress) -> None:
        """Go back to an earlier step; the time was spent all the same."""
        self.step, self.tokens = earlier.step, earlier.tokens
        self.skipped, self.skipped_in_a_row = earlier.skipped, earlier.skipped_in_a_row
        self.val_loss = earlier.val_loss


@dataclass(slots=True)
class StepClock:
    """Splits the wall time of a step into phases, as the training thread sees them.

    On a GPU forward and backward only launch work; unfinished work shows up in "optimizer", where
    the thread waits. The clock never synchronizes.
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
    """Figures of a step exchanged among the ranks.

    Attributes:
        loss: mean over ranks.
        own_ms: step time by rank without its waits for slower ranks in collectives.
        asks: rank 0 has requests.
        saves: a rank has been asked for a checkpoint.
        written: every rank has written its part of the checkpoint that is under way.
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
            replicas: the first so many ranks have the losses of all; others are further stages of
                the same batches.
            parts: so many ranks in a row have the loss of one replica, whose matrices they divide.
        """
        columns = zip(*(map(float, row) for row in rows), strict=True)
        losses, steps, comms, stops, asks, saves, written = columns
        least = min(comms)
        own_ms = tuple(step - (comm - least) for step, comm in zip(steps, comms, strict=True))
        of_replicas = losses[: replicas * parts : parts]
        loss = sum(of_replicas) / replicas
        return cls(loss, own_ms, any(asks), any(saves), all(written), any(stops))
