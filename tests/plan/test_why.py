"""What bounds a step, as the simulation answers it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.exposure import planned
from offloadtrain.cli.main import main
from offloadtrain.config.job import load
from offloadtrain.hardware.machine import find
from offloadtrain.plan.costs.costs import Costs
from offloadtrain.plan.plan import make
from offloadtrain.plan.search.suggest import single_changes, value_of
from offloadtrain.plan.search.why import as_json, text, why
from offloadtrain.plan.times import predict

JOB = "offloadtrain/cli/jobs/llama_1b.toml"


@pytest.mark.slow
def test_a_step_that_waits_for_adam_is_bound_by_the_hosts_memory() -> None:
    plan = planned("fp32", 4096, "host")
    answer = why(plan)
    assert next(iter(answer.gains)) == "the host's memory"
    wider = replace(plan.machine, dram_gbps=2 * plan.machine.dram_gbps)
    faster = plan.prediction.seconds / predict(plan.with_copies, wider).seconds - 1
    assert answer.gains["the host's memory"] == pytest.approx(faster)
    lines = text(answer)
    assert lines.startswith("what bounds the step: the host's memory; twice as fast saves ")
    assert "offload.state_on=auto\n" in lines and "offload.update=delayed (one step of " in lines


@pytest.mark.slow
def test_the_gain_of_a_change_is_that_of_its_plan() -> None:
    plan = planned("fp32", 4096, "host")
    gains = {change.text: gain for change, gain in why(plan).changes}
    job = replace(plan.job, offload=plan.job.offload.replace(state_on="auto"))
    changed = make(job, plan.name, plan.machine)
    gain = plan.prediction.seconds / changed.prediction.seconds - 1
    assert gains["offload.state_on=auto"] == pytest.approx(gain) and gain > 0.15
    assert list(gains.values()) == sorted(gains.values(), reverse=True)


@pytest.mark.slow
def test_a_step_that_computes_is_bound_by_arithmetic() -> None:
    answer = why(planned("int8", 65536 // 2, "host"))
    assert next(iter(answer.gains)) == "the GPU's arithmetic"
    assert "nothing that keeps the numbers of the run gains" in text(answer)
    assert as_json(answer)["gains_of_twice"]["the links between ranks"] == 0.0


@pytest.mark.slow
def test_the_command_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "demo", "--machine", "cpu2", "--why", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["why"]
    assert set(answer) == {"gains_of_twice", "changes"}


@pytest.mark.slow
def test_compiled_layers_take_less_time_and_run_again_as_a_whole() -> None:
    plan = planned("fp32", 4096, "host")
    assert plan.job.offload.activations.mode == "recompute"

    def of(**keys: object) -> tuple[float, float]:
        """Seconds of the first layer's forward and backward."""
        job = replace(plan.job, offload=plan.job.offload.replace(**keys))
        costs = Costs(make(job, plan.name, plan.machine).placed, plan.machine)
        first = next(block.name for block in costs.spec.blocks if block.repeated)
        return costs.computed[first].forward, costs.computed[first].backward

    eager, compiled = of(), of(compile_blocks=True)
    keeping, compiled_kept = of(activation="keep"), of(activation="keep", compile_blocks=True)
    assert compiled_kept[0] < keeping[0] and compiled_kept[1] < keeping[1]
    assert compiled[1] - compiled_kept[1] == pytest.approx(compiled[0])
    assert eager[1] - keeping[1] < eager[0]  # without its last product


@pytest.mark.slow
def test_changes_are_printed_as_overrides_take_them() -> None:
    changes = single_changes(load(JOB), "h100", find("h100")[1], 1)
    assert "offload.compile_blocks=true" in [change.text for change in changes]
    for change in changes:
        assert value_of(load(JOB, change.text.split()), next(iter(change.keys))) is not None
