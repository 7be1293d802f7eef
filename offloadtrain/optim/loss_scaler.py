"""Dynamic loss scaling for fp16 gradients.

[Note: A late loss scale]
With update = "delayed" the loss scale of step t depends on the steps up to t - 2, as the weights of
step t do. A pipeline without flushes cannot use step t - 1: microbatches of step t + 1 already run
when step t is decided. Therefore every division of a run has the same scales, bit for bit.
The result of a step is ignored if its scale is no longer in use. For example, if two consecutive
steps overflow at the same scale, the first halves the scale and the second changes nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from offloadtrain.config.errors import OffloadTrainError

LARGEST = 2.0**24
SMALLEST = 2.0**-14


class LossScaleError(OffloadTrainError):
    """Gradients overflow even at the smallest loss scale."""


@dataclass(slots=True)
class LossScaler:
    """Doubles the scale after `growth_interval` good steps in a row, halves it after an overflow.

    The scale stays a power of two in [2^-14, 2^24], so that unscaling is exact. With `hysteresis`
    n, the first n - 1 overflows after the scale last grew do not change it.

    Attributes:
        scale: current factor of the loss.
        good_steps: steps without overflow since the last overflow or change of the scale.
        hysteresis: 1 halves the scale at every overflow, as torch's GradScaler does.
        tolerated: overflows since the scale last grew that have not halved it.
        waiting: steps that do not affect the scale yet, oldest first. Each entry: whether gradients
            overflowed (None: the step must not affect the scale), and the scale of the step.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0
    hysteresis: int = 1
    tolerated: int = 0
    waiting: deque[tuple[bool | None, float]] = field(default_factory=deque)

    def ended(self, overflow: bool | None, scale: float, *, late: bool) -> None:
        """Record a decided step with this scale. With `late`, the scale of the next step depends
        only on earlier steps, see [Note: A late loss scale].

        Raises:
            LossScaleError: under the same condition as `update`.
        """
        self.waiting.append((overflow, scale))
        self.catch_up(1 if late else 0)

    def catch_up(self, left: int = 0) -> None:
        """Account for all waiting steps except the last `left` ones; raises the error of
        `update`."""
        while len(self.waiting) > left:
            overflow, scale = self.waiting.popleft()
            if overflow is not None and scale == self.scale:
                self.update(overflow=overflow)

    def update(self, *, overflow: bool) -> None:
        """Account for one step.

        Raises:
            LossScaleError: if an overflow would halve the smallest scale.
        """
        if overflow:
            if self.tolerated < self.hysteresis - 1:
                self.tolerated += 1
            else:
                self._require_smaller()
                self.scale /= 2.0
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale = min(2.0 * self.scale, LARGEST)
            self.good_steps = self.tolerated = 0

    def check(self) -> None:
        """Raise LossScaleError if `catch_up` would."""
        for overflow, scale in self.waiting:
            if overflow and scale == self.scale and self.tolerated >= self.hysteresis - 1:
                self._require_smaller()

    def _require_smaller(self) -> None:
        if self.scale <= SMALLEST:
            raise LossScaleError(
                f"gradients overflow fp16 at the smallest loss scale ({self.scale}): the loss "
                "or a weight is not finite, or the model needs precision = 'bf16' or 'fp32'"
            )

    def state_dict(self) -> dict[str, float]:
        """Return the state that changes between steps; `hysteresis` is an option of the run."""
        state = {
            "scale": self.scale,
            "growth_interval": self.growth_interval,
            "good_steps": self.good_steps,
            "tolerated": self.tolerated,
        }
        known = [(overflow, scale) for overflow, scale in self.waiting if overflow is not None]
        for overflow, scale in known:  # between steps the last one, if any
            state |= {"waiting_overflow": float(overflow), "waiting_scale": scale}
        return state

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.growth_interval = int(state["growth_interval"])
        self.good_steps = int(state["good_steps"])
        self.tolerated = int(state["tolerated"])
        self.waiting.clear()
        if "waiting_scale" in state:
            waiting = bool(state["waiting_overflow"]), float(state["waiting_scale"])
            self.waiting.append(waiting)
