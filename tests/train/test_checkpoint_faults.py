"""A process killed, or a disk failing, at any point of a save costs at most that save.

Every effect of a save is one call of the `os` module, so "any point" is every call, one at a time.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from offloadtrain.hardware import atomic_io, direct_io
from offloadtrain.train.checkpoint import checkpoint, disk_space
from offloadtrain.train.checkpoint import save as save_module
from offloadtrain.train.checkpoint.manifest import CheckpointError
from offloadtrain.train.checkpoint.restore import restore
from offloadtrain.train.checkpoint.save import save
from tests.train.faulty_os import FaultyOs, fail_with, kill
from tests.train.toy_state import filled, same

WRITES = ("posix_fallocate", "pwrite", "write", "fsync", "rename")

STRIDES = pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 7])
"""Every call, or every seventh: the kinds of calls take turns, so that it meets all of them."""


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
    real = atomic_io.os
    for module in (atomic_io, direct_io, checkpoint, disk_space, save_module):
        module.os = fault  # type: ignore[attr-defined]
    try:
        save(folder, 3, *filled(3), {"step": 3})
        checkpoint.prune(folder, 2)
    finally:
        for module in (atomic_io, direct_io, checkpoint, disk_space, save_module):
            module.os = real  # type: ignore[attr-defined]


def num_calls(two_saved: Path, scratch: Path) -> int:
    counter = FaultyOs()
    save_and_prune(fresh(two_saved, scratch), counter)
    return len(counter.calls)


def fresh(two_saved: Path, scratch: Path) -> Path:
    shutil.rmtree(scratch, ignore_errors=True)
    return Path(shutil.copytree(two_saved, scratch))


def loaded_step(folder: Path) -> int:
    """Return the step of the newest checkpoint, after comparing all its values."""

    def fail(path: Path, damage: Exception) -> None:
        raise AssertionError(f"a completely named checkpoint is damaged: {damage}")

    found = checkpoint.newest_good(folder, fail)
    assert found is not None
    assert all(checkpoint.verify(path) for path in checkpoint.find(folder))
    model, state = filled(99)
    restore(found, model, state)
    assert same(state, filled(found.step)[1]) and model.seen == found.step
    assert found.state == {"step": found.step}
    return found.step


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("tear", [False, True], ids=["before", "half-way"])
@STRIDES
def test_killed_at_every_call(two_saved: Path, tmp_path: Path, tear: bool, stride: int) -> None:
    seen = set()
    total = num_calls(two_saved, tmp_path / "run")
    assert total > 40
    for at in range(tear, total, stride):
        folder = fresh(two_saved, tmp_path / "run")
        child = os.fork()
        if child == 0:
            fault = FaultyOs(at, kill)
            fault.tear_writes = tear
            save_and_prune(folder, fault)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        seen.add(loaded_step(folder))
        save(folder, 4, *filled(4), {"step": 4})
        assert loaded_step(folder) == 4
        assert all(name.startswith("step-") and len(name) == 13 for name in os.listdir(folder))
    assert seen == {2, 3}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@STRIDES
def test_disk_failing_at_every_call(
    two_saved: Path, tmp_path: Path, code: int, stride: int
) -> None:
    total = num_calls(two_saved, tmp_path / "run")
    for at in range(0, total, stride):
        folder = fresh(two_saved, tmp_path / "run")
        fault = FaultyOs(at, fail_with(code))
        with pytest.raises((CheckpointError, OSError)) as caught:
            save_and_prune(folder, fault)
        published = (folder / "step-00000003").exists()
        assert published or isinstance(caught.value, CheckpointError)
        assert loaded_step(folder) == (3 if published else 2)
        save(folder, 4, *filled(4), {"step": 4})
        assert all(name.startswith("step-") and len(name) == 13 for name in os.listdir(folder))


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
