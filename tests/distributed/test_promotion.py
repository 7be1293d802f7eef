"""State moves to the devices of all ranks at one step, as far as the fullest of them allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from offloadtrain.engine import promotion
from offloadtrain.engine.promotion import CHECK_STEPS
from offloadtrain.step.layout.step_spec import StepSpec
from tests.distributed.conftest import Run
from tests.distributed.reference import compare
from tests.numerics.test_promotion import Device


def shares_of(name: str, rooms: list[int], lanes: str, **options: Any) -> list[float]:
    """Train on this rank with so much room on each device; return the shares that moved."""
    device, shares = Device(), []
    device.room = rooms[dist.get_rank()]

    def with_share(spec: StepSpec, share: float) -> StepSpec:
        shares.append(share)
        return with_share_(spec, share)

    with_share_ = promotion._with_share
    with pytest.MonkeyPatch.context() as patch:
        device.install(patch)
        patch.setattr(promotion, "_with_share", with_share)
        steps = 2 * CHECK_STEPS + 4
        compare(name, loop={"steps": steps, "lanes": lanes}, state_on="auto", **options)
    return shares


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("frozen", {"zero_stage": 3, "working": "host", "resident_blocks": 2}),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("chain", {"zero_stage": 1, "grad_accum_steps": 2}),
                ("chain", {"zero_stage": 2, "clip_norm": 0.1}),
                ("frozen", {"zero_stage": 3}),
                ("chain", {"zero_stage": 3, "update": "speculative", "reduction": "fp32"}),
            )
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("lanes", ["in order", pytest.param("late", marks=pytest.mark.slow)])
def test_all_ranks_move_the_same_share(
    ranks: Run, name: str, options: dict[str, Any], lanes: str
) -> None:
    """Every bit is that of data parallelism."""
    ample, least = 1 << 30, 20_000
    (of_least, also), (alone, _) = (
        ranks(2, shares_of, name, rooms, lanes, **options)
        for rooms in ([ample, least], [least, least])
    )
    assert of_least == also == alone and len(of_least) == 1 and 0 < of_least[0] < 1
