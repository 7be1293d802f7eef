"""Dynamic loss scaling for fp16 gradients."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from offloadtrain.config.errors import OffloadTrainError

_LARGEST = 2.0**24
_SMALLEST = 2.0**-14


class LossScaleError(OffloadTrainError):
    """Gradients overflow even at the smallest loss scale."""


@dataclass(slots=True)
class LossScaler:
    """Doubles the scale after `growth_interval` good steps in a row, halves it after an overflow.

    The scale stays a power of two in [2^-14, 2^24], so that unscaling is exact.

    Attributes:
        scale: current factor of the loss.
        good_steps: steps without overflow since the scale last changed.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0

    def update(self, *, overflow: bool) -> None:
        """Account for one step.

        Raises:
            LossScaleError: on an overflow at the smallest scale.
        """
        if overflow:
            self._shrink()
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale = min(2.0 * self.scale, _LARGEST)
            self.good_steps = 0

    def _shrink(self) -> None:
        if self.scale <= _SMALLEST:
            raise LossScaleError(
                f"gradients overflow fp16 at the smallest loss scale ({self.scale}): the loss or a "
                "weight is not finite, or the model needs precision = 'bf16' or 'fp32'"
            )
        self.scale /= 2.0
        self.good_steps = 0

    def state_dict(self) -> dict[str, float]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.growth_interval = int(state["growth_interval"])
        self.good_steps = int(state["good_steps"])
