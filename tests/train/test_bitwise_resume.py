"""A run that was saved and stopped twice has the bits of one that was never saved: every update
mode, placement and state format, with a spill and with state on the disk too."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.cli.exit_codes import FAILED, of_error
from offloadtrain.config.errors import DiskError
from offloadtrain.engine import OffloadOptimizer
from offloadtrain.engine.saved_state import WORKING
from offloadtrain.events import schema
from offloadtrain.hardware import direct_io
from offloadtrain.hardware.machine import find
from offloadtrain.parallel.pipeline.stage_optimizers import AnyOptimizer
from offloadtrain.plan.plan import make
from offloadtrain.runtime.disk_arena import DiskArena
from offloadtrain.runtime.lanes import LaneError
from offloadtrain.step.layout.step_spec import SPILL_BLOCK
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.manifest import MANIFEST, DamagedCheckpointError, digest_of
from offloadtrain.train.checkpoint.restore import saved_weights
from offloadtrain.train.log.run_log import RunLog
from tests.engine.test_proof import CASES, MODES, PLACEMENTS, options_of
from tests.harsh_lanes import PausingLanes
from tests.seeded_lanes import SeededLanes
from tests.train.bitwise import Case, differ, parted, running, saving, whole
from tests.train.small_job import events_of, run, small_job, tensor_hashes

SPILL = 5 * SPILL_BLOCK
"""Bytes: some buckets, or a part of one."""

LANES = {"sequential": Case.lanes, "threads": lambda: PausingLanes(0.2)}


def case_of(mode: str, placement: str, formats: tuple[str, str], **options: Any) -> Case:
    state, precision = formats
    chosen = {**options_of(mode, precision), "state": state, "precision": precision}
    chosen["checkpoint_spill"] = SPILL
    return Case(chosen, PLACEMENTS[placement], **options)


def check(case: Case, placements: Sequence[str], folder: Path) -> int:
    """Compare a run with the same that saves, and with one of three starts, each of them with its
    weights elsewhere; return the number of resumes."""
    expected = whole(case)
    assert differ(saving(case, folder / "saving"), expected) == [], "a save changed the run"
    cases = [replace(case, placement=PLACEMENTS[name]) for name in placements]
    assert differ(parted(cases, folder / "parted"), expected) == []
    return len(cases) - 1


ALL = list(product(MODES, PLACEMENTS, CASES))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_one_run_of_each_mode(tmp_path: Path, request: Any, mode: str) -> None:
    draw = random.Random(f"{request.config.option.seed} {mode}")
    case = case_of(mode, draw.choice(sorted(PLACEMENTS)), draw.choice(CASES), accum=2)
    check(case, draw.choices(sorted(PLACEMENTS), k=3), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("formats", CASES[:3:2])
def test_a_delayed_checkpoint_holds_the_newest_weights(
    tmp_path: Path, formats: tuple[str, str]
) -> None:
    """Exports and another mode go on with them. Weights in use of some parameters are damage."""
    with running(case_of("delayed", "streamed", formats)) as run:
        run.train(range(1, 4))
        run.save(tmp_path, 3)
        run.commit()
        (path,) = checkpoint.find(tmp_path)
        weights = dict(saved_weights(checkpoint.verify(path), ot.AdamW()))
        expected, newest = dict(run.optimizer.master_weights()), run.bits()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    with running(case_of("exact", "on the device", formats), seed=1) as run:
        run.load(tmp_path)
        assert differ(([], run.bits()), ([], newest)) == []
    content = json.loads((path / MANIFEST).read_text())
    next(entry for entry in content["tensors"] if entry["kind"] == WORKING)["kind"] = "other"
    (path / MANIFEST).write_text(json.dumps(content | {"sha256": digest_of(content)}))
    with pytest.raises(DamagedCheckpointError, match="weights in use of some parameters only"):
        checkpoint.open_checkpoint(path)


@pytest.mark.long
def test_every_mode_placement_and_format(tmp_path: Path) -> None:
    draw = random.Random(0)
    resumes = 0
    for number, (mode, placement, formats) in enumerate(ALL):
        lanes = LANES[draw.choice(sorted(LANES))]
        case = case_of(mode, placement, formats, accum=1 + number % 2, lanes=lanes)
        later = draw.choices(sorted(PLACEMENTS), k=2)
        resumes += check(case, [placement, *later], tmp_path / f"{number}")
    print(f"{resumes} resumes of {len(ALL)} runs: 0 bits differ")
    assert resumes >= 200


# ---- the spill

BLOCKS = (5, 1, 1000, 14)
"""Of the spill: a bucket and a half, the least, more than all state, several buckets."""

ON_HOST = [name for name, options in PLACEMENTS.items() if options.get("state_on") != "device"]
"""Placements with state to copy."""

EACH = [
    (
        mode,
        CASES[(number + number // len(MODES)) % len(CASES)],
        ON_HOST[number % len(ON_HOST)],
        BLOCKS[number % len(BLOCKS)],
    )
    for number, mode in enumerate([*MODES, *MODES])
]
"""Every mode with two formats and every format in two modes, placements and spills in turn."""


def files(case: Case, folder: Path) -> tuple[bytes, object]:
    """Save while later steps are trained; return the tensors' file and what the manifest says."""
    with running(case) as run:
        run.train(range(1, 3))
        run.save(folder, 2)
        run.train(range(3, 6))
        run.commit()
    (path,) = checkpoint.find(folder)
    return (path / "rank-000.bin").read_bytes(), json.loads((path / MANIFEST).read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "formats", "placement", "blocks"), EACH)
def test_a_spill_changes_no_byte(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    formats: tuple[str, str],
    placement: str,
    blocks: int,
) -> None:
    # Most fields are larger than a window: parts end in the midst of one.
    monkeypatch.setattr(direct_io, "WINDOW_BYTES", 2 * direct_io.BLOCK)
    options = {**options_of(mode, formats[1]), "state": formats[0], "precision": formats[1]}
    expected = files(Case(options, PLACEMENTS[placement]), tmp_path / "none")
    spilled = Case(options | {"checkpoint_spill": blocks * SPILL_BLOCK}, PLACEMENTS[placement])
    late = replace(spilled, lanes=lambda: SeededLanes(7, late=True))
    assert files(late, tmp_path / "spilled") == expected


# ---- state on the disk

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
    threads = replace(on_disk, lanes=lambda: PausingLanes(0.2))
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
