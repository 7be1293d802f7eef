"""The remains of a run, how it kept to its plan, and steps and disks that fail."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from offloadtrain_tui.reading.log_reader import list_runs

from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.config.job import Config
from offloadtrain.config.sections import TrainConfig
from offloadtrain.events import log_lines, schema
from offloadtrain.events import writer as event_writer
from offloadtrain.hardware.machine import dump, find
from offloadtrain.model.transformer import Transformer
from offloadtrain.optim import LossScaleError
from offloadtrain.plan.placement import PlanError
from offloadtrain.plan.plan import Plan
from offloadtrain.train import build
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.manifest import CheckpointError
from offloadtrain.train.log.console import Console
from offloadtrain.train.log.run_log import Pace
from offloadtrain.train.saving import TrainingError
from offloadtrain.train.trainer import MAX_SKIPS, Trainer
from tests.events.test_events import Disk
from tests.train.small_job import events_of, history, kinds, run, small_job

SAMPLED = ("train.sample_tokens=8", "train.sample_prompt=1 + ")


class Trained(NamedTuple):
    """A run, and its output."""

    job: Config
    path: Path
    phases: list[str]
    out: str
    err: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder, phases = tmp_path_factory.mktemp("trained"), list[str]()
    job = small_job(folder, *SAMPLED, "optim.schedule=linear", "optim.min_lr_ratio=0")
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(Console, "doing", lambda self, phase: phases.append(phase))
        assert run(job, folder / "run") == 0
    return Trained(job, folder / "run", phases, out.getvalue(), err.getvalue())


def test_the_run_folder_is_complete(trained: Trained) -> None:
    path = trained.path
    files = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    tensors = [
        f"checkpoints/step-{step:08d}/{name}"
        for step in (9, 12)
        for name in ("manifest.json", "state.json", "rank-000.bin")
    ]
    log = "events/rank000.jsonl"
    assert files == {"run.json", "job.toml", "resolved.toml", "lock", log, *tensors}
    assert jobs.load(path / "resolved.toml") == trained.job
    assert json.loads((path / "run.json").read_text())["name"] == "small"
    assert (path / "run.json").stat().st_uid == os.getuid()
    assert trained.out == f"{path}\n", "stdout is data: the run folder"
    for part in ("training loss by step", "validation loss (nats", "sample\n  1 + ", "next:"):
        assert part in trained.err
    phases = [phase for phase in trained.phases if not phase.startswith("step")]
    assert phases == [
        *("loading torch", "preparing data and model", "validation"),
        *("saving a checkpoint", "validation") * 3,
        *("saving a checkpoint", "writing a sample"),
    ]
    assert len(trained.phases) == len(phases) + 12


def test_the_event_log_is_well_formed(trained: Trained) -> None:
    path = trained.path
    lines = (path / "events" / "rank000.jsonl").read_bytes().splitlines(keepends=True)
    records = [log_lines.from_line(line) for line in lines]
    assert all(line.endswith(b"\n") for line in lines) and None not in records
    events = [record.event for record in records if record]
    # A slow set-up is sampled before the log begins.
    started = next(event for event in events if not isinstance(event, schema.System))
    assert isinstance(started, schema.RunStarted) and isinstance(events[-1], schema.RunEnded)
    expected = {"run_started", "set_up", "step", "memory", "span", "eval", "checkpoint", "sample"}
    sampled = {"live_memory", "step_memory"}  # in their own time, if the run is long enough
    assert kinds(events) - sampled == expected | {"system", "plan_compared", "run_ended"}
    assert events[-1].status == "done" and events[-1].step == 12
    (set_up,) = events_of(path, schema.SetUp)
    assert 0 < set_up.parts_s["reading weights"] < set_up.duration_s
    assert tomllib.loads((path / "resolved.toml").read_text())["optim"] == started.config["optim"]

    steps = events_of(path, schema.Step)
    assert [step.step for step in steps] == list(range(1, 13))
    assert [step.tokens for step in steps] == [256 * n for n in range(1, 13)]
    assert all(step.loss > 0 and math.isfinite(step.loss) for step in steps)
    for step in steps:
        parts = step.data_ms + step.forward_ms + step.backward_ms + step.optimizer_ms
        assert parts == pytest.approx(step.step_ms)
        assert step.tokens_per_s == pytest.approx(256e3 / step.step_ms)
        assert step.d2h_bytes > 0 and step.h2d_bytes > 0
    owners = {row.owner for row in events_of(path, schema.Memory)[0].rows}
    assert {"working weights", "master weights", "exp_avg", "exp_avg_sq"} <= owners


def test_it_learns_by_its_schedule(trained: Trained, tmp_path: Path) -> None:
    losses = [e.val_loss for e in events_of(trained.path, schema.Eval)]
    assert losses[-1] < losses[0] - 0.5
    steps = events_of(trained.path, schema.Step)
    rates = [step.lr for step in steps]
    assert rates[:3] == pytest.approx([5e-3, 1e-2, 9e-3]) and rates[-1] == 0.0
    state = checkpoint.verify(trained.path / "checkpoints" / "step-00000012").state
    decays = [group["weight_decay"] for group in state["param_groups"]]
    assert decays == [0.1, 0.0], "matrices decay, norms do not"
    assert [group["lr"] for group in state["param_groups"]] == [0.0, 0.0]
    assert run(small_job(tmp_path, "train.seed=7", "train.steps=3"), tmp_path / "run") == 0
    assert history(tmp_path / "run")[0] != history(trained.path)[0]


@pytest.fixture
def not_finite(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterable[int]], None]:
    """Return a function that names the training forwards (from 0) whose loss shall be NaN. Those of
    a trace, which is made where no earlier test has made it, do not count."""

    def arm(chosen: Iterable[int]) -> None:
        real, wanted, count = Transformer.forward, set(chosen), iter(range(10**9))

        def forward(self: Transformer, *args: Any, **kwargs: Any) -> object:
            loss = real(self, *args, **kwargs)
            counts = self.training and type(loss) is torch.Tensor
            return loss * math.nan if counts and next(count) in wanted else loss

        monkeypatch.setattr(Transformer, "forward", forward)

    return arm


def test_a_skipped_step_is_counted_and_changes_nothing(
    tmp_path: Path, not_finite: Callable[[Iterable[int]], None]
) -> None:
    path = tmp_path / "run"
    not_finite([5, 6, 8])  # microbatches: two steps of two are hit, then a third
    assert run(small_job(tmp_path), path) == 0
    steps = events_of(path, schema.Step)
    assert [step.step for step in steps] == [1, 2, 3, 3, 3, *range(3, 13)]
    assert [step.skipped for step in steps[2:6]] == [True, True, True, False]
    assert len({step.lr for step in steps[2:6]}) == 1, "the schedule waits"
    assert [step.tokens for step in steps] == [256 * n for n in range(1, 16)], "batches are used"
    codes = [warning.code for warning in events_of(path, schema.Warning_)]
    assert codes == ["loss-not-finite"] * 3
    progress = checkpoint.verify(path / "checkpoints" / "step-00000012").state["progress"]
    assert (progress["step"], progress["skipped"], progress["skipped_in_a_row"]) == (12, 3, 0)


def test_a_time_limit_ends_a_start_as_its_last_step_does(tmp_path: Path) -> None:
    """With evaluation, checkpoint and sample, and a line that says so; a resume goes on with the
    steps of a run without a limit."""
    limit = "train.max_s=1e-9"  # over after a step
    job = small_job(tmp_path, *SAMPLED, limit)
    path = tmp_path / "limited"
    assert run(job, path) == 0
    events = {kind: events_of(path, kind) for kind in (schema.Step, schema.Eval, schema.Sample)}
    assert [event.step for event in events[schema.Step]] == [1]
    assert events[schema.Eval][-1].step == 1 and len(events[schema.Sample]) == 1
    assert [p.name for p in checkpoint.find(path / "checkpoints")] == ["step-00000001"]
    (end,) = events_of(path, schema.RunEnded)
    (warning,) = [e for e in events_of(path, schema.Warning_) if e.code == "time-limit"]
    assert (end.status, end.step) == ("done", 1)
    assert warning.message.startswith("train.max_s = 1e-09 is over: the run ends at step 1 of 12")
    assert run(job, path, resume=str(path)) == 0
    assert run(small_job(tmp_path), tmp_path / "whole") == 0
    assert history(path) == history(tmp_path / "whole")[:2]


def test_documents_that_lose_their_ends_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert run(small_job(tmp_path, "data.packing=padded", "train.steps=4"), path) == 0
    warnings = events_of(path, schema.Warning_)
    (message,) = [event.message for event in warnings if event.code == "documents-cut"]
    assert "documents are longer than data.seq_len = 32 and lose their ends" in message


def test_skips_without_end_abort_with_a_checkpoint(
    tmp_path: Path, not_finite: Callable[[Iterable[int]], None]
) -> None:
    path = tmp_path / "run"
    not_finite(range(8, 10**6))
    message = rf"{MAX_SKIPS} steps in a row .* in step 5 the gradients of '\w.* more are .*optim.lr"
    with pytest.raises(TrainingError, match=message):
        run(small_job(tmp_path), path)
    assert checkpoint.verify(checkpoint.find(path / "checkpoints")[0]).step == 4
    ended = events_of(path, schema.RunEnded)[-1]
    assert ended.status == "failed" and "TrainingError" in ended.message


def test_the_warning_of_a_skip_counts_it_and_names_gradients(tmp_path: Path) -> None:
    job = small_job(tmp_path, "optim.lr=1e30", "optim.warmup_steps=0")
    with pytest.raises(TrainingError, match=f"{MAX_SKIPS} steps in a row"):
        run(job, tmp_path / "run")
    warnings = events_of(tmp_path / "run", schema.Warning_)
    messages = [event.message for event in warnings if event.code == "step-skipped"]
    times = ["", *(f", {count} times in a row" for count in range(2, MAX_SKIPS + 1))]
    for message, count in zip(messages, times, strict=True):
        assert re.fullmatch(rf"step 2 was skipped{count}: the gradients of '.* not finite", message)


UNSKIPPED = ("offload.skip_nonfinite=false", "train.keep_last=2")


@pytest.mark.parametrize(
    "overrides",
    [
        ("offload.clip_norm=0",),
        *(
            pytest.param(overrides, marks=pytest.mark.slow)
            for overrides in (
                ("offload.update=speculative",),
                ("offload.update=delayed", "offload.warmup_steps=2"),
                ("offload.state=split16", "offload.working=host"),
            )
        ),
    ],
)
def test_what_is_not_finite_is_never_saved(
    tmp_path: Path,
    not_finite: Callable[[Iterable[int]], None],
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
) -> None:
    """Where steps are not skipped, neither a loss nor weights that are not finite."""
    not_finite([15])  # of step 8
    job, path = small_job(tmp_path, *UNSKIPPED, *overrides), tmp_path / "loss"
    with pytest.raises(
        TrainingError, match=r"loss of step 8 is nan.*step-00000006.*skip_nonfinite"
    ):
        run(job, path)
    ended = events_of(path, schema.RunEnded)[-1]
    assert (ended.status, ended.step) == ("failed", 8)

    monkeypatch.setattr("offloadtrain.train.losses.LateLoss.wait", lambda self: 1.0)
    not_finite([15])
    path = tmp_path / "weights"
    with pytest.raises(TrainingError, match=r"after step 9 the weights of .* are not finite"):
        run(job, path)
    for folder in (tmp_path / "loss", path):
        checkpoints = checkpoint.find(folder / "checkpoints")
        assert [checkpoint.verify(saved).step for saved in checkpoints] == [6, 3]


@pytest.mark.slow
def test_a_run_without_a_good_state_at_its_end_is_not_done(
    tmp_path: Path, not_finite: Callable[[Iterable[int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(jobs.dump(small_job(tmp_path, *UNSKIPPED)))
    for losses, number in (("seen", 23), ("hidden", 23), ("hidden", 0)):
        with monkeypatch.context() as patch:
            if losses == "hidden":
                patch.setattr("offloadtrain.train.losses.LateLoss.wait", lambda self: 1.0)
            not_finite([number])
            path = tmp_path / f"{losses}-{number}"
            assert main(["train", str(job), "--run-dir", str(path)]) == 1
        assert events_of(path, schema.RunEnded)[-1].status == "failed"
        steps = [checkpoint.step_of(saved) for saved in checkpoint.find(path / "checkpoints")]
        assert steps == ([] if number == 0 else [9, 6])


@pytest.mark.slow
def test_an_overflow_at_the_smallest_scale_ends_with_a_checkpoint(
    tmp_path: Path, not_finite: Callable[[Iterable[int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    monkeypatch.setattr("offloadtrain.optim.loss_scaler.SMALLEST", 2.0**14)
    not_finite(range(8, 10**6))
    with pytest.raises(
        LossScaleError, match=r"smallest loss scale.*Not finite: the gradients of '\w"
    ):
        run(small_job(tmp_path, "offload.precision=fp16"), path)
    assert checkpoint.verify(checkpoint.find(path / "checkpoints")[0]).step == 4
    assert events_of(path, schema.RunEnded)[-1].status == "failed"


def test_a_full_disk_does_not_end_a_run_that_can_save_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, real = tmp_path / "run", checkpoint.atomic_io.write_file

    def full(target: Path, parts: object) -> object:
        if "step-00000006" in str(target) or path.name == "last":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(target, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint.atomic_io, "write_file", full)
    assert run(small_job(tmp_path), path) == 0
    saved = [(e.step, e.state) for e in events_of(path, schema.Checkpoint)]
    assert saved == [(3, "saved"), (6, "failed"), (9, "saved"), (12, "saved")]
    assert "No space left on device" in capsys.readouterr().err
    path = tmp_path / "last"
    with pytest.raises(CheckpointError, match="No space left"):
        run(small_job(tmp_path, "train.steps=3"), path)


def test_what_does_not_fit_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offloadtrain.hardware.telemetry.available_bytes", lambda: 10 << 30)
    job = small_job(tmp_path, "model.d_model=16384", "model.num_layers=9")
    monkeypatch.setattr(build, "offload_job", lambda *_, **__: pytest.fail("it is built"))
    with pytest.raises(PlanError, match=r"needs .* GiB and has 1\d\.\d GiB"):
        run(job, tmp_path / "run")


def test_stopped_before_the_first_step(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert run(small_job(tmp_path), path, stop_after=0) == 75
    assert checkpoint.verify(checkpoint.find(path / "checkpoints")[0]).step == 0
    assert events_of(path, schema.RunEnded)[0].status == "stopped"
    assert run(small_job(tmp_path), path, resume="auto") == 0


# ---- the plan


def compared(path: Path) -> dict[str, schema.PlanRow]:
    (event,) = events_of(path, schema.PlanCompared)
    return {row.what: row for row in event.rows}


def warnings(path: Path) -> list[str]:
    return [event.message for event in events_of(path, schema.Warning_)]


def test_bytes_are_as_planned(trained: Trained) -> None:
    rows = compared(trained.path)
    for tier in ("host bytes", "device bytes"):
        assert rows[tier].measured == pytest.approx(rows[tier].planned, rel=0.01)
    assert rows["step"].unit == "s" and rows["step"].measured > 0
    assert "measured / planned" in trained.err
    assert not any("not as planned" in text for text in warnings(trained.path))


def test_bytes_that_differ_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    host = Plan.host.func
    monkeypatch.setattr(Plan, "host", property(lambda plan: host(plan) | {"forgotten": 1 << 30}))
    assert run(small_job(tmp_path), path) == 0
    (message,) = (text for text in warnings(path) if "not as planned" in text)
    assert "host bytes: planned 1." in message and "step" not in message


def test_times_are_held_to_a_measured_machine(tmp_path: Path) -> None:
    """Its file says a thousandth of what any machine does."""
    path, file = tmp_path / "run", tmp_path / "slow.toml"
    machine = find("cpu2")[1]
    slow = replace(machine, bf16_tflops=1e-6, fp16_tflops=1e-6, fp32_tflops=1e-6)
    file.write_text(dump(slow, "Slow"))
    assert run(small_job(tmp_path, f"device.machine={file}"), path) == 0
    (message,) = (text for text in warnings(path) if "not as planned" in text)
    assert "step: planned" in message and "bytes" not in message


# ---- the remaining time


def test_the_trainer_counts_what_held_it_up() -> None:
    """Steps of 2 s, an evaluation of 5 s after every 4th, and 3 s for a checkpoint after it."""
    now_s = 0.0
    pace = Pace(TrainConfig(steps=12, eval_every=4, checkpoint_every=4), lambda: now_s)
    assert math.isnan(pace.seconds_left(0))
    for step in range(1, 9):
        pace.begin_step(step - 1)
        now_s += 2.0
        pace.end_step(2.0)
        if step % 4 == 0:
            now_s += 5.0 + 3.0
            pace.evaluated(5.0)
    pace.begin_step(8)
    assert pace.seconds_left(8) == pytest.approx(4 * 2.0 + 5.0 + 3.0)
    assert pace.seconds_left(12) == 0.0


# ---- a disk without room


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    real = os.statvfs

    def statvfs(path: object) -> os.statvfs_result:
        block, fragment, blocks, _, _, *rest = real(path)  # type: ignore[arg-type]
        left = num_bytes // fragment
        return os.statvfs_result((block, fragment, blocks, left, left, *rest))

    monkeypatch.setattr(os, "statvfs", statvfs)


def test_a_disk_too_small_is_reported_or_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ("train.steps=4", "train.eval_every=0")
    for mib, overrides, warns in (
        (4, ("train.checkpoint_every=1",), True),  # 1.6 MiB each with some room, three at once
        (5, ("train.checkpoint_every=1",), False),
        (3, ("train.checkpoint_every=0",), False),  # one is all there will be
    ):
        path = tmp_path / f"{mib}"
        with monkeypatch.context() as patch:
            free(patch, mib << 20)
            assert run(small_job(tmp_path, *short, *overrides), path) == 0
        messages = [e.message for e in events_of(path, schema.Warning_) if e.code == "disk-small"]
        assert len(messages) == warns
        assert all("which is 2 times" in message for message in messages)
        assert all("keep_last = 2 takes 3 times" in message for message in messages)
    free(monkeypatch, 1 << 20)
    monkeypatch.setattr(Transformer, "forward", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(CheckpointError, match=r"a checkpoint needs 1\.\d MiB and 1\.0 MiB is free"):
        run(small_job(tmp_path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("until", [10, 13])
def test_a_log_whose_disk_is_full_from_step_3_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    until: int,
) -> None:
    """For some steps: it is whole. To the end: it says what it lost, and the run counts as done."""
    path = tmp_path / "run"
    disk, real = Disk(monkeypatch, path / "events" / "rank000.jsonl"), Trainer._between_steps

    def between(self: Trainer) -> None:
        disk.room = 0 if 3 <= self.progress.step < until else 1 << 30
        real(self)

    monkeypatch.setattr(Trainer, "_between_steps", between)
    monkeypatch.setattr(event_writer, "END_WITHIN_S", 0.05)
    assert run(small_job(tmp_path), path) == 0
    (row,) = list_runs(tmp_path, 0.0)
    assert (row.state, row.folder) == ("done", path)
    output = capsys.readouterr().err
    assert output.count("the event log cannot be written (No space left on device)") == 1
    lost = [e.message for e in events_of(path, schema.Warning_) if e.code == "events-dropped"]
    if until == 10:
        assert [e.step for e in events_of(path, schema.Step)] == list(range(1, 13))
        assert "written again; 0 records were lost" in output and not lost
    else:
        (message,) = lost
        assert "events were lost: the log's disk refused (No space left on device)" in message


def test_a_run_folder_that_is_removed_meanwhile_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, real = tmp_path / "run", Trainer._between_steps

    def removed(self: Trainer) -> None:
        if self.progress.step == 5:
            shutil.rmtree(path)
        real(self)

    monkeypatch.setattr(Trainer, "_between_steps", removed)
    assert run(small_job(tmp_path), path) == 0
    output, log = capsys.readouterr().err, path / "events" / "rank000.jsonl"
    assert f"{log} was removed or renamed during the run" in output
    assert [saved.name for saved in sorted((path / "checkpoints").iterdir())] == [
        "step-00000009",
        "step-00000012",
    ]


def test_a_precision_chosen_here_is_held_to_the_same_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp16 that "auto" resolved to, on a GPU without bf16, and a job that never skips."""
    job = small_job(tmp_path, "offload.skip_nonfinite=false", "offload.precision=auto")
    monkeypatch.setattr(
        "offloadtrain.train.build.resolve_precision", lambda *_: ("fp16", "no bf16")
    )
    with pytest.raises(jobs.ConfigError, match=r"\(offload.precision = fp16: no bf16\)"):
        run(job, tmp_path / "run")
