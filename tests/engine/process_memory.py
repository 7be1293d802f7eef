"""Trains in every placement and prints the anonymous memory of the process beside the Ledger.

    MALLOC_MMAP_THRESHOLD_=65536 python -m tests.engine.process_memory

The weights of a layer and its input are of the same size, so that no copy of either goes unnoticed.
With this setting of the C library freed memory returns to the kernel at once. Placements come
first; then `changes`: layers freeze and train again between steps; then the planted faults:
`reuse`, the host memory of block inputs is not used again; `copies`, something keeps a copy of each
of them.
"""

from __future__ import annotations

import gc
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.engine.autograd.offload import ActivationOffloader, OffloadedActivation
from offloadtrain.runtime.lanes import Lanes, SequentialLanes, on_lanes
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.program.activations import ActivationPath
from tests.harsh_lanes import PausingLanes
from tests.seeded_lanes import SeededLanes

LAYERS, SIZE, STEPS = 6, 500_000, 10
INPUT_BYTES = 2 * SIZE
FAULTS = ("reuse", "copies")
LANES: list[Callable[[], Lanes]] = [
    SequentialLanes,
    lambda: SeededLanes(1, late=True),
    lambda: PausingLanes(0.2),
]
SAVED = {"activation": "offload_saved", "offload_saved_above": 0}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "streamed": {"working": "host"},
    "streamed, inputs offloaded": {"working": "host", "activation": "offload", "state": "int8"},
    "inputs offloaded": {"activation": "offload", "state": "split16"},
    "saved tensors offloaded": SAVED,
    "streamed, saved tensors offloaded": {"working": "host", **SAVED},
    "recompute": {"activation": "recompute", "grad_accum_steps": 2},
    "speculative": {"update": "speculative", "clip_norm": 1e9, "working": "host"},
    "delayed": {"update": "delayed", "warmup_steps": 1, "activation": "offload"},
    "half of the state on the device": {"state_on": {"device": 0.5}},
    "all of the state on the device": {"state_on": "device", "activation": "offload"},
    "disk": {
        "state_on": "disk",
        "scratch_dir": tempfile.gettempdir(),
        "scratch_in_memory": True,
        "activation": "offload",
        "working": "host",
    },
}


class Scale(nn.Module):
    """A layer with as many weights as its input has elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


def anonymous_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(re.findall(r"Anonymous: +(\d+) kB", text)[0])


def forget_peak() -> None:
    """Make the peak of the resident memory what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(rf"{name}:\s+(\d+) kB", text)[0])


CHANGED = ("device", "streamed", "speculative", "half of the state on the device", "disk")


def train(
    options: dict[str, Any],
    make_lanes: Callable[[], Lanes],
    *,
    changes: bool = False,
    steps: int = STEPS,
) -> dict[str, Any]:
    """After each step, the bytes of the Ledger on both tiers, since the device's memory is the
    process's own, and the anonymous bytes of the process without what it had before; by how much
    the resident memory grows in the last forward of a step and while the optimizer closes; and what
    is left of it afterwards.

    Args:
        changes: other layers are frozen before each step; every second time all train again.
    """
    gc.collect()
    before = anonymous_bytes()
    with torch.device("meta"):
        model = nn.Sequential(*(Scale() for _ in range(LAYERS)))
    with on_lanes(make_lanes):
        optimizer = ot.offload(
            model, device="cpu", param_init_fn=lambda module: None, **({"clip_norm": 1.0} | options)
        )
    in_ledger, anonymous, growing = [], [], []
    for number in range(steps):
        forget_peak()
        resident = resident_bytes("VmRSS")
        for at, layer in enumerate(model if changes else ()):
            layer.requires_grad_(number % 2 == 1 or at % 2 == number // 2 % 2)
        for _ in range(options.get("grad_accum_steps", 1)):
            x = torch.zeros(SIZE, dtype=torch.bfloat16, requires_grad=True)
            loss = model(x).float().square().mean()
            growth = resident_bytes("VmHWM") - resident
            optimizer.backward(loss)
            del x, loss
        growing.append(growth)
        optimizer.step()
        optimizer.synchronize()
        in_ledger.append(sum(optimizer.ledger.total(tier) for tier in (Tier.HOST, Tier.DEVICE)))
        anonymous.append(anonymous_bytes() - before)
    forget_peak()
    resident = resident_bytes("VmRSS")
    optimizer.close()
    closing = resident_bytes("VmHWM") - resident
    del optimizer
    return {
        "in_ledger": in_ledger,
        "anonymous": anonymous,
        "growing": growing,
        "closing": closing,
        "left": anonymous_bytes() - before,
    }


def planted(fault: str) -> Any:
    """A context in which the engine has this fault."""
    if fault == "reuse":
        return mock.patch.object(ActivationPath, "_give_back", lambda path, buffer: None)
    copies, offload = [], ActivationOffloader.offload

    def keeps(offloader: ActivationOffloader, tensor: Tensor) -> OffloadedActivation:
        copies.append(tensor.detach().clone())
        return offload(offloader, tensor)

    return mock.patch.object(ActivationOffloader, "offload", keeps)


def show(part: str, name: str, result: dict[str, Any]) -> None:
    print(json.dumps({"part": part, "placement": name, **result}), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    # Kernels are loaded, modules imported, threads have their stacks.
    for state in ("fp32", "split16", "int8"):
        train({"state": state, "activation": "offload"}, LANES[-1], steps=3)
    for number, (name, options) in enumerate(PLACEMENTS.items()):
        show("placements", name, train(options, LANES[number % len(LANES)]))
    for number, name in enumerate(CHANGED):
        show("changes", name, train(PLACEMENTS[name], LANES[number % len(LANES)], changes=True))
    for fault in FAULTS:
        with planted(fault):
            show(fault, "inputs offloaded", train(PLACEMENTS["inputs offloaded"], LANES[0]))


if __name__ == "__main__":
    main()
