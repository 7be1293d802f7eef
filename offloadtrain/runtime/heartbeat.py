"""The progress of this process, and the watchdog that observes it.

[Note: Progress]
A hang is silence: no progress for longer than any healthy silence. Five things are progress:

* beats: a phase begins, an operation is launched, a phase advances;
* the queues of the lanes;
* collectives: this rank enters one, or returns from it;
* bytes that the process reads or writes, counted by the kernel: a long save or verification;
* processor time of the training thread: a long forward on the CPU, or set-up. On a GPU it does
  not count once training has begun, because a thread that waits for the device spins.

A healthy run sets its own limit: four times the longest silence that ended by itself in the same
phase, and at least `train.hang_timeout_s`. Time in which the watching thread did not run
either (Ctrl-Z, a suspended machine) does not count as silence.

[Note: Who judges]
A single process judges itself: its watchdog reports a hang and ends it. A rank of `--nproc` sends
its progress to the launcher, which sees all ranks, including stopped ones: it decides, and
requests reports. Ranks of torchrun exchange their progress through the store:
`failure_detector.py`.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from offloadtrain.runtime.launcher_link import Link, Pulse

CPU_MOVES_S = 0.02
IO_MOVES_BYTES = 4 << 20
LONGEST = 4.0
"""Factor on the longest healthy silence of a phase."""


@dataclass(frozen=True, slots=True)
class Part:
    """The current work within a phase, and how many of its bytes are done."""

    what: str
    done_bytes: int
    total_bytes: int


class Heartbeat:
    """The progress of this process. Every method may be called on any thread.

    Attributes:
        phase: the current activity, in words.
        part: the current part of the phase; None if unknown.
        spent_s: part → the seconds that it has taken so far.
        cpu_counts: whether processor time of the training thread is progress.
        held_up: an external activity takes time; this is not a hang.
        watched: a watchdog reports hangs.
        collective_of: kind and owner of the last launched collective of weights or gradients.
    """

    def __init__(self) -> None:
        self.phase = "starting"
        self.part: Part | None = None
        self.spent_s: dict[str, float] = {}
        self._part_since_s = 0.0
        self.cpu_counts = True
        self.held_up = self.watched = False
        self.collective_of = ""
        self.beats = 0
        # Keyed by thread: each thread writes only its key, so that no count is lost without a lock.
        self._entered: dict[int, int] = {}
        self._inside: set[int] = set()

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.phase, self.part = phase, None
        self.beats += 1

    def advance(self, what: str, done_bytes: int, total_bytes: int) -> None:
        """Record the progress of a part of the phase. Only one thread at a time sets up."""
        now_s = time.monotonic()
        part = self.part
        if part is not None and part.what == what and part.done_bytes < part.total_bytes:
            self.spent_s[what] = self.spent_s.get(what, 0.0) + now_s - self._part_since_s
        self.part, self._part_since_s = Part(what, done_bytes, total_bytes), now_s
        self.beats += 1

    def beat(self) -> None:
        """Record progress within a phase. Threads may overwrite each other's count: any change
        counts."""
        self.beats += 1

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Record that this thread waits for other ranks."""
        thread = threading.get_ident()
        self._entered[thread] = self._entered.get(thread, 0) + 1
        self._inside.add(thread)
        try:
            yield
        finally:
            self._inside.discard(thread)
            self.beats += 1

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Record that this thread computes, within a `collective` that sometimes waits."""
        thread = threading.get_ident()
        waited = thread in self._inside
        self._inside.discard(thread)
        self.beats += 1
        try:
            yield
        finally:
            self.beats += 1
            if waited:
                self._inside.add(thread)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Record that an external activity takes time: a paused terminal, a logger's server."""
        self.held_up = True
        try:
            yield
        finally:
            self.held_up = False

    @property
    def waits(self) -> bool:
        """True if a thread of this process waits for other ranks."""
        return bool(self._inside)

    @property
    def collectives(self) -> int:
        """Number of collectives that this rank has entered: the rank with the fewest blocks the
        others."""
        return sum(list(self._entered.values()))

    @property
    def marks(self) -> tuple[int, int]:
        """A value that changes with every beat and collective."""
        return self.beats, self.collectives


HEARTBEAT = Heartbeat()
"""The heartbeat of this process. Global, like signal handlers: a process trains one model at a
time."""


class Silence:
    """Measures how long there was no progress. One thread calls `look`, at least once a second."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        least_limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`least_limit_s`: the limit of a phase without longer healthy silences.

        Attributes:
            lanes: describes the engine's lanes: changes of their queues are progress too.
        """
        self._heartbeat, self._least_limit_s, self._clock = heartbeat, least_limit_s, clock
        self.lanes: Callable[[], str] = str
        self._queues = ""
        self._thread = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._marks = heartbeat.marks
        self._cpu_s, self._io_bytes = self._cpu(), moved_bytes()
        self._looked_s = clock()
        self._longest_s: dict[str, float] = {}
        self.seconds = 0.0

    @property
    def limit_s(self) -> float:
        longest_s = self._longest_s.get(_kind(self._heartbeat.phase), 0.0)
        return max(self._least_limit_s, LONGEST * longest_s)

    def look(self, most_s: float) -> float:
        """Return the length of the silence, in seconds.

        Args:
            most_s: the longest time since the last call that counts; this thread slept no longer.
        """
        now_s = self._clock()
        passed_s, self._looked_s = min(now_s - self._looked_s, most_s), now_s
        if self._has_moved():
            kind = _kind(self._heartbeat.phase)
            self._longest_s[kind] = max(self._longest_s.get(kind, 0.0), self.seconds)
            self.seconds = 0.0
        else:
            self.seconds += passed_s
        return self.seconds

    def _has_moved(self) -> bool:
        marks, cpu_s, io_bytes = self._heartbeat.marks, self._cpu(), moved_bytes()
        queues = self.lanes()
        moved = (
            marks != self._marks
            or queues != self._queues
            or io_bytes - self._io_bytes >= IO_MOVES_BYTES
            or (self._heartbeat.cpu_counts and cpu_s - self._cpu_s >= CPU_MOVES_S)
            or self._heartbeat.held_up
        )
        if moved:
            self._marks, self._queues = marks, queues
            self._cpu_s, self._io_bytes = cpu_s, io_bytes
        return moved

    def _cpu(self) -> float:
        return time.clock_gettime(self._thread)


def _kind(phase: str) -> str:
    """Return the phase without its numbers: every step is the same phase."""
    return phase.rstrip("0123456789 ")


def moved_bytes() -> int:
    """Return the bytes that this process has read and written; 0 if the kernel does not
    count them."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            counts = dict(line.split(": ") for line in file.read().splitlines())
    except OSError:
        return 0
    return int(counts["rchar"]) + int(counts["wchar"])


LOOK_EVERY_S = 0.25
NEVER_S = 1e9
"""A limit that no silence reaches."""
REPORT_S = 4.0
"""Maximum time for a report."""
NO_PROGRESS = "makes no progress"


class Watchdog:
    """Watches this process while entered.

    Attributes:
        log: writes the text of a report to the run's log; None before there is a log.
        run: the run folder, for the launcher; "" before the run has begun.
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
            least_limit_s: least silence in seconds that is a hang; 0: no limit.
            hung_code: exit code of a process that hangs.
            judges: end this process if it hangs; otherwise launcher or detector decides.
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
        # The thread checks again shortly: the end of the process must not wait for a blocked
        # report.
        self._thread.join(4 * LOOK_EVERY_S)

    def watch_lanes(self, state: Callable[[], str]) -> None:
        """`state`: describes the engine's lanes, from any thread."""
        self._silence.lanes = state

    def pulse(self) -> Pulse:
        """Return the state of this process for the launcher or other ranks."""
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
        """Report, and end the process at once: an orderly end would wait for the hanging
        operation."""
        # On a thread with a timeout: the report may need the resource that hangs.
        thread = threading.Thread(target=lambda: self.report(cause), name="report", daemon=True)
        thread.start()
        # After the timeout a hanging report is abandoned with its thread, and the process ends.
        thread.join(REPORT_S)
        os._exit(self._hung_code)

    def _watch(self) -> None:
        while not self._over.is_set():
            silent_s = self._silence.look(most_s=4 * LOOK_EVERY_S)
            if self._link is not None:
                # Send the pulse to the launcher, and wait for its answer until the next look.
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
    """Return the stacks of all threads of this process, newest call last."""
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
    """Return the ranks that hang, those that block the others first; [] if none hangs.

    A rank that waits for others in a collective does not hang: the rank that it waits for does. If
    all wait, they wait for the rank that has entered the fewest collectives.
    """
    silent = [rank for rank, pulse in pulses.items() if pulse.silent_s >= pulse.limit_s]
    hung = [rank for rank in silent if not pulses[rank].waits]
    if silent and not hung and len(silent) == len(pulses):
        fewest = min(pulse.collectives for pulse in pulses.values())
        hung = [rank for rank in silent if pulses[rank].collectives == fewest]
    return sorted(hung, key=lambda rank: pulses[rank].collectives)
