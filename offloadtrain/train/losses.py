"""Losses of microbatches: how they add up to the loss of a step, and how a spike is handled.

[Note: Spikes]
The loss of a step is known once its forward is done, and all ranks have its mean before any of them
updates. So a spike can be stopped before it reaches the weights (`train.on_spike`):

    report      raise an alert and update (default; needs no exchange before the update)
    skip        change nothing, as for a step with gradients that are not finite; the batch is
                consumed
    rollback    skip, then load the newest valid checkpoint and continue from there with the
                batches after those that led to the spike

The losses that a new loss is compared with, and the rollbacks so far, are part of checkpoints. If a
run is killed after a rollback and before the next checkpoint, it meets the same spike again and
rolls back again: its bits equal those of a run that was never killed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from offloadtrain.config.sections import TrainConfig
from offloadtrain.data.batches import Batch, Batches
from offloadtrain.events.alerts import SPIKE_HISTORY, spike
from offloadtrain.model.language_model import LanguageModel
from offloadtrain.runtime.process_group import Ranks


def loss_divisor(batches: Batches, calls: int, ranks: int) -> float | None:
    """Return the divisor for the sum of losses in each of the next microbatches, `calls` per rank.

    None if every token counts: then each microbatch divides by its own number of tokens, and the
    step by the number of microbatches. Otherwise gradients, which are summed over the step's
    microbatches and averaged over ranks, become the mean over all counted tokens of the step. A
    step without counted tokens has loss 0.
    """
    if batches.all_count:
        return None
    return max(1, batches.counted(calls)) / ranks


def loss_of(model: LanguageModel, batch: Batch, divisor: float | None) -> Tensor:
    """Return the loss of one microbatch, an fp32 scalar on the device."""
    return model.loss(
        batch.tokens_BT, batch.targets_BT, positions_BT=batch.positions_BT, divisor=divisor
    )


def of_step(losses: Tensor, *, divides: bool) -> Tensor:
    """Return a step's loss from its microbatches' losses, summed as one process sums them.

    Args:
        divides: return their mean, see `loss_divisor`; False: their sum.
    """
    total = torch.zeros(())
    for loss in losses:
        total += loss
    return total / len(losses) if divides else total


def pinned(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to page-locked memory if the device is a GPU. Any thread may call this."""
    if device.type == "cpu":
        return batch
    # A new thread would otherwise create a CUDA context on the first device.
    with torch.cuda.device(device):
        return Batch(*(None if part is None else part.pin_memory() for part in batch))  # type: ignore[arg-type]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch asynchronously to the device; torch keeps its pinned memory until it is done."""
    if device.type == "cpu":
        return batch
    pinned_batch = pinned(batch, device)
    return Batch(
        *(None if x is None else x.to(device, non_blocking=True) for x in pinned_batch)  # type: ignore[arg-type]
    )


class LateLoss:
    """A loss that is copied to the host asynchronously, so that the device does not idle.

    The copy is launched before backward, and the step waits for gradients, so the copy is complete
    by the time of `wait`.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None

    def launch(self, loss: Tensor) -> None:
        self._host.copy_(loss, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> float:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.item()


class Spikes:
    """Decides whether a step's loss is a spike; the decision is equal on all ranks.

    Attributes:
        rollbacks: (step with the spike, step that was restored) of each rollback of the run.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._losses: deque[float] = deque(maxlen=SPIKE_HISTORY)
        self.rollbacks: list[tuple[int, int]] = []

    def problem_of(self, loss: LateLoss, step: int) -> str:
        """Return why the step must not update, or "". Every rank calls this between its backward
        and its update."""
        if self._config.on_spike == "report":
            return ""
        # Waits for the forward of the last microbatch, then for the ranks: one more collective per
        # step. The update would wait for the complete backward anyway.
        mean = self._ranks.all_gather_host([loss.wait()]).mean().item()
        problem = spike(mean, step, self._losses, self._config.spike_score)
        if not problem:
            self._losses.append(mean)
        return problem

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "rollbacks": list(self.rollbacks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint's values; rollbacks of this start stay counted."""
        self._losses = deque(state["losses"], maxlen=SPIKE_HISTORY)
        saved = [(at, to) for at, to in state["rollbacks"]]
        self.rollbacks = max(self.rollbacks, saved, key=len)
