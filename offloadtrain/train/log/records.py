"""Records of the run log, made of what the trainer knows."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from offloadtrain.engine import StepReport
from offloadtrain.events import schema
from offloadtrain.plan.plan import PROCESS, Plan
from offloadtrain.step.layout.block_spec import BucketSpec
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.train.progress import Progress, StepClock, StepStats


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Return what `RunStarted.plan` holds of a plan: bytes by tier and owner, and times."""
    host = {owner: size for owner, size in plan.host.items() if owner != PROCESS}
    return {
        "machine": plan.name,
        "memory": {"device": plan.engine_device, "host": host},
        "process_bytes": plan.process_bytes,
        "activations": plan.activations.owners(),
        "step": asdict(plan.prediction),
        "adam_bytes_per_step": sum(_update_bytes(placed.spec) for placed in plan.placements),
    }


def step_record(
    number: int,
    progress: Progress,
    report: StepReport,
    clock: StepClock,
    told: StepStats,
    *,
    lr: float,
    rank: int,
    batch_tokens: int,
    scaling: bool,
    mfu: float | None,
    peaks: tuple[int, int],
) -> schema.Step:
    """Return the record of a step.

    Args:
        batch_tokens: of all ranks.
        scaling: the loss is scaled.
        peaks: most bytes on the device and on the host within the step.
    """
    many = len(told.own_ms) > 1
    return schema.Step(
        step=number,
        loss=told.loss,
        lr=lr,
        tokens=progress.tokens,
        grad_norm=report.grad_norm,
        clip_coef=report.clip_coef,
        loss_scale=report.loss_scale if scaling else None,
        skipped=report.skipped,
        tokens_per_s=1e3 * batch_tokens / clock.total_ms,
        step_ms=clock.total_ms,
        exposed_ms=report.exposed_ms,
        busy_ms=dict(report.busy_ms),
        d2h_bytes=report.d2h_bytes,
        h2d_bytes=report.h2d_bytes,
        comm_bytes=report.comm_bytes,
        disk_read_bytes=report.disk_read_bytes,
        disk_written_bytes=report.disk_written_bytes,
        own_ms=told.own_ms[rank] if many else 0.0,
        ranks_ms=told.own_ms if many and rank == 0 else (),
        early_buckets=report.early_buckets,
        speculation_hit=report.speculation_hit,
        mfu=mfu,
        device_peak_bytes=peaks[0],
        host_peak_bytes=peaks[1],
        **{f"{phase}_ms": spent for phase, spent in clock.milliseconds.items()},
    )


def _update_bytes(spec: StepSpec) -> int:
    """Count the bytes that updates move through one rank's host memory in a step."""

    def of_one(bucket: BucketSpec) -> float:
        gradient = 4 if spec.holds_sum(bucket) else bucket.weight_bytes
        moved = bucket.format.traffic_per_param(bucket.moments, bucket.weight_bytes, gradient)
        return moved * bucket.params

    return round(sum(map(of_one, spec.buckets)) / spec.ranks)
