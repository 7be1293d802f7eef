"""The time of a pipeline: by hand, its properties, and the search for the fastest division."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offloadtrain.config.job import Config
from offloadtrain.config.ranks_options import RanksConfig
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan import pipeline_times as timing
from offloadtrain.plan.costs import Costs
from offloadtrain.plan.pipeline_search import search
from offloadtrain.plan.plan import Plan, make
from offloadtrain.step.pipeline_drive import Schedule, Turn, order, stage_steps
from offloadtrain.step.program import Program
from offloadtrain.step.prove import prove
from tests.plan.test_memory import job

A100 = find("a100_80gb")[1]
FREE = replace(
    A100,
    **dict.fromkeys(("h2d_gbps", "d2h_gbps", "host_link_gbps", "gpu_link_gbps"), 1e9),
    **dict.fromkeys(("dram_gbps", "shared_dram_gbps"), 1e9),
)
"""Nothing but compute takes time."""

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "2bw")


def pipeline(stages: int, count: int, schedule: Schedule = "1f1b", **keys: Any) -> Config:
    """Layers that are alike, and a head that is next to nothing."""
    shape = {"num_layers": 8, "d_model": 256, "num_heads": 2, "vocab_size": 2}
    given = {
        "train__grad_accum_steps": count,
        "offload__precision": "bf16",
        "device__kind": "auto",
    }
    config = job(shape | {"max_seq_len": 16}, **(given | keys))
    if schedule == "2bw":
        config = replace(config, offload=replace(config.offload, update="delayed"))
    return replace(config, ranks=RanksConfig(pipeline=stages, schedule=schedule))


def planned(
    stages: int, count: int, schedule: Schedule, machine: Machine = FREE, **keys: Any
) -> Plan:
    return make(pipeline(stages, count, schedule, **keys), "test", machine, stages)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_is_its_compute_and_its_flush(stages: int, schedule: Schedule) -> None:
    """m microbatches, and p - 1 more where the pipeline is flushed."""
    found = planned(stages, 8, schedule).pipeline
    assert found is not None
    each = found.compute_s[0] / 8
    turns = 8 if schedule == "2bw" else 8 + stages - 1
    assert found.seconds == pytest.approx(turns * each, rel=0.05)
    assert found.bubbles[0] == pytest.approx(1 - 8 / turns, abs=0.05)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_slow_links_make_a_step_longer(schedule: Schedule) -> None:
    fast = planned(4, 8, schedule).pipeline
    slow = planned(4, 8, schedule, replace(FREE, gpu_link_gbps=0.5)).pipeline
    assert fast is not None and slow is not None
    assert slow.links[0].seconds == slow.links[0].nbytes / 0.5e9 and slow.seconds > fast.seconds


def test_a_link_between_hosts_is_shared_by_those_who_cross() -> None:
    """Four stages of two ranks on hosts of four: the second boundary crosses, with two pairs."""
    config = pipeline(4, 8, train__micro_batch=2)
    machine = replace(FREE, gpus=4, gpu_link_gbps=100.0, node_link_gbps=10.0)
    times = make(config, "test", machine, 8).pipeline
    assert times is not None
    assert [link.between_hosts for link in times.links] == [False, True, False]
    inside, crossing, _ = (link.nbytes / link.seconds for link in times.links)
    assert (inside, crossing) == (pytest.approx(100e9), pytest.approx(5e9))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_microbatches_take_what_a_simulation_of_all_takes(schedule: Schedule) -> None:
    plan = planned(2, 16, schedule, A100)
    costs = [Costs(stage, A100) for stage in plan.stages]
    links = timing.links_of(plan.stages, A100)
    exact = timing._step_s(costs, links, schedule, 16)
    assert plan.pipeline is not None
    assert plan.pipeline.seconds == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_driven_program_of_every_stage_has_no_race(schedule: Schedule, ranks: int) -> None:
    plan = make(pipeline(2, 4, schedule), "test", A100, 2 * ranks)
    for number, stage in enumerate(plan.stages):
        operations, turns = stage_steps(Program(stage.spec), schedule, number, 2, 3)
        assert prove(operations) == []
        assert len(turns) >= 3 * 2 * stage.spec.config.grad_accum_steps


def test_turns_by_hand() -> None:
    def told(turns: list[Turn]) -> str:
        return " ".join(f"{turn.kind[0]}{turn.number}" for turn in turns)

    assert told(list(order("gpipe", 0, 2, 2, 1))) == "f0 f1 b0 b1 s0 d0"
    assert told(list(order("1f1b", 0, 2, 3, 1))) == "f0 f1 b0 f2 b1 b2 s0 d0"
    assert told(list(order("1f1b", 1, 2, 3, 1))) == "f0 b0 f1 b1 f2 b2 s0 d0"
    assert told(list(order("2bw", 0, 2, 2, 2))) == "f0 f1 b0 f2 b1 s0 d0 f3 b2"


def test_without_a_flush_weights_are_there_twice_but_on_the_last_stage() -> None:
    flushed, without = planned(2, 4, "1f1b", A100), planned(2, 4, "2bw", A100)
    first, last = (stage.device()["working weights"] for stage in without.stages)
    assert first == 2 * flushed.stages[0].device()["working weights"]
    assert last == flushed.stages[1].device()["working weights"]


def test_only_the_last_stage_has_the_head() -> None:
    config = pipeline(2, 4)
    config = replace(config, model=replace(config.model, vocab_size=50_000))
    plan = make(config, "test", replace(A100, launch_us=0.0), 2)
    assert plan.pipeline is not None
    first, last = plan.pipeline.compute_s
    assert last > 1.5 * first


def test_ranks_of_other_stages_share_the_host() -> None:
    machine = replace(A100, numa_nodes=1)
    one = Costs(make(pipeline(1, 4), "test", machine, 1).placed, machine)
    two = Costs(make(pipeline(2, 4), "test", machine, 2).placed, machine)
    assert two._dram < one._dram


@pytest.mark.slow
def test_the_search_finds_what_a_plan_of_its_keys_says() -> None:
    found = search(pipeline(1, 16), "test", A100, 4)
    assert {one.stages for one in found} == {1, 2, 4}
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    for one in found:
        again = make(one.plan.job, "test", A100, 4)
        assert again.prediction.seconds == one.seconds and again.fits
        assert again.prediction.tokens_per_s == pytest.approx(16 * 16 * 2 / one.seconds)
