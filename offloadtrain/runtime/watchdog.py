"""The thread of each process that watches its progress, [Note: Progress] in `heartbeat.py`.

Alone it judges: a hang is reported and ends the process. A rank of `--nproc` sends what it sees to
the launcher, which sees all ranks, also one that is stopped: it judges there, and asks for reports.
Ranks of torchrun exchange what they see through the store: `failure_detector.py`.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from offloadtrain.runtime.heartbeat import Heartbeat, Silence
from offloadtrain.runtime.launcher_link import Link, Pulse

LOOK_EVERY_S = 0.25
NEVER_S = 1e9
"""A limit that no silence reaches."""
REPORT_S = 4.0
"""Time for a report."""
NO_PROGRESS = "makes no progress"


class Watchdog:
    """Watches this process while entered.

    Attributes:
        log: writes the text of a report to the run's log; None before there is one.
        run: the run folder, for the launcher; "" before it has begun.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        *,
        least_limit_s: float,
        hung_code: int,
        link: Link | None = None,
        judges: bool = True,
    ) -> None:
        """
        Args:
            least_limit_s: least silence in seconds that is a hang; 0: none is.
            hung_code: exit code of a process that hangs.
            judges: end this process if it hangs; otherwise others judge.
        """
        self._heartbeat, self._link, self._judges = heartbeat, link, judges
        self._hung_code = hung_code
        self._silence = Silence(heartbeat, least_limit_s or NEVER_S)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.log: Callable[[str], None] | None = None
        self.run = ""

    def __enter__(self) -> Watchdog:
        self._heartbeat.watched = True
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._heartbeat.watched = False
        # It looks again within a moment: an end of the process must not wait for a blocked report.
        self._thread.join(4 * LOOK_EVERY_S)

    def watch_lanes(self, state: Callable[[], str]) -> None:
        """`state`: describes the engine's lanes, from any thread."""
        self._silence.lanes = state

    def pulse(self) -> Pulse:
        """Return what this process says of itself."""
        heartbeat, silence = self._heartbeat, self._silence
        return Pulse(
            phase=heartbeat.phase,
            silent_s=silence.seconds,
            limit_s=silence.limit_s,
            collectives=heartbeat.collectives,
            waits=heartbeat.waits,
            run=self.run,
        )

    def report(self, cause: str) -> None:
        """Write cause, phase, stacks and lanes to stderr, and to the log if it answers."""
        lanes = self._silence.lanes() or "nothing launched yet"
        doing = f"phase: {self._heartbeat.phase}; lanes: {lanes}"
        print(f"{cause}; {doing}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
        if self.log is not None:
            self.log(f"{cause}; {doing}\n{stacks()}")

    def end_hung(self, cause: str) -> None:
        """Report, and end the process at once: an orderly end would wait for what hangs."""
        # In a few seconds: what it needs may be what hangs.
        thread = threading.Thread(target=lambda: self.report(cause), name="report", daemon=True)
        thread.start()
        # No longer: a report that hangs is given up with its thread, and the process ends.
        thread.join(REPORT_S)
        os._exit(self._hung_code)

    def _watch(self) -> None:
        while not self._over.is_set():
            silent_s = self._silence.look(most_s=4 * LOOK_EVERY_S)
            if self._link is not None:
                # The launcher is told, and listened to until the next look.
                self._link.send(asdict(self.pulse()))
                try:
                    message = self._link.receive(LOOK_EVERY_S)
                except EOFError:  # the launcher has ended: see [Note: No orphans]
                    os._exit(1)
                if message is not None:
                    self.end_hung(str(message["hung"]))
            elif self._over.wait(LOOK_EVERY_S):
                return
            elif self._judges and silent_s >= self._silence.limit_s:
                self.end_hung(f"no progress for {silent_s:.0f} s")


def stacks() -> str:
    """Return the stacks of all threads of this process, the newest call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    sections = []
    for ident, frame in sys._current_frames().items():
        calls = [
            f"  {Path(call.filename).name}:{call.lineno} {call.name}"
            for call in traceback.extract_stack(frame)
        ]
        sections.append("\n".join((f"thread {names.get(ident, ident)}:", *calls)))
    return "\n".join(sections)


def judge(pulses: dict[int, Pulse]) -> list[int]:
    """Return the ranks that hang, those that hold the others up first; [] while none does.

    A rank that waits for others in a collective does not hang: the one that it waits for does. If
    all wait, they wait for the rank that has entered the fewest.
    """
    silent = [rank for rank, pulse in pulses.items() if pulse.silent_s >= pulse.limit_s]
    hung = [rank for rank in silent if not pulses[rank].waits]
    if silent and not hung and len(silent) == len(pulses):
        fewest = min(pulse.collectives for pulse in pulses.values())
        hung = [rank for rank in silent if pulses[rank].collectives == fewest]
    return sorted(hung, key=lambda rank: pulses[rank].collectives)
