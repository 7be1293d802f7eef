"""The model of published systems: its bounds on published numbers, cases by hand, properties."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import validate_plan
from benchmarks.papers import (
    PUBLISHED,
    megatron_flops,
    run_of,
)
from offloadtrain.config.model_shape import SIZES, num_params
from offloadtrain.plan.baselines.published import (
    MEGATRON,
    SCHEDULES,
    Pipeline,
    Run,
    Schedule,
    Software,
    compute_seconds,
    pipeline_row,
    step_times,
    too_large_for,
)
from tests import levels

DATA: dict[str, Any] = json.loads(PUBLISHED.read_text())
FIGURES, DGX2 = validate_plan.load()
SOFTWARE = Software()
TEN_B = SIZES["gpt-10b"]
DOC = Path(__file__).resolve().parents[2] / "docs/validation.md"


# ── published numbers ──


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.figure)
def test_planned_is_within_the_bounds_of_published(figure: validate_plan.Figure) -> None:
    assert list(validate_plan.broken(figure)) == []


def test_the_bounds_are_the_promised_ones() -> None:
    promised: dict[str, dict[str, Any]] = {
        figure: {"median": 0.15, "cell": 0.25}
        for figure in ("fig-8", "fig-9", "fig-9-gain", "fig-10", "fig-11", "zero-2")
    }
    promised |= {"zero-limits": {"cell": 0.25}, "zero-mean": {"cell": 0.10}}
    promised |= {"zero-fig-2": {"cell": 0.25}, "zero-fig-4": {"median": 0.20, "cell": 0.25}}
    promised |= {"zero-table-1": {"exact": True}, "max-size": {"cell": 0.10}}
    promised |= {"tutorial": {"cell": 0.20}, "gpipe": {"cell": 0.10}}
    assert {figure.figure: figure.bounds for figure in FIGURES} == promised


def test_only_these_cells_are_printed_and_not_asserted() -> None:
    assert {
        figure.figure: left_out
        for figure in FIGURES
        if (left_out := [cell.cell for cell in figure.cells if cell.not_asserted])
    } == {
        "max-size": ["ZeRO-2, 4 GPUs", "ZeRO-2, 16 GPUs"],
        "fig-10": [f"{size}, mp 2" for size in ("40B", "60B")],
        "zero-fig-2": ["170B, inputs on the host", "100B, model parallel alone"],
        "zero-fig-4": ["13B"],
        "tutorial": ["forward", "backward"],
        "gpipe": [
            *(f"{stages} stages, 1 microbatch" for stages in (2, 4, 8)),
            *(f"{stages} stages, 4 microbatches" for stages in (4, 8)),
        ],
    }


def test_no_cell_brings_a_constant_of_its_own() -> None:
    allowed = {field.name for field in fields(Run)} - {"shape"}
    for figure in DATA["figures"]:
        assert figure["source"]
        for cell in figure["cells"]:
            assert set(cell.get("run", {})) <= allowed


def test_memory_agrees_with_what_the_papers_ran() -> None:
    """Every run whose speed is asserted fits; the two that the paper cannot have run do not."""
    for figure in DATA["figures"]:
        if figure["measure"] not in ("tflops", "seconds"):
            continue
        for cell in figure["cells"]:
            run = run_of(cell, DGX2)
            expected = "GPU" if "impossible" in cell.get("not_asserted", "") else ""
            if run.stage:
                assert too_large_for(run, DGX2, SOFTWARE) == expected, cell["cell"]


def test_printed_digits_are_met_rounded_or_cut_off() -> None:
    for planned, digits in ((41.25, "41.3"), (2218.75, "2218"), (2218.75, "2219"), (0.117, "0.12")):
        assert validate_plan.printed_as(planned, digits)
    for planned, digits in ((41.25, "41.4"), (41.25, "41.1"), (2218.75, "2217"), (16e3, "16001")):
        assert not validate_plan.printed_as(planned, digits)


@pytest.mark.parametrize(
    ("bounds", "broken"),
    [
        ({"cell": 0.25, "median": 0.15}, ["median 20.0%, bound 15%"]),
        ({"cell": 0.15}, ["b: +20.0%, bound 15%", "c: -20.0%, bound 15%"]),
        ({"exact": True}, ["b: 12, published 10", "c: 8, published 10"]),
        ({"cell": 0.25, "median": 0.25}, []),
    ],
)
def test_a_broken_bound_is_found(bounds: dict[str, Any], broken: list[str]) -> None:
    planned = {"a": 10.0, "b": 12.0, "c": 8.0}
    cells = [
        validate_plan.Cell(cell=name, planned=value, published="10", not_asserted="")
        for name, value in planned.items()
    ]
    cells.append(replace(cells[0], planned=99.0, not_asserted="a reason"))
    figure = validate_plan.Figure(
        figure="f", title="F", source="", bounds=bounds, cells=tuple(cells)
    )
    assert list(validate_plan.broken(figure)) == [f"F: {line}" for line in broken]


# ── the command ──


SUMMARY = re.compile(
    r"  (parameters|residual|without|left out|error)\b|    of them|  [a-z0-9-]+ +\d+ cells  "
)
"""Lines about many cells."""


def test_the_documentation_shows_the_errors_that_the_command_prints() -> None:
    """After a change: paste these lines of `python -m benchmarks.validate_plan` there."""
    blocks = re.findall(r"```text\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    shown = [line for block in blocks[1:] for line in block.splitlines()]
    printed = [line for line in validate_plan.report(FIGURES, DGX2) if SUMMARY.match(line)]
    assert shown == printed and len(printed) > 25


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_broken_bound_ends_in_exit_1_and_is_named(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["validate_plan", *arguments])
    monkeypatch.setattr(validate_plan.planned_jobs, "lines", lambda: [])
    assert validate_plan.main() == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(validate_plan, "SOFTWARE", Software(adam_share=0.1))
    assert validate_plan.main() == 1
    out, err = capsys.readouterr()
    assert "figure 9" in err and "bound 25%" in err
    if arguments:
        assert json.loads(out)["software"]["adam_share"] == 0.1


# ── by hand ──


def test_flops_by_hand() -> None:
    """One token of one sequence of one: 24 h^2 forward per layer, attention 4 h s, logits 2 h V."""
    shape = replace(TEN_B, num_layers=3, d_model=8, num_heads=1, vocab_size=10, max_seq_len=1)
    forward, attention, logits = 3 * 24 * 64, 3 * 4 * 8, 2 * 8 * 10
    assert megatron_flops(shape, 2) == pytest.approx(2 * (4 * (forward + attention) + 3 * logits))
    without = megatron_flops(shape, 2, recompute=False)
    assert without == pytest.approx(2 * 3 * (forward + attention + logits))


@pytest.mark.parametrize(("stage", "passes"), [(0, 2), (1, 2), (2, 4), (3, 9)])
def test_collectives_of_a_step_by_stage(stage: int, passes: int) -> None:
    """Of three microbatches: stage 2 reduces each, stage 3 also gathers each twice."""
    run = Run(shape=TEN_B, micro_batch=1, micro_steps=3, gpus=4, stage=stage, offload=False)
    moved = passes * 2 * num_params(TEN_B) * 3 / 4
    assert step_times(run, DGX2, SOFTWARE).communication == pytest.approx(moved / 150e9)


@pytest.mark.parametrize(("params", "layers", "batch"), [(100, 125, 32), (170, 212, 12)])
def test_the_largest_of_zero_need_partitioned_inputs(params: int, layers: int, batch: int) -> None:
    """ZeRO, figure 2, on 400 GPUs with model parallelism of 16: without Pa they do not fit."""
    shape = replace(TEN_B, d_model=8192, num_heads=64, num_layers=layers)
    run = Run(shape=shape, micro_batch=batch, gpus=400, mp=16, offload=False)
    assert num_params(shape) == pytest.approx(params * 1e9, rel=0.02)
    assert too_large_for(run, DGX2, SOFTWARE) == "GPU"
    split, host = replace(run, inputs="split"), replace(run, inputs="host")
    assert too_large_for(split, DGX2, SOFTWARE) == ("" if params == 100 else "GPU")
    assert too_large_for(host, DGX2, SOFTWARE) == ""


# ── properties ──

# ── pipelines ──

PIPE = Pipeline(shape=TEN_B, micro_batch=2, micro_batches=8, stages=4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipeline_memory_by_hand(schedule: Schedule) -> None:
    """Recompute: inputs of the stashed microbatches and one stage's whole activations."""
    first = pipeline_row(schedule, PIPE, DGX2)
    per_stage = num_params(TEN_B) / 4
    stashed = 8 if schedule == "gpipe" else 4
    inputs, full = 2 * 2 * 1024 * 4096, 2 * 1024 * 4096 * 74 * 50 / 4
    assert first.weights_bytes == (4 if schedule == "2bw" else 2) * per_stage
    last = pipeline_row(schedule, PIPE, DGX2, 3)
    assert last.weights_bytes == 2 * per_stage
    kept_last = 8 if schedule == "gpipe" else 1
    assert last.activation_bytes == pytest.approx(kept_last * inputs + full)
    assert first.state_bytes == 14 * per_stage
    assert first.activation_bytes == pytest.approx(stashed * inputs + full)
    plain = pipeline_row(schedule, replace(PIPE, recompute=False), DGX2)
    assert plain.activation_bytes == pytest.approx(stashed * (inputs + full))
    assert first.stale == (schedule == "2bw")


def test_pipeline_time_by_hand() -> None:
    """Three of eleven turns are bubble; a boundary's input and its gradient cross a link."""
    rows = {schedule: pipeline_row(schedule, PIPE, DGX2) for schedule in SCHEDULES}
    full = compute_seconds(TEN_B, 2, DGX2, MEGATRON, recompute=True)
    stage = (full.forward + full.backward) / 4 + 2 * (2 * 2 * 1024 * 4096) / 150e9
    assert rows["gpipe"].step_s == rows["flush"].step_s == pytest.approx(11 * stage)
    assert rows["gpipe"].bubble == pytest.approx(3 / 11)
    assert rows["2bw"].step_s == pytest.approx(8 * stage)
    assert rows["2bw"].bubble == 0


def test_replicas_between_hosts_add_their_sync() -> None:
    """2BW hides it beside the next step until it is longer than the step."""
    wide = replace(PIPE, replicas=8)
    sync = 2 * (2 * num_params(TEN_B) / 4) * 7 / 8 / (100e9 / 16)
    alone, many = (pipeline_row("flush", pipe, DGX2).step_s for pipe in (PIPE, wide))
    assert many - alone == pytest.approx(sync)
    hidden, short = (replace(wide, micro_batches=count) for count in (8, 1))
    assert pipeline_row("2bw", hidden, DGX2).bubble == 0
    assert pipeline_row("2bw", short, DGX2).step_s == pytest.approx(sync)


@levels.examples(100)
@given(st.integers(1, 64), st.integers(1, 64))
def test_the_bubble_lies_between_no_pipeline_and_no_bubble(stages: int, count: int) -> None:
    seconds = validate_plan.gpipe_seconds
    assert 1 / stages <= seconds(stages, count) <= 1
    assert seconds(stages, count + 1) <= seconds(stages, count)
