"""SIGKILL at calls of `offloadtrain convert` that have an effect: to a file or a folder of torch,
and from one to a run."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch.distributed.checkpoint.filesystem import FileSystemReader

from offloadtrain.config.job import Config
from offloadtrain.convert import run_import
from offloadtrain.convert.reader import open_foreign
from offloadtrain.convert.torch_export import to_dcp, to_torch
from offloadtrain.train import trained_model
from offloadtrain.train.build import described, empty_model
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.log.console import Console
from tests.train.small_job import run, small_job
from tests.train.storage.exports import CalledOf
from tests.train.storage.saves import Case, in_fork, none_unfinished, refuse_damage

EVERY = {"to dcp": 24}
"""Direction → every so many calls are tried: torch's writer of folders has thousands of them."""
Convert = Callable[[Path], object]
"""To a new path."""
Check = Callable[[Path, Path], bool]
"""Compares what is at a path, if anything, with what should be; returns whether it is there."""


@dataclass(frozen=True, slots=True)
class Direction:
    convert: Convert
    check: Check


def cases(scratch: Path) -> list[Case]:
    """Every call, of conversions of a small run and back."""
    job = small_job(scratch, "train.steps=2", "train.eval_every=0", "train.checkpoint_every=0")
    trained = scratch / "trained"
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        assert run(job, trained) == 0
    to_torch(trained_model.open_saved(trained), scratch / "source.pt")
    longer = replace(job, train=replace(job.train, steps=9))
    directions = {
        "to torch": Direction(lambda out: to_torch(trained_model.open_saved(trained), out), _file),
        "to dcp": Direction(lambda out: to_dcp(trained_model.open_saved(trained), out), _folder),
        "to a run": Direction(_from_file(longer, scratch / "source.pt"), _run),
    }
    return [
        case for name, direction in directions.items() for case in _of(name, direction, scratch)
    ]


def _of(name: str, direction: Direction, scratch: Path) -> Iterator[Case]:
    expected_path = scratch / f"{name}, complete"
    for out in (scratch / f"{name}, warm", expected_path):  # imported and cached from here on
        calls = _converted(direction, out, CalledOf())
    every = EVERY.get(name, 1)
    for at, call in list(enumerate(calls))[::every]:
        title = f"{name}: before call {at} ({call})"
        yield Case(title, partial(_killed, direction, expected_path, at))


def _converted(direction: Direction, out: Path, profiler: CalledOf) -> list[str]:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        sys.setprofile(profiler)
        try:
            direction.convert(out)
        finally:
            sys.setprofile(None)
    return profiler.calls


def _killed(direction: Direction, expected_path: Path, at: int, root: Path) -> str:
    out = root / "out"
    pid = os.fork()
    if pid == 0:
        in_fork(lambda: _converted(direction, out, CalledOf(at)))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    # Once in a while a process has a call less than the one before it.
    assert code in (-signal.SIGKILL, 0), code
    there = direction.check(out, expected_path)
    again = root / "again" if out.exists() else out
    _converted(direction, again, CalledOf())
    assert direction.check(again, expected_path)
    return "complete" if there else "absent"


def _file(out: Path, expected_path: Path) -> bool:
    assert not out.exists() or out.read_bytes() == expected_path.read_bytes()
    return out.exists()


def _folder(out: Path, expected_path: Path) -> bool:
    if not out.exists():
        return False
    assert {p.name for p in out.iterdir()} == {p.name for p in expected_path.iterdir()}
    for path in expected_path.glob("*.distcp"):
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    # The index holds the folder's own path, too.
    written, expected = (FileSystemReader(at).read_metadata() for at in (out, expected_path))
    assert written.state_dict_metadata == expected.state_dict_metadata
    assert written.storage_data == expected.storage_data
    return True


def _run(out: Path, expected_path: Path) -> bool:
    newest = checkpoint.newest_good(out / "checkpoints", refuse_damage)
    if newest is None:
        return False
    name = f"{newest.path.name}/rank-000.bin"
    expected = expected_path / "checkpoints" / name
    assert (out / "checkpoints" / name).read_bytes() == expected.read_bytes()
    none_unfinished(out / "checkpoints")
    return True


def _from_file(job: Config, source: Path) -> Convert:
    """A conversion to a run, whose reader's process has answered before: it writes nothing."""
    wanted = list(run_import.model_tensors(empty_model(described(job))))
    with open_foreign(source, None, wanted) as foreign:
        tensors = list(foreign.tensors())
        recorded = SimpleNamespace(
            **{key: getattr(foreign, key) for key in ("kind", "step", "groups", "notes")},
            tensors=lambda: iter(tensors),
        )

    @contextmanager
    def opened(*arguments: Any) -> Iterator[Any]:
        yield recorded

    def to_run(out: Path) -> None:
        with mock.patch.object(run_import, "open_foreign", opened):
            quiet = Console(quiet=True)
            run_import.to_run(job, "", source, optimizer=None, run_dir=out, console=quiet)

    return to_run
