"""Dynamic loss scaling for fp16 gradients."""

from __future__ import annotations

from dataclasses import dataclass

from offloadtrain.config.errors import OffloadTrainError

LARGEST = 2.0**24
SMALLEST = 2.0**-14


class LossScaleError(OffloadTrainError):
    """Gradients overflow even at the smallest loss scale."""


@dataclass(slots=True)
class LossScaler:
    """Doubles the scale after `growth_interval` good steps in a row, halves it after an overflow.

    The scale stays a power of two in [2^-14, 2^24], so that unscaling is exact. With `hysteresis`
    n, the first n - 1 overflows since the scale last grew leave it as it is.

    Attributes:
        scale: current factor of the loss.
        good_steps: steps without overflow since the scale last changed, or the last overflow.
        hysteresis: 1 halves at every overflow, as torch's GradScaler does.
        tolerated: overflows since the scale last grew that have not halved it.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0
    hysteresis: int = 1
    tolerated: int = 0

    def update(self, *, overflow: bool) -> None:
        """Account for one step.

        Raises:
            LossScaleError: on an overflow at the smallest scale that would halve it.
        """
        if overflow:
            if self.tolerated < self.hysteresis - 1:
                self.tolerated += 1
            elif self.scale <= SMALLEST:
                raise LossScaleError(
                    f"gradients overflow fp16 at the smallest loss scale ({self.scale}): the loss "
                    "or a weight is not finite, or the model needs precision = 'bf16' or 'fp32'"
                )
            else:
                self.scale /= 2.0
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale = min(2.0 * self.scale, LARGEST)
            self.good_steps = self.tolerated = 0

    def state_dict(self) -> dict[str, float]:
        """Return what changes; `hysteresis` is an option of the run."""
        return {
            "scale": self.scale,
            "growth_interval": self.growth_interval,
            "good_steps": self.good_steps,
            "tolerated": self.tolerated,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.growth_interval = int(state["growth_interval"])
        self.good_steps = int(state["good_steps"])
        self.tolerated = int(state["tolerated"])
