"""A program that is driven without a model does what the engine is recorded to do with one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadtrain as ot
from offloadtrain.config.errors import HostMemoryError
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.step.layout import step_spec as spec
from offloadtrain.step.program.operations import Kind, Launch
from offloadtrain.step.program.program import Program
from offloadtrain.step.proof.drive import steps
from offloadtrain.step.proof.recording import Entry, Launched, trace
from tests import levels
from tests.numerics.comparison import train
from tests.numerics.models import Chain, batches, loss_of
from tests.numerics.muon import RULE
from tests.recording_lanes import RecordingLanes

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
    "state on the disk": {"state_on": "disk"},
    "all on the disk": {"state_on": "disk", "working": "disk", "grad_on": "disk"},
}
OURS = (Kind.FORWARD, Kind.BACKWARD, Kind.DECIDE)

Lanes = dict[str, list[str]]


def by_lane(launches: Iterable[tuple[str, str]]) -> Lanes:
    lanes = defaultdict(list)
    for lane, name in launches:
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


FORMATS = ("fp32", "int8")
STAGING = (spec.STAGING_BYTES, 4096)
"""A slot of the latter holds a piece of a bucket."""


def options_of(place: str, mode: str, folder: Path) -> dict[str, Any] | None:
    """Return options of `offload`; None if the mode cannot be in this place."""
    options = dict(PLACES[place])
    if options.get("state_on") == "disk":
        if mode == "speculative":
            return None
        options |= {"scratch_dir": str(folder), "scratch_in_memory": True}
        if mode == "delayed":
            options.pop("grad_on", None)
    return options


@pytest.mark.parametrize(
    ("mode", "place", "accum", "staging", "state"),
    levels.array([*OPTIONS], [*PLACES], (1, 3), STAGING, FORMATS),
)
def test_every_lane_does_the_same_in_the_same_order(
    mode: str,
    place: str,
    accum: int,
    staging: int,
    state: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spec, "STAGING_BYTES", staging)
    if (options := options_of(place, mode, tmp_path)) is not None:
        options["state"] = state
        assert compared(mode, accum, options, batches(STEPS * accum)) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "place"), [("exact", "2 slots, inputs offloaded"), ("early", "on the device")]
)
def test_a_rule_for_matrices_does_the_same(mode: str, place: str) -> None:
    assert compared(mode, 2, PLACES[place], batches(2 * STEPS), RULE) == ""


@pytest.mark.parametrize("accum", [1, 2])
def test_blocks_without_a_second_copy(accum: int) -> None:
    """There is memory for a second copy of some blocks' state."""
    fitting = 0
    for limit in range(300_000, 900_000, 100_000):
        options = {"host_memory_limit": limit}
        try:
            assert compared("speculative", accum, options, batches(STEPS * accum)) == ""
        except HostMemoryError:
            continue
        fitting += 1
    assert fitting


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
