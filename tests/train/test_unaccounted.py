"""Host memory that grows past the Ledger is told once, with what it may be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offloadtrain.hardware.nvml import Nvml
from offloadtrain.runtime.arena import Ledger
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.train.log import run_memory
from offloadtrain.train.log.run_memory import RunMemory, UnaccountedMemory, anonymous_bytes
from tests.runtime.fake_allocator import FakeAllocator

GIB = 1 << 30


class Process:
    """A process whose memory is set by the test."""

    def __init__(self) -> None:
        self.ledger, self.other = Ledger(), 3 * GIB
        self.ledger.add("master weights", Tier.HOST, 90 * GIB)
        self.memory = UnaccountedMemory(self.ledger, self.read)

    def read(self) -> int:
        return self.ledger.total(Tier.HOST) + self.other


def test_growth_that_nothing_accounts_for_is_told_once_with_its_likely_owner() -> None:
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


def test_memory_that_is_being_mapped_is_not_told() -> None:
    process = Process()
    for _ in range(3):
        process.other += 8 * GIB
        assert process.memory.look() is None
        process.other -= 8 * GIB
        process.ledger.add("block inputs", Tier.HOST, 8 * GIB)
        assert process.memory.look() is None


def test_real_memory_and_the_mapping_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_memory, "ALLOWED_BYTES", 64 << 20)
    memory = UnaccountedMemory(Ledger())
    before = anonymous_bytes()
    assert memory.look() is None and before is not None
    kept = torch.ones(256 << 20, dtype=torch.uint8)
    now = anonymous_bytes()
    assert now is not None and now - before >= 200 << 20
    assert memory.look() is None
    message = memory.look()
    assert message is not None and "Largest mappings: " in message and "MiB" in message
    assert int(kept[0]) == 1


def test_a_run_looks_every_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    FakeAllocator(32 * GIB).install(monkeypatch)
    monkeypatch.setattr(run_memory, "gpu_uuid", lambda device: "GPU-1")
    process, told = Process(), []
    monkeypatch.setattr(run_memory, "anonymous_bytes", process.read)
    optimizer: Any = SimpleNamespace(
        device=torch.device("cuda", 0), ledger=process.ledger, pinned=True
    )
    memory = RunMemory(
        optimizer,
        lambda event: None,
        tmp_path / "rank000.ring",
        nvml=Nvml(),
        warn=lambda code, message: told.append(code),
    )
    process.other += 20 * GIB
    for _ in range(3):
        memory._sampler._each_second()
    assert told == ["host-memory"]
    memory.close()
