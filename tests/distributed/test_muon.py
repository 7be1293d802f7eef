"""Muon on two ranks, each of which has whole matrices: the bits of a plain loop on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.conftest import Run
from tests.numerics.models import batches
from tests.numerics.muon import NarrowMuonRun, assert_same, is_hidden, pair
from tests.numerics.test_rules import follow
from tests.runtime.kernels.test_adam import needs_fma_in_torch

OPTIONS: dict[str, dict[str, Any]] = {
    "stage 1": {"zero_stage": 1, "clip_norm": 0.5},
    "stage 2, summed": {"zero_stage": 2, "clip_norm": 0.5, "grad_accum_steps": 2},
    "stage 2, early, wide": {"zero_stage": 2, "skip_nonfinite": False, "reduction": "fp32"},
    "stage 3": {"zero_stage": 3, "clip_norm": 0.5},
    "stage 3, streamed, delayed": {"working": "host", "update": "delayed", "warmup_steps": 1},
    "stage 2, state on the device": {"zero_stage": 2, "state_on": "device"},
}


def compare(options: dict[str, Any]) -> None:
    """On one rank. All see the same batches: their sum, divided by their number, is exact."""
    run, optimizer, model = pair(**options)
    accum = options.get("grad_accum_steps", 1)
    follow(run, optimizer, model, batches(4 * accum), accum)
    for name, extent in optimizer.extents().items():
        if is_hidden(name, run.params[name]):
            assert extent.hi - extent.lo in (0, run.params[name].numel()), name
    assert_same(run, optimizer, model)
    optimizer.close()


def compare_split16() -> None:
    run, optimizer, model = pair(run=NarrowMuonRun, state="split16", clip_norm=0.5)
    follow(run, optimizer, model, batches(4), 1)
    for name, master in optimizer.master_weights():
        if name in run.buffers:
            assert torch.equal(master, run.master(name)), name
    for name, kept in optimizer.named_state():
        if name in run.buffers and kept["momentum_buffer"].numel():
            assert torch.equal(kept["momentum_buffer"], run.buffers[name]), name
    optimizer.close()


def halves() -> list[str]:
    """Return the matrices of this rank."""
    run, optimizer, _ = pair()
    found = [
        name
        for name, extent in optimizer.extents().items()
        if is_hidden(name, run.params[name]) and extent.hi > extent.lo
    ]
    optimizer.close()
    return found


@needs_fma_in_torch
@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_shards_have_the_bits_of_one_rank(ranks: Run, options: dict[str, Any]) -> None:
    ranks(2, compare, options)


@needs_fma_in_torch
@pytest.mark.slow
def test_narrow_shards_have_the_bits_of_one_rank(ranks: Run) -> None:
    ranks(2, compare_split16)


@pytest.mark.slow
def test_each_matrix_is_on_one_rank(ranks: Run) -> None:
    first, second = ranks(2, halves)
    assert not set(first) & set(second)
    assert sorted(first + second) == [
        f"layers.{i}.{name}.weight" for i in range(3) for name in ("down", "up")
    ]
    assert len(first) == len(second)


@pytest.mark.slow
def test_a_rank_may_have_no_matrix(ranks: Run) -> None:
    """Two matrices in each layer, on four ranks: two have padding only."""
    ranks(4, compare, {"clip_norm": 0.5})
