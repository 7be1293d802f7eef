"""State, gradients and weights on the disk in a plan: bytes, seconds, wear; jobs that need it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest

from offloadtrain.config import job as jobs
from offloadtrain.config.job import Config
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan.costs.disk import ASSUMED_GBPS
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.report import text
from offloadtrain.plan.search.why import why
from offloadtrain.step.layout import step_spec as spec
from offloadtrain.step.layout.formats import ADAM_MOMENTS
from offloadtrain.train.dry_run import check
from tests.plan.test_memory import GPT, booked, job
from tests.plan.test_scaled import SCALE, SIDE, scaled

EXAMPLES = Path(__file__).parents[2] / "examples"
DISK: dict[str, Any] = {
    "offload__state_on": "disk",
    "offload__scratch_dir": gettempdir(),
    "offload__scratch_in_memory": True,
}


UPDATES: dict[str, dict[str, Any]] = {
    "exact": {},
    "early": {"offload__clip_norm": 0, "offload__skip_nonfinite": False},
    "delayed": {"offload__update": "delayed"},
    "grad on the disk": {"offload__grad_on": "disk"},
}


def example() -> Config:
    return jobs.load(EXAMPLES / "llama_8b_disk.toml")


def example_32b(**offload: Any) -> Config:
    config = jobs.load(EXAMPLES / "qwen_32b_disk.toml")
    return replace(config, offload=config.offload.replace(**offload))


def nvme(**keys: Any) -> Machine:
    return replace(find(str(EXAMPLES / "rtx4090_nvme.toml"))[1], **keys)


def planned(machine: Machine, **offload: Any) -> Plan:
    config = example()
    return make(replace(config, offload=config.offload.replace(**offload)), "nvme", machine)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["fp32", "split16", "int8"])
@pytest.mark.parametrize("working", ["device", "host", "disk"])
@pytest.mark.parametrize("mode", ["exact", "early", "delayed", "grad on the disk"])
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.cover(2, 2)
def test_every_owner_to_the_byte(accum: int, mode: str, working: str, state: str) -> None:
    keys = {"offload__state": state, "offload__working": working, "train__grad_accum_steps": accum}
    keys |= UPDATES[mode]
    config = job(GPT, **keys, **DISK)
    plan = make(config, "cpu2", find("cpu2")[1])
    owners = booked(config)
    assert owners["disk"] == plan.disk
    assert owners["host"] == plan.placed.host()
    assert "exp_avg" not in owners["host"] and owners["host"]["state slots"]


@pytest.mark.slow
def test_8b_with_fp32_state_on_a_host_of_64_gb() -> None:
    """Planned, laid out and proved at its real size."""
    plan = planned(nvme())
    assert plan.fits, plan.problems
    params = sum(bucket.numel for bucket in plan.placed.spec.buckets)
    assert sum(plan.disk.values()) == 12 * params > 89 << 30
    assert sum(plan.host.values()) < 64e9 < 12 * params
    assert "free of races" in check(plan)
    assert not planned(nvme(), state_on="host", scratch_dir=None).fits


@pytest.mark.parametrize("clips", [False, True])
def test_32b_on_a_host_of_64_gb(clips: bool) -> None:
    """Its gradients and weights alone take 128 GB. Laid out and proved at its real size."""
    keys = {"clip_norm": 1.0, "skip_nonfinite": True} if clips else {}
    plan = make(example_32b(**keys), "nvme", nvme())
    assert plan.fits, plan.problems
    params = sum(bucket.numel for bucket in plan.placed.spec.buckets)
    assert params > 32e9 and sum(plan.host.values()) < 64e9 < 2 * params
    assert plan.disk["gradients"] == 2 * params
    # Clipped, the weights of the layers are those in the state; else there are two versions.
    assert ("streamed weights" in plan.disk) == (not clips)
    assert "free of races" in check(plan)
    for key in ({"working": "host"}, {"grad_on": "host"}):
        assert not make(example_32b(**keys, **key), "nvme", nvme()).fits


def test_32b_takes_hardly_longer_than_its_compute() -> None:
    """At 32k tokens per step, 6 GB/s each way."""
    plan = make(example_32b(), "nvme", nvme())
    bound_s, lane = plan.prediction.bound
    assert plan.job.batch_tokens == 32768 and lane == "compute"
    load, busy = plan.prediction.disk, plan.prediction.busy_s
    assert load.read_bytes == pytest.approx(6e9 * (busy["disk_read"] + busy["disk_load"]))
    assert load.written_bytes == pytest.approx(6e9 * busy["disk_write"])
    assert max(load.read_bytes, load.written_bytes) / 6e9 < bound_s
    assert plan.prediction.seconds <= 1.15 * bound_s


def test_lanes_that_read_share_the_drive() -> None:
    """Half as fast, it reads for longer than compute takes: that is the bound, and no step is
    faster."""
    plan = make(example_32b(), "nvme", nvme(disk_read_gbps=3.0, disk_write_gbps=6.0))
    bound_s, lane = plan.prediction.bound
    assert lane == "disk_read"
    assert bound_s == pytest.approx(plan.prediction.disk.read_bytes / 3e9)
    assert bound_s <= plan.prediction.seconds <= 1.15 * bound_s


def test_seconds_are_bytes_over_the_drives_rates() -> None:
    prediction = planned(nvme(disk_read_gbps=4.0, disk_write_gbps=2.0)).prediction
    moved = prediction.disk.read_bytes
    assert prediction.disk.written_bytes == moved
    assert prediction.busy_s["disk_read"] == pytest.approx(moved / 4e9)
    assert prediction.busy_s["disk_write"] == pytest.approx(moved / 2e9)
    assert prediction.bound == (pytest.approx(moved / 2e9), "disk_write")


@pytest.mark.slow
def test_a_shared_drive_takes_as_long_as_both_at_once() -> None:
    shared = planned(nvme(disk_both_gbps=6.0)).prediction
    assert max(shared.busy_s["disk_read"], shared.busy_s["disk_write"]) == pytest.approx(
        2 * shared.disk.read_bytes / 6e9
    )
    apart = planned(nvme(disk_both_gbps=12.0)).prediction
    assert apart.busy_s["disk_read"] == pytest.approx(apart.disk.read_bytes / 6e9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"state": "int8", "clip_norm": None, "skip_nonfinite": False}, 1.15),
        ({"state": "int8", "update": "delayed"}, 1.05),
    ],
    ids=["inside backward", "delayed"],
)
def test_updates_beside_compute_hide_the_drive(options: dict[str, Any], most: float) -> None:
    """8B, 32k tokens per step, 6 GB/s each way: against the busiest lane, which is compute."""
    plan = planned(nvme(), **options)
    assert plan.fits and plan.job.batch_tokens == 32768
    bound_s, lane = plan.prediction.bound
    assert lane == "compute" and plan.prediction.seconds <= most * bound_s


def test_a_drive_that_was_not_measured_is_assumed_and_said() -> None:
    plan = planned(nvme(disk_read_gbps=0.0, disk_write_gbps=0.0, disk_tbw=0.0))
    assert plan.prediction.disk.assumed
    assert plan.prediction.disk.read_rate == ASSUMED_GBPS * 1e9
    report = text(plan)
    assert "assumed: `offloadtrain doctor --save`" in report and "its rating is unknown" in report
    assert "assumed" not in text(planned(nvme()))


@pytest.mark.slow
@pytest.mark.parametrize("rates", [{}, {"disk_read_gbps": 0.0, "disk_write_gbps": 0.0}])
def test_a_faster_drive_is_the_first_to_help_an_update_that_waits_for_it(
    rates: dict[str, float],
) -> None:
    gains = why(planned(nvme(**rates))).gains
    assert next(iter(gains)) == "the drive" and gains["the drive"] > 0.2
    assert "the drive" not in why(planned(nvme(), state_on="host", scratch_dir=None)).gains


@pytest.mark.slow
def test_wear_is_what_all_ranks_of_a_host_write() -> None:
    plan = planned(nvme())
    bytes_per_param = plan.placed.spec.buckets[0].format.bytes_per_param(ADAM_MOMENTS, 2)
    params = sum(bucket.numel for bucket in plan.placed.spec.buckets)
    assert plan.wear.per_step == bytes_per_param * params
    per_day = plan.wear.per_step * 86400 / plan.prediction.seconds
    assert plan.wear.per_day == pytest.approx(per_day)
    assert plan.wear.days == pytest.approx(1200e12 / per_day)
    two = make(example(), "nvme", nvme(gpus=2), ranks=2)
    assert two.wear.per_step == plan.wear.per_step


@pytest.mark.slow
@pytest.mark.parametrize(("of", "heads"), [(example, 4), (example_32b, 5)])
def test_a_thousandth_of_it_trains(
    of: Callable[[], Config], heads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With matrices 32 times narrower and shorter: in a thousandth of the planned memory of the
    host, and of the disk."""
    large = of()
    plan = make(large, "nvme", nvme())
    monkeypatch.setattr(spec, "STAGING_BYTES", spec.STAGING_BYTES // SCALE)
    small = scaled(large)
    keys = {"scratch_dir": str(tmp_path), "scratch_in_memory": True, "grad_accum_steps": 1}
    # Keys and values have one head: an eighth or a quarter of so few would be none.
    model = replace(small.model, num_heads=heads, num_kv_heads=1, d_ff=large.model.d_ff // SIDE)
    small = replace(
        small,
        model=model,
        offload=small.offload.replace(**keys),
        device=replace(small.device, kind="cpu"),
        train=replace(small.train, grad_accum_steps=1, micro_batch=large.train.micro_batch),
    )
    measured, host = booked(small, steps=2), plan.placed.host()
    for owners in (host, measured["host"]):
        del owners["padding"]  # what separates neighbours has a size of its own
    for owners, planned_owners in ((measured["host"], host), (measured["disk"], plan.disk)):
        assert sum(owners.values()) == pytest.approx(sum(planned_owners.values()) / SCALE, rel=0.05)
