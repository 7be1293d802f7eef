"""The order of a save's calls, and what is left where one of them fails.

`test_storage_faults.py` has the faults at every call.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.manifest import CheckpointError
from offloadtrain.train.checkpoint.save import save
from tests.train.faulty_os import FaultyOs, fail_with, through
from tests.train.toy_state import filled

WRITES = ("posix_fallocate", "pwrite", "write", "fsync", "rename")


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    for step in (1, 2):
        save(folder, step, *filled(step), {"step": step})
    (folder / "step-00000003.tmp-dead").mkdir()
    (folder / "step-00000003.tmp-dead" / "rank-000.bin").write_bytes(b"half")
    return folder


def save_and_prune(folder: Path, fault: FaultyOs) -> None:
    """Save step 3 beside 1 and 2 and prune, with every `os` call going through `fault`."""
    with through(fault):
        save(folder, 3, *filled(3), {"step": 3})
        checkpoint.prune(folder, 2)


def fresh(two_saved: Path, scratch: Path) -> Path:
    shutil.rmtree(scratch, ignore_errors=True)
    return Path(shutil.copytree(two_saved, scratch))


def test_a_failed_write_leaves_nothing_behind(two_saved: Path, tmp_path: Path) -> None:
    folder = fresh(two_saved, tmp_path / "run")
    fault = FaultyOs()
    save_and_prune(folder, fault)
    writes = [n for n, (name, _) in enumerate(fault.calls) if name in WRITES]
    for at in writes[:-2]:
        folder = fresh(two_saved, tmp_path / "run")
        with pytest.raises(CheckpointError, match="No space left on device"):
            save_and_prune(folder, FaultyOs(at, fail_with(errno.ENOSPC)))
        if not (folder / "step-00000003").exists():
            assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000002"]


def test_order_of_durability(two_saved: Path, tmp_path: Path) -> None:
    """Against power loss: content before names, the new name before the old ones go."""
    folder = fresh(two_saved, tmp_path / "run")
    trace = _trace(folder)
    created = [n for n, (name, path) in enumerate(trace) if name == "create"]
    publish = next(n for n, (name, path) in enumerate(trace) if name == "rename")
    for n in created:
        assert ("fsync", trace[n][1]) in trace[n:publish]
    unfinished = Path(trace[publish][1])
    assert trace[publish - 1] == ("fsync", str(unfinished))
    assert trace[publish + 1] == ("fsync", str(folder))
    removals = [n for n, (name, path) in enumerate(trace) if name in ("unlink", "rmdir")]
    stale = [n for n in removals if "tmp-dead" in trace[n][1]]
    assert all(n > publish + 1 for n in removals if n not in stale)


def _trace(folder: Path) -> list[tuple[str, str]]:
    """Save with file descriptors resolved to paths, keeping only what durability depends on."""
    trace: list[tuple[str, str]] = []

    class Tracing(FaultyOs):
        def __getattr__(self, name: str) -> object:
            real = super().__getattr__(name)
            if name == "open":

                def opened(path: Path, flags: int, mode: int) -> int:
                    if flags & os.O_CREAT:
                        trace.append(("create", str(path)))
                    return int(real(path, flags, mode))

                return opened
            if name == "fsync":

                def synced(fd: int) -> None:
                    trace.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
                    real(fd)

                return synced
            if name in ("rename", "unlink", "rmdir"):

                def named(path: Path, *rest: Path) -> None:
                    trace.append((name, str(path)))
                    real(path, *rest)

                return named
            return real

    save_and_prune(folder, Tracing())
    return trace
