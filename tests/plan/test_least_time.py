"""What no schedule is faster than, and searches that simulate only what may be the best."""

from __future__ import annotations

import pytest

from offloadtrain.config import job as jobs
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan import plan as plans
from offloadtrain.plan.costs.costs import Costs
from offloadtrain.plan.placement import Placement
from offloadtrain.plan.plan import make
from offloadtrain.plan.search import question, suggest
from offloadtrain.plan.search.largest import MODELS
from offloadtrain.plan.times import Prediction

NO_NORM = ("offload.clip_norm=0", "offload.skip_nonfinite=false")


@pytest.mark.parametrize("machine", ["rtx4090", "h100_16cores"])
@pytest.mark.parametrize(
    ("overrides", "tight"),
    [
        pytest.param(("train.micro_batch=2",), True, id="Adam after backward"),
        pytest.param(("train.micro_batch=2", *NO_NORM), False, id="Adam inside backward"),
        pytest.param(("train.micro_batch=2", "offload.update=delayed"), False, id="delayed"),
        pytest.param(("train.micro_batch=2", "offload.update=speculative"), False, id="guesses"),
        pytest.param(("train.micro_batch=64",), True, id="compute"),
        pytest.param(("offload.working=host", "offload.state=int8"), False, id="streamed"),
        pytest.param(("offload.state_on={device=0.5}",), False, id="half of the state there"),
        pytest.param(("offload.state_on=disk",), False, id="disk"),
        pytest.param(("train.grad_accum_steps=4", "train.global_batch_tokens=0"), False, id="sums"),
    ],
)
def test_no_schedule_is_faster(machine: str, overrides: tuple[str, ...], tight: bool) -> None:
    """`tight`: what is left out (the norm, the first bucket's way) is less than a quarter."""
    job = jobs.load(
        "offloadtrain/cli/jobs/llama_1b.toml",
        ["train.global_batch_tokens=0", "train.grad_accum_steps=1", *overrides],
    )
    plan = make(job, "", find(machine)[1])
    seconds, least = plan.prediction.seconds, Costs(plan.with_copies, plan.machine).least_s
    assert least <= seconds * (1 + 1e-9)
    assert plan.prediction.tokens_per_s <= plan.most_tokens_per_s * (1 + 1e-9)
    assert not tight or least >= 0.75 * seconds


@pytest.mark.slow
def test_a_search_simulates_only_what_may_be_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones are those of a search that simulates all."""
    job, target = (
        question.job_of("a", MODELS["Qwen2.5-3B"]),
        find("h100_16cores")[1],
    )
    counts = []
    simulate = plans.predict

    def counted(placed: Placement, on: Machine) -> Prediction:
        counts[-1] += 1
        return simulate(placed, on)

    def search(most: int) -> list[suggest.Change]:
        counts.append(0)
        return suggest.of_each_placement(job, "", target, 1, most=most)

    monkeypatch.setattr(plans, "predict", counted)
    every, few = search(10**6), search(3)
    assert [change.keys for change in few[:3]] == [change.keys for change in every[:3]]
    assert 3 <= counts[1] < counts[0] / 1.5
