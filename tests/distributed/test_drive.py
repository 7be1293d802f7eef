"""Among ranks, too, a program that is driven does what the engine is recorded to do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.conftest import Run
from tests.distributed.test_sharded import own_batches
from tests.step.test_drive import STEPS, compared

PLACES: dict[str, dict[str, Any]] = {
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 2, summed in fp32": {"zero_stage": 2, "reduction": "fp32"},
    "stage 3, device": {"zero_stage": 3},
    "stage 3, host": {"working": "host"},
    "stage 3, some stay": {"working": "host", "resident_blocks": 2, "device_slots": 1},
}


def differs(mode: str, accum: int, options: dict[str, Any]) -> str:
    return compared(mode, accum, options, own_batches(STEPS * accum))


@pytest.mark.cover(0, 2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("mode", "accum"),
    [("exact", 1), ("exact", 2), ("early", 2), ("speculative", 1), ("delayed", 2)],
)
def test_every_rank_does_what_its_program_says(
    ranks: Run, mode: str, accum: int, place: str
) -> None:
    assert ranks(2, differs, mode, accum, PLACES[place]) == ["", ""]
