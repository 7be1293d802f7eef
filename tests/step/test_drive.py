"""A program that is driven without a model does what the engine is recorded to do with one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import offloadtrain as ot
from offloadtrain.config.errors import HostMemoryError
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.step.layout import step_spec as spec
from offloadtrain.step.program.operations import Kind, Launch
from offloadtrain.step.program.program import Program
from offloadtrain.step.proof.drive import steps
from offloadtrain.step.proof.recording import Entry, Launched, trace
from tests.numerics.models import Chain, batches, loss_of
from tests.numerics.test_offload import train

STEPS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {"clip_norm": 0.5},
    "early": {"skip_nonfinite": False},
    "speculative": {"update": "speculative", "clip_norm": 1e9},
    "delayed": {"update": "delayed"},
}
PLACES: dict[str, dict[str, Any]] = {
    "on the device": {},
    "1 slot": {"working": "host", "device_slots": 1},
    "2 slots": {"working": "host"},
    "inputs offloaded": {"activation": "offload"},
    "2 slots, inputs offloaded": {"working": "host", "activation": "offload"},
    "3 slots, some stay": {"working": "host", "device_slots": 3, "resident_blocks": 2},
}
OURS = (Kind.FORWARD, Kind.BACKWARD, Kind.DECIDE)

Lanes = dict[str, list[str]]


def by_lane(found: Iterable[tuple[str, str]]) -> Lanes:
    lanes = defaultdict(list)
    for lane, name in found:
        lanes[lane].append(name)
    return dict(lanes)


def launched(program: Iterable[Entry]) -> Lanes:
    """Of a recording."""
    return by_lane((e.lane.value, e.name) for e in program if isinstance(e, Launched))


def driven(optimizer: ot.OffloadOptimizer) -> Lanes:
    """What its program does without it, behind the first upload, which leaves buckets in slots."""
    program = Program(optimizer._engine.program.spec, optimizer.ranks.rank)
    program.upload_masters()
    program.synchronized()
    operations = [
        op
        for op in steps(program, STEPS, input_bytes=64)
        if not (isinstance(op, Launch) and op.kind in OURS)
    ]
    return launched(trace(program.spec, operations, optimizer.ranks.rank))


def compared(
    mode: str,
    accum: int,
    options: dict[str, Any],
    stream: list[Any],
    rule: Any = None,
    made: Callable[[], nn.Module] = lambda: Chain(5),
) -> str:
    """How the two differ: empty where they do not."""
    torch.manual_seed(0)
    model, lanes = made(), RecordingLanes(SequentialLanes())
    with on_lanes(lanes):
        optimizer = ot.offload(
            model, rule, device="cpu", grad_accum_steps=accum, **OPTIONS[mode], **options
        )
    lanes.program.clear()  # the upload of the first weights
    for step in range(STEPS):
        train(optimizer, model, stream[step * accum : (step + 1) * accum])
    recorded, expected = launched(lanes.program), driven(optimizer)
    optimizer.close()
    differ = [lane for lane in {*recorded, *expected} if recorded.get(lane) != expected.get(lane)]
    return "; ".join(f"{lane}: {recorded.get(lane)}, {expected.get(lane)}" for lane in differ)


@pytest.mark.cover(1)
@pytest.mark.parametrize("staging", [spec.STAGING_BYTES, 4096], ids=["whole", "pieces"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("mode", OPTIONS)
def test_every_lane_does_the_same_in_the_same_order(
    mode: str, accum: int, place: str, staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec, "STAGING_BYTES", staging)
    assert compared(mode, accum, PLACES[place], batches(STEPS * accum)) == ""


@pytest.mark.parametrize("accum", [1, 2])
def test_blocks_without_a_second_copy(accum: int) -> None:
    """There is memory for a second copy of some blocks' state."""
    some = 0
    for limit in range(300_000, 900_000, 100_000):
        options = {"host_memory_limit": limit}
        try:
            assert compared("speculative", accum, options, batches(STEPS * accum)) == ""
        except HostMemoryError:
            continue
        some += 1
    assert some


def test_the_stand_in_can_say_no() -> None:
    model = Chain(5)
    lanes = RecordingLanes(SequentialLanes())
    with on_lanes(lanes):
        optimizer = ot.offload(model, device="cpu", clip_norm=0.5)
    lanes.program.clear()
    for tokens in batches(STEPS + 1):  # one step more than is driven
        optimizer.backward(loss_of(model, tokens))
        optimizer.step()
    assert launched(lanes.program) != driven(optimizer)
    optimizer.close()
