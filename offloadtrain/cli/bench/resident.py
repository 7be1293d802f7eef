"""The demo model offloaded and resident, alternating: the cost of offloading in time and bits.

The resident loop is the usual one without offloading: working weights in the compute dtype, fp32
    master
weights and `torch.optim.AdamW(fused=True)` on the device, the norm clipped by torch.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.cli.bench.rounds import measure, ratio
from offloadtrain.config.model_shape import SIZES
from offloadtrain.engine import offload
from offloadtrain.model.transformer import Transformer
from offloadtrain.optim import AdamW
from offloadtrain.runtime.device import resolve_device, resolve_precision
from offloadtrain.runtime.dtypes import PRECISIONS

CLIP_NORM = 1.0
BATCH, LENGTH = 8, 256
WARM_STEPS = 2

OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {},
    "speculative": {"update": "speculative"},
    "delayed": {"update": "delayed"},
    "streamed": {"working": "host"},
    "streamed, inputs offloaded": {"working": "host", "activation": "offload"},
}

Step = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentRow:
    """One way to train the demo model.

    Attributes:
        step_ms: median.
        x_resident: median of the ratios of its step to the resident one of the same round.
        exposed_ms: median exposed time; None: resident.
    """

    case: str
    step_ms: float
    x_resident: float
    exposed_ms: float | None


def run(rounds: int, on_round: Callable[[str], None]) -> list[ResidentRow]:
    """Train all cases alternately, a step each per round."""
    device = resolve_device("auto")
    dtype = PRECISIONS[resolve_precision("auto", device)[0]]
    model = Transformer(SIZES["demo"], seed=0)
    steps: dict[str, Step] = {"resident": resident_step(copy.deepcopy(model), device, dtype)}
    exposed: dict[str, list[float]] = {}
    for name, options in OPTIONS.items():
        steps[name] = offloaded_step(copy.deepcopy(model), device, dtype, options, exposed, name)
    tokens = torch.randint(0, 256, (BATCH, LENGTH + 1), device=device)

    def run_to_end(step: Step) -> None:
        step(tokens[:, :-1], tokens[:, 1:])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = measure(
        {name: partial(run_to_end, step) for name, step in steps.items()},
        rounds,
        lambda number: on_round(f"demo, round {number + 1}/{WARM_STEPS + rounds}"),
        warm=WARM_STEPS,
    )
    return [
        ResidentRow(
            case=name,
            step_ms=statistics.median(times) * 1e3,
            x_resident=ratio(times, seconds["resident"]) or 0.0,
            exposed_ms=statistics.median(exposed[name][WARM_STEPS:]) if name in exposed else None,
        )
        for name, times in seconds.items()
    ]


def resident_step(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Step:
    model.to(device)
    masters = [param.detach().float().clone() for param in model.parameters()]
    model.to(dtype)
    adam = torch.optim.AdamW(masters, lr=1e-3, fused=True)

    def step(inputs: Tensor, targets: Tensor) -> None:
        model(inputs, targets).backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, CLIP_NORM)
        adam.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)

    return step


def offloaded_step(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    options: dict[str, Any],
    exposed: dict[str, list[float]],
    name: str,
) -> Step:
    precision: Any = next(key for key, value in PRECISIONS.items() if value is dtype)
    optimizer = offload(
        model, AdamW(lr=1e-3), device=device, precision=precision, clip_norm=CLIP_NORM, **options
    )
    waited = exposed.setdefault(name, [])

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.backward(model(inputs, targets))
        optimizer.step()
        assert optimizer.last_step is not None
        waited.append(optimizer.last_step.exposed_ms)

    return step


def table(rows: Sequence[ResidentRow]) -> str:
    """Return all rows as a text table."""
    lines = [f"{'case':26} {'ms per step':>12} {'x resident':>11} {'exposed ms':>11}"]
    for row in rows:
        waited = "-" if row.exposed_ms is None else f"{row.exposed_ms:.1f}"
        lines.append(f"{row.case:26} {row.step_ms:12.1f} {row.x_resident:11.2f} {waited:>11}")
    return "\n".join(lines)
