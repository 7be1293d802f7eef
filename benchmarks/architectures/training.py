"""One architecture trained for a few steps on the same data, by a plain torch loop or offloaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import offloadtrain as ot
from benchmarks.architectures.batches import Batch
from benchmarks.architectures.models import Architecture

CLIP_NORM, GRAD_ACCUM_STEPS = 0.5, 2
ADAMW: dict[str, Any] = dict(lr=3e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


class SkippedError(AssertionError):
    """A step changed nothing."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Losses of all microbatches, norms of all steps before clipping, masters and buffers after the
    last."""

    losses: list[float]
    norms: list[float]
    masters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def build(architecture: Architecture) -> nn.Module:
    torch.manual_seed(0)
    return architecture.build().train()


def microbatches(architecture: Architecture) -> list[Batch]:
    """The same in every step, so that the loss falls: a run that does not train is far off."""
    source = torch.Generator().manual_seed(1)
    return [architecture.batch(source) for _ in range(GRAD_ACCUM_STEPS)]


def loss_of(architecture: Architecture, model: nn.Module, batch: Batch, number: int) -> Tensor:
    """Dropout and masks of microbatch `number` are the same in every run."""
    torch.manual_seed(number)
    np.random.seed(number)  # wav2vec2 draws its masks there
    return architecture.loss_of(model, batch)


def train_plain(
    architecture: Architecture,
    steps: int,
    around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[float]:
    """Losses of fp32 weights under torch.optim.AdamW, as everybody writes it.

    But for a weight that no microbatch of a step has used: torch's optimizers pass over what has no
    gradient, ours takes it for zero, and so does this loop.
    """
    model = build(architecture)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses: list[float] = []
    batches = microbatches(architecture)
    for _ in range(steps):
        for batch in batches:
            with around_forward():
                loss = loss_of(architecture, model, batch, len(losses))
            losses.append(loss.item())
            (loss / len(batches)).backward()
        for param in model.parameters():
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_autocast(architecture: Architecture, steps: int) -> list[float]:
    return train_plain(architecture, steps, lambda: torch.autocast("cpu", torch.bfloat16))


def train_masters(architecture: Architecture, steps: int) -> list[float]:
    """Losses of a model cast to bf16 whole, over fp32 masters under torch.optim.AdamW."""
    model = build(architecture)
    masters = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, **ADAMW)
    model.bfloat16()
    losses: list[float] = []
    batches = [_in_bf16(batch) for batch in microbatches(architecture)]
    for _ in range(steps):
        for master in masters:
            master.grad = torch.zeros_like(master)
        for batch in batches:
            loss = loss_of(architecture, model, batch, len(losses))
            losses.append(loss.item())
            (loss / len(batches)).backward()
            _move_gradients(model, masters)
        torch.nn.utils.clip_grad_norm_(masters, CLIP_NORM)
        optimizer.step()
        for param, master in zip(model.parameters(), masters, strict=True):
            param.data.copy_(master)
    return losses


def _in_bf16(batch: Batch) -> Batch:
    return {key: x.bfloat16() if x.is_floating_point() else x for key, x in batch.items()}


def _move_gradients(model: nn.Module, masters: list[Tensor]) -> None:
    """Add the 16-bit gradients to those of the masters."""
    for param, master in zip(model.parameters(), masters, strict=True):
        if param.grad is not None and master.grad is not None:
            master.grad += param.grad
            param.grad = None


def train_offloaded(architecture: Architecture, steps: int, **options: Any) -> Trained:
    model = build(architecture)
    optimizer = ot.offload(
        model,
        ot.AdamW(**ADAMW),
        device="cpu",
        clip_norm=CLIP_NORM,
        grad_accum_steps=GRAD_ACCUM_STEPS,
        **{**architecture.options, **options},
    )
    losses: list[float] = []
    norms: list[float] = []
    batches = microbatches(architecture)
    for _ in range(steps):
        for batch in batches:
            loss = loss_of(architecture, model, batch, len(losses))
            losses.append(loss.item())
            optimizer.backward(loss)
        optimizer.step()
        norms.append(_norm_of_step(optimizer))
        optimizer.zero_grad()
    masters = {name: state["master"].clone() for name, state in optimizer.named_state()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    optimizer.close()
    return Trained(losses, norms, masters, buffers)


def _norm_of_step(optimizer: ot.OffloadOptimizer) -> float:
    report = optimizer.last_step
    assert report is not None
    if report.skipped:
        raise SkippedError(f"step {report.step} was skipped: gradient norm {report.grad_norm}")
    return report.grad_norm
