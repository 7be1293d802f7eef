"""What becomes of a step whose loss is a spike: reported, skipped, or gone back from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.config.errors import ConfigError
from offloadtrain.events import alerts, schema
from offloadtrain.train import trainer
from offloadtrain.train.saving import TrainingError
from offloadtrain.train.trainer import Trainer
from tests.train.small_job import (
    assert_same_run,
    events_of,
    history,
    run,
    run_in_parts,
    small_job,
    tensor_hashes,
)

STEPS = 16
BATCHES = 2 * 4
"""Samples of a step: microbatches times windows."""
Spoil = Callable[..., None]


def plant(patch: pytest.MonkeyPatch, *steps: int, times: float = 40.0) -> None:
    """Multiply the loss of the batches that belong to these steps (1-based) of a plain run; a spike
    needs a history of six losses."""
    samples = {BATCHES * (step - 1) for step in steps}
    patch.setattr(alerts, "SPIKE_AFTER", 6)
    real_accumulate, real_loss = Trainer._accumulate, trainer.loss_of
    bad = False

    def accumulate(self: Trainer, clock: Any) -> None:
        nonlocal bad
        bad = self._context.batches.state_dict()["sample"] in samples
        real_accumulate(self, clock)
        bad = False

    def loss_of(*arguments: Any) -> Any:
        return real_loss(*arguments) * (times if bad else 1.0)

    patch.setattr(Trainer, "_accumulate", accumulate)
    patch.setattr(trainer, "loss_of", loss_of)


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spoil]:
    yield lambda *steps: plant(monkeypatch, *steps)


def job_of(folder: Path, policy: str, *more: str) -> Any:
    plain = ("train.eval_every=0", "model.dropout=0.0", f"train.steps={STEPS}")
    return small_job(folder, *plain, f"train.on_spike={policy}", *more)


def warnings_of(path: Path, code: str) -> list[str]:
    return [w.message for w in events_of(path, schema.Warning_) if w.code == code]


@pytest.mark.slow
def test_report_makes_the_update_and_alerts(tmp_path: Path, spoil: Spoil) -> None:
    spoil(11)
    assert run(job_of(tmp_path, "report"), tmp_path / "run") == 0
    assert not any(step.skipped for step in events_of(tmp_path / "run", schema.Step))
    raised = [a for a in events_of(tmp_path / "run", schema.Alert) if a.code == "loss-spike"]
    assert raised[0].state == "raised" and raised[0].step == 11


@pytest.mark.slow
@pytest.mark.parametrize("mode", [(), ("offload.update=speculative",)])
def test_skip_leaves_the_batch_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: tuple[str, ...],
) -> None:
    """The bits of a run that never saw the batch; and of one that was stopped behind the spike."""
    skipping, without, parted = (tmp_path / name for name in ("skip", "without", "parted"))
    job = job_of(tmp_path, "skip", *mode)
    with monkeypatch.context() as patch:
        plant(patch, 11)
        assert run(job, skipping) == 0
        run_in_parts(job, parted, 11)
    real = Trainer._accumulate

    def leave_out(self: Trainer, clock: Any) -> None:
        if self._context.batches.state_dict()["sample"] == 10 * BATCHES:
            self._context.batches.next(), self._context.batches.next()
        real(self, clock)

    monkeypatch.setattr(Trainer, "_accumulate", leave_out)
    assert run(job, without) == 0
    assert [s.step for s in events_of(skipping, schema.Step) if s.skipped] == [11]
    assert "step 11 was skipped: loss" in warnings_of(skipping, "step-skipped")[0]
    assert tensor_hashes(skipping, STEPS) == tensor_hashes(without, STEPS)
    assert_same_run(parted, skipping, STEPS)


@pytest.mark.slow
def test_rollback_goes_on_with_other_data_and_resumes_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Spoil
) -> None:
    """Checkpoints at 3, 6, 9 …; the batch of step 11 spikes: back to 9, on with that of step 12."""
    spoil(11)
    job = job_of(tmp_path, "rollback")
    uninterrupted, killed, stopped = (tmp_path / name for name in ("whole", "killed", "stopped"))
    assert run(job, uninterrupted) == 0
    steps = [step.step for step in events_of(uninterrupted, schema.Step)]
    assert steps == [*range(1, 12), *range(10, STEPS + 1)]
    (message,) = warnings_of(uninterrupted, "rolled-back")
    assert "back to step 9; the data goes on at sample 88 of epoch 0" in message
    assert "rollback 1 of 3" in message

    real = Trainer._between_steps

    def between(self: Trainer) -> None:
        if self.progress.step == 11:
            raise RuntimeError("killed")
        real(self)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(Trainer, "_between_steps", between)
        run(job, killed)
    assert run(job, killed, resume="auto") == 0
    run_in_parts(job, stopped, 13)  # behind the rollback: a checkpoint that holds it
    for path in (killed, stopped):
        assert tensor_hashes(path, STEPS) == tensor_hashes(uninterrupted, STEPS)
        assert history(path)[-3:] == history(uninterrupted)[-3:]
    assert len(warnings_of(killed, "rolled-back")) == 2, "it met the same spike again"
    assert len(warnings_of(stopped, "rolled-back")) == 1


@pytest.mark.slow
def test_rollbacks_and_skips_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, *range(11, 60))
    path = tmp_path / "run"
    with pytest.raises(TrainingError, match=r"train.max_rollbacks = 2 rollbacks are used up"):
        run(job_of(tmp_path, "rollback", "train.max_rollbacks=2"), path)
    assert len(warnings_of(path, "rolled-back")) == 2
    with pytest.raises(TrainingError, match="there is no checkpoint to go back to"):
        run(job_of(tmp_path, "rollback", "train.checkpoint_every=100"), tmp_path / "without")
    monkeypatch.setattr(trainer, "MAX_SKIPS", 4)
    with pytest.raises(TrainingError, match=r"4 steps in a row were skipped: loss .* before"):
        run(job_of(tmp_path, "skip"), tmp_path / "skipped")


def test_jobs_that_contradict_themselves(tmp_path: Path) -> None:
    for overrides, message in (
        (["train.on_spike=rollback", "train.checkpoint_every=0"], "set train.checkpoint_every"),
        (
            ["train.on_spike=skip", "offload.skip_nonfinite=false", "offload.clip_norm=0"],
            "Adam runs inside backward",
        ),
        (["train.on_spike=ignore"], "train.on_spike"),
        (["train.spike_score=0"], "train.spike_score = 0.0 must be above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            small_job(tmp_path, *overrides)


@pytest.mark.slow
def test_a_step_whose_checkpoint_is_damaged_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Spoil
) -> None:
    """The newest is damaged on the disk when the run goes back: it is set aside."""
    spoil(11)
    real, path = Trainer._between_steps, tmp_path / "run"

    def between(self: Trainer) -> None:
        file = path / "checkpoints" / "step-00000009" / "rank-000.bin"
        if self.progress.step == 10 and not warnings_of(path, "rolled-back"):
            file.write_bytes(bytes(file.stat().st_size))
        real(self)

    monkeypatch.setattr(Trainer, "_between_steps", between)
    assert run(job_of(tmp_path, "rollback", "train.keep_last=9"), path) == 0
    (message,) = warnings_of(path, "rolled-back")
    assert "back to step 6" in message
    names = {saved.name for saved in (path / "checkpoints").iterdir()}
    assert {"step-00000006", "step-00000009", "step-00000012"} <= names
    assert any(name.startswith("damaged-step-00000009-") for name in names)
    assert not warnings_of(path, "checkpoint-failed")
