"""Ranks over NCCL, on two GPUs, or without a GPU over Gloo. The same comparisons as in
`tests/distributed`, on CUDA lanes."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import offloadtrain as ot
from offloadtrain.runtime.rendezvous import join_through
from tests.gpu.precision import DEVICE, HAS_BF16, HAS_GPU, offload
from tests.gpu.stand_in import stand_in
from tests.numerics.models import Chain, batches, loss_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(HAS_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
RANKS, STEPS = 2, 6


def losses_of(**options: Any) -> list[float]:
    """The losses and norms of this rank."""
    torch.manual_seed(0)
    model, rank = Chain(4), dist.get_rank()
    optimizer = offload(model, ot.AdamW(lr=1e-2), clip_norm=0.5, **options)
    figures = []
    for tokens in batches(STEPS * RANKS)[rank::RANKS]:
        loss = loss_of(model, tokens.to(DEVICE.type))
        optimizer.backward(loss)
        optimizer.step()
        figures += [loss.item(), optimizer.grad_norm or 0.0]
    optimizer.close()
    return figures


def by_torch() -> list[float]:
    """The same in fp32 by DDP and torch's AdamW."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(Chain(4).to(DEVICE.type))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    figures = []
    for tokens in batches(STEPS * RANKS)[rank::RANKS]:
        loss = loss_of(model, tokens.to(DEVICE.type))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
        adam.zero_grad()
        figures += [loss.item(), norm.item()]
    return figures


def on_rank(rank: int, folder: str, options: list[dict[str, Any]]) -> None:
    torch.use_deterministic_algorithms(True)
    join_through(Path(folder, "store"), rank, RANKS, on_gpu=HAS_GPU)
    of_options = []
    for chosen in options:
        # A process of its own: the stand-in of pytest's is not here.
        with nullcontext() if HAS_GPU else stand_in(until=None):
            of_options.append(by_torch() if chosen.get("torch") else losses_of(**chosen))
    torch.save(of_options, Path(folder, f"figures{rank}"))
    dist.destroy_process_group()


def figures_of(*options: dict[str, Any]) -> list[list[float]]:
    """The losses and norms of rank 0 with each of these."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(on_rank, args=(folder, list(options)), nprocs=RANKS)
        return list(torch.load(Path(folder, "figures0"), weights_only=True))


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
def test_placements_change_no_bit_and_ddp_agrees(state: str) -> None:
    """In one start of the ranks, which takes longer than their steps."""
    plain = {"state": state}
    first, *placed, ours, ddp = figures_of(
        plain,
        plain | {"zero_stage": 1},
        plain | {"zero_stage": 3},
        plain | {"zero_stage": 3, "working": "host"},
        plain | {"update": "speculative"},
        {"precision": "fp32"},
        {"torch": True},
    )
    assert all(other == first for other in placed)
    assert ours == pytest.approx(ddp, rel=1e-4)
