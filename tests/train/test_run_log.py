"""Telling costs the training thread next to nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offloadtrain.events import log_lines, schema
from offloadtrain.hardware.nvml import Nvml
from offloadtrain.runtime.arena import Ledger
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.train.log import run_memory
from offloadtrain.train.log.run_memory import RunMemory, UnaccountedMemory, anonymous_bytes
from tests.runtime.fake_allocator import FakeAllocator
from tests.train.small_job import run, small_job

GIB = 1 << 30


def test_owners_are_logged_when_now_or_peak_moves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a GPU's other memory, both: activations that are still there, and those that were."""
    gpu = FakeAllocator(32 * GIB)
    gpu.install(monkeypatch)
    monkeypatch.setattr(run_memory, "gpu_uuid", lambda device: "GPU-1")
    monkeypatch.setattr(run_memory, "_EVERY_S", -1.0)
    ledger = Ledger()
    ledger.add("working weights", Tier.DEVICE, 24 * GIB)
    gpu.take(24 * GIB)
    optimizer: Any = SimpleNamespace(device=torch.device("cuda", 0), ledger=ledger, pinned=True)
    records: list[schema.Event] = []
    memory = RunMemory(records.append)
    memory.begin(optimizer, nvml=Nvml(), warn=_no_warning)
    report: Any = SimpleNamespace(sampled="a timeline")

    def other() -> tuple[int, int]:
        (row,) = [row for row in memory.news() if row.owner == "activations and gradients"]
        return row.num_bytes, row.peak_bytes

    assert other() == (0, 0) and memory.news() == ()
    memory.sampler.step_begins(1, follow=True)
    gpu.take(5 * GIB)
    assert other() == (5 * GIB, 5 * GIB)
    gpu.take(-5 * GIB)
    assert other() == (0, 5 * GIB)
    assert memory.end_step(report)[0] == 29 * GIB
    memory.sampler.step_begins(2, follow=False)
    assert memory.end_step(report)[0] == 24 * GIB
    assert memory.news() == ()  # the run's peak stays, when the step's is set back
    memory.sampler.close()
    (*_, last) = records
    assert isinstance(last, schema.LiveMemory) and _newest(last.allocated_kib) == 24 << 20


@pytest.mark.slow
def test_a_run_on_a_cpu_logs_the_memory_of_the_host(tmp_path: Path) -> None:
    """Live records, the peak of each step, and a curve of a sampled one."""
    path = tmp_path / "run"
    assert run(small_job(tmp_path, "train.steps=24"), path) == 0
    log = path / "events/rank000.jsonl"
    events = [record.event for record in log_lines.read(log)]
    steps = [event for event in events if isinstance(event, schema.Step)]
    assert max(step.host_peak_bytes for step in steps) > 50 << 20
    live = [event for event in events if isinstance(event, schema.LiveMemory)]
    assert live and live[-1].rss_kib and not live[-1].allocated_kib
    sampled = {event.step for event in events if isinstance(event, schema.LaneSpan)}
    curves = [event for event in events if isinstance(event, schema.StepMemory)]
    assert {curve.step for curve in curves} <= sampled
    assert all(curve.tier == "host" for curve in curves)


def _newest(sizes: tuple[int, ...]) -> int:
    return sizes[len(sizes) // 2]  # of one size, or of the least, the newest and the most


def _no_warning(code: str, message: str) -> None:
    raise AssertionError(message)


# ---- memory that nothing accounts for


class Process:
    """A process whose memory is set by the test."""

    def __init__(self) -> None:
        self.ledger, self.other = Ledger(), 3 * GIB
        self.ledger.add("master weights", Tier.HOST, 90 * GIB)
        self.memory = UnaccountedMemory(self.ledger, self.read)

    def read(self) -> int:
        return self.ledger.total(Tier.HOST) + self.other


def test_unaccounted_growth_is_reported_once_with_its_likely_owner() -> None:
    process = Process()
    process.ledger.add("block inputs", Tier.HOST, 16 * GIB)  # accounted for
    process.other += 2 * GIB  # libraries
    assert [process.memory.look() for _ in range(3)] == [None] * 3
    process.other += 15 * GIB
    assert process.memory.look() is None, "it may be on its way into the Ledger"
    message = process.memory.look()
    assert message is not None
    assert "grown by 17.0 GiB since training began" in message
    assert "about the size of 'block inputs' (16.0 GiB)" in message
    assert "126.0 GiB" in message and "106.0 GiB" in message and "train.micro_batch" in message
    assert process.memory.look() is None, "once"


def test_real_memory_and_the_mapping_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_memory, "ALLOWED_BYTES", 64 << 20)
    memory = UnaccountedMemory(Ledger())
    before = anonymous_bytes()
    assert memory.look() is None and before is not None
    ones = torch.ones(256 << 20, dtype=torch.uint8)
    now = anonymous_bytes()
    assert now is not None and now - before >= 200 << 20
    assert memory.look() is None
    message = memory.look()
    assert message is not None and "Largest mappings: " in message and "MiB" in message
    assert int(ones[0]) == 1
