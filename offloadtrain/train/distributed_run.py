"""This process as a rank of a job: connects, opens the shared run folder, reports, ends."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from offloadtrain.boundary.output import tell
from offloadtrain.config.errors import ConfigError, OffloadTrainError
from offloadtrain.config.job import Config
from offloadtrain.runtime.device import resolve_device
from offloadtrain.runtime.failure_detector import FailureDetector, RankInfo, say_stopped_early
from offloadtrain.runtime.heartbeat import HEARTBEAT, Watchdog
from offloadtrain.runtime.process_group import LostRankError, RankError, Ranks, is_of_exchange, lost
from offloadtrain.runtime.rendezvous import attempt_store, connect, disconnect
from offloadtrain.train.log.run_log import RunLog
from offloadtrain.train.run_folder import Opened, RunFolder, Say, open_run
from offloadtrain.train.signals import StoppedEarlyError, StopRequests, told_early

COLLECTIVE_TIMEOUT_S = 1800.0
"""Timeout of last resort: `failure_detector.FailureDetector` detects a failed rank much earlier."""
_RUN_KEY = "offloadtrain/run"


class DistributedRun:
    """Context of a rank. If the rank leaves it with an error, the rank reports the error to the
    other ranks and ends its process."""

    def __init__(
        self,
        rank_info: RankInfo,
        config: Config,
        code_of: Callable[[BaseException], int],
        stop: StopRequests,
        watchdog: Watchdog | None = None,
    ) -> None:
        """
        Args:
            code_of: returns the exit code of a process that ends with this error.
            stop: this rank's stop requests. A launcher stops all ranks; a rank may end before it
                has reported why, and the other ranks then rely on their own stop request.
            watchdog: reports hangs of ranks; None if offloadtrain's launcher detects them.

        Raises:
            ConfigError: there are more ranks on this host than GPUs.
        """
        import torch

        on_gpu = resolve_device(config.device.kind).type == "cuda"
        if on_gpu and rank_info.local_size > torch.cuda.device_count():
            raise ConfigError(
                f"{rank_info.local_size} ranks on this host and {torch.cuda.device_count()} GPUs: "
                "start one rank per GPU"
            )
        self.rank_info, self._code_of, self._stop = rank_info, code_of, stop
        HEARTBEAT.enter("connecting the ranks")
        with HEARTBEAT.collective():
            self._store = connect(rank_info, on_gpu=on_gpu, timeout_s=COLLECTIVE_TIMEOUT_S)
        store = attempt_store(self._store, rank_info)
        try:
            self._failures = FailureDetector(store, rank_info, self._lost, watchdog=watchdog)
        except StoppedEarlyError as error:
            # Other ranks may already know this rank, and would take its end for a failure.
            say_stopped_early(store, rank_info, str(error))
            raise
        self._log: RunLog | None = None
        self._run: RunFolder | None = None
        try:
            self.ranks = Ranks.of(None, torch.device("cpu"))
        except RuntimeError as error:
            if not is_of_exchange(error):
                raise
            raise LostRankError(lost("the connection of the ranks")) from error

    def open_run(self, config: Config, *, run_dir: Path | None, resume: str, say: Say) -> Opened:
        """Open the run folder as `run_folder.open_run`. Restarted ranks reopen their folder."""
        if self.rank_info.attempt and self._store.check([_RUN_KEY]):
            run_dir, resume = Path(self._store.get(_RUN_KEY).decode()), "auto"
        opened = open_run(config, run_dir=run_dir, resume=resume, say=say, ranks=self.ranks)
        self._run = opened.run
        return opened

    def began(self, run: RunFolder) -> None:
        """Record the folder for a restart of the ranks."""
        if self.rank_info.rank == 0:
            self._store.set(_RUN_KEY, str(run.path.resolve()))

    @contextmanager
    def reporting(self, log: RunLog) -> Iterator[None]:
        """Report an error inside to the other ranks, or raise another rank's failure.

        Raises:
            RankError: another rank has failed first.
            StoppedEarlyError: another rank was asked to stop during set-up.
        """
        self._log = log
        try:
            yield
        except Exception as error:
            cause = self._failures.cause()
            if cause is not None and self._stops_early():
                raise StoppedEarlyError(cause) from error
            if cause is not None:
                raise RankError(_blamed(cause)) from error
            self._failures.fail(f"{type(error).__name__}: {error}")
            raise

    @property
    def nproc(self) -> int:
        """Ranks that `--nproc` starts again; 1 if the ranks are on several hosts."""
        info = self.rank_info
        return info.size if info.local_size == info.size else 1

    def __enter__(self) -> DistributedRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.ranks.barrier()
            self._failures.close()
            self.ranks.close()
            disconnect()
            return
        self._end(error)

    def _end(self, error: BaseException) -> None:
        """End the process at once. An orderly end could hang: lanes may wait in a collective that
        other ranks have left."""
        if isinstance(error, StoppedEarlyError):
            self._failures.stop_early(str(error))
            self._leave("" if self.rank_info.rank else told_early(error), self._code_of(error))
        known = isinstance(error, OffloadTrainError) and not isinstance(error, LostRankError)
        # A collective fails because its peer is gone, so the peer's failure is the cause to report.
        if not known and (cause := self._failures.cause()) is not None:
            error, known = RankError(_blamed(cause)), True
        self._failures.fail(f"{type(error).__name__}: {error}")
        text = f"{type(error).__name__}: {error}"
        if not known:
            text = "".join(traceback.format_exception(error))
        self._leave(f"rank {self.rank_info.rank}: {text}", self._code_of(error))

    def _lost(self, cause: str) -> None:
        """Handle a rank that has left while the training thread continues. Runs on the detector's
        thread."""
        early = self._stops_early()
        error = StoppedEarlyError(cause) if early else RankError(_blamed(cause))
        if self._log is not None:
            self._log.ended("stopped" if early else "failed", str(error))
        if self._run is not None:
            self._run.close()
        advice = (
            ""
            if self.rank_info.rank
            else told_early(StoppedEarlyError(self._stop.requested or cause))
        )
        text = advice if early else f"rank {self.rank_info.rank}: RankError: {error}"
        self._leave(text, self._code_of(error))

    def _stops_early(self) -> bool:
        """Return True if this rank or any reachable one was asked to stop during set-up."""
        return self._failures.stopped_early or self._stop.stops_building

    def _leave(self, text: str, code: int) -> NoReturn:
        if text:
            tell(text, sys.stderr)
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


def _blamed(cause: str) -> str:
    return f"another rank has failed: {cause}"
