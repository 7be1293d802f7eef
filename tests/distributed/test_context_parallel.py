"""Context parallelism in a user's model: each rank has a part of every sequence, and gathers keys
and values. Its ranks are the engine's, whose mean of the local losses is the loss of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import offloadtrain as ot
from tests.distributed.conftest import Run
from tests.distributed.test_tensor_parallel import HEAD, VOCABULARY, Attention, Llama


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
        rows, length = x.shape[:2]
        q, k, v = (
            project(x).view(rows, length, -1, HEAD).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        k, v = GatherSequence.apply(k), GatherSequence.apply(v)  # type: ignore[no-untyped-call]
        own = torch.arange(length) + dist.get_rank() * length
        seen = torch.arange(k.shape[2])[None] <= own[:, None]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o(mixed.transpose(1, 2).reshape(rows, length, -1))


def trained(**options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model, size, rank = Llama(), dist.get_world_size(), dist.get_rank()
    for layer in model.layers:
        layer.attention.__class__ = ContextParallelAttention
    chosen: dict[str, Any] = {"precision": "fp32", "clip_norm": 0.5} | options
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", **chosen)
    losses, generator = [], torch.Generator().manual_seed(7)
    for _ in range(3):
        tokens = torch.randint(0, VOCABULARY, (2, 17), generator=generator)
        x, y = (part.chunk(size, 1)[rank] for part in (tokens[:, :-1], tokens[:, 1:]))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    masters = {name: value.numpy() for name, value in optimizer.master_weights()}
    optimizer.close()
    return {"losses": losses, "masters": masters}


@pytest.mark.slow
def test_sequences_in_parts_train_as_whole_ones(ranks: Run) -> None:
    (one,) = ranks(1, trained)
    two = ranks(2, trained)
    for step, loss in enumerate(one["losses"]):
        parts = [found["losses"][step] for found in two]
        assert sum(parts) / 2 == pytest.approx(loss, rel=1e-5)
    for name, value in one["masters"].items():
        assert abs(two[0]["masters"][name] - value).max() < 1e-4, name
        assert (two[0]["masters"][name] == two[1]["masters"][name]).all()


@pytest.mark.slow
def test_placements_change_no_bit(ranks: Run) -> None:
    plain = ranks(2, trained)
    streamed = ranks(2, trained, zero_stage=3, working="host")
    for one, other in zip(plain, streamed, strict=True):
        assert one["losses"] == other["losses"]
        assert all((other["masters"][n] == value).all() for n, value in one["masters"].items())
