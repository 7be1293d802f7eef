"""`offloadtrain train` in processes that begin with all it imports, ranks and launcher: seconds of
imports per case are saved, and everything behind them is the command's own.

Three things stand in for an `exec`: what a process inherits is closed, signals have their defaults,
and the environment is the one that it is given. A file that all of them hold open finds them.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NoReturn

import torch

from offloadtrain.cli import supervisor
from offloadtrain.runtime.launcher_link import STACKS
from tests.distributed.pool import forkserver

MARKER = 200
"""The descriptor of the file that finds the processes of a job."""
_NUMBERS = itertools.count()
_MODULES = {"offloadtrain": "offloadtrain.cli.main"}


class ForkedRank:
    """What `subprocess.Popen` is to the launcher, by a fork of it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: int | None,
        stderr: int | None,
        pass_fds: Sequence[int],
        start_new_session: bool,
        env: Mapping[str, str],
    ) -> None:
        assert stdin == subprocess.DEVNULL and start_new_session
        self.stdout: BinaryIO | None = None
        ends = os.pipe() if stdout == subprocess.PIPE else None
        self.pid = os.fork()
        if self.pid == 0:
            if ends:
                os.dup2(ends[1], 1)
                os.dup2(ends[1], 2)
            os.setsid()
            _become(command[command.index("-m") + 1 :], keep=pass_fds, environ=env)
        if ends:
            os.close(ends[1])
            self.stdout = os.fdopen(ends[0], "rb")
        self._code: int | None = None

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


_FORKS = SimpleNamespace(
    Popen=ForkedRank,
    PIPE=subprocess.PIPE,
    DEVNULL=subprocess.DEVNULL,
    STDOUT=subprocess.STDOUT,
)
"""What the launcher takes for the module `subprocess`."""


class ForkedJob:
    """A launcher, as `rank_faults.Job` needs it: with its exit code and its signals."""

    def __init__(self, program: str, arguments: Sequence[str], fault: Path) -> None:
        """
        Args:
            program: what ranks run: `-m MODULE`, and arguments before `train`.
            arguments: from `train` on.
            fault: where a fault writes its time; other files of the job are made beside it.
        """
        marker, output = fault.with_suffix(".marker"), fault.with_suffix(f".output{next(_NUMBERS)}")
        os.mkfifo(output)
        marker.touch()
        args = ([*program.split()], [*arguments], output, marker, fault)
        self._process: BaseProcess = forkserver().Process(target=_job, args=args)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdout = output.open(encoding="utf-8", errors="replace")

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked job", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _job(
    program: Sequence[str], arguments: Sequence[str], printed: Path, marker: Path, fault: Path
) -> NoReturn:
    """All of a launcher's process."""
    supervisor.subprocess = _FORKS  # type: ignore[assignment, attr-defined]
    supervisor.PROGRAM = tuple(program)  # type: ignore[assignment]
    os.dup2(os.open(marker, os.O_RDONLY), MARKER)
    output = os.open(printed, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    environ = os.environ | {"OMP_NUM_THREADS": "1", "FAULT_AT": str(fault)}
    _become(["offloadtrain", *arguments], keep=(), environ=environ)


def _become(command: Sequence[str], *, keep: Sequence[int], environ: Mapping[str, str]) -> NoReturn:
    """Run a module's `main` with these arguments as a process of its own would."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in (0, 1, 2, MARKER, *keep):
            with suppress(OSError):  # that of the listing
                os.close(fd)
    faulthandler.unregister(STACKS)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    variables = dict(environ)
    os.environ.clear()
    os.environ.update(variables)
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
    torch.set_num_threads(1)
    code = 1
    try:
        module, *arguments = command
        code = importlib.import_module(_MODULES.get(module, module)).main(arguments)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _stream(fd: int) -> Any:
    return open(fd, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
