"""The time of a pipeline: by hand, its properties, and the search for the fastest division."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from offloadtrain.config.job import Config, loads
from offloadtrain.config.ranks_options import RanksConfig, Schedule
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.parallel.pipeline import times as timing
from offloadtrain.parallel.pipeline.drive import (
    in_flight,
    rank_order,
    stage_steps,
)
from offloadtrain.parallel.pipeline.plan import stages_of, times_of
from offloadtrain.parallel.pipeline.search import search
from offloadtrain.plan.costs.costs import Costs
from offloadtrain.plan.plan import Plan, make
from offloadtrain.step.program.program import Program
from offloadtrain.step.proof.prove import prove
from tests.plan.test_memory import JOB, job

A100 = find("a100_80gb")[1]
FREE = replace(
    A100,
    **dict.fromkeys(("h2d_gbps", "d2h_gbps", "host_link_gbps", "gpu_link_gbps"), 1e9),
    **dict.fromkeys(("dram_gbps", "shared_dram_gbps"), 1e9),
    bf16_tflops=0.01,
    **dict.fromkeys(("half_width", "launch_us"), 0.0),
)
"""Nothing but compute takes time."""

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "2bw")


def pipeline(stages: int, count: int, schedule: Schedule = "1f1b", **keys: Any) -> Config:
    """Layers that are alike, and a head that is next to nothing."""
    shape = {"num_layers": 8, "d_model": 256, "num_heads": 2, "vocab_size": 2}
    shape |= keys.pop("shape", {})
    values = {
        "train__grad_accum_steps": count,
        "offload__precision": "bf16",
        "device__kind": "auto",
    }
    config = job(shape | {"max_seq_len": 16}, **(values | keys))
    if schedule == "2bw":
        config = replace(config, offload=config.offload.replace(update="delayed"))
    return replace(config, ranks=RanksConfig(pipeline=stages, schedule=schedule))


def planned(
    stages: int, count: int, schedule: Schedule, machine: Machine = FREE, **keys: Any
) -> Plan:
    return make(pipeline(stages, count, schedule, **keys), "test", machine, stages)


@pytest.mark.parametrize(("schedule", "stages"), [("gpipe", 4), ("1f1b", 2), ("2bw", 4)])
def test_a_step_is_its_compute_and_its_flush(schedule: Schedule, stages: int) -> None:
    """m microbatches, and p - 1 more where the pipeline is flushed."""
    times = times_of(planned(stages, 8, schedule))
    assert times is not None
    each = times.compute_s[0] / 8
    turns = 8 if schedule == "2bw" else 8 + stages - 1
    assert times.seconds == pytest.approx(turns * each, rel=0.05)
    assert times.bubbles[0] == pytest.approx(1 - 8 / turns, abs=0.05)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_microbatches_take_what_a_simulation_of_all_takes(schedule: Schedule) -> None:
    plan = planned(2, 16, schedule, A100)
    costs = [Costs(stage, A100) for stage in stages_of(plan)]
    links = timing.links_of(stages_of(plan), A100)
    exact = timing._step_s(costs, links, schedule, 16, 2)
    times = times_of(plan)
    assert times is not None and times.seconds == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(("schedule", "ranks"), [("gpipe", 1), ("1f1b", 2), ("2bw", 2)])
def test_the_driven_program_of_every_stage_has_no_race(schedule: Schedule, ranks: int) -> None:
    plan = make(pipeline(2, 4, schedule), "test", A100, 2 * ranks)
    for number, stage in enumerate(stages_of(plan)):
        operations, turns = stage_steps(Program(stage.spec), schedule, number, 2, 3)
        assert prove(operations) == []
        assert len(turns) >= 3 * 2 * stage.spec.config.grad_accum_steps


class Shape:
    """What torch's order of a schedule depends on."""

    def __init__(self, ranks: int, per_rank: int, microbatches: int) -> None:
        self.pp_group_size, self.n_local_stages = ranks, per_rank
        self._n_microbatches = microbatches
        self.microbatches_per_round = microbatches // max(1, microbatches // ranks)


@pytest.mark.parametrize(("ranks", "per_rank"), [(2, 3), (3, 2), (4, 3)])
def test_interleaved_is_in_torchs_order(ranks: int, per_rank: int) -> None:
    """Of every rank, in rounds that the ranks divide and others; no stage has more in flight."""
    for count in (count for count in range(ranks, 14) if count % (count // ranks) == 0):
        shape, most = Shape(ranks, per_rank, count), dict.fromkeys(range(ranks * per_rank), 0)
        for rank in range(ranks):
            actions = ScheduleInterleaved1F1B._calculate_single_rank_operations(shape, rank)
            expected = [action for action in actions if action is not None]
            turns = list(rank_order("interleaved", rank, ranks, per_rank, count, 1))
            kinds = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
            assert [(stage, turn.kind, turn.number) for stage, turn in turns[: len(expected)]] == [
                (action.stage_index, kinds[action.computation_type.name], action.microbatch_index)
                for action in expected
            ]
            assert [turn.kind for _, turn in turns[len(expected) :]] == [
                *["squares"] * per_rank,
                *["decide"] * per_rank,
            ]
            now = dict.fromkeys(most, 0)
            for action in expected:
                stage = action.stage_index
                now[stage] += 1 if action.computation_type.name == "FORWARD" else -1
                most[stage] = max(most[stage], now[stage])
        for stage, number in most.items():
            assert in_flight("interleaved", stage, ranks * per_rank, per_rank, count) == number


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_that_take_turns_have_less_of_a_bubble(stages: int) -> None:
    """arXiv:2104.04473, 2.2: with v stages on a rank it is 1 / v of 1F1B's, where nothing but
    compute takes time."""
    job = pipeline(stages, 8, shape={"num_layers": 16})
    in_turn = RanksConfig(pipeline=stages, schedule="interleaved", stages_per_rank=2)
    both = job, replace(job, ranks=in_turn)
    plain, twice = (times_of(make(config, "test", FREE, stages)) for config in both)
    assert plain is not None and twice is not None
    compute = max(plain.compute_s)
    bubbles = [times.seconds / compute - 1 for times in (plain, twice)]
    assert bubbles[0] == pytest.approx((stages - 1) / 8, rel=0.05)
    assert bubbles[1] == pytest.approx(bubbles[0] / 2, rel=0.1)


def test_only_the_last_stage_has_the_head() -> None:
    config = pipeline(2, 4)
    config = replace(config, model=replace(config.model, vocab_size=50_000))
    plan = make(config, "test", replace(A100, launch_us=0.0), 2)
    times = times_of(plan)
    assert times is not None
    first, last = times.compute_s
    assert last > 1.5 * first


@pytest.mark.slow
def test_the_search_finds_what_a_plan_of_its_keys_says() -> None:
    rows = search(pipeline(1, 16), "test", A100, 4)
    assert {row.stages for row in rows} == {1, 2, 4}
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    for row in rows:
        again = make(row.plan.job, "test", A100, 4)
        assert again.prediction.seconds == row.seconds and again.fits
        assert again.prediction.tokens_per_s == pytest.approx(16 * 16 * 2 / row.seconds)


@pytest.mark.slow
def test_no_division_is_faster_than_its_launches() -> None:
    """A stage of half of the layers has half of the launches, for twice as many microbatches."""
    rows = search(pipeline(1, 16), "test", replace(A100, launch_us=200.0), 2)
    assert {row.stages for row in rows} == {1, 2}
    for row in rows:
        assert row.seconds >= row.plan.prediction.launch_s > 0
    least_s, *more_s = sorted(row.plan.prediction.launch_s for row in rows)
    assert all(launch_s > 0.7 * least_s for launch_s in more_s)


@pytest.mark.slow
def test_the_search_tries_several_stages_on_a_rank() -> None:
    """Where nothing but compute takes time, they have the smaller bubble."""
    rows = {row.order: row for row in search(pipeline(1, 16), "test", FREE, 2) if row.stages == 2}
    assert rows["interleaved x2"].seconds < rows["1f1b"].seconds
    assert "ranks.schedule=interleaved ranks.stages_per_rank=2" in rows["interleaved x2"].keys
    assert "stages_per_rank" not in rows["1f1b"].keys


@pytest.mark.slow
def test_the_search_recomputes_as_few_layers_as_fit() -> None:
    config = pipeline(1, 16, shape={"num_layers": 8, "d_model": 512}, train__micro_batch=4)
    longer = replace(config.model, max_seq_len=1024), replace(config.data, seq_len=1024)
    config = replace(config, model=longer[0], data=longer[1])
    schedules: tuple[Schedule, ...] = ("1f1b", "2bw")
    ample, tight = (
        {
            (row.order, row.stages): row
            for row in search(config, "test", replace(A100, gpu_memory=memory), 2, schedules)
        }
        for memory in ("80 GiB", "1350 MiB")
    )
    assert all(row.activation == "keep" for row in ample.values())
    recomputed = set()
    for order_and_stages, row in tight.items():
        activations = row.plan.job.offload.activations
        if activations.recomputes:
            recomputed.add(order_and_stages)
            assert type(activations.recompute_blocks) is int and activations.recompute_blocks > 0
            assert f"offload.recompute_blocks={activations.recompute_blocks}" in row.keys
            assert row.seconds >= ample[order_and_stages].seconds
    assert {("1f1b", 2), ("2bw", 2)} <= recomputed


@pytest.mark.slow
@pytest.mark.parametrize(
    "division",
    [
        ["ranks.pipeline=2", "ranks.layers_per_stage=[2,2]"],
        ["ranks.pipeline=2", "ranks.schedule=interleaved", "ranks.stages_per_rank=2"],
        [
            *("ranks.tensor=2", "offload.activation=recompute", "offload.recompute_blocks=auto"),
            "offload.partition_activations=true",
        ],
    ],
)
def test_the_job_takes_the_keys_of_a_division(division: list[str]) -> None:
    layers = 8 if "interleaved" in division[1] else 4
    sizes = [f"model.num_layers={layers}", "model.tie_embeddings=false", "train.micro_batch=16"]
    job_of_division = loads(JOB, overrides=[*sizes, *division, "device.kind=auto"])
    for row in search(job_of_division, "a100_80gb", A100, 4):
        job_of_keys = loads(JOB, overrides=[*sizes, *division, *row.keys.split()])
        assert job_of_keys.ranks == row.plan.job.ranks, row.keys
        assert (
            job_of_keys.offload.activations.recomputes
            == row.plan.job.offload.activations.recomputes
        )
