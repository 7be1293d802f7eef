"""Lion, SGD and Adagrad over the shards of two ranks: the bits of a plain loop on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.conftest import Run
from tests.numerics.models import batches
from tests.numerics.test_rules import RULES, NarrowRuleRun, RuleRun, follow, pair
from tests.runtime.kernels.test_adam import needs_fma_in_torch


def compare(rule: str, state: str, options: dict[str, Any]) -> None:
    """On one rank. All see the same batches: their sum, divided by their number, is exact."""
    kind = RuleRun if state == "fp32" else NarrowRuleRun
    run, optimizer, model = pair(RULES[rule], kind, state=state, **options)
    follow(run, optimizer, model, batches(4), 1)
    extents, format = optimizer.extents(), next(iter(optimizer._blocks)).buckets[0].format
    for name, kept in optimizer.named_state():
        lo, hi = extents[name].lo, extents[name].hi
        if state == "fp32":
            whole = [run.master(name), *(run.moment(name, key) for key in RULES[rule].moments)]
        else:
            whole = list(run.kept[name])
        for field, value in zip(format.fields(RULES[rule].moments), whole, strict=True):
            flat = value.reshape(-1)
            expected = flat[lo // field.per : -(-hi // field.per)] if lo < hi else flat[:0]
            assert torch.equal(kept[field.name].reshape(-1), expected), (name, field.name)
    optimizer.close()


@needs_fma_in_torch
@pytest.mark.cover(0, 2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("rule", "state"),
    [*((name, "fp32") for name in RULES), ("lion", "int8"), ("nesterov", "split16")],
)
def test_shards_have_the_bits_of_one_rank(ranks: Run, rule: str, state: str, stage: int) -> None:
    ranks(2, compare, rule, state, {"zero_stage": stage})
