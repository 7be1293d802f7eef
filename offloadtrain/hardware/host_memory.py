"""The memory that the host has for this process, measured or stated."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offloadtrain.config.errors import HostMemoryError, InputError
from offloadtrain.config.units import format_bytes, parse_bytes
from offloadtrain.hardware import cgroup

HOST_MEMORY_VARIABLE = "OFFLOADTRAIN_HOST_MEMORY"
_ALL, _RESIDENT, _DATA = 0, 1, 5
"""Fields of /proc/self/statm, in pages."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that one limit leaves to this process."""

    num_bytes: int
    limit: str

    def __str__(self) -> str:
        return f"{format_bytes(max(self.num_bytes, 0))} is available ({self.limit})"


def available_bytes() -> int:
    """Return the host memory that is available under every limit."""
    return least_room().num_bytes


def least_room() -> Room:
    """Return the tightest limit: the machine's memory (the kernel's estimate, or the stated size
    without this process's memory), this process's cgroups at every level, or its rlimits."""
    return min((_machine(), *_cgroups(), *_rlimits()), key=lambda room: room.num_bytes)


def has_rlimit() -> bool:
    """Return True if this process has a limit of address space or of data (ulimit -v, -d)."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return any(limit != resource.RLIM_INFINITY for limit in limits)


_FEWEST_BYTES = 128 << 20


def require_threads_room() -> None:
    """Check the memory under rlimits before threads are started. A thread without memory ends
    before it reports its start, and Python waits for this report forever.

    Raises:
        HostMemoryError: if the memory is too small for the stacks of threads and their imports.
    """
    for room in _rlimits():
        if room.num_bytes < _FEWEST_BYTES:
            needed = f"threads need {format_bytes(_FEWEST_BYTES)}"
            raise HostMemoryError(f"the host gives no more memory ({needed}): {room}")


_REFUSALS = (
    *("DefaultCPUAllocator: can't allocate", "DefaultCPUAllocator: not enough memory", "bad_alloc"),
    *("Cannot allocate memory", "failed to map segment from shared object"),
    *("can't start new thread", "Resource temporarily unavailable", "could not create a primitive"),
)
"""Error texts of torch, the loader, Python and oneDNN, which have no exception type for a
refusal."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if Python, the kernel, a library or the loader could not get host memory, or a
    thread, which needs memory. Returns False for an error that already reports this."""
    if error is None or isinstance(error, HostMemoryError):
        return False
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    # C code that returned without its MemoryError; llvmlite, which hides the loader's reason.
    vague = isinstance(error, SystemError) or "load shared object file" in str(error)
    if vague and has_rlimit():
        return True
    by_words = isinstance(error, RuntimeError | ImportError | OSError)
    if by_words and any(words in str(error) for words in _REFUSALS):
        return True
    return is_out_of_memory(error.__cause__)


_reserve = [bytearray(4 << 20)]
"""Address space for the message of `refusal`; its pages are never touched."""


def refusal(error: object) -> str:
    """Return a message, for example "the host gives no more memory (can't start new thread): 68.0
    KiB is available (RLIMIT_AS = 943718400)".

    Args:
        error: an error for which `is_out_of_memory` is true, or a description of the event.
    """
    # At the limit no further memory is available, not even to read /proc.
    _reserve.clear()
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = next((x for x in lines if any(words in x for words in _REFUSALS)), lines[0])
    reason = line.strip().rpartition("DefaultCPUAllocator: ")[2][:200]
    if "thread" in reason or "temporarily" in reason:
        reason += "; a limit of processes (ulimit -u, pids.max) may be the cause"
    return f"the host gives no more memory ({reason}): {least_room()}"


def _machine() -> Room:
    stated = stated_bytes()
    if stated is None:
        return Room(_meminfo_available(), "MemAvailable of /proc/meminfo")
    return Room(max(stated - (resident_bytes() or 0), 0), HOST_MEMORY_VARIABLE)


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None if unknown."""
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_bytes().split()[_RESIDENT])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return None


def _cgroups() -> Iterator[Room]:
    for limit in cgroup.memory_limits():
        yield Room(limit.free_bytes, f"{limit.file} = {limit.num_bytes}")


def _rlimits() -> Iterator[Room]:
    """Yield the limits of address space, which is always larger than the memory of a process."""
    fields = [int(text) for text in Path("/proc/self/statm").read_text().split()]
    for name, pages in (("RLIMIT_AS", fields[_ALL]), ("RLIMIT_DATA", fields[_DATA])):
        limit, _ = resource.getrlimit(getattr(resource, name))
        if limit != resource.RLIM_INFINITY:
            free = limit - pages * os.sysconf("SC_PAGE_SIZE")
            yield Room(max(free, 0), f"{name} = {limit}")


def stated_bytes() -> int | None:
    """Return the host's memory stated in OFFLOADTRAIN_HOST_MEMORY; None if not set.

    The variable is for virtual machines whose memory grows on demand, because the kernel knows only
    the current size.

    Raises:
        InputError: if the value is not a size.
    """
    text = os.environ.get(HOST_MEMORY_VARIABLE, "")
    if not text:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise InputError(f"{HOST_MEMORY_VARIABLE}: {error}") from None


def meminfo() -> dict[str, int]:
    """Return the sizes in /proc/meminfo, in bytes."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {name.rstrip(":"): int(size) << 10 for name, size, *_ in lines}


def _meminfo_available() -> int:
    if (available := meminfo().get("MemAvailable")) is None:
        raise HostMemoryError("/proc/meminfo has no MemAvailable: Linux 3.14 or newer is needed")
    return available
