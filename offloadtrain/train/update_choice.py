"""Chooses exact or speculative updates by measured steps, for `offload.update = "auto"`.

[Note: Measured update mode]
The plan decides first. If it expects a gain from "speculative", the job begins in that mode: the
layout has the second copies, with which "exact" can run as well, with the same bits. So the mode
can change between two steps without moving memory. After `STEPS` steps with a prediction, as many
steps run in mode "exact", and the mode with the shorter median stays for the rest of the run; the
planned mode stays unless the other is faster by `GAIN`. Steps in which "speculative" does not
predict, because gradients were clipped or skipped too often, are not counted: the comparison
continues when predictions are right again.

Step times are those of the slowest rank, which all ranks know, so all decide alike after the
same step. Checkpoints contain the decision, and a resumed run keeps it. After a decision for
"exact" the second copies are freed ([Note: Changes between steps] in `engine.relayout`).
"""

from __future__ import annotations

import statistics

from offloadtrain.config.job import Config
from offloadtrain.config.offload import UpdateMode
from offloadtrain.engine import OffloadOptimizer
from offloadtrain.plan.automatic import GAIN, with_decisions_of, with_update
from offloadtrain.train.build import TrainingContext

STEPS = 8
"""Steps of each mode in the compared medians."""
_SETTLING = 2
"""First steps of each mode, which are not compared: they may run an update of the other mode."""


class UpdateChoice:
    """Decides the update mode of one run.

    Attributes:
        decided: the faster mode in this run; None if not measured, or not yet.
        resolved: the job with the plan's decisions, but with "auto" for a mode to be measured.
    """

    def __init__(self, config: Config, context: TrainingContext) -> None:
        optimizer, job = context.optimizer, with_decisions_of(config, context.plan.job)
        is_open = (
            config.offload.update == "auto"
            and job.offload.update == "speculative"
            # A pipeline stage waits for other stages in every step, so the plan's decision stays.
            and context.pipelined is None
        )
        self._optimizer = optimizer if is_open and isinstance(optimizer, OffloadOptimizer) else None
        self.resolved = with_update(job, "auto") if is_open else job
        self.decided: str | None = None
        # Mode of the next step, and whether it updates on the guess "no clipping, no overflow".
        self._mode, self._guesses = job.offload.update, False
        self._step_ms: dict[str, list[float]] = {"speculative": [], "exact": []}

    def decide(self, mode: UpdateMode) -> str:
        """Apply the decision of an earlier start; return a sentence, or "" if nothing changed."""
        if self._optimizer is None or self.decided:
            return ""
        self.decided = self._mode = mode
        self._optimizer.speculate(enabled=mode == "speculative")
        if mode == "exact":
            self._optimizer.keep_exact()
        return f"offload.update = auto: {mode}, as measured in an earlier start"

    def after_step(self, step_ms: float | None) -> str:
        """Count a step and decide the mode once enough steps were measured.

        Args:
            step_ms: duration on the slowest rank; None if the step was skipped.

        Returns:
            A sentence if the mode was decided by this step, else "".
        """
        if self._optimizer is None or self.decided:
            return ""
        times = self._step_ms[self._mode]
        if step_ms is not None and (self._guesses or self._mode == "exact"):
            times.append(step_ms)
        if self._mode == "exact" and len(times) == _SETTLING + STEPS:
            guessed_ms, exact_ms = (
                statistics.median(ms[_SETTLING:]) for ms in self._step_ms.values()
            )
            self.decide("exact" if guessed_ms >= exact_ms * (1 + GAIN) else "speculative")
            return (
                f"offload.update = auto: {self.decided} from here on; a step took {guessed_ms:.4g} "
                f"ms with speculative and {exact_ms:.4g} ms with exact (medians of {STEPS} steps)"
            )
        if len(times) == _SETTLING + STEPS:
            self._mode = "exact"
        self._guesses = self._optimizer.speculate(enabled=self._mode == "speculative")
        return ""
