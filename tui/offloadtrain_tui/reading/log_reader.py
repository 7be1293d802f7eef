"""Snapshots of run folders, read by a single thread, and the list of runs in a folder."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from offloadtrain.boundary.safe_open import open_regular
from offloadtrain.config import units
from offloadtrain.events import oom_kills
from offloadtrain.events.set_up_file import SetUpNow
from offloadtrain_tui.clock import Clock
from offloadtrain_tui.reading import runs
from offloadtrain_tui.reading.history import History, fold
from offloadtrain_tui.reading.runs import RunPath
from offloadtrain_tui.reading.tail import Tail
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.text import clean, short

POLL_S = 0.17
NEWS_S, NEWS_OVER_SSH_S = 0.33, 1.0
"""Least interval between news, in seconds: a dozen charts take 20 ms to draw and 30 KB to send."""

_LINES_AT_ONCE = 5000
_LOOK_FOR_RANKS_S = 2.0
_SKEW_S = 2.0
"""Seconds in the future from which a record must have been written with another clock."""
_HEAD_BYTES, _TAIL_BYTES = 1 << 16, 1 << 18
_LONG_BYTES = 4 << 20
"""Size from which a log's last megabyte is shown while the rest is read."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment, from which every widget is drawn.

    Attributes:
        name: name of its folder or file.
        views: views by rank; the lowest rank with a log is first.
        state: one of `runs.STATES`.
        is_complete: True if the logs have been read to their end.
        out_of_memory: the run was killed, probably by the kernel for memory.
        refused: reasons why logs are not read, such as that they are not regular files.
        lives_here: its process is alive on this host.
        set_up: progress of a set-up that has not ended; None after set-up.
        ending: how the run has ended; None if it is alive or its end is unknown.
    """

    name: str
    folder: Path | None
    views: tuple[View, ...]
    state: str
    is_complete: bool = True
    refused: tuple[str, ...] = ()
    out_of_memory: bool = False
    lives_here: bool = False
    set_up: SetUpNow | None = None
    ending: runs.Ending | None = None

    @property
    def first(self) -> View:
        return self.views[0]

    @property
    def has_records(self) -> bool:
        return any(view.history.last_time_s for view in self.views)

    @property
    def is_run(self) -> bool:
        """True if there is a record of the run, or its process is alive or has begun to set up."""
        return self.has_records or self.set_up is not None or self.state in runs.ALIVE

    @property
    def problem(self) -> str:
        """Message about a problem with the logs; "" if there is none."""
        if self.refused:
            return f"not read: {self.refused[0]}"
        lines = sum(view.history.unreadable for view in self.views)
        unreadable = {0: "", 1: "1 line is no record"}.get(lines, f"{lines} lines are no records")
        if self.has_records:
            return "; ".join(filter(None, (self._missing_ranks, unreadable)))
        # An empty state means that there is no run.
        if not self.is_complete or not self.state or self.state in runs.ALIVE or self.set_up:
            return ""
        return f"there is no record of a run in it{f': {unreadable}' if unreadable else ''}"

    @property
    def _missing_ranks(self) -> str:
        """Message if ranks have no log; at the start, some logs appear a moment late."""
        start = self.first.start
        if self.folder is None or start is None or start.world_size <= len(self.views):
            return ""
        first = self.first.history.rank
        shown = f", shown is rank {first}" if first else ""
        return f"logs of {len(self.views)} of {start.world_size} ranks{shown}"

    @property
    def changed(self) -> tuple[object, ...]:
        """Key that changes when the logs or the state change."""
        return (
            self.state,
            self.is_complete,
            self.set_up,
            *((v.length, v.time_s, v.history.last_time_s) for v in self.views),
        )


@dataclass(slots=True)
class RunReader:
    """Reads the logs of one run while they grow."""

    run: RunPath
    histories: dict[Path, History] = field(default_factory=dict)
    is_complete: bool = False
    _glances: dict[Path, History] = field(default_factory=dict)
    _tails: dict[Path, Tail] = field(default_factory=dict)
    _looked_s: float = 0.0
    _first_s: float = 0.0
    _heard_s: float | None = None
    _grew: bool = False

    def read(self, most_lines: int = _LINES_AT_ONCE) -> bool:
        """Read new lines of every rank; return True if there were any."""
        self._find_ranks()
        any_lines, was_complete = False, self.is_complete
        self.is_complete = True
        for path, tail in self._tails.items():
            before = tail.restarts
            lines = tail.poll(most=most_lines * 400)
            if tail.restarts != before or path not in self.histories:
                self.histories[path] = History(_rank_of(path))
                if tail.left_bytes > _LONG_BYTES:
                    self._glances[path] = glance(path, _rank_of(path), 1 << 20)
            self.histories[path].feed_lines(lines)
            any_lines |= bool(lines)
            self.is_complete &= not tail.left_bytes or bool(tail.refused)
        if self.is_complete:
            self._glances.clear()
        self._grew |= any_lines and was_complete
        return any_lines

    def read_to_end(self, now_s: float) -> Snapshot:
        """Read everything in the logs; return a snapshot."""
        while self.read() or not self.is_complete:
            pass
        return self.snapshot(now_s)

    def snapshot(self, now_s: float) -> Snapshot:
        """Return a snapshot of what has been read."""
        known = {**self.histories, **self._glances}
        ordered = sorted(known.values(), key=lambda history: history.rank)
        views = tuple(map(View.at, ordered)) or (View.at(History()),)
        folder = self.run.folder
        life = runs.life_of(folder, views[0], now_s, self._silent_s(views[0], now_s))
        state = life.state
        if folder is None and state == "starting" and views[0].start is None:
            state = "unknown"  # the file is not the log of a run
        refused = tuple(tail.refused for tail in self._tails.values() if tail.refused)
        if folder is not None and not os.access(folder / "events", os.R_OK | os.X_OK):
            why = "no permission" if os.path.lexists(folder / "events") else "it is gone"
            refused, state = (f"{folder / 'events'}: {why}", *refused), "unknown"
        then = life.set_up.oom_kills if life.set_up else runs.facts(folder).get("oom_kills")
        killed = state == "killed" and oom_kills.risen(then)  # probably by the kernel, for memory
        return Snapshot(
            *(self.run.name, folder, views, state, self.is_complete, refused, killed),
            *(bool(life.alive), life.set_up, runs.ending_of(folder, views[0], state)),
        )

    def _silent_s(self, view: View, now_s: float) -> float | None:
        """Return the seconds since the last new record, by this machine's clock: the writer's host
        may have a different clock. None: use the times in the log."""
        self._first_s = self._first_s or now_s
        if self._grew:
            self._grew, self._heard_s = False, now_s
        if self._heard_s is not None:
            return now_s - self._heard_s
        return now_s - self._first_s if view.history.last_time_s > now_s + _SKEW_S else None

    @property
    def read_bytes(self) -> int:
        """Bytes of all ranks' logs that have been read so far."""
        return sum(tail.read_bytes for tail in list(self._tails.values()))

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()

    def _find_ranks(self) -> None:
        now_s = time.monotonic()
        if self._tails and (self.run.folder is None or now_s - self._looked_s < _LOOK_FOR_RANKS_S):
            return
        self._looked_s = now_s
        if self.run.folder is not None:
            self.run = runs.open_run(self.run.folder)
        for path in self.run.logs:
            self._tails.setdefault(path, Tail(path))


def glance(path: Path, rank: int = 0, tail_bytes: int = _TAIL_BYTES) -> History:
    """Read the first and the last records of a log, in constant time."""
    lines: list[bytes] = []
    with suppress(OSError), open_regular(path) as log:
        size = os.fstat(log.fileno()).st_size
        head = log.read(_HEAD_BYTES)
        lines = head.split(b"\n")[:-1] if size > len(head) else head.split(b"\n")
        if size > _HEAD_BYTES:
            log.seek(max(size - tail_bytes, _HEAD_BYTES))
            lines += log.read(tail_bytes).split(b"\n")[1:]
    return fold(lines, rank)


def _rank_of(path: Path) -> int:
    digits = path.stem.removeprefix("rank")
    return int(digits) if digits.isdigit() else 0


# ---- the list of runs, from the first and last records of their logs

COLUMNS = ("run", "state", "step", "loss", "val", "tok/s", "ran", "last step")


@dataclass(frozen=True, slots=True)
class RunRow:
    """A row of the list of runs; None for values that are not in the log.

    Attributes:
        ran_s: seconds from its newest start to its end, or to now.
        ending: how it has ended; None: it is alive, or not known to have ended.
    """

    folder: Path
    state: str
    step: int
    total: int | None
    loss: float | None
    val_loss: float | None
    tokens_per_s: float | None
    last_s: float | None
    ran_s: float | None
    ending: runs.Ending | None = None

    def cells(self, now_s: float) -> tuple[str, ...]:
        """Return a text for each of `COLUMNS`; "-": not known."""
        age_s = None if self.last_s is None else max(now_s - self.last_s, 0.0)
        return (
            clean(self.folder.name),
            self.state,
            f"{self.step}/{self.total}" if self.total else str(self.step),
            *map(short, (self.loss, self.val_loss, self.tokens_per_s)),
            "-" if self.ran_s is None else units.format_duration(self.ran_s),
            "-" if age_s is None else f"{units.format_duration(age_s)} ago",
        )


@dataclass(slots=True)
class Listing:
    """The runs in a folder, and named runs outside of it. A log that has not changed is not read
    again."""

    runs_dir: Path
    named: tuple[Path, ...] = ()
    _views: dict[Path, tuple[tuple[int, int], View]] = field(default_factory=dict)

    def rows(self, now_s: float, most: int = 200) -> list[RunRow]:
        """Return named runs outside of the folder, then the folder's runs, the newest first."""
        there = runs.all_runs(self.runs_dir)[:most]
        listed = {path.resolve() for path in there} if self.named else set()
        folders = [path for path in self.named if path.resolve() not in listed] + there
        self._views = {folder: self._read(folder) for folder in folders}
        return [_row(folder, view, now_s) for folder, (_, view) in self._views.items()]

    def _read(self, folder: Path) -> tuple[tuple[int, int], View]:
        """Return the log's (size, modification time), and a view of rank 0's first and last
        records."""
        logs = runs.open_run(folder).logs
        stamp = (0, 0)
        with suppress(OSError):
            status = os.lstat(logs[0]) if logs else None
            stamp = (status.st_size, status.st_mtime_ns) if status else stamp
        known = self._views.get(folder)
        if known is not None and known[0] == stamp:
            return known
        return stamp, View.at(glance(logs[0]) if logs else History())


def _row(folder: Path, view: View, now_s: float) -> RunRow:
    state = runs.life_of(folder, view, now_s).state
    ending, since_s = runs.ending_of(folder, view, state), view.started_s
    ran_s = ending.lasted_s if ending else None
    if state in runs.ALIVE and since_s is not None:
        ran_s = max(now_s - since_s, 0.0)
    return RunRow(
        folder=folder,
        state=state,
        step=view.step,
        total=view.total_steps,
        loss=view.last("loss"),
        val_loss=view.val_loss,
        tokens_per_s=view.last("tokens_per_s"),
        last_s=view.step_time_s,
        ran_s=ran_s,
        ending=ending,
    )


def list_runs(runs_dir: Path, now_s: float) -> list[RunRow]:
    """Return the runs in a folder, the newest first."""
    return Listing(runs_dir).rows(now_s)


# ---- the reader thread


class Reader:
    """Reads runs on a separate thread, and reports news.

    Attributes:
        snapshots: the newest snapshot of each run; the list is replaced, not changed.
    """

    def __init__(
        self,
        run_paths: Sequence[RunPath],
        clock: Clock,
        on_news: Callable[[], object],
        *,
        news_s: float = NEWS_S,
    ) -> None:
        self.readers = [RunReader(run) for run in run_paths]
        self._clock = clock
        self._on_news = on_news
        self._news_s = news_s
        self.snapshots: list[Snapshot] = []
        self._ended = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="run-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, run: RunPath) -> None:
        """Read this run, too."""
        if all(reader.run.folder != run.folder for reader in self.readers):
            self.readers = [*self.readers, RunReader(run)]
            self._wake.set()

    def close(self) -> None:
        self._ended.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    @property
    def read_bytes(self) -> int:
        """Bytes of all logs read so far; safe to read on any thread."""
        return sum(reader.read_bytes for reader in self.readers)

    def _run(self) -> None:
        published_s = 0.0
        while not self._ended.is_set():
            busy = any([reader.read() and not reader.is_complete for reader in self.readers])
            if time.monotonic() - published_s >= self._news_s and self.publish():
                published_s = time.monotonic()
            (gc.disable if busy else gc.enable)()  # a long log creates many lists, without cycles
            if not busy:
                self._wake.wait(POLL_S)
                self._wake.clear()
        gc.enable()
        for reader in self.readers:
            reader.close()

    def publish(self) -> bool:
        """Publish snapshots of everything read so far; return True if anything has changed."""
        before = [snapshot.changed for snapshot in self.snapshots]
        self.snapshots = [reader.snapshot(self._clock.now_s()) for reader in self.readers]
        news = [snapshot.changed for snapshot in self.snapshots] != before
        if news:
            self._on_news()
        return news
