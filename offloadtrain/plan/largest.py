"""The largest GPT that trains on a machine, by placement and state format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from offloadtrain.config.job import Config, DataConfig, TrainConfig
from offloadtrain.config.model_shape import ModelShape, num_params
from offloadtrain.config.offload import STATE_PRECISIONS
from offloadtrain.config.units import format_bytes, format_count
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.suggest import applied

SEQ_LEN, VOCAB, HEAD_WIDTH = 1024, 50304, 128
WIDTHS = (1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 10240, 12288)
LAYERS = (8, 128)
"""Fewest and most layers that are usual at these widths."""

SHAPE = ModelShape(
    vocab_size=VOCAB,
    num_layers=2,
    d_model=HEAD_WIDTH,
    num_heads=1,
    max_seq_len=SEQ_LEN,
    positions="learned",
    norm="layernorm",
    mlp="gelu",
    tie_embeddings=True,
    bias=True,
)


@dataclass(frozen=True, slots=True)
class Row:
    """A placement and a state format; `plan` is None if not even a small model fits."""

    working: str
    activation: str
    state: str
    plan: Plan | None

    @property
    def params(self) -> int:
        return num_params(self.plan.job.model) if self.plan else 0


def largest(name: str, machine: Machine, ranks: int = 1, micro_batch: int = 1) -> list[Row]:
    """Return one row per placement and state format: weights on the device or streamed, layer
    inputs on the device or the host.

    Args:
        micro_batch: sequences per rank.
    """
    precision = machine.auto_precision
    rows = []
    for working, activation in (("device", "recompute"), ("host", "offload")):
        for state, precisions in STATE_PRECISIONS.items():
            if precision in precisions:
                job = _job(working, activation, state, micro_batch * ranks)
                rows.append(Row(working, activation, state, _largest(job, name, machine, ranks)))
    return rows


def table(rows: list[Row], machine: Machine) -> str:
    """Return the rows as a text table."""
    head = (
        f"{'weights':8} {'state':8} {'parameters':>10} {'layers':>6} {'width':>6} {'device':>10} "
        f"{'host':>10} {'tokens/s':>9}"
    )
    lines = [_line(row) for row in rows]
    ranks = next((row.plan.placed.spec.ranks for row in rows if row.plan), 1)
    note = (
        f"GPT, sequences of {SEQ_LEN}, vocabulary {VOCAB}, {machine.auto_precision}, activations "
        f"recomputed (streamed: their inputs on the host), a step of one microbatch"
        + (f" on each of {ranks} GPUs; device: of each, host: of all" if ranks > 1 else "")
    )
    return "\n".join([head, *lines, note])


def _line(row: Row) -> str:
    weights = "streamed" if row.working == "host" else "device"
    if row.plan is None:
        return f"{weights:8} {row.state:8} {'-':>10}"
    shape, plan = row.plan.job.model, row.plan
    device, host = sum(plan.device.values()), max(plan.host_peaks.values())
    rate = plan.prediction.tokens_per_s
    return (
        f"{weights:8} {row.state:8} {format_count(row.params):>10} {shape.num_layers:6} "
        f"{shape.d_model:6} {format_bytes(device):>10} {format_bytes(host):>10} "
        f"{format_count(rate):>9}"
    )


def _job(working: str, activation: str, state: str, micro_batch: int) -> Config:
    base = Config(
        name="largest",
        model=SHAPE,
        data=DataConfig(train="-", seq_len=SEQ_LEN),
        train=TrainConfig(steps=1, micro_batch=micro_batch),
    )
    places = {
        "offload.working": working,
        "offload.activation": activation,
        "offload.state": state,
    }
    return applied(base, places)


def _largest(job: Config, name: str, machine: Machine, ranks: int) -> Plan | None:
    """Return the largest of the deepest plans that fit, one per width."""

    def planned(width: int, layers: int) -> Plan:
        return make(replace(job, model=_shape(width, layers)), name, machine, ranks)

    best: Plan | None = None
    for width in WIDTHS:
        if not planned(width, LAYERS[0]).fits:
            break
        low = LAYERS[0] if best is None else _more_layers(width, num_params(best.job.model))
        # What fits in depth fits in less: a width that cannot win is not searched.
        if low <= LAYERS[1] and planned(width, low).fits:
            best = _deepest(low, partial(planned, width))
    return best


def _shape(width: int, layers: int) -> ModelShape:
    return replace(SHAPE, num_layers=layers, d_model=width, num_heads=width // HEAD_WIDTH)


def _more_layers(width: int, params: int) -> int:
    """Return the fewest layers of this width with more parameters than these."""
    one, two = (num_params(_shape(width, layers)) for layers in (1, 2))
    return max(LAYERS[0], (params - one) // (two - one) + 2)


def _deepest(low: int, planned: Callable[[int], Plan]) -> Plan:
    """Return the plan with most layers that fits; with `low` it does."""
    high = LAYERS[1] + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if planned(middle).fits else (low, middle)
    return planned(low)
