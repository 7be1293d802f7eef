"""Live memory: peaks between samples are in records, and what it writes is little."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offloadtrain.events import log_lines, schema
from offloadtrain.hardware import memory_sampler
from offloadtrain.hardware.memory_sampler import MemorySampler, Window, thinned
from offloadtrain.runtime.device_memory import AllocatorCounters
from tests.runtime.fake_allocator import FakeAllocator

GIB = 1 << 30
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    allocator = FakeAllocator(32 * GIB)
    allocator.install(monkeypatch)
    return allocator


class Sampled:
    """A sampler whose samples can be waited for."""

    def __init__(self, allocator: AllocatorCounters | None) -> None:
        self.records: list[schema.Event] = []
        self._sampled = threading.Semaphore(0)
        self.sampler = MemorySampler(self.records.append, interval_s=0.001)
        self.sampler.begin(read_device=allocator.read if allocator else None, pinned=self._pinned)

    def _pinned(self) -> int:
        self._sampled.release()  # a sample is being taken
        return GIB

    def two_more(self) -> None:
        """Wait until a sample was taken that began after this call."""
        while self._sampled.acquire(blocking=False):
            pass
        assert self._sampled.acquire(timeout=60) and self._sampled.acquire(timeout=60)


def live(actual: Sampled) -> schema.LiveMemory:
    (record,) = actual.records
    assert isinstance(record, schema.LiveMemory)
    return record


def test_a_peak_between_two_samples_is_in_the_record_and_in_the_step(gpu: FakeAllocator) -> None:
    """Activations that are gone before anybody looks: the allocator's own peak tells."""
    gpu.take(24 * GIB)
    counters = AllocatorCounters(DEVICE, gpu.free)
    result = Sampled(counters)
    result.sampler.step_begins(1)
    result.two_more()
    gpu.take(5 * GIB)
    gpu.take(-5 * GIB)
    result.two_more()
    result.sampler.end_step()
    assert counters.end_step() == 29 * GIB
    gpu.take(GIB)
    gpu.take(-GIB)
    assert counters.end_step() == 25 * GIB  # the next step's own
    assert counters.run_peak == 29 * GIB
    result.sampler.close()
    result.sampler.close()
    assert not any(thread.name == "memory-sampler" for thread in threading.enumerate())
    record = live(result)
    assert record.allocated_kib == (24 << 20, 24 << 20, 29 << 20)
    assert record.reserved_kib == (24 << 20, 29 << 20, 29 << 20)
    assert record.free_kib[1] == 3 << 20
    assert record.pinned_kib == (1 << 20,) and record.step == 1


@pytest.mark.slow
def test_the_host_is_sampled_without_a_gpu() -> None:
    """A block that is touched and freed within the run is in the peak and in the least."""
    result = Sampled(None)
    result.sampler.step_begins(1, follow=True)
    result.two_more()
    block = bytearray(96 << 20)
    block[::4096] = b"x" * len(block[::4096])
    result.two_more()
    del block
    result.two_more()
    peak, curve = result.sampler.end_step()
    result.sampler.close()
    record = live(result)
    least, _, most = record.rss_kib
    assert most - least > 90 << 10 and peak >> 10 == most
    assert not record.allocated_kib and record.available_kib and record.page_cache_kib
    assert curve is not None and curve.tier == "host"
    assert max(curve.kib) - min(curve.kib) > 90 << 10
    assert list(curve.at_ms) == sorted(curve.at_ms)


@pytest.mark.slow
def test_an_hour_is_less_than_a_megabyte() -> None:
    """Records every 2 s in which every quantity moves, at the sizes of a large machine; and a curve
    of a step of 0.5 s, for which steps are followed most often, every 10 s."""
    draw = random.Random(0)

    def size() -> int:
        return draw.randrange(100 * GIB, 999 * GIB)

    window, written = Window(), 0
    for _ in range(1800):
        for _ in range(3):
            sizes = {name: size() for name in schema.MEMORY_QUANTITIES}
            window.add(123_456, sizes | {"pinned": 900 * GIB, "swap": 0})  # those do not move
        written += len(log_lines.to_line(window.record(), 0, 1_795_000_000.1234567, 10**15))
    points = round(0.5 / memory_sampler.WITHIN_STEP_S)
    curve = thinned([(draw.uniform(0, 500), size()) for _ in range(points)])
    at_ms, kib = zip(*curve, strict=True)
    followed = schema.StepMemory(step=123_456, tier="device", at_ms=at_ms, kib=kib)
    written += 360 * len(log_lines.to_line(followed, 0, 1_795_000_000.1234567, 10**15))
    assert written < 1e6


@pytest.mark.slow
def test_sampling_costs_a_fraction_of_a_core(gpu: FakeAllocator) -> None:
    """In CPU time of its thread per sample, beside reading a file of the kernel: at 5 Hz a share of
    0.5 % of a core is 1 ms for a sample."""
    counters = AllocatorCounters(DEVICE, gpu.free)

    def sample() -> None:
        Window().add(1, memory_sampler.sampled(counters.read(), 0, {}))

    def stat() -> None:
        Path("/proc/self/status").read_text()

    assert _least_cpu_s(sample) < 12 * _least_cpu_s(stat)


def _least_cpu_s(work: Callable[[], None], times: int = 50) -> float:
    spent = []
    for _ in range(times):
        began = time.thread_time()
        work()
        spent.append(time.thread_time() - began)
    return min(spent)
