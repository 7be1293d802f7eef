"""Loss spikes: what is done about a step whose loss is far above the usual.

[Note: Spikes]
The loss of a step is known once its forward is done, and all ranks have its mean before any of them
updates. So a spike can be stopped before it reaches the weights (`train.on_spike`):

    report      an alert; the update is made (the default, and nothing is exchanged beforehand)
    skip        the step changes nothing, as one with gradients that are not finite; its batch is
                used up
    rollback    the same, then the newest good checkpoint is loaded, and training goes on from there
                behind the batches that led to the spike: with other data

The losses that a new one is compared with, and the rollbacks so far, are part of checkpoints. A run
that is killed behind a rollback and before the next checkpoint meets the same spike again, and goes
back again: its bits are those of a run that was never killed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from offloadtrain.config.job import TrainConfig
from offloadtrain.events.alerts import SPIKE_HISTORY, spike
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.train.losses import LateLoss


class Spikes:
    """Decides about each step, alike on all ranks.

    Attributes:
        rollbacks: each rollback of the run: the step that spiked, the step gone back to.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._losses: deque[float] = deque(maxlen=SPIKE_HISTORY)
        self.rollbacks: list[tuple[int, int]] = []

    @property
    def goes_back(self) -> bool:
        return self._config.on_spike == "rollback"

    @property
    def last_rollback_is_used(self) -> bool:
        return len(self.rollbacks) >= self._config.max_rollbacks

    def found(self, loss: LateLoss, step: int) -> str:
        """Tell whether the step must not be made: the reason, or "". Every rank calls this between
        its backward and its update."""
        if self._config.on_spike == "report":
            return ""
        # Waits for the forward of the last microbatch, then for the ranks: one more exchange per
        # step. The update would wait for the whole backward anyway.
        mean = self._ranks.all_gather_host([loss.wait()]).mean().item()
        problem = spike(mean, step, self._losses, self._config.spike_score)
        if not problem:
            self._losses.append(mean)
        return problem

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "rollbacks": list(self.rollbacks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint holds; rollbacks of this start stay counted."""
        self._losses = deque(state["losses"], maxlen=SPIKE_HISTORY)
        saved = [(at, to) for at, to in state["rollbacks"]]
        self.rollbacks = max(self.rollbacks, saved, key=len)
