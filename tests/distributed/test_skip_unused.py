"""`skip_unused` among ranks: an expert is used if it got tokens on any of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offloadtrain as ot
from tests.distributed.conftest import Run
from tests.distributed.reference import DataParallelRun, whole_state
from tests.distributed.test_sharded import same_start
from tests.numerics.skipping import PATTERNS, Routed, SkippingRun, batches, loss_of
from tests.numerics.test_offload import DTYPES
from tests.numerics.test_skip_unused import train


class RanksSkippingRun(DataParallelRun, SkippingRun):
    """Skips the experts without a token on any rank."""

    def follow(self, optimizer: ot.OffloadOptimizer, reduction: torch.dtype | None = None) -> None:
        self.buckets = [bucket for block in optimizer._blocks for bucket in block.buckets]
        self.reduction = reduction

    def apply(self, sums: dict[str, Tensor]) -> None:
        hits: list[set[str]] = [set()] * dist.get_world_size()
        dist.all_gather_object(hits, self.model.take_hits())
        self.used = set().union(*hits)
        DataParallelRun.apply(self, sums)


def compare(
    precision: str = "bf16",
    *,
    accum: int = 1,
    clip: float | None = 0.3,
    reduction: str = "working",
    **options: Any,
) -> int:
    """On one rank; returns the number of different step counts."""
    torch.manual_seed(dist.get_rank())
    model, steps = Routed(), 10 if precision == "fp16" else 5
    twin = same_start(model)
    optimizer = ot.offload(
        model,
        ot.AdamW(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
        device="cpu",
        precision=precision,
        clip_norm=clip,
        grad_accum_steps=accum,
        reduction=reduction,
        skip_unused=PATTERNS,
        **options,
    )
    run = RanksSkippingRun(twin, DTYPES[precision], clip_norm=clip, scale=optimizer.loss_scale)
    run.follow(optimizer, torch.float32 if reduction == "fp32" else None)
    rank, size = dist.get_rank(), dist.get_world_size()
    stream = batches(steps * accum * size)[rank::size]
    micros = [stream[step * accum : (step + 1) * accum] for step in range(steps)]
    # All of the reference first: its collectives must not meet those that a lane puts off.
    expected = [run.step(micro, loss_of) for micro in micros]
    for step, micro in enumerate(micros):
        assert train(optimizer, model, micro) == expected[step], step
        assert optimizer.grad_norm == run.norms[step], step
    assert run.skipped < steps
    optimizer.synchronize()
    for key, values in whole_state(optimizer, "master", "exp_avg", "exp_avg_sq").items():
        for name, value in values.items():
            expected_value = run.master(name) if key == "master" else run.moment(name, key)
            assert torch.equal(value, expected_value), (name, key)
    found = {}
    for name, param in model.named_parameters():
        found[name] = optimizer.state[param]["step"].reshape(-1).int().tolist()
        assert found[name] == run.steps(name), name
    optimizer.close()
    return len({step for steps in found.values() for step in steps})


OPTIONS: dict[str, dict[str, Any]] = {
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 3": {"zero_stage": 3},
    "stage 3, host": {"zero_stage": 3, "working": "host"},
    "device": {"state_on": "device"},
    "speculative": {"update": "speculative"},
    "early": {"skip_nonfinite": False, "clip": None},
    "wide": {"reduction": "fp32"},
}


@pytest.mark.parametrize("placed", ["stage 2", pytest.param("stage 1", marks=pytest.mark.slow)])
def test_the_bits_of_ranks_that_skip(ranks: Run, placed: str) -> None:
    assert min(ranks(2, compare, **OPTIONS[placed])) > 1


@pytest.mark.slow
@pytest.mark.cover(1)
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("placed", OPTIONS)
def test_everywhere(ranks: Run, placed: str, size: int, accum: int) -> None:
    ranks(size, compare, accum=accum, **OPTIONS[placed])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_other_precisions(ranks: Run, precision: str) -> None:
    assert min(ranks(2, compare, precision)) > 1
