"""`offload.update = "auto"`: the plan decides between exact and speculative updates."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.config.offload import OptionError
from offloadtrain.events import schema
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan import report
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.search.suggest import settled
from offloadtrain.step.layout.block_spec import BlockSpec
from offloadtrain.step.layout.placement import lay_out
from tests.train.small_job import events_of, run, small_job, tensor_hashes

H100 = find("h100_16cores")[1]
SMALL_BATCH = ("train.micro_batch=4", "train.grad_accum_steps=1", "train.global_batch_tokens=0")


def planned(*overrides: str, machine: Machine = H100) -> Plan:
    config = jobs.load("offloadtrain/cli/jobs/llama_1b.toml", [*SMALL_BATCH, *overrides])
    return make(config, "", machine)


def test_a_step_that_waits_for_adam_guesses() -> None:
    exact, speculative, chosen = (
        planned(f"offload.update={mode}") for mode in ("exact", "speculative", "auto")
    )
    assert speculative.prediction.tokens_per_s > 1.03 * exact.prediction.tokens_per_s
    assert chosen.job.offload.update == "speculative"
    assert chosen.prediction == speculative.prediction
    assert "update = auto chooses speculative\n" in report.text(chosen)
    assert "update = auto" not in report.text(exact) + report.text(speculative)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("train.micro_batch=64",), id="nothing is waited for"),
        pytest.param(("offload.state_on={disk=1.0}",), id="not with state on the disk"),
        pytest.param(("offload.clip_norm=0", "offload.skip_nonfinite=false"), id="no guess needed"),
    ],
)
def test_other_steps_are_exact(overrides: tuple[str, ...]) -> None:
    plan = planned("offload.update=auto", *overrides)
    assert plan.job.offload.update == "exact"
    assert plan.prediction.none_right_s is None
    assert "update = auto chooses exact: speculative gains less than 3 %" in report.text(plan)
    assert report.as_json(plan)["update"] == "exact"


def test_a_host_without_room_for_second_copies_is_exact() -> None:
    least = max(planned("offload.update=exact").host_peaks.values())
    machine = replace(H100, host_memory=f"{least + (2 << 30)} B")
    assert planned("offload.update=auto", machine=machine).job.offload.update == "exact"


def test_the_rest_of_what_is_open_is_decided_with_it() -> None:
    config = jobs.load(
        "offloadtrain/cli/jobs/llama_1b.toml",
        [*SMALL_BATCH, "offload.update=auto", "offload.state_on=auto", "device.placement=auto"],
    )
    job = settled(config, "", H100, 1)
    assert "auto" not in (job.offload.update, job.offload.state.tier)


def test_the_engine_refuses_what_only_a_plan_decides() -> None:
    config = jobs.load("offloadtrain/cli/jobs/llama_1b.toml", ["offload.update=auto"]).offload
    config = config.replace(precision="bf16")
    with pytest.raises(OptionError, match="update = 'auto' is decided by the plan"):
        lay_out([BlockSpec("a", (), ())], config, ranks=1, num_tensors=1, available_bytes=None)


@pytest.mark.slow
def test_the_page_has_the_planned_figures(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path("docs/plan.md").read_text().partition("## Exact or speculative updates")[2]
    (command,) = re.findall(r"^    offloadtrain (.* offload\.update=auto)$", page, re.MULTILINE)
    rows = re.findall(r"^\| (\d+) \| (\S+ tokens/s) \| (\S+ tokens/s) \|$", page, re.MULTILINE)
    assert len(rows) == 4
    for size, *rates in rows:
        for mode, rate in zip(("exact", "auto"), rates, strict=True):
            changed = [f"train.micro_batch={size}", f"offload.update={mode}"]
            assert main([*command.split(), *changed]) == 0
            assert rate in capsys.readouterr().out.splitlines()[0]


@pytest.mark.slow
def test_a_run_has_the_weights_of_an_exact_one_and_says_what_was_decided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for update in ("exact", "auto"):
        job = small_job(tmp_path, "train.steps=4", f"offload.update={update}")
        assert run(job, tmp_path / update) == 0
    assert tensor_hashes(tmp_path / "auto", 4) == tensor_hashes(tmp_path / "exact", 4)
    saved = jobs.load(tmp_path / "auto" / "resolved.toml").offload.update
    (started,) = events_of(tmp_path / "auto", schema.RunStarted)
    assert saved == started.config["offload"]["update"] in ("exact", "speculative")
    assert f"; update = auto: {saved}" in capsys.readouterr().err
