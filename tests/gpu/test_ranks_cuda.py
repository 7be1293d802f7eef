"""Ranks over NCCL, on two GPUs, or without a GPU over Gloo. The same comparisons as in
`tests/distributed`, on CUDA lanes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import offloadtrain as ot
from offloadtrain.runtime.rendezvous import join_through
from tests.gpu.precision import DEVICE, HAS_BF16, HAS_GPU, offload
from tests.numerics.models import Chain, batches, loss_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(HAS_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
RANKS, STEPS = 2, 6


def losses_of(**options: Any) -> list[float]:
    """Of this rank, and its norms."""
    torch.manual_seed(0)
    model, rank = Chain(4), dist.get_rank()
    optimizer = offload(model, ot.AdamW(lr=1e-2), clip_norm=0.5, **options)
    found = []
    for tokens in batches(STEPS * RANKS)[rank::RANKS]:
        loss = loss_of(model, tokens.to(DEVICE.type))
        optimizer.backward(loss)
        optimizer.step()
        found += [loss.item(), optimizer.grad_norm or 0.0]
    optimizer.close()
    return found


def by_torch() -> list[float]:
    """The same in fp32 by DDP and torch's AdamW."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(Chain(4).to(DEVICE.type))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for tokens in batches(STEPS * RANKS)[rank::RANKS]:
        loss = loss_of(model, tokens.to(DEVICE.type))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
        adam.zero_grad()
        found += [loss.item(), norm.item()]
    return found


def on_rank(rank: int, folder: str, options: list[dict[str, Any]]) -> None:
    torch.use_deterministic_algorithms(True)
    join_through(Path(folder, "store"), rank, RANKS, on_gpu=HAS_GPU)
    told = [by_torch() if chosen.get("torch") else losses_of(**chosen) for chosen in options]
    torch.save(told, Path(folder, f"told{rank}"))
    dist.destroy_process_group()


def told_by(*options: dict[str, Any]) -> list[list[float]]:
    """What rank 0 found with each of these."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(on_rank, args=(folder, list(options)), nprocs=RANKS)
        return list(torch.load(Path(folder, "told0"), weights_only=True))


@pytest.mark.parametrize(
    "state",
    [
        pytest.param("fp32", marks=pytest.mark.slow),
        *(
            pytest.param(state, marks=pytest.mark.long)
            for state in ("int8", *(["split16"] if HAS_BF16 else []))
        ),
    ],
)
def test_placements_change_no_bit(state: str) -> None:
    plain = {"state": state}
    first, *others = told_by(
        plain,
        plain | {"zero_stage": 1},
        plain | {"zero_stage": 3},
        plain | {"zero_stage": 3, "working": "host"},
        plain | {"update": "speculative"},
    )
    assert all(other == first for other in others)


def test_ddp_agrees() -> None:
    ours, ddp = told_by({"precision": "fp32"}, {"torch": True})
    assert ours == pytest.approx(ddp, rel=1e-4)
