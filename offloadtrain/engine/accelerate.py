"""What Accelerate's wrapper of an optimizer does, for one that is not wrapped.

`Accelerator.prepare` (so the Trainer of transformers, and TRL's) wraps an optimizer. The wrapper
copies its whole state dict to the device, here 12 bytes per parameter, and never asks it whether a
step was skipped. An optimizer that says that it is prepared is left as it is, and has to do the
rest itself: nothing in `step` and `zero_grad` before the last microbatch of `accumulate`.
"""

from __future__ import annotations

import sys
from typing import Any

from offloadtrain.engine.engine import EngineError


class Prepared:
    """The attributes of an optimizer that Accelerate reads."""

    _prepared = False
    """Accelerate has asked: it will drive this optimizer."""
    last_step: Any

    @property
    def _is_accelerate_prepared(self) -> bool:
        """True, and from here on Accelerate says when a step is due."""
        if _state("AcceleratorState").get("_mixed_precision") == "fp16":
            raise EngineError(
                "Accelerator(mixed_precision = 'fp16') scales losses by a GradScaler, which finds "
                "no gradients to unscale: use mixed_precision = 'no', offload with precision = "
                "'fp16', and optimizer.backward(loss) in place of accelerator.backward(loss)"
            )
        self._prepared = True
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        self._prepared = value

    @property
    def optimizer(self) -> Prepared:
        """Itself: where Accelerate looks for whose learning rate a scheduler sets."""
        return self

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, so that a scheduler should wait."""
        return self.last_step is not None and self.last_step.skipped

    @property
    def _accumulating(self) -> bool:
        """Whether more microbatches come before Accelerate's next step."""
        return self._prepared and not _state("GradientState").get("sync_gradients", True)


def _state(name: str) -> dict[str, Any]:
    """What Accelerate shares between all objects of one of its classes; nothing where it is not
    loaded."""
    found = getattr(sys.modules.get("accelerate.state"), name, None)
    return {} if found is None else dict(found._shared_state)
