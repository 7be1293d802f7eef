"""The program of a rule that needs whole matrices: proved, and the same bits in any order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offloadtrain.engine.interpreter import SalvageError, UpdateJournal
from offloadtrain.runtime.lanes import HostProgress, Lane, SequentialLanes
from offloadtrain.step.program.operations import Kind, Launch, Update
from offloadtrain.step.proof.prove import prove
from offloadtrain.step.proof.recording import Launched
from tests.engine.test_proof import LANES, program, run
from tests.harsh_lanes import poisoned
from tests.numerics.comparison import assert_equal
from tests.numerics.muon import RULE
from tests.recording_lanes import RecordingLanes


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"accum": 2, "working": "host", "activation": "offload"},
        {"update": "delayed", "warmup_steps": 1},
        {"state_on": "device", "accum": 2},
        {"skip_nonfinite": False, "clip_norm": None},
        {"state_on": {"device": 0.1}, "working": "host"},
        {"state_on": "disk", "working": "disk", "grad_on": "disk"},
    ],
    ids=["streamed", "delayed", "on the device", "early", "partly on the device", "on the disk"],
)
def test_no_run_races_and_any_legal_order_of_it_has_the_same_bits(
    options: dict[str, Any], tmp_path: Path
) -> None:
    if options.get("state_on") == "disk":
        options = options | {"scratch_dir": str(tmp_path), "scratch_in_memory": True}
    recorder = RecordingLanes(SequentialLanes())
    expected = run(recorder, "partly used", rule=RULE, steps=4, **options)
    assert prove(recorder.program) == []
    for make_lanes in LANES.values():
        lanes = poisoned(make_lanes(7))
        assert_equal(run(lanes, "partly used", rule=RULE, steps=4, **options), expected)


def test_the_device_has_the_next_block_while_the_host_updates_one() -> None:
    """The direction of a block stands in front of Adam of the block before, on the host lane."""
    recorded = program("chain", steps=3, rule=RULE)
    assert prove(recorded) == []
    host = [e.name for e in recorded if isinstance(e, Launched) and e.lane is Lane.HOST]
    direction, adam = Kind.DIRECTION.value, Kind.ADAM.value
    last = len(host) - 1 - host[::-1].index(f"{direction} layers.0/1")
    layers = [name for name in host[last:] if "layers" in name and "/1" in name]
    assert layers == [
        f"{direction} layers.0/1",
        f"{direction} layers.1/1",
        f"{adam} layers.0/1",
        f"{direction} layers.2/1",
        f"{adam} layers.1/1",
        f"{adam} layers.2/1",
    ]


def test_matrices_that_the_device_has_not_done_are_not_salvaged() -> None:
    journal, ran = UpdateJournal(), []
    update = Update(1, 1.0, out_of_place=False)
    for bucket, matrices in (("a", False), ("b", True)):
        op = Launch(Kind.ADAM, Lane.HOST, bucket, update=update)
        if matrices:
            journal.of_matrices.add(bucket)
        launched = HostProgress(launched=int(matrices), begun=0, ended=0)
        journal.launches(op, lambda bucket=bucket: ran.append(bucket), launched, decided=True)
    with pytest.raises(SalvageError, match="the update of 1 buckets of matrices was decided"):
        journal.finish(HostProgress(launched=2, begun=0, ended=0), lambda op: list, print)
    assert ran == []
