"""The loggers of a run, each on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from offloadtrain.config.job import Config
from offloadtrain.train.loggers.files import Csv, JsonLines
from offloadtrain.train.loggers.row import Logger, Source, row_of
from offloadtrain.train.loggers.tensorboard import TensorBoard
from offloadtrain.train.loggers.wandb import FINISH_WITHIN_S, Wandb

CAPACITY = 4096
END_WITHIN_S = 2.0 * FINISH_WITHIN_S
FAIL_WITHIN_S = 5.0

Report = Callable[[str], None]


class Loggers:
    """Gives events to the loggers of a job.

    [Note: A logger that fails] Training does not depend on a logger: network, disk or package of
    one may fail at any time. The failure is reported once, as a warning in the event log and on
    the console, and that logger gets no more rows in this start; the run and the other loggers go
    on. The event log has every row.
    """

    def __init__(self, report: Report) -> None:
        """`report` gets a sentence per failed logger, on that logger's thread."""
        self._report = report
        self._feeds: list[_Feed] = []
        self._kept_step = -1

    def open(self, run: Path, config: Config, start_step: int) -> None:
        """Start the threads; files are made with the first row.

        Args:
            run: the run folder; what its loggers wrote after `start_step` is dropped.
        """
        self._kept_step = kept_step = start_step or -1  # step 0 is evaluated again
        makers: dict[str, Callable[[], Logger]] = {
            "csv": partial(Csv, run / "metrics.csv", kept_step),
            "jsonl": partial(JsonLines, run / "metrics.jsonl", kept_step),
            "tensorboard": partial(TensorBoard, run / "tensorboard", config, kept_step),
            "wandb": partial(Wandb, run, config, kept_step),
        }
        self._feeds = [_Feed(to, makers[to], self._report) for to in dict.fromkeys(config.log.to)]

    def emit(self, event: Source) -> None:
        """Queue the event for every logger; never blocks. An evaluation of the step that a run
        resumes after is already there."""
        if event.step > self._kept_step:
            now_s = time.time()
            for feed in self._feeds:
                feed.put(event, now_s)

    def close(self, *, failed: bool) -> None:
        """Wait until all rows are written, but not for ever; a second call does nothing."""
        feeds, self._feeds = self._feeds, []
        for feed in feeds:
            feed.end(failed=failed)
        give_up_s = time.monotonic() + (FAIL_WITHIN_S if failed else END_WITHIN_S)
        for feed in feeds:
            feed.wait(give_up_s)


class _Feed:
    """The queue and the thread of one logger. They are two lanes: the training thread pays for a
    queue put, and a logger that waits for its network delays no other one."""

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
                with suppress(Exception):  # frees what it holds; its failure was reported
                    logger.close(failed=True)
