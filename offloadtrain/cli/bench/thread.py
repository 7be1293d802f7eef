"""Measure the engine's cost on the training thread, with steps that wait for nothing else.

[Note: Idle lanes]
After a few real steps the lanes do nothing: the engine decides, waits for and launches operations,
but their functions are not called. A small model on such lanes is bound by its launches. The CPU
time of the training thread, less that of the same model's forward and backward in plain torch, is
the cost of the engine: hooks, saved tensors, the program, its interpreter. Other threads and other
processes are not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.cli.bench.rounds import measure, torch_threads
from offloadtrain.engine import offload
from offloadtrain.optim import AdamW
from offloadtrain.runtime.lanes import Operation, Range, SequentialLanes, on_lanes
from offloadtrain.step.program.operations import Lane

LAYERS = (24, 40)
WIDTH, ROWS = 64, 8
WARM_STEPS = 4

OPTIONS: dict[str, dict[str, Any]] = {
    "device": {},
    "streamed": {"working": "host"},
    "streamed, recompute": {"working": "host", "activation": "recompute"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadRow:
    """One placement; milliseconds of the training thread per layer and step.

    Attributes:
        plain_ms: median of forward and backward in plain torch, nothing recomputed.
        engine_ms: median over the rounds of the offloaded step's time less the plain step's.
    """

    case: str
    layers: int
    plain_ms: float
    engine_ms: float


class IdleLanes(SequentialLanes):
    """Lanes that do nothing from the moment on when `idle` is set."""

    idle = False

    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        if not self.idle:
            super().launch(lane, name, fn, reads, writes)


class Layer(nn.Module):
    """Six parameters in three modules, as small as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + added


def run(steps: int, on_round: Callable[[str], None]) -> list[ThreadRow]:
    """Every placement with every number of layers, on one thread."""
    with torch_threads(1):
        return [row for layers in LAYERS for row in _measure(layers, steps, on_round)]


def _measure(layers: int, steps: int, on_round: Callable[[str], None]) -> list[ThreadRow]:
    """All placements and plain torch in turn, a step each per round."""
    cases = {name: _offloaded(layers, options) for name, options in OPTIONS.items()}
    seconds = measure(
        {"plain": _plain(layers), **cases},
        steps,
        lambda number: on_round(f"{layers} layers, round {number + 1}/{WARM_STEPS + steps}"),
        time.thread_time,
        warm=WARM_STEPS,
    )
    plain_s, per_layer = seconds.pop("plain"), 1e3 / layers
    return [
        ThreadRow(
            case=name,
            layers=layers,
            plain_ms=statistics.median(plain_s) * per_layer,
            engine_ms=statistics.median(a - b for a, b in zip(times, plain_s, strict=True))
            * per_layer,
        )
        for name, times in seconds.items()
    ]


def _plain(layers: int) -> Callable[[], object]:
    model = _model(layers)

    def step() -> None:
        model(torch.ones(ROWS, WIDTH)).mean().backward()
        for param in model.parameters():
            param.grad = None

    return step


def _offloaded(layers: int, options: dict[str, Any]) -> Callable[[], object]:
    model, lanes = _model(layers), IdleLanes()
    with on_lanes(lanes):
        optimizer = offload(model, AdamW(), device="cpu", precision="fp32", **options)

    def step() -> None:
        optimizer.backward(model(torch.ones(ROWS, WIDTH)).mean())
        optimizer.step()

    for _ in range(WARM_STEPS):  # real ones: slots hold weights, and the order of use is known
        step()
    lanes.idle = True
    return step


def _model(layers: int) -> nn.Module:
    return nn.Sequential(*(Layer() for _ in range(layers)))


def table(rows: Sequence[ThreadRow]) -> str:
    """All rows, for people."""
    head = f"{'layers':>6}  {'weights':20} {'plain torch':>12} {'the engine beyond it':>22}"
    lines = [
        f"{row.layers:6}  {row.case:20} {row.plain_ms:9.3f} ms {row.engine_ms:19.3f} ms"
        for row in rows
    ]
    return "\n".join([head, *lines])
