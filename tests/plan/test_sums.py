"""Where microbatches are summed: the plan decides `sums_on = "auto"`, and the search tries the
device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from offloadtrain.config import job as jobs
from offloadtrain.config.job import Config
from offloadtrain.config.offload import OptionError
from offloadtrain.events import schema
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.parallel.pipeline import search as pipeline_search
from offloadtrain.plan import report
from offloadtrain.plan.automatic import FULL
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.search.suggest import nearest, settled
from offloadtrain.step.layout.block_spec import BlockSpec
from offloadtrain.step.layout.placement import lay_out
from offloadtrain.step.layout.state_tiers import sums_bytes, sums_share
from offloadtrain.train.dry_run import check, preview
from tests.train.small_job import events_of, run, small_job

H100 = find("h100")[1]
LLAMA = ("model.num_layers=8", "offload.state=int8", "train.grad_accum_steps=32",
         "train.micro_batch=1", "train.global_batch_tokens=0")  # fmt: skip


def job(*overrides: str) -> Config:
    return jobs.load("offloadtrain/cli/jobs/llama_1b.toml", [*LLAMA, *overrides])


def planned(config: Config, machine: Machine = H100) -> Plan:
    return make(config, "", machine)


def with_memory(gpu: str = "80 GiB", host: str = "2 TiB") -> Machine:
    return replace(H100, gpu_memory=gpu, host_memory=host)


def test_many_microbatches_are_summed_on_a_device_that_has_room() -> None:
    plan = planned(job("offload.sums_on=auto"))
    on_host, on_device = (planned(job(f"offload.sums_on={tier}")) for tier in ("host", "device"))
    assert (plan.job.offload.gradients.sums_tier, plan.job.offload.gradients.sums_dtype) == (
        "device",
        "fp32",
    )
    assert plan.prediction == on_device.prediction
    assert plan.prediction.tokens_per_s > 1.03 * on_host.prediction.tokens_per_s
    assert "microbatches are summed on the device" in report.text(plan)


def _gpu_between(share: float) -> Machine:
    """Return a machine whose GPU, 95 % full, has room for so large a share of the sums."""
    on_host, on_device = (planned(job(f"offload.sums_on={tier}")) for tier in ("host", "device"))
    used, with_sums = (sum(plan.device.values()) for plan in (on_host, on_device))
    room = int((used + share * (with_sums - used)) / FULL)
    return with_memory(gpu=f"{room + H100.gpu_reserved_bytes} B")


def test_as_many_are_on_the_device_as_it_has_room_for() -> None:
    """The largest share, to a hundredth, where that is faster; and the program is proved."""
    machine = _gpu_between(0.6)
    plan = planned(job("offload.sums_on=auto"), machine)
    share = plan.job.offload.gradients.device_share
    assert 0.5 < share < 0.65 and plan.has_room
    assert plan.device["gradient sums"] == sums_bytes(plan.placed.spec, share)
    more = planned(job(f"offload.sums_on={{device={share + 0.05:.2f}}}"), machine)
    assert not more.has_room
    on_host = planned(job(), machine)
    assert plan.prediction.tokens_per_s > 1.03 * on_host.prediction.tokens_per_s
    of_host = f"({100 * sums_share(plan.placed.spec):.0f} % of the sums) and on the host"
    assert f"microbatches are summed on the device {of_host}" in report.text(plan)
    assert "free of races" in check(plan)


def test_where_sums_and_state_compete_for_the_device_the_plan_weighs_them() -> None:
    """Neither all sums with what state then fits, nor the reverse, is faster by more than what a
    plan is accurate to."""
    machine = _gpu_between(0.6)
    keys = ("offload.state_on=auto", "train.grad_accum_steps=8")
    plan = planned(job("offload.sums_on=auto", *keys), machine)
    assert plan.has_room
    for sums_on in ("host", "{device=0.5}", "{device=0.6}"):
        other = planned(job(f"offload.sums_on={sums_on}", *keys), machine)
        if other.has_room:
            assert plan.prediction.tokens_per_s * 1.03 >= other.prediction.tokens_per_s, sums_on


def test_they_stay_on_the_host_where_the_device_has_no_room_for_their_sums() -> None:
    machine = _gpu_between(0.0)
    decided = planned(job("offload.sums_on=auto", "offload.sums_down=working"), machine)
    assert (decided.job.offload.gradients.sums_tier, decided.job.offload.gradients.sums_dtype) == (
        "host",
        "fp32",
    )
    assert decided.fits and "summed on the device" not in report.text(decided)


def _with_room_for_all_sums_or_activations() -> tuple[tuple[str, ...], Machine]:
    """Return keys of a job whose sums fit on the GPU if the forward of all layers runs again, and
    on the host if they are rounded; and the machine."""
    keys = ("offload.sums_down=working", "offload.activation=recompute", "train.micro_batch=4")
    all_again = planned(job("offload.sums_on=device", *keys))
    room = int(sum(all_again.device.values()) / FULL) + H100.gpu_reserved_bytes
    return keys, replace(_host_between(*keys), gpu_memory=f"{room} B")


def test_a_job_that_does_not_fit_is_told_the_share_with_which_it_is_fastest() -> None:
    _, machine = _with_room_for_all_sums_or_activations()
    config = job("train.micro_batch=4", "offload.working=host")
    (change,) = (
        change
        for change in nearest(config, "", machine, 1)
        if change.keys.get("offload.activation") == "recompute"
    )
    share = change.plan.job.offload.gradients.device_share
    assert 0 < share < 1 and f"offload.sums_on={{device={share}}}" in change.text
    assert "offload.recompute_blocks=6" in change.text and change.plan.fits


def test_the_least_share_with_which_the_host_has_room_keeps_most_activations() -> None:
    """Fewer sums on the device leave room for layers whose forward does not run again."""
    keys, machine = _with_room_for_all_sums_or_activations()
    keys = (*keys, "offload.recompute_blocks=auto")
    plan = planned(job("offload.sums_on=auto", *keys), machine)
    all_sums = planned(job("offload.sums_on=device", *keys), machine)
    assert plan.fits and 0 < plan.job.offload.gradients.device_share < 1
    assert plan.placed.recomputed < all_sums.placed.recomputed
    assert plan.prediction.tokens_per_s > all_sums.prediction.tokens_per_s


def test_a_step_of_one_microbatch_keeps_the_host() -> None:
    assert planned(
        job("offload.sums_on=auto", "train.grad_accum_steps=1")
    ).job.offload.gradients.sums_tier == ("host")


def _host_between(*keys: str) -> Machine:
    """Return a machine whose host has room for 16-bit gradients and none for fp32 sums."""
    on_host = ("offload.sums_on=host", "offload.sums_down=fp32")
    narrow = ("offload.sums_on=device", "offload.sums_down=working")
    jobs_of_both = (job(*keys, *some) for some in (on_host, narrow))
    wide, less = (max(planned(config).host_peaks.values()) for config in jobs_of_both)
    assert less < wide
    machine = with_memory(host="1 TiB")
    room = planned(job(), machine).host_room
    return with_memory(host=f"{(1 << 40) - room + (wide + less) // 2} B")


def test_where_only_sums_on_the_device_fit_they_are_there() -> None:
    machine = _host_between()
    assert not planned(job(), machine).fits
    open_job = job("offload.sums_on=auto", "offload.sums_down=working")
    plan = planned(open_job, machine)
    assert plan.fits
    assert (plan.job.offload.gradients.sums_tier, plan.job.offload.gradients.sums_dtype) == (
        "device",
        "working",
    )
    assert settled(open_job, "", machine, 1) == replace(open_job, offload=plan.job.offload)


def test_a_job_that_lacks_host_memory_for_its_sums_is_told_to_sum_on_the_device() -> None:
    """It keeps the tokens of its step."""
    config, machine = job("offload.working=host"), _host_between()
    changes = nearest(config, "", machine, 1)
    assert {"offload.sums_on": "device", "offload.sums_down": "working"}.items() <= (
        changes[0].keys.items()
    )
    assert changes[0].plan.fits and changes[0].plan.job.batch_tokens == config.batch_tokens


@pytest.mark.slow
def test_the_search_of_stages_sums_on_the_device_where_that_is_faster() -> None:
    config = job("train.grad_accum_steps=128")
    first, *_ = pipeline_search.search(config, "", with_memory(gpu="20 GiB"), 2, ("1f1b",))
    assert first.plan.job.offload.gradients.sums_tier == "device"
    assert " offload.sums_on=device" in first.keys


def test_the_engine_refuses_what_only_a_plan_decides() -> None:
    config = replace(job("offload.sums_on=auto").offload, precision="bf16")
    with pytest.raises(OptionError, match="sums_on = 'auto' is decided by the plan"):
        lay_out([BlockSpec("a", (), ())], config, ranks=1, num_tensors=1, available_bytes=None)


def test_the_decision_is_in_the_dry_run_the_run_folder_and_the_log(tmp_path: Path) -> None:
    config = small_job(tmp_path, "train.steps=2", "offload.sums_on=auto")
    text, fits, resolved = preview(config)
    assert fits and resolved.offload.gradients.sums_tier in ("host", "device")
    assert run(config, tmp_path / "run") == 0
    saved = jobs.load(tmp_path / "run" / "resolved.toml").offload.gradients.sums_tier
    (started,) = events_of(tmp_path / "run", schema.RunStarted)
    assert resolved.offload.gradients.sums_tier == saved == started.config["offload"]["sums_on"]
    assert ("summed on the device" in text) == (saved == "device")
