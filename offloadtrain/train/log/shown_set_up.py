"""The progress of a set-up, written for whoever watches the run folder."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from offloadtrain.events import oom_kills, set_up_file
from offloadtrain.events.set_up_file import SetUpNow
from offloadtrain.hardware import cgroup
from offloadtrain.runtime.heartbeat import HEARTBEAT, Heartbeat
from offloadtrain.train.run_folder import start_ticks

EVERY_S = 0.5


class ShownSetUp:
    """Writes what a heartbeat says into the folder, from a thread, until the context is left."""

    def __init__(
        self, folder: Path, warn: Callable[[str], None], heartbeat: Heartbeat = HEARTBEAT
    ) -> None:
        """`warn`: called once if the file cannot be written; the set-up goes on unseen."""
        self._folder, self._warn, self._heartbeat = folder, warn, heartbeat
        self._over = threading.Event()
        self._since_s = time.time()
        self._kills = oom_kills.count(cgroup.oom_counters())
        self._thread = threading.Thread(target=self._run, name="shown-set-up", daemon=True)

    def __enter__(self) -> ShownSetUp:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Remove the file: the log has begun, or the start is refused. Idempotent."""
        self._over.set()
        self._thread.join()
        set_up_file.remove(self._folder)

    def _run(self) -> None:
        while True:
            try:
                set_up_file.write(self._folder, self._now())
            except OSError as error:
                self._warn(f"the set-up's progress cannot be written: {error}")
                return
            if self._over.wait(EVERY_S):
                return

    def _now(self) -> SetUpNow:
        part = self._heartbeat.part
        return SetUpNow(
            pid=os.getpid(),
            pid_start_ticks=start_ticks(),
            host=socket.gethostname(),
            since_s=self._since_s,
            time_s=time.time(),
            phase=self._heartbeat.phase,
            part=part.what if part else "",
            done_bytes=part.done_bytes if part else 0,
            total_bytes=part.total_bytes if part else 0,
            oom_kills=self._kills,
        )
