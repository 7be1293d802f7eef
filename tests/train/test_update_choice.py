"""A job with `offload.update = "auto"` measures both modes; the bits are those of an exact run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from offloadtrain_tui.reading.history import moment_of

from offloadtrain.config.job import Config
from offloadtrain.events import log_lines, schema
from offloadtrain.plan import automatic
from offloadtrain.train import update_choice
from offloadtrain.train.log import run_memory
from offloadtrain.train.trainer import Trainer
from offloadtrain.train.update_choice import UpdateChoice
from tests.train.small_job import (
    assert_same_run,
    events_of,
    run,
    run_in_parts,
    small_job,
    tensor_hashes,
)

MEASURED = update_choice._SETTLING + 3
"""Steps of each mode; all take the same time here, so that a few have the median of many."""
STEPS = 2 * MEASURED + 5
DECIDES = STEPS - 4
"""The last step that is measured: the first of the run does not guess."""


def job_of(folder: Path, *overrides: str) -> Config:
    few = (f"train.steps={STEPS}", "train.eval_every=0", "train.checkpoint_every=0")
    return small_job(folder, *few, "offload.clip_norm=1e9", *overrides)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Plan a gain for speculative updates; return a function that sets the step times of the
    modes, speculative and exact."""
    monkeypatch.setattr(automatic, "GAIN", -1.0)
    monkeypatch.setattr(update_choice, "STEPS", MEASURED - update_choice._SETTLING)
    monkeypatch.setattr(run_memory, "_EVERY_S", 0.0)  # the log has the memory of every step
    after_step = UpdateChoice.after_step

    def arm(speculative_ms: float, exact_ms: float) -> None:
        times = {"speculative": speculative_ms, "exact": exact_ms}

        def timed(choice: UpdateChoice, step_ms: float) -> str:
            return after_step(choice, times[choice._mode])

        monkeypatch.setattr(UpdateChoice, "after_step", timed)

    return arm


def guesses(path: Path) -> list[bool]:
    """For each step, whether updates ran inside its backward."""
    return [event.early_buckets > 0 for event in events_of(path, schema.Step)]


def second_copy_bytes(path: Path) -> int:
    """The bytes of the second copies of the state at the end of the run, as the monitor has it."""
    rows = events_of(path, schema.Memory)[-1].rows
    return sum(row.num_bytes for row in rows if row.owner == "other copy of the state")


def kill_after(last: int) -> Callable[[Trainer], None]:
    """Return what stands for `Trainer._between_steps`, and ends the run without a checkpoint."""
    real = Trainer._between_steps

    def between_steps(trainer: Trainer) -> None:
        if trainer.progress.step == last:
            raise RuntimeError("killed")
        real(trainer)

    return between_steps


@pytest.mark.parametrize(
    ("speculative_ms", "exact_ms", "decided"),
    [
        (20.0, 10.0, "exact"),
        pytest.param(10.0, 20.0, "speculative", marks=pytest.mark.slow),
        pytest.param(10.2, 10.0, "speculative", marks=pytest.mark.slow),
    ],
)
def test_the_faster_mode_stays_also_after_a_resume(
    tmp_path: Path,
    clock: Callable[[float, float], None],
    capsys: pytest.CaptureFixture[str],
    speculative_ms: float,
    exact_ms: float,
    decided: str,
) -> None:
    """A difference of 2 % is none. The run that is stopped within the steps of the first mode
    measures anew, and the one that is stopped after the decision does not."""
    clock(speculative_ms, exact_ms)
    auto, exact, parted = (tmp_path / name for name in ("auto", "exact", "parted"))
    assert run(job_of(tmp_path, "offload.update=exact"), exact) == 0
    assert run(job_of(tmp_path, "offload.update=auto"), auto) == 0
    console = capsys.readouterr().err
    assert "; update = auto: speculative as planned\n" in console
    assert_same_run(auto, exact, STEPS)
    (event,) = events_of(auto, schema.Decided)
    assert event.step == DECIDES and f"auto: {decided} from here on" in event.message
    assert console.count(event.message) == 1
    moments = [moment_of(r, b"") for r in log_lines.read(auto / "events" / "rank000.jsonl")]
    assert event.message in [moment.text for moment in moments if moment], "the monitor lists it"
    first = [False] + [True] * MEASURED + [False] * MEASURED
    assert guesses(auto) == first + [decided == "speculative"] * 4
    assert bool(second_copy_bytes(auto)) == (decided == "speculative")
    assert 'update = "auto"' in (auto / "resolved.toml").read_text()

    run_in_parts(job_of(tmp_path, "offload.update=auto"), parted, 2, DECIDES)
    assert_same_run(parted, exact, STEPS)
    first_event, event = events_of(parted, schema.Decided)
    assert first_event.step == event.step == DECIDES + 2
    assert event.message == f"offload.update = auto: {decided}, as measured in an earlier start"
    assert bool(second_copy_bytes(parted)) == (decided == "speculative")
    assert guesses(parted) == [False, True, *first, False, decided == "speculative"]


@pytest.mark.slow
def test_a_run_that_is_killed_before_its_decision_is_saved_measures_again(
    tmp_path: Path, clock: Callable[[float, float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(20.0, 10.0)
    exact, killed = tmp_path / "exact", tmp_path / "killed"
    saves = f"train.checkpoint_every={DECIDES - 2}"
    assert run(job_of(tmp_path, "offload.update=exact", saves), exact) == 0
    job = job_of(tmp_path, "offload.update=auto", saves)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_between_steps", kill_after(DECIDES + 1))
        with pytest.raises(RuntimeError, match="killed"):
            run(job, killed)
    assert len(events_of(killed, schema.Decided)) == 1 and not guesses(killed)[-1]
    assert run(job, killed, resume=str(killed)) == 0
    assert tensor_hashes(killed, STEPS) == tensor_hashes(exact, STEPS)
    # The first step of a start does not guess.
    assert guesses(killed)[-STEPS + DECIDES - 2 :] == [False, *[True] * (STEPS - DECIDES + 1)]


def test_steps_without_a_guess_are_not_measured(
    tmp_path: Path, clock: Callable[[float, float], None]
) -> None:
    """All are clipped, so that the mode stops guessing, and nothing is decided."""
    clock(10.0, 20.0)
    auto, exact = tmp_path / "auto", tmp_path / "exact"
    for update, path in (("exact", exact), ("auto", auto)):
        clipped = job_of(tmp_path, f"offload.update={update}", "offload.clip_norm=1e-6")
        assert run(clipped, path) == 0
    assert_same_run(auto, exact, STEPS)
    assert not events_of(auto, schema.Decided) and not any(guesses(auto)[-3:])


def test_equal_plans_are_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without clipping nothing is guessed."""
    never = ("offload.clip_norm=0", "offload.skip_nonfinite=false", "train.steps=2")
    assert run(job_of(tmp_path, "offload.update=auto", *never), tmp_path / "run") == 0
    assert "; update = auto: exact as planned\n" in capsys.readouterr().err
