"""What a job leaves to its plan: the fewest layers recomputed that fit, and state beside them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from offloadtrain.config.job import Config, load
from offloadtrain.config.offload import OptionError
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan import report
from offloadtrain.plan.automatic import FULL
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.search.suggest import nearest, settled, single_changes
from offloadtrain.train.dry_run import check

RTX4090 = find("rtx4090")[1]
AUTO = ("offload.activation=recompute", "offload.recompute_blocks=auto")


def job(*overrides: str) -> Config:
    return load("offloadtrain/cli/jobs/llama_1b.toml", ["train.micro_batch=8", *overrides])


def with_count(config: Config, count: Any) -> Config:
    return replace(config, offload=config.offload.replace(recompute_blocks=count))


def planned(config: Config, machine: Machine = RTX4090) -> Plan:
    return make(config, "", machine)


@pytest.mark.slow
@pytest.mark.parametrize(
    "activation", ["recompute", pytest.param("offload", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "gpu_memory",
    ["10 GiB", "16 GiB", *(pytest.param(n, marks=pytest.mark.slow) for n in ("24 GiB", "80 GiB"))],
)
def test_the_fewest_that_fit_run_again(activation: str, gpu_memory: str) -> None:
    config = job(f"offload.activation={activation}", "offload.recompute_blocks=auto")
    machine = replace(RTX4090, gpu_memory=gpu_memory)
    plan = planned(config, machine)
    count, layers = plan.job.offload.activations.recompute_blocks, config.model.num_layers
    assert isinstance(count, int)
    used = [sum(planned(with_count(config, n), machine).device.values()) for n in range(layers + 1)]
    fitting = [n for n in range(layers + 1) if used[n] <= FULL * plan.device_room]
    assert count == min(fitting, default=layers)
    assert plan.fits == bool(fitting)


@pytest.mark.slow
def test_each_layer_that_is_kept_makes_the_step_faster_and_takes_as_much_more() -> None:
    config = job("offload.activation=recompute")
    counts = [None, *range(config.model.num_layers, -1, -1)]
    plans = [planned(with_count(config, count)) for count in counts]
    assert plans[0].device == plans[1].device
    assert plans[0].prediction.seconds == pytest.approx(plans[1].prediction.seconds)
    rates = [plan.prediction.tokens_per_s for plan in plans[1:]]
    assert rates == sorted(rates) and rates[-1] > 1.25 * rates[0]
    bytes_of = [sum(plan.device.values()) for plan in plans[2:]]
    more = {two - fewer for fewer, two in pairwise(bytes_of)}
    assert len(more) == 1 and more.pop() > 0
    keep = planned(job("offload.activation=keep"))
    assert plans[-1].device == keep.device
    assert plans[-1].prediction.seconds == pytest.approx(keep.prediction.seconds)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["exact", "delayed"])
def test_the_step_of_some_recomputed_is_between(update: str) -> None:
    """Of very many layers a few are simulated where they are alike."""
    config = load(
        "offloadtrain/cli/jobs/gpt_13b_32gb.toml",
        ["offload.activation=recompute", f"offload.update={update}"],
    )
    machine = find("h200")[1]
    some, none, every = (
        make(with_count(config, count), "", machine).prediction.seconds for count in (20, 0, None)
    )
    assert none <= some * (1 + 1e-9) and some <= every * (1 + 1e-9) and none < every


@pytest.mark.slow
def test_where_state_is_open_too_the_fastest_of_three_is_taken() -> None:
    config = load("offloadtrain/cli/jobs/gpt_13b_32gb.toml", [*AUTO, "offload.state_on=auto"])
    machine = find("h100")[1]
    plan = make(config, "", machine)
    alone = replace(config, offload=config.offload.replace(state_on="host"))
    full = with_count(config, None)
    for other in (alone, full):
        seconds = make(other, "", machine).prediction.seconds
        assert plan.prediction.seconds <= seconds * 1.001
    assert plan.has_room


@pytest.mark.slow
def test_a_job_that_keeps_too_much_is_told_the_number() -> None:
    config = job("offload.activation=keep")
    assert not planned(config).fits
    changes = nearest(config, "", RTX4090, 1)
    [recomputing] = [
        change for change in changes if change.keys.get("offload.activation") == "recompute"
    ]
    count = recomputing.keys["offload.recompute_blocks"]
    assert (
        recomputing.plan.job.offload.activations.recompute_blocks == count < config.model.num_layers
    )
    assert f"offload.recompute_blocks={count}" in recomputing.text and recomputing.plan.has_room


@pytest.mark.slow
def test_a_job_that_recomputes_too_much_is_told_to_leave_it_open() -> None:
    config = planned(job("offload.activation=recompute")).job
    now = planned(config).prediction.tokens_per_s
    rates = {
        change.text: change.plan.prediction.tokens_per_s
        for change in single_changes(config, "", RTX4090, 1)
    }
    assert rates["offload.recompute_blocks=auto"] > 1.1 * now
    of_keep = single_changes(job("offload.activation=keep", "train.micro_batch=1"), "", RTX4090, 1)
    assert not any("offload.recompute_blocks" in change.keys for change in of_keep)


def test_it_is_settled_before_the_engine_sees_it() -> None:
    config = settled(job(*AUTO), "", RTX4090, 1)
    assert type(config.offload.activations.recompute_blocks) is int
    assert (
        config.offload.activations.recompute_blocks
        == planned(job(*AUTO)).job.offload.activations.recompute_blocks
    )
    with pytest.raises(OptionError, match="'auto' is decided by the plan"):
        job(*AUTO).offload.activations.recomputed_of([1, 2])


@pytest.mark.slow
@pytest.mark.parametrize("open_", [AUTO, ("device.placement=auto",)])
def test_where_nothing_runs_again_no_input_is_divided(open_: tuple[str, ...]) -> None:
    """What is settled is checked once more where it is used."""
    parts = ("ranks.tensor=2", "model.num_heads=4", "train.sample_tokens=0")
    divides = ("offload.activation=recompute", "offload.partition_activations=true")
    config = settled(job(*parts, *divides, *open_), "", find("h100")[1], 2)
    assert not config.offload.activations.recomputes and not config.offload.activations.partition
    assert not [*config.offload.problems()]


@pytest.mark.slow
def test_the_report_has_the_number() -> None:
    plan = planned(job(*AUTO))
    count = plan.job.offload.activations.recompute_blocks
    assert f"the forward of {count} of 24 blocks runs again" in report.text(plan)
    assert report.as_json(plan)["recomputed_blocks"] == count
    every = planned(job("offload.activation=recompute"))
    assert "runs again" not in report.text(every)
    assert report.as_json(every)["recomputed_blocks"] == 24


def test_the_engine_lays_out_what_is_planned_and_its_program_is_proved() -> None:
    assert "proved" in check(planned(job(*AUTO)))


def test_selective_recompute_is_planned_between_keeping_and_recompute() -> None:
    """Memory from a trace of the layers; no product runs again."""
    h100 = find("h100")[1]
    modes = ("keep", "selective", "recompute")
    keep, selective, again = (planned(job(f"offload.activation={mode}"), h100) for mode in modes)
    saved = [plan.activations.saved for plan in (keep, selective, again)]
    assert saved[2] * 2 < saved[1] < saved[0] * 0.8
    seconds = [plan.prediction.seconds for plan in (keep, selective, again)]
    assert seconds[0] < seconds[1] < seconds[2]
    assert keep.prediction.forward_again == pytest.approx(0.0, abs=1e-9)
    assert selective.prediction.forward_again == pytest.approx(0.0, abs=1e-9)
    assert again.prediction.forward_again > 0.7
    assert "with recompute of 0 % of the forward" in report.text(selective)
    assert f"of {100 * again.prediction.forward_again:.0f} % of the forward" in report.text(again)


def test_compiled_layers_are_planned_by_their_budget() -> None:
    h100 = find("h100")[1]

    def plan(*keys: str) -> Plan:
        return planned(job("offload.compile_blocks=true", *keys), h100)

    selective = "offload.activation=selective"
    shares = (0.0, 0.25, 0.5, 1.0)
    plans = [plan(selective, f"offload.activation_budget={share}") for share in shares]
    keep, again = plan("offload.activation=keep"), plan("offload.activation=recompute")
    low, high = again.activations.saved, keep.activations.saved
    for share, each in zip(shares, plans, strict=True):
        assert each.activations.saved == pytest.approx(low + share * (high - low), rel=1e-6)
        rest = (1 - share) * plans[0].prediction.forward_again
        assert each.prediction.forward_again == pytest.approx(rest, abs=1e-9)
    # Without a budget the last product runs again, too.
    assert 0.7 < plans[0].prediction.forward_again < again.prediction.forward_again
    assert plan(selective).activations == plans[2].activations
