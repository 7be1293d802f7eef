"""What a run leaves behind, and what it does about steps and disks that fail."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import tomllib
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.config.job import Config
from offloadtrain.events import log_lines, schema
from offloadtrain.model.transformer import Transformer
from offloadtrain.optim import LossScaleError
from offloadtrain.plan.placement import PlanError
from offloadtrain.runtime import kernels
from offloadtrain.train import build
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.manifest import CheckpointError
from offloadtrain.train.log.console import Console
from offloadtrain.train.saving import TrainingError
from offloadtrain.train.trainer import MAX_SKIPS
from tests.train.conftest import StopAfter
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
    events = {"events/rank000.jsonl", "events/rank000.ring"}
    assert files == {"run.json", "job.toml", "resolved.toml", "lock", *events, *tensors}
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


def test_numba_is_named_while_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step takes many times as long as the others then."""
    doing: list[str] = []
    monkeypatch.setattr(Console, "doing", lambda self, what: doing.append(what))
    numba = replace(kernels.backend(), name="numba")
    monkeypatch.setattr("offloadtrain.runtime.kernels.backend", lambda: numba)
    assert run(small_job(tmp_path, "train.steps=2"), tmp_path / "run") == 0
    steps = [what for what in doing if what.startswith("step")]
    assert steps == ["step 1 (Numba compiles the CPU kernels)", "step 2"]


@pytest.mark.slow
def test_speculation_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    assert (
        run(small_job(tmp_path, "offload.update=speculative", "offload.clip_norm=1e9"), path) == 0
    )
    steps = events_of(path, schema.Step)
    assert [step.speculation_hit for step in steps] == [None, *[True] * 11]
    assert all(step.early_buckets > 0 for step in steps[1:])
    assert "speculation: 11 steps predicted, 0 of them mispredicted" in capsys.readouterr().err


@pytest.mark.slow
def test_each_group_follows_the_schedule_from_its_own_rate(tmp_path: Path) -> None:
    """Under Muon, what is no matrix of a layer has a rate of its own."""
    job = small_job(tmp_path, "optim.name=muon", "optim.adamw_lr=1e-3", "train.steps=6")
    assert run(job, tmp_path / "run") == 0
    lr = events_of(tmp_path / "run", schema.Step)[-1].lr
    newest = checkpoint.find(tmp_path / "run" / "checkpoints")[0]
    groups = json.loads((newest / "state.json").read_text())["param_groups"]
    rates = {(group["use_muon"], group["lr"]) for group in groups}
    assert rates == {(True, lr), (False, lr * (1e-3 / 1e-2))}


@pytest.fixture
def not_finite(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterable[int]], None]:
    """Return a function that names the training forwards (from 0) whose loss shall be NaN."""

    def arm(chosen: Iterable[int]) -> None:
        real, wanted, count = Transformer.forward, set(chosen), iter(range(10**9))

        def forward(self: Transformer, *args: Any, **kwargs: Any) -> object:
            loss = real(self, *args, **kwargs)
            return loss * math.nan if self.training and next(count) in wanted else loss

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


def test_a_full_disk_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, real = tmp_path / "run", checkpoint.atomic_io.write_file

    def full(target: Path, parts: object) -> object:
        if "step-00000006" in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(target, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint.atomic_io, "write_file", full)
    assert run(small_job(tmp_path), path) == 0
    saved = [(e.step, e.state) for e in events_of(path, schema.Checkpoint)]
    assert saved == [(3, "saved"), (6, "failed"), (9, "saved"), (12, "saved")]
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.slow
def test_the_last_checkpoint_must_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(target: Path, parts: object) -> object:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint.atomic_io, "write_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        run(small_job(tmp_path), tmp_path / "run")


def test_what_does_not_fit_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offloadtrain.hardware.telemetry.available_bytes", lambda: 10 << 30)
    job = small_job(tmp_path, "model.d_model=16384", "model.num_layers=9")
    monkeypatch.setattr(build, "offload_job", lambda *_, **__: pytest.fail("it is built"))
    with pytest.raises(PlanError, match=r"needs .* GiB and has 1\d\.\d GiB"):
        run(job, tmp_path / "run")


def test_stopped_before_the_first_step(tmp_path: Path, stop_after: StopAfter) -> None:
    path = tmp_path / "run"
    stop_after(0)
    assert run(small_job(tmp_path), path) == 75
    assert checkpoint.verify(checkpoint.find(path / "checkpoints")[0]).step == 0
    assert events_of(path, schema.RunEnded)[0].status == "stopped"
    stop_after(None)
    assert run(small_job(tmp_path), path, resume="auto") == 0


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
