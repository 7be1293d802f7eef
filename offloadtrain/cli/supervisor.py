"""The launcher of `offloadtrain train --nproc`: starts ranks on this host, watches them, ends them.

[Note: Supervision]
One loop waits for four events: a rank ends, a rank sends a pulse, a rank other than 0 prints, a
signal arrives. Rank 0 writes directly to the launcher's output. If a rank fails, the other ranks
get a few seconds to log the cause, and are then killed. After a hang all ranks report, and are then
killed. Processes that a rank has started are in its process group, and end with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType

from offloadtrain.boundary.output import say_on_stderr
from offloadtrain.cli.exit_codes import (
    DOES_NOT_FIT,
    DONE,
    FAILED,
    HUNG,
    STOPPED,
    USAGE,
)
from offloadtrain.events import oom_kills
from offloadtrain.hardware import cgroup
from offloadtrain.runtime.heartbeat import (
    CPU_MOVES_S,
    LOOK_EVERY_S,
    NEVER_S,
    NO_PROGRESS,
    REPORT_S,
    judge,
)
from offloadtrain.runtime.launcher_link import BLOCKED, STACKS, VARIABLE, Link, Pulse
from offloadtrain.train.signals import REPEAT_S, signals_handled

GRACE_S = 10.0
"""Time for the other ranks to end after one has failed."""
STALE_S = 2.0
"""Silence of a rank's watchdog after which the launcher examines the process itself."""
_LOOPBACK = "127.0.0.1"
_FINAL = (DONE, STOPPED, USAGE, DOES_NOT_FIT)
"""Exit codes after which a restart would end the same way, or is not wanted."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_OUTPUT_BYTES = 1 << 16

PROGRAM = ("-m", "offloadtrain")
"""Arguments of Python that run this program."""

Command = Callable[[str], Sequence[str]]
"""Run folder to continue in ("" if none has begun) → the command line of a rank's process."""


class _Rank:
    """The process of one rank, seen from its launcher."""

    def __init__(
        self,
        rank: int,
        process: subprocess.Popen[bytes],
        link: Link,
        limit_s: float,
        role: str = "",
    ) -> None:
        self.rank, self.process, self.link, self._role = rank, process, link, role
        self.end = os.pidfd_open(process.pid)
        self.last_pulse = Pulse(
            phase="starting", silent_s=0.0, limit_s=limit_s, collectives=0, waits=False
        )
        self.code: int | None = None
        self._rest = b""
        self._cpu_s, self._stale_s = 0.0, 0.0

    def __str__(self) -> str:
        role = f"{self._role}, " if self._role else ""
        return f"rank {self.rank} ({role}pid {self.process.pid})"

    @property
    def pulse(self) -> Pulse:
        """The last pulse; if no more arrive, with the time of silence."""
        if self.answers():
            return self.last_pulse
        return replace(self.last_pulse, silent_s=self._stale_s, waits=False)

    def listen(self, passed_s: float) -> None:
        """Receive its pulses. Without a pulse, CPU time of its main thread counts as progress: the
        GIL may be locked."""
        heard = None
        with suppress(EOFError):
            while (message := self.link.receive()) is not None:
                heard = Pulse(**message)
        _, cpu_s = _main_thread(self.process.pid)
        if heard is not None or cpu_s - self._cpu_s >= CPU_MOVES_S:
            self.last_pulse, self._stale_s = heard or self.last_pulse, 0.0
            self._cpu_s = cpu_s
        else:
            self._stale_s += passed_s

    def state(self) -> str:
        """Return its activity for the report of a hang."""
        state, _ = _main_thread(self.process.pid)
        if state in "Tt":
            doing = "stopped by a signal (SIGSTOP, SIGTSTP)"
        elif not self.answers():
            doing = "it does not answer"
        else:
            doing = "waiting for other ranks" if self.last_pulse.waits else "running"
        return f"{doing}; last phase: {self.last_pulse.phase}"

    def answers(self) -> bool:
        return self._stale_s < STALE_S

    def forward(self) -> None:
        """Print its new output as labelled, complete lines."""
        if self.process.stdout is None:
            return
        with suppress(BlockingIOError):  # no more output for now
            while new := os.read(self.process.stdout.fileno(), _OUTPUT_BYTES):
                *lines, self._rest = (self._rest + new).split(b"\n")
                for line in lines:
                    self._print(line)

    def reap(self) -> None:
        """Collect the process's exit code, and kill the processes that it has started."""
        self.kill()  # before the wait, after which its pid may be reused
        self.code = self.process.wait()
        self.forward()
        if self._rest:
            self._print(self._rest)

    def signal(self, number: int) -> None:
        if self.code is None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the process and its process group."""
        if self.code is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.end)
        self.link.close()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _print(self, line: bytes) -> None:
        say_on_stderr(f"[rank {self.rank}] {line.decode(errors='replace')}")


class Supervisor:
    """Runs a job on several ranks of this host."""

    def __init__(
        self,
        ranks: int,
        command: Command,
        *,
        max_restarts: int = 0,
        least_limit_s: float = 0.0,
        environ: Mapping[str, str] = os.environ,
        roles: Sequence[str] = (),
    ) -> None:
        """
        Args:
            least_limit_s: shortest silence of a rank, in seconds, that is a hang; 0: never.
            roles: description of each rank in a pipeline, for messages; empty without a pipeline.
        """
        self._roles = roles or [""] * ranks
        self._size, self._command, self._max_restarts = ranks, command, max_restarts
        self._least_limit_s = least_limit_s or NEVER_S
        self._environ = environ
        self._ranks: list[_Rank] = []
        self._run = ""
        self._stopping = False
        self._stopped_s = 0.0
        self._hung = False
        self._kill_at_s: float | None = None
        self._oom_kills: dict[str, int] = {}

    def run(self) -> int:
        """Return the exit code of the job. Signals reach the ranks through this process."""
        with signals_handled((*_STOPS, signal.SIGUSR1), self._pass_on):
            for attempt in range(self._max_restarts + 1):
                code = self._attempt(attempt)
                if code in _FINAL or self._stopping or attempt == self._max_restarts:
                    break
                say_on_stderr(f"restart {attempt + 1} of {self._max_restarts}")
        return code

    def _attempt(self, attempt: int) -> int:
        self._ranks, self._hung, self._kill_at_s = [], False, None
        self._oom_kills = oom_kills.count(cgroup.oom_counters())
        try:
            self._start(attempt)
            looked_s = time.monotonic()
            while any(rank.code is None for rank in self._ranks):
                self._wait()
                now_s = time.monotonic()
                # A launcher that was stopped (SIGSTOP) has missed pulses during that time.
                self._look(now_s, min(now_s - looked_s, 4 * LOOK_EVERY_S))
                looked_s = now_s
            return self._code()
        finally:
            for rank in self._ranks:
                rank.kill()
                if rank.code is None:
                    rank.reap()
                rank.close()

    # ---- start

    def _start(self, attempt: int) -> None:
        with socket.create_server((_LOOPBACK, 0)) as store, _blocked():
            shared = {
                "WORLD_SIZE": str(self._size),
                "LOCAL_WORLD_SIZE": str(self._size),
                "MASTER_ADDR": _LOOPBACK,
                "MASTER_PORT": str(store.getsockname()[1]),
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
            }
            for rank in range(self._size):
                self._ranks.append(self._spawn(rank, store, shared))

    def _spawn(self, rank: int, store: socket.socket, shared: Mapping[str, str]) -> _Rank:
        parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        store_fd = store.fileno() if rank == 0 else None
        link_args = {"pid": os.getpid(), "link": child_end.fileno(), "store": store_fd}
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), VARIABLE: json.dumps(link_args)}
        with child_end:
            process = subprocess.Popen(
                self._command(self._run),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank else None,
                stderr=subprocess.STDOUT if rank else None,
                pass_fds=[fd for fd in (child_end.fileno(), store_fd) if fd is not None],
                # A separate session, so that Ctrl-C in the terminal reaches only the launcher.
                start_new_session=True,
                env={**self._environ, **shared, **of_rank},
            )
        if process.stdout is not None:
            os.set_blocking(process.stdout.fileno(), False)
        return _Rank(rank, process, Link(parent_end), self._least_limit_s, self._roles[rank])

    # ---- the loop

    def _wait(self) -> None:
        """Wait for an event, at most LOOK_EVERY_S."""
        waited: list[int] = []
        for rank in self._ranks:
            if rank.code is None:
                waited += [rank.end, rank.link.fileno()]
                waited += [] if rank.process.stdout is None else [rank.process.stdout.fileno()]
        select.select(waited, [], [], LOOK_EVERY_S)

    def _look(self, now_s: float, passed_s: float) -> None:
        for rank in self._ranks:
            if rank.code is None:
                rank.listen(passed_s)
                self._run = rank.last_pulse.run or self._run
                rank.forward()
                if select.select([rank.end], [], [], 0)[0]:
                    rank.reap()
                    self._ended(rank)
        alive = {rank.rank: rank.pulse for rank in self._ranks if rank.code is None}
        if self._kill_at_s is None and (hung := judge(alive)):
            self._report(hung)
        # Before the run begins there is nothing to lose, so busy ranks are killed.
        early = self._stopping and not self._run and now_s >= self._stopped_s + GRACE_S
        if early or (self._kill_at_s is not None and now_s >= self._kill_at_s):
            for rank in self._ranks:
                rank.kill()

    def _ended(self, rank: _Rank) -> None:
        """Give the other ranks some time to end if this one has failed, or has stopped before the
        run began: then others may wait for its connection, and get no other notice."""
        stopped = rank.code == STOPPED or self._stopped(rank)
        if rank.code == DONE or self._kill_at_s is not None or (stopped and self._run):
            return
        if not stopped and rank.code is not None and rank.code < 0:
            name = signal.Signals(-rank.code).name
            out = oom_kills.risen(self._oom_kills)
            why = ", probably out of memory: the kernel has killed a process for it" if out else ""
            say_on_stderr(f"{rank} was killed by {name}{why}; last phase: {rank.last_pulse.phase}")
        self._kill_at_s = time.monotonic() + GRACE_S

    def _stopped(self, rank: _Rank) -> bool:
        """Return True if the rank was ended by a stop signal that it could not handle yet."""
        return self._stopping and rank.code is not None and -rank.code in _STOPS

    def _report(self, hung: list[int]) -> None:
        """Print which rank hangs, and request a report from every rank."""
        self._hung = True
        self._kill_at_s = time.monotonic() + REPORT_S + STALE_S
        first = self._ranks[hung[0]]
        cause = f"{first} {NO_PROGRESS} for {first.pulse.silent_s:.0f} s: {first.state()}"
        running = [rank for rank in self._ranks if rank is not first and rank.code is None]
        say_on_stderr("\n".join([cause, *(f"{rank}: {rank.state()}" for rank in running)]))
        for rank in self._ranks:
            rank.link.send({"hung": cause})
            if not rank.answers():
                rank.signal(STACKS)

    def _code(self) -> int:
        codes = [FAILED if rank.code is None else rank.code for rank in self._ranks]
        early = self._stopping and not self._run and set(codes) <= {STOPPED, -signal.SIGKILL}
        if STOPPED in codes or early or (self._stopping and any(map(self._stopped, self._ranks))):
            if codes[0] == -signal.SIGKILL and not self._run:  # rank 0 could not print it
                say_on_stderr("stopped before the first step; the same command starts again")
            return STOPPED
        if self._hung:
            return HUNG
        # Prefer an error that a rank raised itself over FAILED of ranks that lost their peer.
        errors = [code for code in codes if code not in (DONE, FAILED) and code > 0]
        return errors[0] if errors else FAILED if any(codes) else DONE

    # ---- signals

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            for rank in self._ranks[:1]:
                rank.signal(number)
        elif self._stopping:
            if time.monotonic() - self._stopped_s >= REPEAT_S:
                for rank in self._ranks:
                    rank.kill()
                with suppress(OSError):  # the terminal may be gone
                    os.write(2, b"\nended at once; saved checkpoints are intact\n")
                os._exit(FAILED)
        else:
            self._stopping, self._stopped_s = True, time.monotonic()
            for rank in self._ranks:
                rank.signal(number)


def launch(
    ranks: int,
    max_restarts: int,
    arguments: Sequence[str],
    opening: Sequence[str],
    least_limit_s: float,
    roles: Sequence[str] = (),
) -> int:
    """Run `offloadtrain` with these arguments on `ranks` ranks; return the exit code.

    Args:
        opening: arguments that choose the run folder; restarted ranks continue in the one that
            began.
        least_limit_s: `train.hang_timeout_s` of the job.
        roles: description of each rank in a pipeline, for messages.
    """

    def command(run: str) -> list[str]:
        chosen = ("--run-dir", run, "--resume", "auto") if run else opening
        return [sys.executable, *PROGRAM, *arguments, *chosen]

    environ = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    supervisor = Supervisor(
        ranks,
        command,
        max_restarts=max_restarts,
        least_limit_s=least_limit_s,
        environ=environ,
        roles=roles,
    )
    return supervisor.run()


@contextmanager
def _blocked() -> Iterator[None]:
    """Context in which new processes start with signals blocked, until they handle these."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _main_thread(pid: int) -> tuple[str, float]:
    """Return state (a letter of stat(5)) and CPU time in seconds of the main thread of a process;
    ("?", 0.0) if it has ended.

    Other threads wake up now and then to wait for the GIL, which is not progress.
    """
    try:
        with open(f"/proc/{pid}/task/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "?", 0.0
    return fields[0], sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
