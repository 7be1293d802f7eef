"""The cost of a checkpoint follows from the disk and the step."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from offloadtrain.hardware.direct_io import BLOCK
from offloadtrain.hardware.machine import find
from offloadtrain.plan.plan import make
from offloadtrain.plan.save_cost import SHARE, save_cost
from offloadtrain.train.checkpoint import checkpoint
from tests.train.small_job import run, small_job


@pytest.mark.parametrize(
    ("write_s", "step_s", "stall_s", "interval"),
    [(1.0, 2.0, 0.0, 1), (10.0, 1.0, 9.0, 300), (4.0, 4.0, 0.0, 1), (5.0, 2.0, 3.0, 50)],
)
def test_a_step_hides_what_it_can(
    write_s: float, step_s: float, stall_s: float, interval: int
) -> None:
    found = save_cost(write_s, step_s)
    assert (found.stall_s, found.interval) == (stall_s, interval)
    assert found.stall_s <= SHARE * interval * step_s


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
