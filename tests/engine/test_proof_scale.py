"""Two thousand random configurations of the engine proved, and six hundred orders of it run. Level
quick draws a shard of each, fifty configurations and thirty orders."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.runtime.lanes import Lanes, SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.runtime.lanes.seeded import SeededLanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.step.layout import step_spec as spec
from offloadtrain.step.program import modes
from offloadtrain.step.proof.prove import prove

SHARDS, IN_A_SHARD = 100, 20


class Tower(nn.Module):
    """So many layers that a step is mostly engine."""

    def __init__(self, depth: int, *, tied: bool, frozen: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=index % 3 > 0) for index in range(depth))
        self.last = nn.Linear(8, 8)
        if tied:
            self.last.weight = self.first.weight
        if frozen:
            self.layers[depth // 2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return self.last(x)


def drawn(draw: random.Random, *, large: bool) -> dict[str, Any]:
    """Options of `offload`, and "depth", "tied", "frozen", "steps" of the run."""
    depth = draw.choice([100, 60, 2]) if large else draw.randint(1, 7)
    accum = (16 if depth == 2 else 1) if large else draw.choice([1, 1, 2, 3])
    update = draw.choice(["exact", "exact", "speculative", "delayed"])
    clip = draw.choice([None, 1e-3, 1e9])
    state = draw.choice(["fp32", "split16", "int8"])
    working = draw.choice(["device", "host"])
    return {
        "depth": depth,
        "tied": draw.random() < 0.3,
        "frozen": depth > 1 and draw.random() < 0.3,
        "steps": 2 if large else 3,
        "pieces": draw.random() < 0.1,
        "update": update,
        "clip_norm": clip,
        "skip_nonfinite": draw.random() < 0.6,
        "warmup_steps": draw.randint(0, 2) if update == "delayed" else 0,
        "grad_accum_steps": accum,
        "state": state,
        "precision": draw.choice(["bf16", "fp16"]) if state == "int8" else "bf16",
        "working": working,
        "device_slots": draw.randint(1, 4),
        "resident_blocks": draw.randint(0, 3) if working == "host" else None,
        "activation": draw.choice(["keep", "keep", "recompute", "offload"]),
    }


def recorded(options: dict[str, Any], patch: pytest.MonkeyPatch) -> list[Any]:
    """The program of a run with these options."""
    lanes = RecordingLanes(SequentialLanes())
    trained(options, lanes, patch)
    return lanes.program


def trained(options: dict[str, Any], lanes: Lanes, patch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Train on these lanes; returns weights and state."""
    torch.manual_seed(0)
    kept = dict(options)
    depth, steps, pieces = (kept.pop(key) for key in ("depth", "steps", "pieces"))
    model = Tower(depth, tied=kept.pop("tied"), frozen=kept.pop("frozen"))
    if kept["precision"] == "fp16":
        kept["skip_nonfinite"] = True
    patch.setattr(modes.SpeculationPolicy, "should_speculate", lambda policy: True)
    patch.setattr(spec, "STAGING_BYTES", 256 if pieces else 64 << 20)
    with on_lanes(lanes):
        optimizer = ot.offload(model, device="cpu", pin_memory=False, **kept)
    for _ in range(steps):
        for _ in range(kept["grad_accum_steps"]):
            optimizer.backward(model(torch.randn(2, 8)).float().square().mean())
        optimizer.step()
    optimizer.synchronize()
    found = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, tensors in optimizer.named_state():
        found |= {f"{name}/{key}": value.clone() for key, value in tensors.items()}
    optimizer.close()
    return found


@pytest.mark.cover(0)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_configuration_races(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(shard)
    for number in range(IN_A_SHARD):
        options = drawn(draw, large=number == 0)
        with monkeypatch.context() as patch:
            faults = prove(recorded(options, patch))
        assert faults == [], options


ORDERS = 15


@pytest.mark.cover(0)
@pytest.mark.parametrize("shard", range(40))
def test_six_hundred_orders_have_the_same_bits(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any legal order, the latest possible, and threads with delays; staging and slots poisoned."""
    options = drawn(random.Random(1000 + shard), large=False)
    with monkeypatch.context() as patch:
        expected = trained(options, SequentialLanes(), patch)
        for seed in range(ORDERS):
            lanes: Lanes = SeededLanes(seed, late=seed % 3 == 0)
            if seed % 10 == 9:
                lanes = ThreadLanes(seed=seed, longest_delay_ms=0.5)
            lanes.poison = True
            found = trained(options, lanes, patch)
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(found[key], value), (options, seed, key)
