"""`offloadtrain train JOB --dry-run`: the plan, laid out and proved."""

from __future__ import annotations

from dataclasses import replace

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.config.offload import STATE_PRECISIONS
from offloadtrain.config.units import format_bytes
from offloadtrain.hardware.machine import Machine, find, shipped
from offloadtrain.plan import report
from offloadtrain.plan.automatic import with_sums_of
from offloadtrain.plan.costs.microbatch import Trace
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.search.suggest import settled
from offloadtrain.runtime.detect_machine import here
from offloadtrain.runtime.device import resolve_device
from offloadtrain.train.build import described, needed_trace
from offloadtrain.train.dry_run import check


def preview(config: Config, ranks: int = 1) -> tuple[str, bool, Config]:
    """Return the needs of a job, whether it fits, and the job with its decided sums, on its machine
    or else on this one."""
    described_job = described(config)
    name, machine = _machine(described_job)
    trace = needed_trace(described_job, machine, ranks)
    job = settled(described_job, name, machine, ranks, trace)
    plan = make(job, name, machine, ranks, trace)
    lines = [report.text(plan), _formats(plan, trace), check(plan)]
    return "\n\n".join(lines), plan.fits, with_sums_of(config, plan.job)


def _machine(config: Config) -> tuple[str, Machine]:
    if config.device.machine:
        return find(config.device.machine)
    try:
        return here(on_gpu=resolve_device(config.device.kind).type == "cuda")
    except ConfigError as error:
        raise ConfigError(
            f"{error}; or set device.machine to the machine the job is for: "
            f"{', '.join(shipped())}, or a file of offloadtrain doctor"
        ) from None


def _formats(plan: Plan, trace: Trace | None) -> str:
    """Return the host's needs in each state format that supports the precision."""
    job, precision = plan.job, plan.job.offload.precision
    needs = {}
    for state, precisions in STATE_PRECISIONS.items():
        if precision in precisions:
            other = replace(job, offload=job.offload.replace(state=state))
            other_plan = make(other, plan.name, plan.machine, plan.ranks, trace)
            needs[state] = max(other_plan.host_peaks.values())
    text = ", ".join(f"{state} {format_bytes(size)}" for state, size in needs.items())
    return f"a host needs, by state format: {text}"
