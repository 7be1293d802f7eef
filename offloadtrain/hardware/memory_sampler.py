"""Live memory of a rank: samples taken during training, several times a second.

[Note: Sampling without waiting]
The sampler's thread reads counters of the allocator, of the driver through NVML, and files of the
kernel. None of them waits for the device, and no step waits for the sampler. The allocator's own
peak includes tensors that live between two samples, and the training thread resets it after each
step: the peak of a record is the peak of the step so far, and no peak is lost. The kernel has no
resettable peak of resident memory, so host peaks shorter than the interval may be missed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.events import schema
from offloadtrain.events.standby_thread import StandbyThread
from offloadtrain.hardware import host_memory

INTERVAL_S = 0.2
RECORD_S = 2.0
WITHIN_STEP_S = 0.025
"""Interval inside a sampled step; at most one step in 20 is sampled."""

HOST_S = 1.0
"""Interval of reading the host's memory under every limit, which costs more than all other
reads."""

CURVE_POINTS = 64


Sizes: TypeAlias = dict[str, int | None]
"""A sample in bytes, by names of `schema.MEMORY_QUANTITIES`; None: unknown."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on the device. All attributes except `peak` are `schema.MEMORY_QUANTITIES`.

    Attributes:
        peak: largest allocated size since the step began.
        free: None: the driver does not report it.
    """

    allocated: int
    reserved: int
    inactive: int
    peak: int
    free: int | None = None


@dataclass(slots=True)
class Window:
    """The smallest, newest and largest value of each quantity since the last record."""

    _extremes: dict[str, list[int]] = field(default_factory=dict)
    step: int = 0

    def add(self, step: int, sizes: Mapping[str, int | None], peak: int | None = None) -> None:
        """Add a sample; `peak`: largest size since the previous sample, if the allocator knows
        it."""
        self.step = step
        for name, size in sizes.items():
            if size is None:
                continue
            least, _, most = self._extremes.get(name, (size, size, size))
            most = max(most, peak or 0) if name == "allocated" else most
            self._extremes[name] = [min(least, size), size, max(most, size)]

    @property
    def is_empty(self) -> bool:
        return not self._extremes

    def record(self) -> schema.LiveMemory:
        """Return a record of the samples since the last call, and clear them."""
        extremes, self._extremes = self._extremes, {}
        return schema.LiveMemory(
            step=self.step, **{f"{name}_kib": _short(sizes) for name, sizes in extremes.items()}
        )


class MemorySampler:
    """Samples memory on its own thread, into records for the log."""

    _read_device: Callable[[], DeviceMemory] | None
    _pinned: Callable[[], int | None]
    _each_second: Callable[[], None]

    def __init__(
        self, emit: Callable[[schema.Event], None], interval_s: float = INTERVAL_S
    ) -> None:
        """`emit` receives a record every RECORD_S, on the sampler's thread."""
        self._emit, self._interval_s = emit, interval_s
        self._window = Window()
        self._step = 0
        self._host_peak = 0
        self._followed: tuple[float, list[tuple[float, int]]] | None = None
        """Start of the followed step, and its curve of (ms, bytes)."""
        self._host, self._host_until_s = Sizes(), 0.0
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread = StandbyThread("memory-sampler")

    def begin(
        self,
        *,
        read_device: Callable[[], DeviceMemory] | None = None,
        pinned: Callable[[], int | None] = lambda: None,
        each_second: Callable[[], None] = lambda: None,
    ) -> None:
        """Start sampling.

        Args:
            read_device: None: sample only the host.
            each_second: called on the sampler's thread.
        """
        self._read_device, self._pinned, self._each_second = read_device, pinned, each_second
        self._thread.begin(self._run)

    def step_begins(self, step: int, *, follow: bool = False) -> None:
        """Set the current step; with `follow`, sample it closely."""
        self._step = step
        if follow:
            self._followed = time.perf_counter(), []
            self._wake.set()  # the thread may sleep for longer than the step

    def end_step(self) -> tuple[int, schema.StepMemory | None]:
        """Return the peak of resident memory in the step, and its curve if it was followed."""
        peak, self._host_peak = self._host_peak, 0
        followed, self._followed = self._followed, None
        if followed is None or not followed[1]:
            return peak, None
        times, sizes = zip(*thinned(followed[1]), strict=True)
        tier = "host" if self._read_device is None else "device"
        return peak, schema.StepMemory(step=self._step, tier=tier, at_ms=times, kib=sizes)

    def close(self) -> None:
        """End the thread; if it samples, write a last record. Idempotent."""
        self._ended.set()
        self._wake.set()
        self._thread.begin(lambda: None)  # no effect if it already samples
        self._thread.join(timeout=10 * INTERVAL_S)  # not longer, because a driver call may hang

    def _run(self) -> None:
        next_record_s = time.monotonic() + RECORD_S
        while True:  # at least one sample, however early it ends
            self._sample()
            if time.monotonic() >= next_record_s:
                self._emit(self._window.record())
                next_record_s += RECORD_S
            # wait for the next sample; the start of a followed step ends the wait
            self._wake.wait(self._interval_s if self._followed is None else WITHIN_STEP_S)
            self._wake.clear()
            if self._ended.is_set():
                break
        if not self._window.is_empty:  # may be empty if no sample followed the previous record
            self._emit(self._window.record())

    def _sample(self) -> None:
        device = self._read_device() if self._read_device else None
        if time.monotonic() >= self._host_until_s:
            self._host = _host_sizes()
            self._host_until_s = time.monotonic() + HOST_S
            self._each_second()
        sizes = sampled(device, self._pinned(), self._host)
        self._window.add(self._step, sizes, device.peak if device else None)
        resident = sizes["rss"] or 0
        self._host_peak = max(self._host_peak, resident)
        if (followed := self._followed) is not None:
            size = device.allocated if device else resident
            followed[1].append((1e3 * (time.perf_counter() - followed[0]), size))


def sampled(device: DeviceMemory | None, pinned: int | None, host: Sizes) -> Sizes:
    """Return a sample: this process's current resident memory, and the last known other sizes."""
    sizes = {"rss": host_memory.resident_bytes(), "pinned": pinned, **host}
    if device is not None:
        names = ("allocated", "reserved", "inactive", "free")
        sizes |= {name: getattr(device, name) for name in names}
    return sizes


def _host_sizes() -> Sizes:
    """Return the sizes of the host's memory; takes half a millisecond."""
    sizes = Sizes()
    with suppress(OSError, ValueError, OffloadTrainError):
        sizes["available"] = max(host_memory.available_bytes(), 0)
    with suppress(OSError, ValueError, KeyError):
        stated = host_memory.meminfo()
        sizes["page_cache"] = stated["Cached"]
        sizes["swap"] = stated["SwapTotal"] - stated["SwapFree"]
    return sizes


def thinned(curve: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return at most CURVE_POINTS of (ms, KiB); each has the largest size of the points that it
    replaces."""
    group = -(-len(curve) // CURVE_POINTS)
    parts = [curve[i : i + group] for i in range(0, len(curve), group)]
    return [(round(part[-1][0], 1), max(size for _, size in part) >> 10) for part in parts]


def _short(sizes: list[int]) -> tuple[int, ...]:
    least, now, most = (size >> 10 for size in sizes)
    return (now,) if least == now == most else (least, now, most)
