"""The model of published systems: its bounds on published numbers, cases by hand, properties."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import validate_plan
from benchmarks.papers import (
    PUBLISHED,
    largest_model,
    megatron_flops,
    run_of,
    tflops,
    with_largest_micro_batch,
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
    gpu_bytes,
    host_bytes,
    layer_bytes,
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


def test_the_documentation_shows_what_the_command_prints() -> None:
    """After a change: paste the output of `python -m benchmarks.validate_plan` there."""
    shown = DOC.read_text(encoding="utf-8").partition("```text\n")[2].partition("```")[0]
    assert shown == "\n".join(validate_plan.report(FIGURES, DGX2)) + "\n"


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


def test_activations_by_hand() -> None:
    """34 + 5as/h bytes per token and channel; the split part shrinks, the rest does not."""
    shape = replace(TEN_B, d_model=4096, num_heads=32, max_seq_len=1024)
    assert layer_bytes(shape, 1) == 1024 * 4096 * (34 + 40)
    assert layer_bytes(shape, 3, mp=8) == 3 * 1024 * 4096 * (10 + (24 + 40) / 8)


def test_model_parallelism_narrows_the_matrices() -> None:
    """Split in four, compute takes more than a quarter: matrices narrow, norms stay whole."""
    times = step_times(Run(shape=TEN_B, micro_batch=3, gpus=4, mp=4), DGX2, SOFTWARE)
    kernels = replace(MEGATRON, split=4)
    alone, split = (
        compute_seconds(TEN_B, 3, DGX2, each, recompute=True) for each in (MEGATRON, kernels)
    )
    assert alone.forward / 4 < split.forward < alone.forward
    assert times.forward == pytest.approx(split.forward / SOFTWARE.compute_share)
    assert times.backward == pytest.approx(split.backward / SOFTWARE.compute_share)


@pytest.mark.parametrize(
    ("size", "widest"), [("gpt-1b", 6 * 1024 * 50304), ("gpt-10b", 1024 * 4096 * 74)]
)
def test_gpu_memory_by_hand(size: str, widest: int) -> None:
    """Weights, layer inputs, two buckets, and logits or one layer: whichever is larger."""
    shape = SIZES[size]
    inputs = 2 * 1024 * shape.d_model * shape.num_layers
    planned = gpu_bytes(Run(shape=shape, micro_batch=1), SOFTWARE)
    assert planned == pytest.approx(2 * num_params(shape) + inputs + widest + 2e9)


def test_ddp_memory_by_hand() -> None:
    """16 bytes of state and DDP's copy of the gradients; every layer's activations, and logits."""
    shape = SIZES["gpt-1b"]
    run = Run(shape=shape, micro_batch=1, stage=0, offload=False, recompute=False)
    activations = 20 * 1024 * 2048 * (34 + 40) + 6 * 1024 * 50304
    assert gpu_bytes(run, SOFTWARE) == pytest.approx(18 * num_params(shape) + activations)


def test_accumulation_copies_the_running_sum_down_and_up() -> None:
    """Between microbatches 2 bytes per parameter go each way, and the GPU waits for both."""
    five = step_times(Run(shape=TEN_B, micro_batch=10, micro_steps=5), DGX2, SOFTWARE)
    assert five.transfers == pytest.approx(4 * (2 + 2) * num_params(TEN_B) / 12e9)


def test_a_backward_too_short_shows_the_last_copy() -> None:
    short = replace(TEN_B, max_seq_len=16)
    times = step_times(Run(shape=short, micro_batch=1), DGX2, SOFTWARE)
    assert times.transfers == pytest.approx(4 * num_params(short) / 12e9 - times.backward)


def test_early_stages_sum_on_the_gpu() -> None:
    run = Run(shape=TEN_B, micro_batch=10, micro_steps=5, gpus=16, stage=1)
    assert step_times(run, DGX2, SOFTWARE).transfers == 0
    assert host_bytes(run, DGX2, SOFTWARE) == pytest.approx(18 * num_params(TEN_B))
    assert gpu_bytes(run, SOFTWARE) - gpu_bytes(replace(run, stage=2), SOFTWARE) == pytest.approx(
        2 * num_params(TEN_B)
    )


def test_the_delayed_update_hides_adam_and_nothing_else() -> None:
    run = Run(shape=TEN_B, micro_batch=10)
    plain = step_times(run, DGX2, SOFTWARE)
    delayed = step_times(replace(run, dpu=True), DGX2, SOFTWARE)
    assert delayed == replace(plain, optimizer=0.0)
    slow = step_times(replace(run, dpu=True), DGX2, Software(adam_share=0.01))
    full = step_times(run, DGX2, Software(adam_share=0.01)).optimizer
    assert slow.optimizer == pytest.approx(full - plain.forward - plain.backward)


def test_ranks_of_a_host_share_its_links_and_cores() -> None:
    params = num_params(TEN_B)
    alone, full = (
        step_times(Run(shape=TEN_B, micro_batch=10, gpus=gpus), DGX2, SOFTWARE) for gpus in (1, 16)
    )
    assert full.h2d == pytest.approx(2 * params / 16 / (48e9 / 16))
    assert full.optimizer == pytest.approx(1.4 * alone.optimizer)
    assert full.communication == pytest.approx(2 * 2 * params * 15 / 16 / 150e9)


@pytest.mark.parametrize(("stage", "passes"), [(0, 2), (1, 2), (2, 4), (3, 9)])
def test_collectives_of_a_step_by_stage(stage: int, passes: int) -> None:
    """Of three microbatches: stage 2 reduces each, stage 3 also gathers each twice."""
    run = Run(shape=TEN_B, micro_batch=1, micro_steps=3, gpus=4, stage=stage, offload=False)
    moved = passes * 2 * num_params(TEN_B) * 3 / 4
    assert step_times(run, DGX2, SOFTWARE).communication == pytest.approx(moved / 150e9)


def test_tensor_parallel_by_hand() -> None:
    """8 bsh (t-1)/t elements of 2 bytes per layer, half as much again for recompute."""
    run = Run(shape=TEN_B, micro_batch=3, gpus=8, mp=8, offload=False)
    each = 8 * 3 * 1024 * 4096 * 7 / 8 * 2 * 50 / 150e9
    assert step_times(run, DGX2, SOFTWARE).communication == pytest.approx(1.5 * each)
    plain = step_times(replace(run, recompute=False), DGX2, SOFTWARE)
    assert plain.communication == pytest.approx(each)


def test_split_inputs_are_gathered_again_and_take_a_share() -> None:
    run = Run(shape=TEN_B, micro_batch=3, gpus=8, mp=8, offload=False)
    split, host = replace(run, inputs="split"), replace(run, inputs="host")
    inputs = 2 * 3 * 1024 * 4096 * 50
    sizes = [gpu_bytes(each, SOFTWARE) for each in (run, split, host)]
    assert sizes[0] - sizes[1] == pytest.approx(inputs * 7 / 8)
    assert sizes[1] - sizes[2] == pytest.approx(inputs / 8)
    times = [step_times(each, DGX2, SOFTWARE).communication for each in (run, split, host)]
    assert times[1] - times[0] == pytest.approx(inputs * 7 / 8 / 150e9)
    assert times[2] - times[1] == pytest.approx(2 * inputs / 8 / (48e9 / 8))


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


def test_the_largest_micro_batch_fits_and_twice_as_much_does_not() -> None:
    run = Run(shape=TEN_B, micro_batch=1, gpus=64, offload=False)
    largest = with_largest_micro_batch(run, DGX2, SOFTWARE, 32)
    assert not too_large_for(largest, DGX2, SOFTWARE)
    twice = replace(largest, micro_batch=2 * largest.micro_batch)
    assert too_large_for(twice, DGX2, SOFTWARE) == "GPU"
    assert with_largest_micro_batch(run, DGX2, SOFTWARE, 3).micro_batch == 2
    none = with_largest_micro_batch(replace(run, gpus=1), DGX2, SOFTWARE, 32)
    assert none.micro_batch == 1 and too_large_for(none, DGX2, SOFTWARE) == "GPU"


def test_the_largest_model_fits_and_one_layer_more_does_not() -> None:
    run = Run(shape=TEN_B, micro_batch=4, micro_steps=2)
    largest = largest_model(run, DGX2, SOFTWARE)
    deeper = [replace(run, shape=replace(TEN_B, num_layers=n)) for n in range(60, 80)]
    fits = [each for each in deeper if not too_large_for(each, DGX2, SOFTWARE)]
    assert fits and len(fits) < len(deeper)
    assert num_params(fits[-1].shape) <= largest < num_params(deeper[len(fits)].shape)


def test_a_small_host_bounds_the_largest_model() -> None:
    run, small = Run(shape=TEN_B, micro_batch=4), replace(DGX2, host_memory="180 GB")
    assert largest_model(run, small, SOFTWARE) == pytest.approx(10e9)
    assert too_large_for(run, small, SOFTWARE) == "host"


# ── properties ──

RUNS = st.builds(
    Run,
    shape=st.sampled_from([SIZES["gpt-1b"], TEN_B, SIZES["gpt-20b"]]),
    micro_batch=st.integers(1, 32),
    micro_steps=st.floats(1, 64),
    gpus=st.sampled_from([4, 16, 128]),
    mp=st.sampled_from([1, 2, 4]),
    stage=st.integers(0, 3),
    offload=st.booleans(),
    dpu=st.booleans(),
    recompute=st.booleans(),
)


def _step(run: Run, software: Software = SOFTWARE) -> float:
    return step_times(run, DGX2, software).step


@levels.examples(100)
@given(RUNS)
def test_more_work_never_takes_less(run: Run) -> None:
    """Equal where a delayed Adam is what the step waits for."""
    least = _step(run) * (1 - 1e-9)
    deeper = replace(run.shape, num_layers=run.shape.num_layers + 1)
    assert _step(replace(run, micro_batch=run.micro_batch + 1)) > least
    assert _step(replace(run, micro_steps=run.micro_steps + 1)) > least
    assert _step(replace(run, shape=deeper)) > least


@levels.examples(100)
@given(RUNS)
def test_nothing_takes_negative_time_or_beats_the_gpu(run: Run) -> None:
    assert all(seconds >= 0 for seconds in asdict(step_times(run, DGX2, SOFTWARE)).values())
    assert 0 < tflops(run, DGX2, SOFTWARE) < DGX2.fp16_tflops


@levels.examples(100)
@given(RUNS)
def test_the_delayed_update_never_costs_and_better_software_never_hurts(run: Run) -> None:
    most = _step(replace(run, dpu=False)) * (1 + 1e-9)
    best = Software(adam_share=1.0, contention=1.0, ring_share=1.0)
    assert _step(replace(run, dpu=True)) <= most
    assert _step(replace(run, dpu=False), best) <= most


@levels.examples(100)
@given(RUNS)
def test_higher_stages_and_offload_never_need_more_of_the_gpu(run: Run) -> None:
    sizes = [gpu_bytes(replace(run, stage=stage), SOFTWARE) for stage in (1, 2, 3)]
    assert sizes == sorted(sizes, reverse=True)
    if run.stage:
        without = gpu_bytes(replace(run, offload=False), SOFTWARE)
        assert gpu_bytes(replace(run, offload=True), SOFTWARE) <= without


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
