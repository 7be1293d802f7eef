"""Lazy updates among ranks: an expert is updated if any rank has tokens for it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offloadtrain as ot
from tests.distributed.conftest import Run
from tests.distributed.reference import whole_state
from tests.numerics.test_lazy_updates import (
    DECAY,
    EXPERTS,
    LR,
    NAMED,
    Micro,
    Model,
    Reference,
    rows_of,
)

ENDS = [[(6, 6, 6, 12), (12, 12, 12, 12)], [(0, 12, 12, 12), (0, 0, 12, 12)], [(3, 6, 9, 12)] * 2]
"""A step, a rank: rows up to each expert."""


def micro_of(number: int, rank: int) -> Micro:
    return rows_of(2 * number + rank), ENDS[number % 3][rank], (number + rank) % 3 == 0


def compare(**options: Any) -> None:
    """On one rank, with the reference that has the microbatches of all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, reference = Model(), Reference(Model(), torch.float32)
    rule = ot.AdamW(lr=LR, weight_decay=DECAY)
    optimizer = ot.offload(
        model, rule, device="cpu", precision="fp32", lazy_updates=NAMED, **options
    )
    before = whole_state(optimizer, "master")["master"]
    for number in range(6):
        optimizer.backward(model(*micro_of(number, rank)).square().mean())
        optimizer.step()
        optimizer.synchronize()
        micro = [micro_of(number, one) for one in range(size)]
        reference.step(number, micro)
        after = whole_state(optimizer, "master")["master"]
        ends = [(0, *one[1]) for one in micro]
        used = [
            any(hi > lo for lo, hi in pairs) for pairs in zip(*map(pairwise, ends), strict=True)
        ]
        adapted = any(one[2] for one in micro)
        for name, master in after.items():
            expected = reference.master(name).view_as(master)
            assert torch.allclose(master, expected, rtol=0, atol=1e-6), (number, name)
            pieces = EXPERTS if name.endswith("experts") else 1
            then, now = before[name].flatten().chunk(pieces), master.flatten().chunk(pieces)
            for index in range(pieces):
                moves = adapted if "adapter" in name else pieces == 1 or used[index]
                assert torch.equal(then[index], now[index]) != moves, (number, name, index)
        before = after
    optimizer.close()


@pytest.mark.parametrize(
    "options",
    [{"zero_stage": 1}, {"update": "speculative"}],
    ids=str,
)
def test_what_no_rank_has_a_gradient_for_stays(ranks: Run, options: dict[str, Any]) -> None:
    ranks(2, compare, **options)
