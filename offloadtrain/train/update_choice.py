"""Exact or speculative updates, by the steps of the run: `offload.update = "auto"` of a job.

[Note: Measured update mode]
The plan decides first. Where it expects a gain from "speculative", the job begins in that mode: the
layout has the second copies, in which "exact" can run as well, with the same bits. So the mode
changes between two steps and moves nothing. After `STEPS` steps that guessed, as many run in mode
"exact", and the mode with the shorter median stays for the rest of the run; the planned one unless
the other is faster by `GAIN`. A step whose gradients were clipped or skipped so often that
"speculative" does not guess is not counted: the comparison goes on when guesses are right again.

Step times are those of the slowest rank, which all ranks know, so all decide the same after the
same step. Checkpoints have the decision, and a resumed run keeps it. After a decision for "exact"
the second copies are given back ([Note: Changes between steps] in `engine.relayout`).
"""

from __future__ import annotations

import statistics

from offloadtrain.config.job import Config
from offloadtrain.config.offload import UpdateMode
from offloadtrain.engine import OffloadOptimizer
from offloadtrain.plan.automatic import GAIN, with_decisions_of, with_update
from offloadtrain.train.build import TrainingContext

STEPS = 8
"""Steps of each mode whose median is compared."""
_SETTLING = 2
"""First steps of each mode, which are not compared: an update of the other mode may run in them."""


class UpdateChoice:
    """Decides about the update mode of one run.

    Attributes:
        decided: the mode that was faster in this run; None: not measured, or not yet.
        resolved: the job with the plan's decisions, but for a mode that is to be measured.
    """

    def __init__(self, config: Config, context: TrainingContext) -> None:
        optimizer, job = context.optimizer, with_decisions_of(config, context.plan.job)
        is_open = (
            config.offload.update == "auto"
            and job.offload.update == "speculative"
            # There a stage waits for others in every step: the plan's decision stays.
            and context.pipelined is None
        )
        self._optimizer = optimizer if is_open and isinstance(optimizer, OffloadOptimizer) else None
        self.resolved = with_update(job, "auto") if is_open else job
        self.decided: str | None = None
        # Of the next step.
        self._mode, self._guesses = job.offload.update, False
        self._step_ms: dict[str, list[float]] = {"speculative": [], "exact": []}

    def decide(self, mode: UpdateMode) -> str:
        """Keep to the decision of an earlier start; return a sentence, "" if nothing is new."""
        if self._optimizer is None or self.decided:
            return ""
        self.decided = self._mode = mode
        self._optimizer.speculate(enabled=mode == "speculative")
        if mode == "exact":
            self._optimizer.keep_exact()
        return f"offload.update = auto: {mode}, as measured in an earlier start"

    def after_step(self, step_ms: float | None) -> str:
        """Count a step.

        Args:
            step_ms: its duration on the slowest rank; None: it was skipped.

        Returns:
            A sentence if the mode was decided now, else "".
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
