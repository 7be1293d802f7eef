"""What may be asked of an engine, and when."""

from __future__ import annotations

from offloadtrain.engine.gradients import Gradients
from offloadtrain.engine.norm import EngineError
from offloadtrain.engine.step_report import Phase
from offloadtrain.step.program.program import Program


class PhaseGuard:
    """Refuses what the phase of the step does not allow."""

    def __init__(self, gradients: Gradients, program: Program) -> None:
        self._gradients = gradients
        self._program = program
        self.closed = False
        self.in_flight = False
        """Microbatches of a pipeline without flushes may be between forward and backward."""

    @property
    def phase(self) -> Phase:
        if self.closed:
            return Phase.CLOSED
        if self._gradients.open:
            return Phase.BACKWARD
        return Phase.ACCUMULATED if self._gradients.micro_steps else Phase.FORWARD

    def require_open(self, what: str) -> None:
        if self.closed:
            raise EngineError(f"{what} after close(): offload the model again")

    def require_at_rest(self, what: str) -> None:
        self.require_open(what)
        if self.in_flight:
            raise EngineError(
                f"{what} while microbatches are between forward and backward (schedule = '2bw'): "
                "call pipeline.drain() on every process first"
            )

    def require_between_steps(self, what: str) -> None:
        self.require_at_rest(what)
        if self.phase is not Phase.FORWARD:
            raise EngineError(f"{what} between backward and step(): call zero_grad() or step()")

    def require_undecided(self, asked: str) -> None:
        """Raises EngineError where no step can be clipped or skipped any more."""
        if not self._program.waits_for_norm:
            raise EngineError(
                f"{asked} after Adam: with skip_nonfinite = False and no clip_norm, Adam runs "
                "inside backward. Offload with clip_norm, or with skip_nonfinite = True"
            )
