"""The largest published model that trains on a machine, by placement and state format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import ModelShape, num_params
from offloadtrain.config.offload import STATE_PRECISIONS
from offloadtrain.config.units import format_bytes, format_count
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.search.published_models import MODELS
from offloadtrain.plan.search.question import STEP_TOKENS, job_of
from offloadtrain.plan.search.suggest import applied
from offloadtrain.step.layout.formats import ADAM_MOMENTS, FORMATS

WEIGHT_BYTES = 2
"""Of a 16-bit working weight: less than any other."""


@dataclass(frozen=True, slots=True)
class Row:
    """A placement and a state format; `plan` is None if not even a small model fits.

    Attributes:
        model: its published name.
    """

    working: str
    activation: str
    state: str
    model: str = ""
    plan: Plan | None = None

    @property
    def params(self) -> int:
        return num_params(self.plan.job.model) if self.plan else 0


def largest(name: str, machine: Machine, ranks: int = 1) -> Iterator[Row]:
    """Yield one row per placement and state format, as they are found: weights on the device or
    streamed, layer inputs on the device or the host."""
    precision = machine.auto_precision
    for working, activation in (("device", "recompute"), ("host", "offload")):
        for state, precisions in STATE_PRECISIONS.items():
            if precision in precisions:
                yield _largest(Row(working, activation, state), name, machine, ranks)


def table(rows: Iterable[Row], machine: Machine, ranks: int) -> Iterator[str]:
    """Yield the lines of a text table, each as soon as its row is there."""
    yield (
        f"{'weights':8} {'state':8} {'model':19} {'parameters':>10} {'microbatch':>10} "
        f"{'device':>10} {'host':>10} {'tokens/s':>9}"
    )
    yield from map(_line, rows)
    yield (
        f"The largest of {len(MODELS)} published models: {machine.auto_precision}, AdamW, "
        f"{STEP_TOKENS} tokens per step in the largest microbatch that fits, activations "
        "recomputed (streamed: their inputs on the host)"
        + (f"; {ranks} GPUs: device of each, host of all on it" if ranks > 1 else "")
    )


def _line(row: Row) -> str:
    weights = "streamed" if row.working == "host" else "device"
    if row.plan is None:
        return f"{weights:8} {row.state:8} {'-':19}"
    plan, train = row.plan, row.plan.placed.config.train
    device, host = sum(plan.device.values()), max(plan.host_peaks.values())
    rate = plan.prediction.tokens_per_s
    return (
        f"{weights:8} {row.state:8} {row.model:19} {format_count(row.params):>10} "
        f"{train.micro_batch:10} {format_bytes(device):>10} {format_bytes(host):>10} "
        f"{format_count(rate):>9}"
    )


def _largest(row: Row, name: str, machine: Machine, ranks: int) -> Row:
    places = {
        "offload.working": row.working,
        "offload.activation": row.activation,
        "offload.state": row.state,
    }
    for model, shape in MODELS.items():
        if _may_fit(row, shape, machine, ranks):
            job = applied(job_of(model, shape, ranks), places)
            if (plan := _fitting(job, name, machine, ranks)) is not None:
                return replace(row, model=model, plan=plan)
    return row


def _may_fit(row: Row, shape: ModelShape, machine: Machine, ranks: int) -> bool:
    """Return whether state and working weights alone fit, which takes no plan to know."""
    params, hosts = num_params(shape), -(-ranks // machine.gpus)
    state = params * FORMATS[row.state].bytes_per_param(ADAM_MOMENTS, WEIGHT_BYTES) / hosts
    weights = params * WEIGHT_BYTES if row.working == "device" else 0
    return state <= machine.host_memory_bytes and weights <= machine.gpu_memory_bytes


def _fitting(job: Config, name: str, machine: Machine, ranks: int) -> Plan | None:
    """Return the plan of the largest microbatch that fits: the whole step, which needs no sums, or
    halves of it. What does not fit in single sequences does not fit in more of them."""
    sequences = job.train.micro_batch
    full, *smaller = _halves(sequences // ranks)

    def planned(size: int) -> Plan:
        train = replace(job.train, micro_batch=size, grad_accum_steps=sequences // size)
        return make(replace(job, train=train), name, machine, ranks)

    # one microbatch of all ranks, which share it
    if (plan := planned(full * ranks)).fits:
        return plan
    if not smaller or not planned(smaller[-1]).fits:
        return None
    return next(plan for plan in map(planned, smaller) if plan.fits)


def _halves(size: int) -> list[int]:
    """Return the size, and its halves as long as they are whole."""
    return [size, *_halves(size // 2)] if size % 2 == 0 else [size]
