"""`offloadtrain trace`: a run log as slices on lanes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from offloadtrain.cli.exit_codes import USAGE
from offloadtrain.events import log_lines, schema
from offloadtrain.events.chrome_trace import LANES, chrome_trace
from offloadtrain.runtime.lanes import Lane
from tests.conftest import Command
from tests.train.small_job import run, small_job


def record(event: schema.Event, time_s: float, rank: int = 0) -> log_lines.Record:
    return log_lines.Record(event, rank, time_s)


def span(step: int, lane: str, start_ms: float) -> schema.LaneSpan:
    return schema.LaneSpan(step=step, lane=lane, name="work", start_ms=start_ms, duration_ms=2.0)


def test_every_lane_has_a_track() -> None:
    assert {lane.value for lane in Lane} < set(LANES)


def test_spans_lie_in_their_steps() -> None:
    steps = [schema.Step(step=n, loss=1.0 / n, lr=0.1, tokens=n, step_ms=50.0) for n in (1, 2)]
    records = [
        record(steps[0], 100.05),
        record(span(2, "host", 10.0), 100.1),
        record(replace(span(2, "comm", 10.0), num_bytes=4_000_000), 100.1),
        record(span(3, "host", 10.0), 100.1),  # of a step that never ended
        record(steps[1], 100.1),
        record(steps[1], 100.2, rank=1),
    ]
    made = chrome_trace(records)["traceEvents"]
    slices = {(e["name"], e["pid"]): (e["ts"], e["dur"]) for e in made if e["ph"] == "X"}
    assert slices == {
        ("step 1", 0): pytest.approx((0.0, 50e3), abs=1e-3),
        ("step 2", 0): pytest.approx((50e3, 50e3)),
        ("step 2", 1): pytest.approx((150e3, 50e3)),
        ("work", 0): pytest.approx((60e3, 2e3)),
    }
    of_lane = {e["cat"]: e["args"] for e in made if "cat" in e}
    assert of_lane["comm"] == {"step": 2, "bytes": 4_000_000, "GB/s": pytest.approx(2.0)}
    assert of_lane["host"] == {"step": 2}
    counted = {e["name"]: e["args"] for e in made if e["ph"] == "C" and e["ts"] < 1}
    assert counted["loss"] == {"loss": 1.0}
    names = {(e["pid"], e["args"]["name"]) for e in made if e["name"] == "thread_name"}
    assert names == {(rank, lane) for rank in (0, 1) for lane in LANES}


def test_a_run_is_traced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Command
) -> None:
    folder = tmp_path / "run"
    assert (
        run(small_job(tmp_path, "offload.working=host", "offload.activation=offload"), folder) == 0
    )
    capsys.readouterr()
    assert command("trace", folder).out.strip() == str(folder / "trace.json")
    made = json.loads((folder / "trace.json").read_text())["traceEvents"]
    categories = {e["cat"] for e in made if "cat" in e}
    assert categories == {"compute", "wait", "d2h", "host", "h2d", "load"}
    ends = [e["ts"] + e["dur"] for e in made if e.get("cat")]
    last = max(e["ts"] + e["dur"] for e in made if e["name"].startswith("step "))
    assert 0 < max(ends) <= last + 1e4


def test_a_folder_without_sampled_steps_is_refused(tmp_path: Path, command: Command) -> None:
    assert "is not a run folder" in command("trace", tmp_path, code=USAGE).err
    (tmp_path / "events").mkdir()
    (tmp_path / "events/rank000.jsonl").write_bytes(b"")
    assert "no step of this run has been sampled" in command("trace", tmp_path, code=USAGE).err
