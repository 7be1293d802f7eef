"""Compares a step with its schedule, and with the same model in plain torch.

[Note: Paced lanes]
The lanes run on CPU threads, and every operation and every block's compute is padded to a fixed
time. The schedule then predicts the step to the microsecond, and the excess of the measured step is
the engine's overhead: Python, hand-over between threads, and waits.

[Note: The resident loop]
The demo model is trained offloaded and resident, alternating, which shows the time that offloading
costs. The resident loop is the usual one: working weights in the compute dtype, fp32 master weights
and `torch.optim.AdamW(fused=True)` on the device, and the norm clipped by torch.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from offloadtrain.cli.bench.rounds import Row, ratio
from offloadtrain.cli.bench.rounds import measure as measure_rounds
from offloadtrain.config.model_shape import SIZES
from offloadtrain.config.offload import OffloadConfig
from offloadtrain.engine import OffloadOptimizer, offload
from offloadtrain.hardware.host_memory import available_bytes
from offloadtrain.model.transformer import Transformer
from offloadtrain.optim import AdamW
from offloadtrain.runtime.device import resolve_device, resolve_precision
from offloadtrain.runtime.dtypes import PRECISIONS
from offloadtrain.runtime.lanes import on_lanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.step.layout.block_spec import BlockSpec, BucketSpec, padded
from offloadtrain.step.layout.formats import format_for
from offloadtrain.step.layout.placement import lay_out
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.operations import Kind
from offloadtrain.step.proof.simulate import steady

Mode = Literal["exact", "early", "speculative", "delayed"]

OPTIONS: dict[Mode, dict[str, Any]] = {
    "exact": {"clip_norm": 1.0},
    "early": {"skip_nonfinite": False},
    "speculative": {"update": "speculative", "clip_norm": 1e9},
    "delayed": {"update": "delayed"},
}
MILLISECONDS = {
    Kind.FORWARD: 6.0,
    Kind.BACKWARD: 12.0,
    Kind.GATHER: 0.3,
    Kind.GRAD_DOWN: 5.0,
    Kind.NORM: 0.1,
    Kind.ADAM: 8.0,
    Kind.WEIGHTS_UP: 5.0,
    Kind.LOAD: 5.0,
    Kind.PUBLISH: 1.0,
}
"""Paced times of a block's operations, for a machine whose host keeps up with its device."""

WARM_STEPS = 3
WIDTH = 1024
"""Number of weights in a layer."""


class _Paced(torch.autograd.Function):
    """Sleeps in forward and backward; all elements of the gradient are equal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        time.sleep(MILLISECONDS[Kind.FORWARD] / 1e3)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        time.sleep(MILLISECONDS[Kind.BACKWARD] / 1e3)
        return grads[0], torch.full_like(weight, 1e-3)


class PacedLayer(nn.Module):
    """A block with a fixed duration and few weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Paced.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


def measure(mode: Mode, *, streamed: bool, layers: int, steps: int) -> Row:
    """Compare a paced step in a mode and placement with its schedule.

    Returns:
        Milliseconds per step: `busiest_ms`, work of the busiest lane, a lower bound of any
        schedule; `schedule_ms`, of the schedule with free launches; `measured_ms`, median over
        steps; `x_schedule`: measured over schedule.
    """
    options = OPTIONS[mode] | ({"working": "host"} if streamed else {})
    expected = steady(spec_of_layers(layers, **options), lambda op: _ms(op.kind) / 1e3)
    measured = paced_step_s(layers, steps, _ms, **options)
    return {
        "mode": mode,
        "working": "host" if streamed else "device",
        "layers": layers,
        "busiest_ms": max(expected.busy.values()) * 1e3,
        "schedule_ms": expected.seconds * 1e3,
        "measured_ms": measured * 1e3,
        "x_schedule": measured / expected.seconds,
    }


def paced_step_s(layers: int, steps: int, ms: Callable[[Kind], float], **options: Any) -> float:
    """Return the median seconds of a step of paced layers; `ms`: least time of each operation."""
    least = {f"{kind.value} {layer}": ms(kind) for kind in Kind for layer in range(layers)}
    model = nn.Sequential(*(PacedLayer() for _ in range(layers)))
    with on_lanes(ThreadLanes(pace=lambda name: least.get(name, 0.0))):
        optimizer = offload(model, AdamW(), device="cpu", precision="fp32", **options)
    try:
        return median_step_s(
            optimizer, lambda: model(torch.ones(1, requires_grad=True)).sum(), steps
        )
    finally:
        optimizer.close()


def median_step_s(optimizer: OffloadOptimizer, loss: Callable[[], Tensor], steps: int) -> float:
    """Return the median seconds of a step, after WARM_STEPS."""
    spent = []
    for _ in range(WARM_STEPS + steps):
        begun = time.perf_counter()
        optimizer.backward(loss())
        optimizer.step()
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent[WARM_STEPS:])


def _ms(kind: Kind) -> float:
    return MILLISECONDS.get(kind, 0.0)


def spec_of_layers(layers: int, ranks: int = 1, **options: Any) -> StepSpec:
    """Return the spec of a step of `layers` paced layers with these options."""
    state_format, numel = format_for("fp32", "float32"), padded([WIDTH], ranks)
    moments = AdamW().moments
    buckets = (
        BucketSpec(f"{n}", numel, WIDTH, "float32", state_format, ranks, moments)
        for n in range(layers)
    )
    return lay_out(
        [BlockSpec(bucket.name, (bucket,), repeated=True) for bucket in buckets],
        OffloadConfig(precision="fp32", **options),
        ranks=ranks,
        num_tensors=layers,
        available_bytes=available_bytes(),
    )


def run(layers: int, steps: int, on_row: Callable[[str], None]) -> list[Row]:
    """Measure every mode, with weights on the device and streamed."""
    rows = []
    for streamed in (False, True):
        for mode in OPTIONS:
            on_row(f"{mode}, {'streamed' if streamed else 'on the device'}")
            rows.append(measure(mode, streamed=streamed, layers=layers, steps=steps))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return all rows as a text table."""
    head = (
        f"{'mode':12} {'weights':8} {'busiest lane':>13} {'schedule':>10} {'measured':>10}  ratio"
    )
    lines = [
        f"{row['mode']:12} {row['working']:8} {row['busiest_ms']:10.1f} ms "
        f"{row['schedule_ms']:7.1f} ms {row['measured_ms']:7.1f} ms  {row['x_schedule']:5.3f}"
        for row in rows
    ]
    return "\n".join([head, *lines])


# ---- the demo model, offloaded and resident: see [Note: The resident loop]

CLIP_NORM = 1.0
BATCH, LENGTH = 8, 256
DEMO_WARM_STEPS = 2

DEMO_OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {},
    "speculative": {"update": "speculative"},
    "delayed": {"update": "delayed"},
    "streamed": {"working": "host"},
    "streamed, inputs offloaded": {"working": "host", "activation": "offload"},
}

Step = Callable[[Tensor, Tensor], object]


def run_demo(rounds: int, on_round: Callable[[str], None]) -> list[Row]:
    """Train all cases alternately, one step each per round.

    Returns:
        One row per case: median `step_ms`; `x_resident`, the median of the ratios of its step to
        the resident one of the same round; median `exposed_ms`, None for the resident case.
    """
    device = resolve_device("auto")
    dtype = PRECISIONS[resolve_precision("auto", device)[0]]
    model = Transformer(SIZES["demo"], seed=0)
    steps: dict[str, Step] = {"resident": resident_step(copy.deepcopy(model), device, dtype)}
    exposed: dict[str, list[float]] = {}
    for name, options in DEMO_OPTIONS.items():
        steps[name] = offloaded_step(copy.deepcopy(model), device, dtype, options, exposed, name)
    tokens = torch.randint(0, 256, (BATCH, LENGTH + 1), device=device)

    def run_to_end(step: Step) -> None:
        step(tokens[:, :-1], tokens[:, 1:])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = measure_rounds(
        {name: partial(run_to_end, step) for name, step in steps.items()},
        rounds,
        lambda number: on_round(f"demo, round {number + 1}/{DEMO_WARM_STEPS + rounds}"),
        warm=DEMO_WARM_STEPS,
    )
    return [
        {
            "case": name,
            "step_ms": statistics.median(times) * 1e3,
            "x_resident": ratio(times, seconds["resident"]) or 0.0,
            "exposed_ms": statistics.median(exposed[name][DEMO_WARM_STEPS:])
            if name in exposed
            else None,
        }
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


def demo_table(rows: Sequence[Row]) -> str:
    """Return all rows as a text table."""
    lines = [f"{'case':26} {'ms per step':>12} {'x resident':>11} {'exposed ms':>11}"]
    for row in rows:
        waited = "-" if row["exposed_ms"] is None else f"{row['exposed_ms']:.1f}"
        figures = f"{row['step_ms']:12.1f} {row['x_resident']:11.2f} {waited:>11}"
        lines.append(f"{row['case']:26} {figures}")
    return "\n".join(lines)
