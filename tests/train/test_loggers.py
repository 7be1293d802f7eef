"""Loggers copy the event log, once per step over all starts, and cost the run nothing."""

from __future__ import annotations

import csv
import json
import shutil
import struct
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.config import sections
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.sections import LogConfig, check_packages
from offloadtrain.events import log_lines, schema
from offloadtrain.train.log import loggers
from offloadtrain.train.log.loggers import STEP_SCALARS, Csv, JsonLines, Loggers, Row
from tests.train.small_job import events_of, run, small_job

Rows = list[dict[str, Any]]

INSTALLED = [name for name in ("tensorboard", "wandb") if find_spec(name)]
ALL = json.dumps(["csv", "jsonl", *INSTALLED])
JOB = ("optim.schedule=constant", "train.eval_every=2", "train.checkpoint_every=2")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of 5 steps that lost its last checkpoint, and was resumed after step 4 up to 6."""
    folder = tmp_path_factory.mktemp("loggers")
    path = folder / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.delenv("WANDB_PROJECT", raising=False)
        for steps, resume in ((5, "never"), (6, str(path))):
            job = small_job(folder, f"log.to={ALL}", f"train.steps={steps}", *JOB)
            assert run(job, path, resume=resume) == 0
            shutil.rmtree(path / "checkpoints" / "step-00000005", ignore_errors=True)
        yield path


def rows_of_log(path: Path) -> tuple[Rows, Rows]:
    """Steps and evaluations of the event log without what the resumed start did again."""
    steps: Rows = []
    evals: Rows = []
    for record in log_lines.read(path / "events" / "rank000.jsonl"):
        event = record.event
        if isinstance(event, schema.RunStarted) and event.start_step:
            steps = [row for row in steps if row["step"] <= event.start_step]
            evals = [row for row in evals if row["step"] <= event.start_step]
        elif isinstance(event, schema.Step):
            values = {name: getattr(event, name) for name in ("step", *STEP_SCALARS)}
            steps.append({name: value for name, value in values.items() if value is not None})
        elif isinstance(event, schema.Eval):
            evals.append({"step": event.step, "val_loss": event.val_loss})
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in evals] == [0, 2, 4, 6]
    return steps, evals


def test_json_lines_are_the_event_log(resumed: Path) -> None:
    steps, evals = rows_of_log(resumed)
    rows = [json.loads(line) for line in (resumed / "metrics.jsonl").read_text().splitlines()]
    assert all(row.pop("time_s") > 1e9 for row in rows)
    assert [row for row in rows if "loss" in row] == steps
    assert [row for row in rows if "val_loss" in row] == evals
    (memory, *_) = events_of(resumed, schema.Memory)
    memory_row = next(row for row in rows if "peak_bytes/host/exp_avg" in row)
    assert memory_row == {"step": memory.step} | {
        f"peak_bytes/{row.tier}/{row.owner}": row.peak_bytes for row in memory.rows
    }


def test_csv_is_the_event_log(resumed: Path) -> None:
    with open(resumed / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    filled = [{key: value for key, value in row.items() if value} for row in rows]
    assert all(float(row.pop("time_s")) > 1e9 for row in filled)
    steps, evals = rows_of_log(resumed)
    expected = [{key: str(value) for key, value in row.items()} for row in (*steps, *evals)]
    assert sorted(filled, key=repr) == sorted(expected, key=repr)
    assert [int(row["step"]) for row in rows] == sorted(int(row["step"]) for row in rows)


def test_tensorboard_has_the_event_log(resumed: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged = EventAccumulator(str(resumed / "tensorboard")).Reload()
    steps, evals = rows_of_log(resumed)
    for rows, names in ((steps, STEP_SCALARS), (evals, ("val_loss",))):
        for name in names:
            expected = [(row["step"], as_float32(row[name])) for row in rows if name in row]
            points = logged.Scalars(name) if expected else []
            assert [(point.step, point.value) for point in points] == expected, name
    assert logged.Scalars("peak_bytes/host/exp_avg")
    assert "_hparams_/session_start_info" in logged.summary_metadata


def as_float32(value: float) -> float:
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)


def test_wandb_offline_has_the_event_log(resumed: Path) -> None:
    pytest.importorskip("wandb")
    files = sorted((resumed / "wandb").glob("offline-run-*/*.wandb"))
    facts = json.loads((resumed / "wandb" / "run.json").read_text())
    assert [file.stem for file in files] == [f"run-{facts['id']}"] * 2
    assert facts["last_step"] == 6
    rows = [row for file in files for row in wandb_rows(file)]
    steps, evals = rows_of_log(resumed)
    before = [e for e in events_of(resumed, schema.Eval) if e.step == 5]
    assert len(before) == 1, "evaluated at the end of the first start, and sent"
    evals.append({"step": 5, "val_loss": before[0].val_loss})
    first = next(e for e in events_of(resumed, schema.Step) if e.step == 5)
    steps[4] = {name: getattr(first, name) for name in steps[4]}  # W&B takes no row back
    assert [row for row in rows if "loss" in row] == steps
    by_step = sorted((row for row in rows if "val_loss" in row), key=lambda row: row["step"])
    assert by_step == sorted(evals, key=lambda row: row["step"])


def wandb_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the history of an offline run: protobuf records in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    position, record_bytes = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        record_bytes += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record = wandb_internal_pb2.Record.FromString(record_bytes)
            record_bytes = b""
            items = {"".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            if items:
                row = {key: json.loads(text) for key, text in items.items()}
                yield {key: value for key, value in row.items() if not key.startswith("_")}


def test_a_logger_that_fails_is_reported_once_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.csv").symlink_to("/dev/full")  # through which nothing is written
    job = small_job(tmp_path, 'log.to=["csv", "jsonl"]', "train.steps=2", *JOB)
    assert run(job, path) == 0
    (warning,) = [e for e in events_of(path, schema.Warning_) if e.code == "logger-failed"]
    assert "'csv' failed" in warning.message and "symbolic link" in warning.message
    (ended,) = events_of(path, schema.RunEnded)
    assert ended.status == "done"
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2], "the other logger goes on"


class Stuck:
    """A logger that waits for its network until `release` is set."""

    def __init__(self) -> None:
        self.began, self.release = threading.Event(), threading.Event()
        self.rows: list[int] = []

    def log(self, row: Row) -> None:
        self.began.set()
        self.release.wait()
        self.rows.append(row.step)

    def close(self, *, failed: bool) -> None:
        self.rows.append(-int(failed))


@pytest.mark.parametrize("is_released", [False, True])
def test_a_stuck_logger_delays_neither_the_run_nor_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_released: bool
) -> None:
    """Lost rows are counted."""
    stuck, warnings = Stuck(), list[str]()
    monkeypatch.setattr(loggers, "JsonLines", lambda *_: stuck)
    monkeypatch.setattr(loggers, "CAPACITY", 3)
    if not is_released:
        monkeypatch.setattr(loggers, "FAIL_WITHIN_S", 0.01)
    feeds = Loggers(warnings.append)
    feeds.open(tmp_path, small_job(tmp_path, 'log.to=["jsonl"]'), 0)
    feeds.emit(schema.Eval(step=0, val_loss=1.0))
    assert stuck.began.wait(60)
    for step in range(1, 6):
        feeds.emit(schema.Eval(step=step, val_loss=1.0))
    (thread,) = [t for t in threading.enumerate() if t.name == "logger-jsonl"]
    if is_released:
        stuck.release.set()
    feeds.close(failed=not is_released)
    slower = "log.to 'jsonl' was slower than the run: 2 rows lost"
    late = "log.to 'jsonl' has not ended in time: its last rows may be lost"
    assert warnings == [slower if is_released else late]
    stuck.release.set()
    thread.join()
    assert stuck.rows == [0, 1, 2, 3, is_released - 1], "rows 4 and 5 met a full queue"


@pytest.mark.parametrize("kind", [Csv, JsonLines])
def test_a_resumed_file_keeps_the_rows_up_to_its_step(tmp_path: Path, kind: type[Any]) -> None:
    path = tmp_path / "metrics"

    def written(last_step: int, *steps: int) -> bytes:
        file = kind(path, last_step)
        for step in steps:
            file.log(Row(step, 1.5, {"loss": float("nan"), "skipped": step == 2}))
        file.close(failed=False)
        return path.read_bytes()

    through_2 = written(-1, 1, 2, 2)  # the first 2 was skipped: a step that is tried again
    through_4 = written(2, 3, 4)
    assert through_4.startswith(through_2)
    path.write_bytes(through_4 + b"5,1.5,2.0" if kind is Csv else through_4 + b'{"step":5,"lo')
    assert written(4) == through_4, "a row torn by a kill is cut"
    assert written(2, 3, 4) == through_4
    assert written(-1, 1, 2, 2) == through_2, "a run that starts over"


def test_a_missing_package_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "job.toml"
    path.write_text(jobs.dump(small_job(tmp_path)))
    assert main(["train", str(path), "--set", 'log.to=["wandb", "csv", "tensorboard"]']) != 0
    assert "pip install 'offloadtrain[tensorboard,wandb]'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    # W&B makes a folder `wandb` in the working directory, which is on Python's path.
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sections, "PACKAGES", ("only_a_folder",))
    with pytest.raises(ConfigError, match="is not installed"):
        check_packages(LogConfig(to=("only_a_folder",)))  # type: ignore[arg-type]
