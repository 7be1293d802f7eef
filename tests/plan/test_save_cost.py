"""The cost of a checkpoint follows from the disk and the step."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from offloadtrain.hardware.direct_io import BLOCK
from offloadtrain.hardware.machine import find
from offloadtrain.plan.costs.disk import SHARE, save_cost
from offloadtrain.plan.plan import make
from offloadtrain.train.checkpoint import checkpoint
from tests.train.small_job import run, small_job

SHAPE = ("model.size=gpt2-124m", "model.d_model=768", "model.num_heads=12")


@pytest.mark.parametrize(
    ("write_s", "step_s", "stall_s", "interval"),
    [(1.0, 2.0, 0.0, 1), (10.0, 1.0, 9.0, 300), (4.0, 4.0, 0.0, 1), (5.0, 2.0, 3.0, 50)],
)
def test_a_step_hides_what_it_can(
    write_s: float, step_s: float, stall_s: float, interval: int
) -> None:
    cost = save_cost(write_s, step_s)
    assert (cost.stall_s, cost.interval) == (stall_s, interval)
    assert cost.stall_s <= SHARE * interval * step_s


def test_no_update_waits_for_what_the_spill_holds() -> None:
    cost = save_cost(5.0, 2.0, 1.0)
    assert (cost.write_s, cost.stall_s, cost.interval) == (5.0, 2.0, 34)
    assert save_cost(5.0, 2.0, 4.0).stall_s == 0.0


def test_the_spill_is_the_jobs_on_every_rank(tmp_path: Path) -> None:
    """Of its own default, as much as there is state; none without regular saves."""
    machine = replace(find("a100_40gb")[1], disk_gbps=1.0)

    def planned(*overrides: str) -> tuple[int, float]:
        job = small_job(tmp_path, *SHAPE, *overrides)
        plan = make(replace(job, device=replace(job.device, kind="auto")), "a machine", machine)
        assert plan.save is not None
        return plan.spill_bytes, plan.save.stall_s

    default, stall_s = planned()
    assert default == 64 << 20 and planned("train.checkpoint_every=0")[0] == 0
    none, longer_s = planned("train.checkpoint_spill=0")
    assert none == 0 and longer_s - stall_s == pytest.approx(default / 1e9)
    assert planned("train.checkpoint_spill=512 MiB")[0] == 512 << 20


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("offload.update=delayed", "offload.state=split16")])
def test_the_size_is_that_of_the_files(tmp_path: Path, options: tuple[str, ...]) -> None:
    """But for blocks that are filled up, and bytes of buffers."""
    job = small_job(tmp_path, "train.steps=3", "train.eval_every=0", "model.d_model=64", *options)
    assert run(job, tmp_path / "run") == 0
    (path,) = checkpoint.find(tmp_path / "run" / "checkpoints")
    manifest = checkpoint.open_checkpoint(path).manifest
    on_gpu = replace(job, device=replace(job.device, kind="auto"))
    planned = make(on_gpu, "a machine", find("a100_40gb")[1]).checkpoint_bytes
    buffers = sum(1 for _ in groupby(entry.kind for entry in manifest.entries))
    assert 0 <= manifest.num_bytes - planned <= BLOCK * buffers < manifest.num_bytes / 10
