"""Copies of a run's scalars for other tools: CSV, JSON lines, TensorBoard, Weights & Biases.

`Loggers` takes the events of the run log and gives each logger a thread. A logger's package is
imported on that thread when the first row arrives.
"""

from __future__ import annotations

import csv
import json
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias

from offloadtrain.boundary.safe_open import open_descriptor, read_json
from offloadtrain.boundary.safe_write import own_folder, replace_file
from offloadtrain.config.job import Config, as_tables
from offloadtrain.events import log_lines, schema

Scalar: TypeAlias = int | float | bool
Source: TypeAlias = schema.Step | schema.Eval | schema.Memory

STEP_SCALARS = (
    *("loss", "lr", "grad_norm", "clip_coef", "loss_scale", "skipped", "tokens"),
    *("tokens_per_s", "mfu", "step_ms", "exposed_ms"),
)
"""Fields of `schema.Step` that loggers receive."""


@dataclass(frozen=True, slots=True)
class Row:
    """Scalars of one event.

    Attributes:
        step: step of the event; a skipped step and the step after it have the same number.
        time_s: Unix time of the event.
        values: name → value; unknown values are left out.
    """

    step: int
    time_s: float
    values: dict[str, Scalar]


class Logger(Protocol):
    """A destination of rows. It is created, used and closed on one thread, which may block."""

    def log(self, row: Row) -> None:
        """Write a row. Rows come in the order of the run. An exception ends the logger, not the
        run."""

    def close(self, *, failed: bool) -> None:
        """Write buffered rows."""


def row_of(event: Source, time_s: float) -> Row:
    values: dict[str, Scalar]
    if isinstance(event, schema.Eval):
        values = {"val_loss": event.val_loss}
    elif isinstance(event, schema.Memory):
        values = {f"peak_bytes/{row.tier}/{row.owner}": row.peak_bytes for row in event.rows}
    else:
        known = ((name, getattr(event, name)) for name in STEP_SCALARS)
        values = {name: value for name, value in known if value is not None}
    return Row(event.step, time_s, values)


COLUMNS = ("step", "time_s", *STEP_SCALARS, "val_loss")


class _RowFile(ABC):
    """A file with one line per row, written at once: a killed run loses no row."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        """Append to the file after its rows up to `resumed_step`; if negative, start a new file."""
        if resumed_step >= 0 and path.exists():
            valid_bytes = 0
            with open(open_descriptor(path, flags=os.O_RDWR), "rb+") as file:
                for line in file:
                    # Cut from the first row after `resumed_step` on, or from a torn last row.
                    if not line.endswith(b"\n") or self.step_of(line) > resumed_step:
                        break
                    valid_bytes += len(line)
                file.truncate(valid_bytes)
        fd = open_descriptor(path, flags=os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if resumed_step < 0:
            os.truncate(fd, 0)
        self._file = open(fd, "a", buffering=1, encoding="utf-8", newline="")

    @abstractmethod
    def step_of(self, line: bytes) -> int:
        """Return the step of a row."""

    def close(self, *, failed: bool) -> None:
        self._file.close()


class JsonLines(_RowFile):
    """One JSON object per row. JSON has no nan and inf, so they are strings, as in the event
    log."""

    def step_of(self, line: bytes) -> int:
        return int(json.loads(line)["step"])

    def log(self, row: Row) -> None:
        values = {"step": row.step, "time_s": row.time_s, **row.values}
        self._file.write(log_lines.encode(values).decode() + "\n")


class Csv(_RowFile):
    """One row per step, and one per evaluation with `val_loss`; unknown values are empty. Memory by
    owner is left out, because its columns are not known at the first row."""

    def step_of(self, line: bytes) -> int:
        """Return the step of a row; 0 for the header, which every resume keeps.

        Raises:
            ValueError: the header has other columns.
        """
        if line.startswith(b"step,"):
            if line.decode().rstrip("\n") != ",".join(COLUMNS):
                raise ValueError("metrics.csv has other columns: move it away")
            return 0
        return int(line.split(b",")[0])

    def log(self, row: Row) -> None:
        if not row.values.keys() & set(COLUMNS):
            return
        rows = csv.DictWriter(self._file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        if self._file.tell() == 0:
            rows.writeheader()
        rows.writerow({"step": row.step, "time_s": row.time_s, **row.values})


_FLUSH_S = 10


class TensorBoard:
    """Event files, one per start; readers discard steps that a resumed run repeats."""

    def __init__(self, folder: Path, config: Config, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        again = resumed_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=again, flush_secs=_FLUSH_S)
        job = dict(_flat(as_tables(config)))
        for summary in hparams(job, {"loss": 0.0, "val_loss": 0.0}):
            self._writer._get_file_writer().add_summary(summary, again)

    def log(self, row: Row) -> None:
        for name, value in row.values.items():
            self._writer.add_scalar(name, value, row.step, row.time_s)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


def _flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value); a value that is not a number, bool or string becomes a string."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            plain = isinstance(value, bool | int | float | str)
            yield f"{prefix}{key}", value if plain else str(value)


_MOST_BYTES = 1 << 16
_INIT_WITHIN_S, FINISH_WITHIN_S = 30, 10


class Wandb:
    """One W&B run for all starts of a run folder.

    W&B does not allow a run to remove rows. `wandb/run.json` stores its id and its last step, so
    that a start resumed from an earlier checkpoint does not send steps again.
    """

    def __init__(self, run: Path, config: Config, resumed_step: int) -> None:
        """
        Raises:
            ValueError: no key is known in online mode; W&B would ask for it on the terminal.
        """
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ValueError("no key: run `wandb login`, or set WANDB_MODE=offline")
        self._state = run / "wandb" / "run.json"
        own_folder(self._state.parent)
        known = resumed_step >= 0 and self._state.exists()
        state = read_json(self._state, max_bytes=_MOST_BYTES) if known else {}
        self._id: str = state.get("id") or secrets.token_hex(8)
        self._sent_step = self._last_step = int(state.get("last_step", -1))
        self._run: Any = wandb.init(
            project=config.log.project or None,
            name=run.name,
            id=self._id,
            resume="allow" if known else None,
            dir=run,
            config=as_tables(config),
            allow_val_change=True,
            settings=wandb.Settings(
                console="off", init_timeout=_INIT_WITHIN_S, finish_timeout=FINISH_WITHIN_S
            ),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, row: Row) -> None:
        if row.step <= self._sent_step:
            return
        self._run.log({"step": row.step, **row.values})
        if row.step > self._last_step and not row.values.get("skipped"):
            self._last_step = row.step
            replace_file(self._state, json.dumps({"id": self._id, "last_step": self._last_step}))

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


CAPACITY = 4096
END_WITHIN_S = 2.0 * FINISH_WITHIN_S
FAIL_WITHIN_S = 5.0

Report = Callable[[str], None]


class Loggers:
    """Passes events to the loggers of a job.

    [Note: A logger that fails] Training does not depend on a logger: its network, disk or package
    may fail at any time. The failure is reported once, as a warning in the event log and on
    the console, and that logger gets no more rows in this start; the run and the other loggers
    continue. The event log has every row.
    """

    def __init__(self, report: Report) -> None:
        """`report` is called once per failed logger with a sentence, on that logger's thread."""
        self._report = report
        self._feeds: list[_Feed] = []
        self._resumed_step = -1

    def open(self, run: Path, config: Config, start_step: int) -> None:
        """Start the threads; files are created with the first row.

        Args:
            run: the run folder; rows that its loggers wrote after `start_step` are dropped.
        """
        self._resumed_step = resumed_step = start_step or -1  # step 0 is evaluated again
        makers: dict[str, Callable[[], Logger]] = {
            "csv": partial(Csv, run / "metrics.csv", resumed_step),
            "jsonl": partial(JsonLines, run / "metrics.jsonl", resumed_step),
            "tensorboard": partial(TensorBoard, run / "tensorboard", config, resumed_step),
            "wandb": partial(Wandb, run, config, resumed_step),
        }
        self._feeds = [_Feed(to, makers[to], self._report) for to in dict.fromkeys(config.log.to)]

    def emit(self, event: Source) -> None:
        """Queue the event for every logger; never blocks. Events up to the resumed step are
        dropped: they were written before."""
        if event.step > self._resumed_step:
            now_s = time.time()
            for feed in self._feeds:
                feed.put(event, now_s)

    def close(self, *, failed: bool) -> None:
        """Wait until all rows are written, up to a time limit; a second call does nothing."""
        feeds, self._feeds = self._feeds, []
        for feed in feeds:
            feed.end(failed=failed)
        give_up_s = time.monotonic() + (FAIL_WITHIN_S if failed else END_WITHIN_S)
        for feed in feeds:
            feed.wait(give_up_s)


class _Feed:
    """Queue and thread of one logger. The training thread pays only for a queue put, and a logger
    that waits for its network delays no other logger."""

    def __init__(self, name: str, make: Callable[[], Logger], report: Report) -> None:
        self._name, self._make, self._report = name, make, report
        self._queue: SimpleQueue[tuple[Source, float] | None] = SimpleQueue()
        self._dropped = 0
        self._failed_run = False
        self._thread = threading.Thread(target=self._run, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def put(self, event: Source, time_s: float) -> None:
        if self._queue.qsize() < CAPACITY:
            self._queue.put((event, time_s))
        elif self._thread.is_alive():
            self._dropped += 1

    def end(self, *, failed: bool) -> None:
        self._failed_run = failed  # read by the thread after the None
        self._queue.put(None)

    def wait(self, give_up_s: float) -> None:
        self._thread.join(max(give_up_s - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._report(f"log.to {self._name!r} has not ended in time: its last rows may be lost")
        elif self._dropped:
            self._report(
                f"log.to {self._name!r} was slower than the run: {self._dropped} rows lost"
            )

    def _run(self) -> None:
        """See [Note: A logger that fails]."""
        logger: Logger | None = None
        try:
            while (item := self._queue.get()) is not None:
                logger = logger or self._make()
                logger.log(row_of(*item))
            if logger is not None:
                logger.close(failed=self._failed_run)
        except Exception as error:
            self._report(
                f"log.to {self._name!r} failed, and gets no more rows in this start; training "
                f"continues: {type(error).__name__}: {error}"
            )
            if logger is not None:
                with suppress(Exception):  # frees its resources; the failure was reported above
                    logger.close(failed=True)
