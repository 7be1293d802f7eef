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
@pytest.mark.parametrize("placement", ["on the device", "streamed", "weights on the disk"])
@pytest.mark.parametrize("mode", ["exact", "early", "delayed"])
@pytest.mark.parametrize("state", ["fp32", "int8"])
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
def test_a_job_goes_from_the_disk_to_the_host_and_back(tmp_path: Path) -> None:
    """The checkpoints are those of the host; the file lies beside the runs and has no name."""
    disk = ("offload.state_on=disk", "offload.scratch_in_memory=true")
    placements: dict[str, list[tuple[str, ...]]] = {
        "host": [(), ()],
        "from the disk": [disk, ()],
        "to the disk": [(), disk],
    }
    for name, (first, second) in placements.items():
        path = tmp_path / name
        assert run(small_job(tmp_path, "train.steps=3", *first), path) == 0
        assert run(small_job(tmp_path, "train.steps=6", *second), path, resume=str(path)) == 0
        for step in (3, 6):
            assert tensor_hashes(path, step) == tensor_hashes(tmp_path / "host", step), name
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        (),
        ("offload.working=disk", "offload.grad_on=disk", "train.grad_accum_steps=4"),
        ("offload.working=disk", "offload.grad_on=disk", "offload.state=int8"),
        ("offload.working=disk", "offload.update=delayed"),
    ],
    ids=["state", "all, four microbatches", "all, int8", "weights, delayed"],
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
    found = events_of(tmp_path / "run", schema.Step)
    moved = [(one.disk_read_bytes, one.disk_written_bytes) for one in found]
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
    assert [found.name for found in checkpoint.find(damaged / "checkpoints")] == ["step-00000003"]
    assert run(small_job(tmp_path, *disk), damaged, resume=str(damaged)) == 0
    assert tensor_hashes(damaged, 12) == tensor_hashes(whole_run, 12)


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_ends_the_run_and_leaves_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real, updates = DiskArena.write, []

    def write(arena: DiskArena, *views: Any) -> None:
        updates.append(views)
        if len(updates) < 40:  # of five buckets: in the eighth step, behind two saves
            return real(arena, *views)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", _failing(code))
            return real(arena, *views)

    monkeypatch.setattr(DiskArena, "write", write)
    disk = ("offload.state_on=disk", "offload.scratch_in_memory=true")
    with pytest.raises((DiskError, LaneError), match=errno.errorcode[code]) as raised:
        run(small_job(tmp_path, *disk), tmp_path / "run")
    assert "its checkpoints are intact" in str(raised.value)
    found = checkpoint.find(tmp_path / "run" / "checkpoints")
    assert [checkpoint.verify(path).step for path in found]


def _failing(code: int) -> Any:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail
