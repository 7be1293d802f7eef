"""Context parallelism in a user's model: each rank has a part of every sequence, and gathers keys
and values. Its ranks are the engine's, whose mean of the local losses is the loss of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import offloadtrain as ot
from tests.distributed.conftest import Run
from tests.parallel.models import KINDS, Attention, llama, token_loss


class GatherSequence(torch.autograd.Function):
    """(B, heads, T / ranks, H) of each rank → (B, heads, T, H) on all; backward sums over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 2)[dist.get_rank()].contiguous()


class ContextParallelAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        k, v = GatherSequence.apply(k), GatherSequence.apply(v)  # type: ignore[no-untyped-call]
        length = x.shape[1]
        positions = torch.arange(length) + dist.get_rank() * length
        causal = torch.arange(k.shape[2])[None] <= positions[:, None]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=causal)
        return self.o(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))


def train_on_parts_of_sequences(**options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and masters of three steps."""
    model, size, rank = llama(), dist.get_world_size(), dist.get_rank()
    for layer in model.layers:
        layer.attention.__class__ = ContextParallelAttention
    chosen: dict[str, Any] = {"precision": "fp32", "clip_norm": 0.5} | options
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", **chosen)
    losses = []
    for step in range(3):
        x, y = (part.chunk(size, 1)[rank] for part in KINDS["llama"].batch(step, 0))
        loss = token_loss(model(x), y)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    masters = {name: value.clone() for name, value in optimizer.master_weights()}
    optimizer.close()
    return losses, masters


@pytest.mark.slow
def test_sequences_in_parts_train_as_undivided_ones(ranks: Run) -> None:
    """And no placement changes a bit."""
    ((losses, masters),) = ranks(1, train_on_parts_of_sequences)
    parts = ranks(2, train_on_parts_of_sequences)
    streamed = ranks(2, train_on_parts_of_sequences, zero_stage=3, working="host")
    for loss, first, second in zip(losses, parts[0][0], parts[1][0], strict=True):
        assert (first + second) / 2 == pytest.approx(loss, rel=1e-5)
    for (part_losses, part), (streamed_losses, other) in zip(parts, streamed, strict=True):
        assert part_losses == streamed_losses
        for name, value in masters.items():
            assert (part[name] - value).abs().max() < 1e-4, name
            assert torch.equal(part[name], parts[0][1][name])
            assert torch.equal(part[name], other[name])
