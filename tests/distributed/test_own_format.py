"""A rule and a state format of one's own over shards: the bits of a plain loop on one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.optim import register_state_format
from tests.distributed.conftest import Run
from tests.engine.test_extending import SEED, CodecRun, Scaled, signum, train
from tests.numerics.models import Chain, batches


def compare(state: str, options: dict[str, Any]) -> None:
    """On one rank. All see the same batches: their sum, divided by their number, is exact."""
    with register_state_format(Scaled()):
        torch.manual_seed(0)
        model = Chain()
        twin = copy.deepcopy(model)
        optimizer = ot.offload(model, signum(), device="cpu", state=state, seed=SEED, **options)
        loop = CodecRun(twin, torch.bfloat16, state=state)
        train(loop, optimizer, model, batches(4), 1)
        extents = optimizer.extents()
        for name, kept in optimizer.named_state():
            lo, hi = extents[name].lo, extents[name].hi
            for field, whole in zip(
                loop.format.fields(("exp_avg",)), loop.states[name], strict=True
            ):
                expected = whole[lo // field.per : -(-hi // field.per)] if lo < hi else whole[:0]
                assert torch.equal(kept[field.name].reshape(-1), expected), (name, field.name)
        optimizer.close()


@pytest.mark.cover(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("state", ["split16", "scaled"])
def test_shards_of_ones_own_format(ranks: Run, state: str, stage: int) -> None:
    ranks(2, compare, state, {"zero_stage": stage})
