"""SIGKILL at every call of an export that may have an effect, Python's and the extensions' own."""

from __future__ import annotations

import io
import os
import signal
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from offloadtrain.config.job import Config
from offloadtrain.train import trained_model
from offloadtrain.train.checkpoint import checkpoint
from tests.train.small_job import run, small_job
from tests.train.storage.saves import Case, in_fork, refuse_damage

EFFECTS = frozenset(
    (
        *("open", "write", "close", "flush", "fsync", "chmod", "truncate", "serialize_file"),
        *("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "symlink", "link"),
    )
)
"""Names of functions of C, of whatever module or type."""


_VALUES = (str, bytes, list, set, deque, io.BytesIO, io.StringIO)
Convert = Callable[[Path], object]
"""To a new path."""
Check = Callable[[Path, Path], bool]
"""Compares what is at a path, if anything, with what should be; returns whether it is there."""


@dataclass(frozen=True, slots=True)
class Direction:
    convert: Convert
    check: Check


class CalledOf:
    """A profiler that counts calls of functions with an effect, and ends the process at one."""

    def __init__(self, at: int = -1) -> None:
        self.calls: list[str] = []
        self._at = at

    def __call__(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if event != "c_call" or arg.__name__ not in EFFECTS or _in_memory(arg):
            return
        if len(self.calls) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls.append(arg.__name__)


def _in_memory(call: Any) -> bool:
    """Tell whether it is a method of a value, such as `str.replace`."""
    return isinstance(getattr(call, "__self__", None), _VALUES)


def cases(scratch: Path) -> list[Case]:
    """Every call, of an export of a small run."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    _, trained = briefly_trained(scratch)
    saved = trained_model.open_saved(trained)

    def check(out: Path, expected: Path) -> bool:
        """Names, and the tensors to the bit; the run is as it was."""
        assert checkpoint.newest_good(trained / "checkpoints", refuse_damage) is not None
        if not out.exists():
            return False
        assert {p.name for p in out.iterdir()} == {p.name for p in expected.iterdir()}
        tensors, other = (load_file(at / "model.safetensors") for at in (out, expected))
        assert tensors.keys() == other.keys()
        assert all(torch.equal(tensors[name], other[name]) for name in tensors)
        return True

    export = partial(trained_model.export, saved, dtype="fp32")
    return list(cases_of("export", Direction(export, check), scratch))


def briefly_trained(scratch: Path) -> tuple[Config, Path]:
    """Return a job, and its run of two steps."""
    job = small_job(scratch, "train.steps=2", "train.eval_every=0", "train.checkpoint_every=0")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        assert run(job, scratch / "trained") == 0
    return job, scratch / "trained"


def cases_of(name: str, direction: Direction, scratch: Path, every: int = 1) -> Iterator[Case]:
    """Yield a case for each of so many calls."""
    expected = scratch / f"{name}, complete"
    for out in (scratch / f"{name}, warm", expected):  # imported and cached from here on
        calls = _converted(direction, out, CalledOf())
    for at, call in list(enumerate(calls))[::every]:
        title = f"{name}: before call {at} ({call})"
        yield Case(title, partial(_killed, direction, expected, at))


def _converted(direction: Direction, out: Path, profiler: CalledOf) -> list[str]:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        sys.setprofile(profiler)
        try:
            direction.convert(out)
        finally:
            sys.setprofile(None)
    return profiler.calls


def _killed(direction: Direction, expected: Path, at: int, root: Path) -> str:
    out = root / "out"
    pid = os.fork()
    if pid == 0:
        in_fork(lambda: _converted(direction, out, CalledOf(at)))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    # Once in a while a process has a call less than the one before it.
    assert code in (-signal.SIGKILL, 0), code
    is_there = direction.check(out, expected)
    again = root / "again" if out.exists() else out
    _converted(direction, again, CalledOf())
    assert direction.check(again, expected)
    return "complete" if is_there else "absent"
