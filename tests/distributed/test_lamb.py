"""LAMB on two ranks, each of which has whole tensors: the bits of a plain loop on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.conftest import Run
from tests.numerics.lamb import CAPPED, LambRun, NarrowLambRun
from tests.numerics.models import batches
from tests.numerics.test_rules import follow, pair
from tests.runtime.kernels.test_adam import needs_fma_in_torch

OPTIONS: dict[str, dict[str, Any]] = {
    "stage 1": {"zero_stage": 1, "clip_norm": 0.5},
    "stage 2, summed": {"zero_stage": 2, "clip_norm": 0.5, "grad_accum_steps": 2},
    "stage 2, early, wide": {"zero_stage": 2, "skip_nonfinite": False, "reduction": "fp32"},
    "stage 2, speculative": {"zero_stage": 2, "update": "speculative", "clip_norm": 0.5},
    "stage 3": {"zero_stage": 3, "clip_norm": 0.5},
    "stage 3, streamed, delayed": {"working": "host", "update": "delayed", "warmup_steps": 1},
    "stage 2, state on the device": {"zero_stage": 2, "state_on": "device"},
}


def compare(options: dict[str, Any], state: str = "fp32") -> list[str]:
    """On one rank. All see the same batches: their sum, divided by their number, is exact.

    Returns the names of this rank's tensors."""
    kind = LambRun if state == "fp32" else NarrowLambRun
    run, optimizer, model = pair(CAPPED, kind, state=state, **options)
    accum = options.get("grad_accum_steps", 1)
    follow(run, optimizer, model, batches(4 * accum), accum)
    held = []
    for name, extent in optimizer.extents().items():
        assert extent.hi - extent.lo in (0, run.params[name].numel()), name
        held += [name] * (extent.hi > extent.lo)
    for name, kept in optimizer.named_state():
        whole = [run.master(name), *(run.moment(name, key) for key in run.rule.moments)]
        expected = whole if state == "fp32" else list(run.kept[name])
        for (field, found), value in zip(kept.items(), expected, strict=True):
            flat = value.reshape(-1)
            assert torch.equal(found.reshape(-1), flat if name in held else flat[:0]), (name, field)
    optimizer.close()
    return held


@needs_fma_in_torch
@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_shards_have_the_bits_of_one_rank(ranks: Run, options: dict[str, Any]) -> None:
    first, second = ranks(2, compare, options)
    assert first and second and not set(first) & set(second)


@needs_fma_in_torch
def test_two_ranks_have_the_bits_of_one(ranks: Run) -> None:
    ranks(2, compare, {"zero_stage": 2, "clip_norm": 0.5})


@needs_fma_in_torch
@pytest.mark.slow
@pytest.mark.parametrize("state", ["split16", "int8"])
def test_narrow_shards_have_the_bits_of_one_rank(ranks: Run, state: str) -> None:
    ranks(2, compare, {"clip_norm": 0.5}, state)
