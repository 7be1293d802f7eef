"""Runs, checkpoints, jobs, logs and saved programs of commit 84537982 load and go on today.

`runs.py` says what each run is, `record.py` how they were made. The values of saved tensors are
compared as hashes on any machine. Losses and what else is computed are the same bits on the class
of machine that recorded them; elsewhere rounding differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.events import log_lines
from tests import levels
from tests.golden import program
from tests.golden.digests import of_exported_folder, of_torch_file
from tests.golden.golden import machine_class
from tests.golden.record import PROMPT, resumed_steps
from tests.golden.runs import ARCHIVES, RUNS, expected, unpack

ROOT = Path(__file__).resolve().parents[2]
FACTS = ("step", "steps", "loss", "lr", "grad_norm", "loss_scale", "tokens", "val_loss", "memory")
"""Of `offloadtrain status --json`: what does not depend on when and where it is asked."""
TOLERANCE = 0.03
"""Of losses on another class of machine, as in `test_golden.py`."""
SINGLE = [name for name, run in RUNS.items() if run.ranks == 1]
OF_RANKS = [name for name, run in RUNS.items() if run.ranks > 1]

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder the working folder: paths in the runs are relative."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_same(values: Any, recorded: Any, made_on: str) -> None:
    """Compare computed values: exact where the same class of machine recorded them."""
    if made_on == machine_class():
        assert values == recorded
    elif isinstance(recorded, dict):
        assert values.keys() == recorded.keys()
        for key, value in recorded.items():
            assert_same(values[key], value, made_on)
    elif isinstance(recorded, list):
        assert len(values) == len(recorded)
        for value, other in zip(values, recorded, strict=True):
            assert_same(value, other, made_on)
    elif isinstance(recorded, float):
        assert values == pytest.approx(recorded, rel=TOLERANCE, abs=TOLERANCE)
    elif not isinstance(recorded, str):
        assert values == recorded


# ---- runs


@pytest.mark.cover(0, levels.ALL)
@pytest.mark.parametrize("name", SINGLE)
def test_a_run_resumes(name: str, inside: Path) -> None:
    folder = unpack(name, inside)
    recorded = expected(folder)
    assert main(["train", f"{name}/run/job.toml", "--resume", f"{name}/run"]) == 0
    log = folder / "run" / "events" / "rank000.jsonl"
    assert_same(resumed_steps(log), recorded["resumed"], recorded["made_on"])
    # Keys that later versions have added are at their defaults: nothing has changed.
    assert '"job-changed"' not in log.read_text()


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in OF_RANKS])
def test_a_run_of_ranks_resumes(name: str, inside: Path) -> None:
    folder = unpack(name, inside)
    recorded = expected(folder)
    arguments = ["train", f"{name}/run/job.toml", "--resume", f"{name}/run"]
    ended = subprocess.run(
        [sys.executable, "-m", "offloadtrain", *arguments, "--nproc", str(RUNS[name].ranks)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tui'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    steps = resumed_steps(folder / "run" / "events" / "rank000.jsonl")
    assert_same(steps, recorded["resumed"], recorded["made_on"])


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_is_read(name: str, inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By every command that reads checkpoints: the values of all tensors, and what they compute."""
    unpack(name, inside)
    recorded, run = expected(inside / name), f"{name}/run"

    def output(command: str, *arguments: str) -> str:
        capsys.readouterr()
        assert main([command, run, *arguments]) == 0
        return capsys.readouterr().out

    listed = output("checkpoints", "--verify", "--json").splitlines()
    assert listed and all(json.loads(line)["state"] == "verified" for line in listed)
    if RUNS[name].evaluates:
        evaluated = json.loads(output("eval", "--data", "tokens/val.bin", "--json"))
        assert_same(evaluated, recorded["eval"], recorded["made_on"])
    if RUNS[name].exports:
        output("export", "exported", "--dtype", "fp32")
        assert of_exported_folder(inside / "exported") == recorded["export"]
    if "generate" in recorded:
        text = output("generate", "--prompt", PROMPT, "--max-tokens", "8", "--temperature", "0")
        assert_same(text, recorded["generate"], recorded["made_on"])
    if RUNS[name].converts:
        output("convert", "state.pt", "--to", "torch")
        assert of_torch_file(inside / "state.pt") == recorded["convert"]


@pytest.mark.cover(0, levels.ALL)
@pytest.mark.parametrize("name", RUNS)
def test_a_log_is_read(name: str, inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack(name, inside)
    for log in (folder / "run" / "events").glob("*.jsonl"):
        assert_reads_all_of(log)
    recorded = expected(folder)["status"]
    main(["status", f"{name}/run", "--json"])
    status = json.loads(capsys.readouterr().out)
    assert {key: status[key] for key in FACTS} == {key: recorded[key] for key in FACTS}
    for command in (
        ["runs", name],
        ["events", f"{name}/run"],
        ["trace", f"{name}/run"],
        ["tui", f"{name}/run", "--once", "--replay"],
    ):
        assert main(command) == 0, command
        assert capsys.readouterr().out


# ---- programs, jobs and records


def test_programs_load_what_they_saved(inside: Path) -> None:
    unpack("programs", inside)
    recorded = json.loads((inside / "programs" / "losses.json").read_text())
    losses = {case: program.resume(inside / "programs", case) for case in program.CASES}
    assert_same(losses, recorded["losses"], recorded["made_on"])


def test_jobs_mean_what_they_meant(inside: Path) -> None:
    """A job file equals its resolved form, in which that commit wrote the value of every key."""
    unpack("jobs", inside)
    names = [path.stem for path in (inside / "jobs").glob("*.toml") if "." not in path.stem]
    assert len(names) > len(RUNS)
    for name in names:
        job = jobs.load(inside / "jobs" / f"{name}.toml")
        assert job == jobs.load(inside / "jobs" / f"{name}.resolved.toml"), name


def test_records_of_every_kind_are_read() -> None:
    log = ARCHIVES / "every_kind.jsonl"
    assert_reads_all_of(log)
    assert len(log.read_text().splitlines()) == 16


def assert_reads_all_of(log: Path) -> None:
    """Compare every line with the record that is read from it: no key may be lost or changed."""
    for text in log.read_text().splitlines():
        record = log_lines.from_line(text)
        assert record is not None, text
        again = log_lines.to_line(record.event, record.rank, record.time_s, record.monotonic_ns)
        written, read = json.loads(text), json.loads(again)
        assert {key: read.get(key) for key in written} == written
