"""Among ranks, too, what `schedule.program` says is what the engine is recorded to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.schedule import program as scheduled
from offloadtrain.transfer import SequentialLanes, on_lanes
from offloadtrain.transfer.recorder import RecordingLanes
from offloadtrain.transfer.virtual import operations
from tests.distributed.conftest import Run
from tests.distributed.test_sharded import own_batches
from tests.engine.test_schedule import KINDS, OPTIONS, STEPS, by_lane, period, shape_of, speeds
from tests.numerics.models import Chain
from tests.numerics.test_offload import train

PLACES: dict[str, dict[str, Any]] = {
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 3, device": {"zero_stage": 3},
    "stage 3, host": {"working": "host"},
    "stage 3, some stay": {"working": "host", "resident_blocks": 2, "device_slots": 1},
}


def compared(mode: str, accum: int, options: dict[str, Any]) -> str:
    """How this rank's recorded program differs from the schedule: empty where it does not."""
    torch.manual_seed(0)
    model, lanes = Chain(5), RecordingLanes(SequentialLanes())
    with on_lanes(lanes):
        optimizer = ot.offload(
            model, device="cpu", grad_accum_steps=accum, **OPTIONS[mode], **options
        )
    begun = len(operations(lanes.program))
    stream = own_batches(STEPS * accum)
    for step in range(STEPS):
        train(optimizer, model, stream[step * accum : (step + 1) * accum])
    recorded = operations(lanes.program)
    slots = options.get("device_slots", 2)
    whole = options.get("zero_stage") == 1
    shape = shape_of(optimizer, mode, accum, slots, whole_gradients=whole)
    expected = scheduled(shape, STEPS)
    optimizer.close()
    mine, said = by_lane(recorded[begun:], KINDS), by_lane(expected, KINDS)
    for lane in sorted({*mine, *said}):
        if mine.get(lane) != said.get(lane):
            return f"{lane}: {mine.get(lane)} and {said.get(lane)}"
    for seed in range(20):
        seconds = speeds(seed)
        takes, should = period(recorded, seconds), period(expected, seconds)
        if abs(takes / should - 1) > 1e-9:
            return f"seed {seed}: {takes} and {should}"
    return ""


@pytest.mark.cover(1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("mode", "accum"),
    [("exact", 1), ("exact", 2), ("early", 2), ("speculative", 1), ("delayed", 2)],
)
def test_the_engine_does_what_its_schedule_says(
    ranks: Run, mode: str, accum: int, place: str
) -> None:
    assert ranks(2, compared, mode, accum, PLACES[place]) == ["", ""]
