"""State moves to the device when its free memory is known, and back when it was too little: the
bits are those of a run that keeps it on the host, as a plain loop has them.

Devices are simulated: `Device` says what torch's allocator and the driver would.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.config.offload import OptionError
from offloadtrain.engine import promotion
from offloadtrain.engine.promotion import CHECK_STEPS
from offloadtrain.runtime.device_memory import MemoryUse
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.runtime.lanes.seeded import SeededLanes
from offloadtrain.step.layout.buffer_table import device_bytes
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.proof.prove import prove
from tests.numerics.comparison import assert_same, contents, follow, pair, train
from tests.numerics.models import Chain, batches, loss_of
from tests.numerics.test_changes_between_steps import booked, planned

TOTAL = 32 << 30
LARGE = 1 << 30
"""Room for all state of the models here."""


class Device:
    """A GPU on which `room` bytes are free beside torch's peak and the reserve."""

    room = LARGE
    failures = 0

    def use(self, device: torch.device) -> MemoryUse:
        others = 1 << 30
        return MemoryUse(TOTAL, others, TOTAL - others - int(0.1 * TOTAL) - self.room)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    simulated = Device()
    monkeypatch.setattr(promotion, "memory_use", simulated.use)
    monkeypatch.setattr(promotion, "failed_allocations", lambda device: simulated.failures)
    monkeypatch.setattr(promotion, "_reason_against", lambda config, rules, device: None)
    return simulated


def share_of(optimizer: ot.OffloadOptimizer) -> float:
    """The share of the state on the device, as the last step reports it."""
    assert optimizer.last_step is not None
    return optimizer.last_step.state_on_device


PLACEMENTS: dict[str, dict[str, Any]] = {
    "clipped, fp32": {"precision": "fp32", "clip": 0.3},
    "two microbatches": {"accum": 2, "clip": 0.3},
    "recompute": {"activation": "recompute"},
    "streamed": {"working": "host", "device_slots": 1, "activation": "offload"},
    "early": {"skip_nonfinite": False},
    "speculative, right": {"update": "speculative", "clip": 1e9},
    "speculative, wrong": {"update": "speculative", "clip": 0.1},
    "delayed": {"update": "delayed", "warmup_steps": 1},
    "delayed, streamed": {"update": "delayed", "working": "host", "clip": 0.3},
    "delayed, fp16": {"update": "delayed", "precision": "fp16"},
    "split16": {"state": "split16"},
    "int8": {"state": "int8", "update": "delayed"},
}


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("late", [False, True], ids=["drawn", "late"])
def test_promoted_and_moved_back(name: str, late: bool, device: Device) -> None:
    """Three epochs: all state on the host, some on the device, all on the host again."""
    options = dict(PLACEMENTS[name])
    torch.manual_seed(0)
    lanes = SeededLanes(3, late=late)
    lanes.poison = True
    with on_lanes(lanes):
        run, optimizer, model = pair(Chain(3), state_on="auto", **options)
    device.room = 30_000
    accum, steps = options.get("accum", 1), 2 * CHECK_STEPS + 4
    stream, shares = batches((steps + 4) * accum), []
    for number in range(steps + 4):
        follow(run, optimizer, model, stream[number * accum : (number + 1) * accum], accum)
        shares.append(share_of(optimizer))
        if number == steps:
            device.failures += 1
            optimizer.zero_grad()
        if number in (steps - 1, steps):
            if "offload" not in str(options) and accum == 1:
                assert booked(optimizer) == planned(optimizer)
    promoted = 2 * CHECK_STEPS
    assert shares[:promoted] == [0.0] * promoted and shares[-3:] == [0.0] * 3
    assert 0 < shares[promoted] < 1 and shares[promoted : steps + 1] == [shares[promoted]] * 5
    assert_same(run, optimizer, model)
    optimizer.close()
    assert optimizer.ledger.total(Tier.HOST) == 0
