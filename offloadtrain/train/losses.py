"""Losses of microbatches: how they become the loss of a step, and what a spike of it does.

[Note: Spikes]
The loss of a step is known once its forward is done, and all ranks have its mean before any of them
updates. So a spike can be stopped before it reaches the weights (`train.on_spike`):

    report      an alert; the update is made (the default, and nothing is exchanged beforehand)
    skip        the step changes nothing, as one with gradients that are not finite; its batch is
                used up
    rollback    the same, then the newest good checkpoint is loaded, and training goes on from there
                with the batches after those that led to the spike

The losses that a new one is compared with, and the rollbacks so far, are part of checkpoints. A run
that is killed after a rollback and before the next checkpoint meets the same spike again, and goes
back again: its bits are those of a run that was never killed.
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
    """Return what divides the sum of losses in each of the next microbatches, `calls` per rank.

    None where every token counts: then each divides by its own number of tokens, and the step by
    the number of microbatches. Otherwise the sum over the step's microbatches and the mean over
    ranks, which gradients are, make the mean over all counted tokens of the step. A step without
    any has the loss 0.
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
    """Return a step's loss from those of its microbatches, in one process's order of sums.

    Args:
        divides: it is their mean, see `loss_divisor`; otherwise their sum.
    """
    total = torch.zeros(())
    for loss in losses:
        total += loss
    return total / len(losses) if divides else total


def pinned(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to page-locked memory, where the device wants it; from any thread."""
    if device.type == "cpu":
        return batch
    # Without it a new thread would make a context on the first device.
    with torch.cuda.device(device):
        return Batch(*(None if part is None else part.pin_memory() for part in batch))  # type: ignore[arg-type]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch from pinned memory: asynchronous; torch keeps that memory until it is done."""
    if device.type == "cpu":
        return batch
    pinned_batch = pinned(batch, device)
    return Batch(
        *(None if x is None else x.to(device, non_blocking=True) for x in pinned_batch)  # type: ignore[arg-type]
    )


class LateLoss:
    """A loss in flight to the host, read after the step so that the device does not stop.

    The copy is launched before backward, and the step waits for gradients, so `wait` finds it
    complete.
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
    """Decides about each step, alike on all ranks.

    Attributes:
        rollbacks: each rollback of the run: the step that spiked, the step gone back to.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._losses: deque[float] = deque(maxlen=SPIKE_HISTORY)
        self.rollbacks: list[tuple[int, int]] = []

    def problem_of(self, loss: LateLoss, step: int) -> str:
        """Return why the step must not be made, or "". Every rank calls this between its backward
        and its update."""
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
