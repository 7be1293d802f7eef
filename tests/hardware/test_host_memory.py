"""The memory that every limit leaves: of the machine, of cgroups, of the process."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from offloadtrain.hardware import cgroup, host_memory

KIB, MIB = 1 << 10, 1 << 20
MEMBERS = "4:memory:/box/inner\n0::/job/task"
V1_NO_LIMIT = 9223372036854771712


def put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def v1(folder: Path, limit: int, used: int, cache: int) -> None:
    put(folder / "memory.limit_in_bytes", limit)
    put(folder / "memory.usage_in_bytes", used)
    put(folder / "memory.stat", f"cache 7\ninactive_file 1\ntotal_inactive_file {cache}")


def v2(folder: Path, limit: object, used: int, cache: int) -> None:
    put(folder / "memory.max", limit)
    put(folder / "memory.current", used)
    put(folder / "memory.stat", f"anon 7\ninactive_file {cache}")


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    put(tmp_path / "membership", MEMBERS)
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "cgroup"


def free(mount: Path) -> list[int]:
    limits = cgroup.memory_limits(mount, mount.parent / "membership")
    return sorted(limit.free_bytes for limit in limits)


def test_a_limit_of_either_version_counts_at_every_level(mount: Path) -> None:
    """A file that says no number sets none, and a group without counters has all of its limit."""
    for make, no_limit, root, levels in (
        (v2, "max", mount, (".", "job", "job/task")),
        (v1, V1_NO_LIMIT, mount / "memory", (".", "box", "box/inner")),
    ):
        for level in levels:
            for above in levels:
                make(root / above, no_limit, 100, 0)  # type: ignore[arg-type]
            assert free(mount) == []
            make(root / level, 1000, 400, 50)  # type: ignore[arg-type]
            assert free(mount) == [650]
        make(root / levels[-1], no_limit, 100, 0)  # type: ignore[arg-type]
    v1(mount / "memory/box", 1000, 900, 0)
    for text in ("", "max", "-1", "x", "9" * 30):
        v2(mount / "job", text, 400, 0)
        assert free(mount) == [100]
    v2(mount / "job", 1000, 400, 0)
    assert free(mount) == [100, 600]
    (mount / "job/memory.current").unlink()
    assert free(mount) == [100, 1000]


def test_the_least_of_all_limits_is_told_by_name(
    mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v2(mount / "job", 3 * MIB, MIB, 0)
    limits = cgroup.memory_limits(mount, mount.parent / "membership")
    monkeypatch.setattr(cgroup, "memory_limits", lambda: limits)
    monkeypatch.setattr(host_memory, "_meminfo_available", lambda: 10 * MIB)
    monkeypatch.delenv("OFFLOADTRAIN_HOST_MEMORY", raising=False)
    assert str(host_memory.least_room()) == (
        f"2.0 MiB is available ({mount}/job/memory.max = 3145728)"
    )
    monkeypatch.setattr(host_memory, "_meminfo_available", lambda: MIB)
    assert str(host_memory.least_room()) == "1.0 MiB is available (MemAvailable of /proc/meminfo)"


@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_an_rlimit_leaves_what_this_process_has_not_taken(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`getrlimit` is asked of Linux; only its answer is changed."""
    limit = 1 << 45
    none = (resource.RLIM_INFINITY,) * 2
    kind = getattr(resource, name)
    monkeypatch.setattr(
        resource, "getrlimit", lambda requested: (limit, 0) if requested == kind else none
    )
    (room,) = host_memory._rlimits()
    assert room.limit == f"{name} = {limit}"
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    fields = ("VmSize",) if name == "RLIMIT_AS" else ("VmData", "VmStk")
    used_bytes = sum(int(status[field].split()[0]) * KIB for field in fields)
    assert limit - room.num_bytes == pytest.approx(used_bytes, rel=0.05)


MAPPED = """
import resource, sys
from offloadtrain.config.errors import HostMemoryError
from offloadtrain.hardware import host_memory
from offloadtrain.runtime import arena
from offloadtrain.step.layout.buffers import BufferSpec
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (64 << 20),) * 2)
if sys.argv[1] == "ENOMEM":  # as if another thread took the memory between look and mapping
    arena.least_room = lambda: host_memory.Room(1 << 40, "")
ledger = arena.Ledger()
try:
    arena.Arena(ledger, pin=False).map([BufferSpec("master weights", 64 << 20, "float32")])
except HostMemoryError as error:
    print(error)
assert ledger.rows() == []
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "ENOMEM"])
def test_a_real_rlimit_is_refused_with_the_owners(when: str) -> None:
    command = [sys.executable, "-c", MAPPED, when]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "needs 256.0 MiB of host memory" in done.stdout
    assert "Largest: master weights 256.0 MiB" in done.stdout
    assert ("RLIMIT_AS" in done.stdout) == (when == "before")


AT_THE_LIMIT = """
import resource, sys
from offloadtrain.hardware.host_memory import refusal

pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (1 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
taken = []
for size in (1 << 16, 1 << 12, 1 << 8, 1 << 5):
    try:
        while True:
            taken.append(bytearray(size))
    except MemoryError as error:
        last = error
sys.stdout.write(refusal(last))
"""


def test_a_refusal_has_memory_for_its_message() -> None:
    """Nothing else can be allocated, not even to read the limits."""
    done = subprocess.run([sys.executable, "-c", AT_THE_LIMIT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the host gives no more memory (MemoryError): " in done.stdout
    assert "is available (RLIMIT_AS = " in done.stdout
