"""The generated 13B runs are logs as the trainer writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.generated_runs import generate
from offloadtrain.config.job import load
from offloadtrain.events import log_lines, schema

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [1, 4])
def test_every_rank_has_steps_memory_and_a_timeline(tmp_path: Path, ranks: int) -> None:
    folder = generate(tmp_path / "run", ranks=ranks, steps=4)
    logs = sorted((folder / "events").glob("rank*.jsonl"))
    assert len(logs) == ranks
    for log in logs:
        events = [record.event for record in log_lines.read(log)]
        kinds = {type(event) for event in events}
        assert {schema.LiveMemory, schema.StepMemory, schema.LaneSpan, schema.System} < kinds
        steps = [event for event in events if isinstance(event, schema.Step)]
        assert [step.step for step in steps] == [1, 2, 3, 4]
        assert isinstance(events[-1], schema.RunEnded)
        assert len(events) == len(log.read_bytes().splitlines())  # no line is unreadable


def test_memory_adds_up_to_the_card(tmp_path: Path) -> None:
    """What the allocator reserved and the driver calls free leaves the context alone, and the peak
    of a record is the planned one."""
    log = generate(tmp_path / "run", steps=3, sample_s=15) / "events/rank000.jsonl"
    events = [record.event for record in log_lines.read(log)]
    live = [event for event in events if isinstance(event, schema.LiveMemory)]
    (start,) = [event for event in events if isinstance(event, schema.RunStarted)]
    planned = sum(start.plan["memory"]["device"].values()) + sum(start.plan["activations"].values())
    assert len(live) > 10
    for one in live:
        assert one.allocated_kib[-1] == planned >> 10 > max(one.allocated_kib[:2])
        assert 0 < (32 << 20) - one.reserved_kib[0] - one.free_kib[0] < 1 << 20
    assert start.config["train"]["steps"] == 3
    job = load(Path(__file__).parent.parent / "examples/gpt_13b_v100.toml")
    assert start.num_params == job.num_params
