"""A run whose device fails: exit code 74, a checkpoint made without it, and the same bits later."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.config.errors import DeviceMemoryError
from offloadtrain.config.job import Config
from offloadtrain.engine import OffloadOptimizer
from offloadtrain.events import schema
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.train import emergency
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.emergency import DeviceFailedError, DeviceLostError
from offloadtrain.train.trainer import Trainer
from tests.losing_lanes import LosingLanes
from tests.train.small_job import events_of, history, run, small_job, tensor_hashes


def arm(
    patch: pytest.MonkeyPatch, lanes: LosingLanes, step: int, *, inside: str, left: int
) -> None:
    """Fail at the operation `left` of the forward ("_accumulate") or of `optimizer.step` of a
    step."""
    owner: Any = Trainer if inside == "_accumulate" else OffloadOptimizer
    real = getattr(owner, inside)
    calls = 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        lanes.left = left if calls == step else lanes.left
        return real(*arguments, **named)

    patch.setattr(owner, inside, counted)


def lose(
    patch: pytest.MonkeyPatch,
    job: Config,
    path: Path,
    step: int,
    inside: str,
    left: int,
    **kind: Any,
) -> BaseException:
    lanes = LosingLanes(SequentialLanes())
    lanes.error = kind.get("error", torch.AcceleratorError)
    with patch.context() as armed, on_lanes(lanes):
        arm(armed, lanes, step, inside=inside, left=left)
        with pytest.raises(Exception, match=r"the device (failed|ran out .*) in step") as raised:
            run(job, path)
    return raised.value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inside", "left", "saved", "options"),
    [
        ("_accumulate", 9, 7, ()),
        ("_accumulate", 9, 7, ("offload.update=speculative",)),
        ("step", 20, 8, ("offload.precision=fp16",)),
        ("step", 30, 8, ()),
    ],
)
def test_it_ends_with_74_and_resumes_to_the_bit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    inside: str,
    left: int,
    saved: int,
    options: tuple[str, ...],
) -> None:
    job = small_job(tmp_path, *options)
    uninterrupted, path, file = tmp_path / "uninterrupted", tmp_path / "run", tmp_path / "job.toml"
    file.write_text(jobs.dump(job))
    assert run(job, uninterrupted) == 0
    lanes = LosingLanes(SequentialLanes())
    capsys.readouterr()
    with monkeypatch.context() as patch, on_lanes(lanes):
        arm(patch, lanes, 8, inside=inside, left=left)
        assert main(["train", str(file), "--run-dir", str(path)]) == 74
    output = capsys.readouterr().err
    assert "the device failed in step 8" in output and "Traceback" not in output
    assert f"after step {saved} was saved" in output and f"--resume {path}" in output
    (warning,) = [w for w in events_of(path, schema.Warning_) if w.code == "emergency-checkpoint"]
    assert warning.step == saved
    assert checkpoint.step_of(checkpoint.find(path / "checkpoints")[0]) == saved
    assert main(["train", str(file), "--resume", str(path)]) == 0
    # The record of a step that was finished without the device is missing: its loss was there.
    missing = {saved} if inside == "step" else set()
    assert history(path) == [line for line in history(uninterrupted) if line[0] not in missing]
    assert tensor_hashes(path, 12) == tensor_hashes(uninterrupted, 12)


@pytest.mark.slow
def test_a_full_device_names_its_owners_and_the_keys_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, full = small_job(tmp_path, "train.eval_every=0"), torch.OutOfMemoryError
    first = lose(monkeypatch, job, tmp_path / "first", 1, "_accumulate", 5, error=full)
    assert isinstance(first, DeviceMemoryError), "exit code 4: it does not fit"
    message = str(first)
    assert "Largest owners of device memory: working weights" in message
    assert "train.micro_batch = 2 with train.grad_accum_steps = 4" in message
    assert 'offload.activation = "recompute"' in message
    assert "No emergency checkpoint: no step is done yet. There is no checkpoint yet" in message
    later = lose(monkeypatch, job, tmp_path / "later", 5, "_accumulate", 5, error=full)
    assert isinstance(later, DeviceMemoryError), "no other card is needed, and no restart helps"
    assert "ran out of memory in step 5" in str(later) and "Largest owners" in str(later)
    assert "Nothing is lost: the state after step 4 was saved" in str(later)


@pytest.mark.slow
def test_a_step_without_memory_is_repeated_by_a_resume_with_the_state_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what the message says first; the bits are those of a run that had the room."""
    on_device = ("offload.state_on={host=0.5,device=0.5}", "train.eval_every=0")
    uninterrupted, path = tmp_path / "uninterrupted", tmp_path / "run"
    assert run(small_job(tmp_path, *on_device), uninterrupted) == 0
    full = torch.OutOfMemoryError
    error = lose(
        monkeypatch, small_job(tmp_path, *on_device), path, 8, "_accumulate", 5, error=full
    )
    assert isinstance(error, DeviceMemoryError)
    assert f"resume from it with --resume {path}." in str(error)
    assert 'Set offload.state_on = "host" or train.micro_batch' in str(error)
    on_host = small_job(tmp_path, "offload.state_on=host", "train.eval_every=0")
    assert run(on_host, path, resume=str(path)) == 0
    steps = {line[0]: line for line in history(path)}
    assert [*steps.values()] == history(uninterrupted)
    assert tensor_hashes(path, 12) == tensor_hashes(uninterrupted, 12)


@pytest.fixture
def with_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has a persistent buffer, which is taken for one on the device."""
    real = Trainer.__init__

    def init(trainer: Trainer, config: Config, context: Any, *rest: Any) -> None:
        context.model.module.register_buffer("seen", torch.zeros(2))
        real(trainer, config, context, *rest)
        context.model.module.seen.fill_(7.0)

    monkeypatch.setattr(Trainer, "__init__", init)
    monkeypatch.setattr(emergency, "on_device", lambda tensor: tensor.numel() == 2)


@pytest.mark.slow
def test_what_is_on_the_device_only_comes_from_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_buffer: None
) -> None:
    job = small_job(tmp_path, "train.eval_every=0")
    early = lose(monkeypatch, job, tmp_path / "early", 3, "_accumulate", 5)
    assert isinstance(early, DeviceFailedError)
    assert "'seen' is on the device only and is in no checkpoint" in str(early)
    later = lose(monkeypatch, job, tmp_path / "later", 6, "_accumulate", 5)
    assert isinstance(later, DeviceLostError)
    (newest, *_) = checkpoint.find(tmp_path / "later" / "checkpoints")
    assert checkpoint.step_of(newest) == 5
    assert run(job, tmp_path / "later", resume="auto") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ("offload.state_on={host=0.5,disk=0.5}",),
            r"the state of \d of \d buckets was on the disk",
        ),
        (("offload.state_on=disk",), r"the state of (\d) of \1 buckets was on the disk"),
        (("offload.state_on={host=0.5,device=0.5}",), "was on the device .offload.state_on."),
        (("offload.sums_on=device",), 'summed on the device .offload.sums_on = "device"'),
        ((), "the state is in parts on 4 ranks"),
    ],
    ids=["part on the disk", "disk", "part on the device", "sums", "ranks"],
)
def test_where_no_emergency_checkpoint_can_be_made_the_message_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], why: str
) -> None:
    scratch = (f"offload.scratch_dir={tmp_path}",) if "disk" in str(options) else ()
    job = small_job(tmp_path, "train.eval_every=0", *options, *scratch)
    with monkeypatch.context() as patch:
        if not options:
            four = SimpleNamespace(is_single=False, size=4)
            real = emergency.Emergency.__init__

            def rank_of_four(self: Any, *arguments: Any) -> None:
                real(self, *arguments)
                self._ranks = four

            patch.setattr(emergency.Emergency, "__init__", rank_of_four)
        error = lose(monkeypatch, job, tmp_path / "run", 5, "_accumulate", 9)
    assert isinstance(error, DeviceFailedError)
    problem, refused = str(error).splitlines()
    assert problem.startswith("the device failed in step 5: ")
    assert re.search(why, refused), refused
    assert refused.startswith("No emergency checkpoint: ")
    last = (
        f". The last checkpoint is step-00000003: resume from it with --resume {tmp_path / 'run'}."
    )
    assert refused.endswith(last)
    assert run(job, tmp_path / "run", resume="auto") == 0


@pytest.mark.slow
def test_a_buffer_that_the_failed_step_has_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_buffer: None
) -> None:
    real = Trainer._accumulate

    def counted(trainer: Trainer, clock: Any) -> None:
        trainer.model.seen.add_(1.0)
        real(trainer, clock)

    monkeypatch.setattr(Trainer, "_accumulate", counted)
    for on_device, message in (
        (True, "has changed since"),
        (False, "has changed the buffer 'seen'"),
    ):
        monkeypatch.setattr(emergency, "on_device", lambda tensor, lost=on_device: lost)
        path = tmp_path / f"{on_device}"
        job = small_job(tmp_path, "train.eval_every=0")
        error = lose(monkeypatch, job, path, 6, "_accumulate", 5)
        assert isinstance(error, DeviceFailedError) and message in str(error)
        assert "The last checkpoint is step-00000003" in str(error)
