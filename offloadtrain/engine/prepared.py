"""The interface of the optimizer to Accelerate.

[Note: Accelerate]
The optimizer behaves like Accelerate's optimizer wrapper without being wrapped.
`Accelerator.prepare` (and with it the Trainers of transformers and TRL) wraps an optimizer. The
wrapper copies its complete state dict to the device, here 12 bytes per parameter, and does not
check whether a step was skipped. An optimizer that reports to be prepared is not wrapped, and must
do the rest itself: `step` and `zero_grad` do nothing before the last microbatch of `accumulate`.
"""

from __future__ import annotations

import sys
from typing import Any

from offloadtrain.engine.norm import EngineError


class Prepared:
    """The attributes of an optimizer that Accelerate reads."""

    _prepared = False
    """Accelerate has read `_is_accelerate_prepared`: it will drive this optimizer."""
    last_step: Any

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Always True; from the first read on, Accelerate decides when a step is due.

        Raises:
            EngineError: Accelerate is configured to scale losses.
        """
        if not self._prepared and _state("AcceleratorState").get("_mixed_precision") == "fp16":
            raise EngineError(
                "Accelerator(mixed_precision = 'fp16') scales losses by a GradScaler, which finds "
                "no gradients to unscale: offload with integrations.accelerate.offload(accelerator,"
                " model, …), or use mixed_precision = 'no', precision = 'fp16' and "
                "optimizer.backward(loss) in place of accelerator.backward(loss)"
            )
        self._prepared = True
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        self._prepared = value

    @property
    def optimizer(self) -> Prepared:
        """The optimizer itself: Accelerate compares it with the optimizer of a learning-rate
        scheduler."""
        return self

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step changed nothing, so that a scheduler should wait."""
        return self.last_step is not None and self.last_step.skipped

    @property
    def _accumulating(self) -> bool:
        """True if Accelerate expects more microbatches before its next step."""
        return not _state("GradientState").get("sync_gradients", True)


def _state(name: str) -> dict[str, Any]:
    """Return the state that Accelerate shares between all objects of a class; {} if Accelerate is
    not imported."""
    state_class = getattr(sys.modules.get("accelerate.state"), name, None)
    return {} if state_class is None else dict(state_class._shared_state)
