"""Losses of microbatches, and how they become the loss of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from offloadtrain.data.batches import Batch, Batches
from offloadtrain.model.language_model import LanguageModel


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
    tokens_BT, targets_BT, positions_BT = (
        None if part is None else part.pin_memory().to(device, non_blocking=True) for part in batch
    )
    assert tokens_BT is not None and targets_BT is not None
    return Batch(tokens_BT, targets_BT, positions_BT)


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
