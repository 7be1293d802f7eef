"""metrics.csv and metrics.jsonl, with the standard library. Every row is written at once."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path

from offloadtrain.boundary.safe_open import open_descriptor
from offloadtrain.events import codec
from offloadtrain.train.loggers.row import STEP_SCALARS, Row

COLUMNS = ("step", "time_s", *STEP_SCALARS, "val_loss")


class JsonLines:
    """One object per row. JSON has no nan and inf: they are strings, as in the event log."""

    def __init__(self, path: Path, kept_step: int) -> None:
        """Append to the file after its rows up to `kept_step`; below 0: begin it anew."""
        self._file = _opened(path, kept_step, lambda line: int(json.loads(line)["step"]))

    def log(self, row: Row) -> None:
        values = {"step": row.step, "time_s": row.time_s, **row.values}
        self._file.write(codec.encode(values).decode() + "\n")

    def close(self, *, failed: bool) -> None:
        self._file.close()


class Csv:
    """A row per step, and one per evaluation with `val_loss`; unknown values are empty. Memory by
    owner is left out: its columns are not known at the first row."""

    def __init__(self, path: Path, kept_step: int) -> None:
        """Append to the file after its rows up to `kept_step`; below 0: begin it anew."""
        self._file = _opened(path, kept_step, _step_of_csv)
        self._rows = csv.DictWriter(self._file, COLUMNS, extrasaction="ignore", lineterminator="\n")

    def log(self, row: Row) -> None:
        if not row.values.keys() & set(COLUMNS):
            return
        if self._file.tell() == 0:
            self._rows.writeheader()
        self._rows.writerow({"step": row.step, "time_s": row.time_s, **row.values})

    def close(self, *, failed: bool) -> None:
        self._file.close()


def _step_of_csv(line: bytes) -> int:
    """Return the step of a row; the header belongs to every step.

    Raises:
        ValueError: it has other columns than ours.
    """
    if line.startswith(b"step,"):
        if line.decode().rstrip("\n") != ",".join(COLUMNS):
            raise ValueError("metrics.csv has other columns: move it away")
        return 0
    return int(line.split(b",")[0])


def _opened(path: Path, kept_step: int, step_of: Callable[[bytes], int]) -> TextIOWrapper:
    if kept_step >= 0 and path.exists():
        _cut(path, kept_step, step_of)
    # line buffering: a killed run has lost no row
    fd = open_descriptor(path, flags=os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if kept_step < 0:
        os.truncate(fd, 0)
    return open(fd, "a", buffering=1, encoding="utf-8", newline="")


def _cut(path: Path, kept_step: int, step_of: Callable[[bytes], int]) -> None:
    """Cut the file before its first row after `kept_step`, or before a torn last row."""
    kept_bytes = 0
    with open(open_descriptor(path, flags=os.O_RDWR), "rb+") as file:
        for line in file:
            if not line.endswith(b"\n") or step_of(line) > kept_step:
                break
            kept_bytes += len(line)
        file.truncate(kept_bytes)
