"""At the end a run says how it kept to its plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from offloadtrain.events import schema
from offloadtrain.hardware.machine import dump, find
from offloadtrain.plan.plan import Plan
from tests.train.small_job import events_of, run, small_job


def compared(path: Path) -> dict[str, schema.PlanRow]:
    (event,) = events_of(path, schema.PlanCompared)
    return {row.what: row for row in event.rows}


def warnings(path: Path) -> list[str]:
    return [event.message for event in events_of(path, schema.Warning_)]


def test_bytes_are_as_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    assert run(small_job(tmp_path), path) == 0
    rows = compared(path)
    for tier in ("host bytes", "device bytes"):
        assert rows[tier].measured == pytest.approx(rows[tier].planned, rel=0.01)
    assert rows["step"].unit == "s" and rows["step"].measured > 0
    assert "found / planned" in capsys.readouterr().err
    assert not any("not as planned" in text for text in warnings(path))


def test_bytes_that_differ_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    host = Plan.host.func
    monkeypatch.setattr(Plan, "host", property(lambda plan: host(plan) | {"forgotten": 1 << 30}))
    assert run(small_job(tmp_path), path) == 0
    (said,) = (text for text in warnings(path) if "not as planned" in text)
    assert "host bytes: planned 1." in said and "step" not in said


def test_times_are_held_to_a_measured_machine(tmp_path: Path) -> None:
    """Its file says a thousandth of what any machine does."""
    path, file = tmp_path / "run", tmp_path / "slow.toml"
    machine = find("cpu2")[1]
    slow = replace(machine, bf16_tflops=1e-6, fp16_tflops=1e-6, fp32_tflops=1e-6)
    file.write_text(dump(slow, "Slow"))
    assert run(small_job(tmp_path, f"device.machine={file}"), path) == 0
    (said,) = (text for text in warnings(path) if "not as planned" in text)
    assert "step: planned" in said and "bytes" not in said


def test_a_file_that_leaves_rates_open_does_not_refuse_a_job(tmp_path: Path) -> None:
    """doctor measures no fp16 on a CPU, where torch computes in it all the same."""
    file = tmp_path / "mine.toml"
    machine = replace(find("cpu2")[1], fp16_tflops=0.0, node_link_gbps=0.0)
    file.write_text(dump(machine, "Mine"))
    overrides = [f"device.machine={file}", "offload.precision=fp16", "train.steps=2"]
    assert run(small_job(tmp_path, *overrides, "optim.warmup_steps=0"), tmp_path / "run") == 0
