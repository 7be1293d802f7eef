"""An optimizer that nobody closes: the model keeps its weights, and can be offloaded again."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.runtime.lanes import Lanes, SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.step.layout.buffers import ARENA_ALIGN, STAGGER_BYTES
from tests import levels
from tests.numerics.models import Chain, batches, loss_of
from tests.seeded_lanes import SeededLanes

PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"working": "host"},
    {"working": "host", "state": "split16", "precision": "bf16"},
    {"working": "disk", "state_on": "disk", "scratch_in_memory": True},
    {"activation": "recompute", "precision": "bf16"},
    {"update": "speculative", "working": "host"},
]


def offloaded(net: nn.Module, tmp_path: Path, **options: Any) -> ot.OffloadOptimizer:
    options = {"precision": "fp32", **options}
    if "state_on" in options:
        options["scratch_dir"] = str(tmp_path)
    return ot.offload(net, ot.AdamW(lr=1e-2), device="cpu", **options)


def train(net: nn.Module, optimizer: ot.OffloadOptimizer, steps: int = 3) -> None:
    for tokens in batches(steps):
        optimizer.backward(loss_of(net, tokens))
        optimizer.step()


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


LANES: dict[str, Callable[[], Lanes]] = {
    "default": SequentialLanes,
    "late": partial(SeededLanes, 0, late=True),
    "seeded": partial(SeededLanes, 1),
    "threads": ThreadLanes,
}


@pytest.mark.parametrize(
    ("options", "in_cycle", "lanes"), levels.array(PLACEMENTS, [False, True], [*LANES])
)
def test_out_of_scope_leaves_what_close_leaves(
    options: dict[str, Any], in_cycle: bool, lanes: str, tmp_path: Path
) -> None:
    """Also an optimizer in a reference cycle, which Python frees together with its engine."""

    def run(close: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = Chain()
        with on_lanes(LANES[lanes]()):
            optimizer = offloaded(net, tmp_path, **options)
        ledger = optimizer.ledger
        train(net, optimizer)
        if close:
            optimizer.close()
        elif in_cycle:
            optimizer.cycle = optimizer  # type: ignore[attr-defined]
        del optimizer
        gc.collect()
        assert not any(row.bytes for row in ledger.rows() if row.tier == "host")
        result = weights(net)
        assert all(type(param) is nn.Parameter for param in net.parameters())
        loss_of(net, batches(1)[0]).backward()
        assert all(param.grad is not None for param in net.parameters())
        net.zero_grad()
        train(net, offloaded(net, tmp_path, **options), 1)  # a dead optimizer counts as closed
        return result

    expected, result = run(close=True), run(close=False)
    for name, value in expected.items():
        assert torch.equal(result[name], value), name


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("options", PLACEMENTS)
def test_the_memory_is_free_without_a_collection(
    options: dict[str, Any], close: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python collects by the number of objects, and these hold 12 bytes per parameter. Only weights
    on the host stay, with the model: a copy of them might not fit."""
    made: list[weakref.ref[mmap.mmap]] = []
    monkeypatch.setattr("offloadtrain.runtime.arena.mmap", recording(made))
    import_module("torch._dynamo")  # its first import keeps the frames around it
    net = Chain()
    optimizer = offloaded(net, tmp_path, **options)
    train(net, optimizer)
    assert made and all(mapping() is not None for mapping in made)
    gc.disable()
    try:
        if close:
            optimizer.close()
        del optimizer
        left = [mapping for mapping in (reference() for reference in made) if mapping is not None]
        streamed = [param for param in net.parameters() if options.get("working") == "host"]
        weight_bytes = sum(param.nbytes for param in streamed)
        assert sum(map(len, left)) <= weight_bytes + len(left) * (ARENA_ALIGN + STAGGER_BYTES)
        del left, streamed
        loss_of(net, batches(1)[0])
        del net
        assert all(mapping() is None for mapping in made)
    finally:
        gc.enable()


def recording(made: list[weakref.ref[mmap.mmap]]) -> ModuleType:
    """Return the module `mmap`, whose mappings are noted in `made`."""

    class Recorded(mmap.mmap):
        def __init__(self, *_: Any, **__: Any) -> None:
            made.append(weakref.ref(self))

    module = ModuleType("mmap")
    vars(module).update(vars(mmap) | {"mmap": Recorded})
    return module


def test_nothing_is_copied_back_at_the_end_of_the_process(tmp_path: Path) -> None:
    """Streamed weights may be larger than what is left of the host's memory."""
    script = """
import torch, offloadtrain as ot
from offloadtrain.engine.block import Residency
from tests.numerics.models import Chain
Residency.close = lambda self: print("copied back")
net = Chain()
optimizer = ot.offload(net, device="cpu", working="host")
"""
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "", "")


# What the first call of `offload()` brings with it.


TRAINED = """
import sys
import torch
import offloadtrain as ot

for options in ({}, {"working": "host"}):
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    optimizer = ot.offload(model, ot.AdamW(), device="cpu", clip_norm=1.0, **options)
    optimizer.backward(model(torch.ones(1, 8)).float().sum())
    optimizer.step()
    optimizer.state_dict()
    optimizer.close()
print(sorted({"torch._dynamo", "torch.onnx", "sympy"}.intersection(sys.modules)))
"""


@pytest.mark.slow
def test_torch_s_compiler_is_not_imported() -> None:
    """It takes over a second. Recompute needs it: torch's checkpoint imports it by itself."""
    done = subprocess.run([sys.executable, "-c", TRAINED], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
