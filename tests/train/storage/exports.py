"""SIGKILL at every call of an export that may have an effect, Python's and the extensions' own."""

from __future__ import annotations

import io
import os
import signal
import sys
import types
from collections import deque
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

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
    job = small_job(scratch, "train.steps=2", "train.eval_every=0", "train.checkpoint_every=0")
    trained = scratch / "trained"
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        assert run(job, trained) == 0
    for warm in ("first", "second"):  # what is imported and cached is so from here on
        calls = _exported(trained, scratch / warm, CalledOf())
    return [
        Case(f"export: before call {at} ({name})", partial(_killed, trained, scratch, at))
        for at, name in enumerate(calls)
    ]


def _exported(trained: Path, out: Path, profiler: CalledOf) -> list[str]:
    saved = trained_model.open_saved(trained)
    sys.setprofile(profiler)
    try:
        trained_model.export(saved, out, dtype="fp32")
    finally:
        sys.setprofile(None)
    return profiler.calls


def _killed(trained: Path, scratch: Path, at: int, root: Path) -> str:
    out = root / "out"
    pid = os.fork()
    if pid == 0:
        in_fork(lambda: _exported(trained, out, CalledOf(at)))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    # Once in a while a process has a call less than the one before it.
    assert code in (-signal.SIGKILL, 0), code
    there = out.exists()
    if there:
        _same_files(out, scratch / "first")
    assert checkpoint.newest_good(trained / "checkpoints", refuse_damage) is not None
    again = root / "again" if there else out
    _exported(trained, again, CalledOf())
    _same_files(again, scratch / "first")
    return "whole" if there else "absent"


def _same_files(out: Path, expected: Path) -> None:
    """Names, and the tensors to the bit."""
    assert {p.name for p in out.iterdir()} == {p.name for p in expected.iterdir()}
    tensors, other = (load_file(at / "model.safetensors") for at in (out, expected))
    assert tensors.keys() == other.keys()
    assert all(torch.equal(tensors[name], other[name]) for name in tensors)
