"""A run with its state on the disk: it stops, goes on anywhere to the bit, survives the disk."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch

from offloadtrain.cli.exit_codes import FAILED, of_error
from offloadtrain.config.errors import DiskError
from offloadtrain.engine import OffloadOptimizer
from offloadtrain.events import schema
from offloadtrain.hardware.machine import find
from offloadtrain.parallel.pipeline.stage_optimizers import AnyOptimizer
from offloadtrain.plan.plan import make
from offloadtrain.runtime.disk_arena import DiskArena
from offloadtrain.runtime.lanes import LaneError
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.log.run_log import RunLog
from tests.engine.test_proof import MODES, PLACEMENTS
from tests.train.bitwise import Case, differ, parted, saving, whole
from tests.train.small_job import events_of, run, small_job, tensor_hashes

DISK: dict[str, Any] = {
    "state_on": "disk",
    "scratch_dir": gettempdir(),
    "scratch_in_memory": True,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "mode", "placement"),
    [
        ("fp32", "exact", "weights on the disk"),
        ("fp32", "early", "streamed"),
        ("fp32", "delayed", "on the device"),
        ("int8", "exact", "on the device"),
        ("int8", "early", "weights on the disk"),
        ("int8", "delayed", "streamed"),
        ("int8", "delayed", "weights on the disk"),
    ],
)
def test_saves_and_stops_change_no_bit(
    tmp_path: Path, state: str, mode: str, placement: str
) -> None:
    """Of a run on the disk, and of one that goes from the disk to the host and back."""
    options = {**MODES[mode], "state": state, "precision": "bf16"}
    there = PLACEMENTS.get(placement, {"working": "host"})
    on_host, on_disk = Case(options, there), Case(options, {**there, **DISK})
    if placement == "weights on the disk":
        grad = {} if mode == "delayed" else {"grad_on": "disk"}
        on_disk = Case(options, {"working": "disk", **grad, **DISK})
    expected = whole(on_host)
    threads = replace(on_disk, lanes=lambda: ThreadLanes(longest_delay_ms=0.2))
    assert differ(saving(threads, tmp_path / "saving"), expected) == []
    cases = [on_disk, on_host, on_disk]
    assert differ(parted(cases, tmp_path / "parted"), expected) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("offload.working=disk", "offload.grad_on=disk", "train.grad_accum_steps=4"),
        ("offload.working=disk", "offload.grad_on=disk", "offload.state=int8"),
        ("offload.working=disk", "offload.update=delayed"),
    ],
    ids=["all, four microbatches", "all, int8", "weights, delayed"],
)
def test_the_log_says_how_many_bytes_each_step_moves(tmp_path: Path, more: tuple[str, ...]) -> None:
    """As many as planned, once the slots hold what the step before has left in them."""
    job = small_job(
        tmp_path,
        *more,
        "offload.state_on=disk",
        "offload.scratch_in_memory=true",
        "train.steps=5",
        "train.checkpoint_every=0",
        "train.eval_every=0",
    )
    assert run(job, tmp_path / "run") == 0
    planned = make(job, "cpu2", find("cpu2")[1]).prediction.disk
    steps = events_of(tmp_path / "run", schema.Step)
    moved = [(step.disk_read_bytes, step.disk_written_bytes) for step in steps]
    assert planned.written_bytes > 0
    assert moved[2:-1] == [(planned.read_bytes, planned.written_bytes)] * 2


def test_a_flipped_bit_ends_the_job_and_its_last_checkpoint_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step uses the bit and no checkpoint has it; resumed, the run has the bits of another."""
    before_step = RunLog.before_step

    def flip_before_step_6(log: RunLog, optimizer: AnyOptimizer) -> None:
        before_step(log, optimizer)
        if optimizer.tries == 5:
            optimizer.lanes.synchronize()
            assert isinstance(optimizer, OffloadOptimizer)
            # The last bucket is in no slot of the host: only the file has its state.
            state = optimizer._blocks[-2].buckets[-1].state[0].flat
            state.view(torch.uint8)[100] ^= 1

    disk = ("offload.state_on=disk", "offload.scratch_in_memory=true", "model.num_layers=4")
    whole_run, damaged = tmp_path / "whole", tmp_path / "damaged"
    assert run(small_job(tmp_path, *disk), whole_run) == 0
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "before_step", flip_before_step_6)
        with pytest.raises((DiskError, LaneError), match=r"of bucket '.*--resume") as raised:
            run(small_job(tmp_path, *disk), damaged)
    assert of_error(raised.value) == FAILED and "\n" not in str(raised.value)
    assert [saved.name for saved in checkpoint.find(damaged / "checkpoints")] == ["step-00000003"]
    assert run(small_job(tmp_path, *disk), damaged, resume=str(damaged)) == 0
    assert tensor_hashes(damaged, 12) == tensor_hashes(whole_run, 12)


@pytest.mark.slow
def test_a_failing_disk_ends_the_run_and_leaves_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They continue with the state on the host, to the bit."""
    real, updates = DiskArena.write, []

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(arena: DiskArena, *views: Any) -> None:
        updates.append(views)
        with pytest.MonkeyPatch.context() as patch:
            if len(updates) >= 40:  # of five buckets: in the eighth step, after two saves
                patch.setattr(os, "pwrite", refuse)
            return real(arena, *views)

    disk, path = ("offload.state_on=disk", "offload.scratch_in_memory=true"), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(DiskArena, "write", write)
        with pytest.raises((DiskError, LaneError), match="ENOSPC") as raised:
            run(small_job(tmp_path, *disk), path)
    assert "its checkpoints are intact" in str(raised.value)
    assert run(small_job(tmp_path), tmp_path / "host") == 0
    assert run(small_job(tmp_path), path, resume=str(path)) == 0
    assert tensor_hashes(path, 12) == tensor_hashes(tmp_path / "host", 12)
    assert list((tmp_path / "runs").iterdir()) == []
