"""The start of a run: its first record, the introduction on the console, and warnings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from offloadtrain.config.batch_split import group_of, part_of
from offloadtrain.config.job import Config, as_tables
from offloadtrain.config.units import format_count
from offloadtrain.events import schema
from offloadtrain.hardware.peak_flops import peak_flops
from offloadtrain.hardware.telemetry import SystemInfo
from offloadtrain.optim.update_rules import update_rule
from offloadtrain.plan.automatic import with_sums_of
from offloadtrain.plan.plan import PROCESS, Plan
from offloadtrain.runtime import kernels
from offloadtrain.runtime.bandwidth import bandwidth
from offloadtrain.step.layout.block_spec import BucketSpec
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.train.build import TrainingContext
from offloadtrain.train.log.run_memory import gpu_uuid
from offloadtrain.train.run_folder import RunFolder


@dataclass(slots=True)
class RunStart:
    """A run that begins or goes on.

    Attributes:
        config: the job of all ranks.
        step: optimizer steps done before.
        waiting: the wait policy of torch's threads, if not OpenMP's default.
        calibrated_gbps: measured bandwidth of the bus by direction; empty on the CPU.
        peak_flops: of the devices of all ranks, per second, if known.
    """

    run: RunFolder
    config: Config
    context: TrainingContext
    machine: SystemInfo
    step: int
    waiting: str
    device_name: str = "CPU"
    calibrated_gbps: dict[str, float] = field(default_factory=dict)
    peak_flops: float | None = None

    def __post_init__(self) -> None:
        """Look at the device, and measure its bus."""
        device = self.context.optimizer.device
        if device.type == "cuda":
            measured = bandwidth(device)
            self.calibrated_gbps = {"h2d": measured.h2d_gbps, "d2h": measured.d2h_gbps}
            self.device_name = torch.cuda.get_device_name(device)
        flops = peak_flops(self.device_name, self.context.precision)
        self.peak_flops = flops and flops * self.context.ranks.size

    def record(self) -> schema.RunStarted:
        """Return the first record of this start: the job, the device and the planned bytes."""
        config, context, device = self.config, self.context, self.context.optimizer.device
        plan: dict[str, Any] = {
            "device": str(device),
            "precision": context.precision,
            "why": context.why,
        }
        if device.type == "cuda":
            plan |= {"gpu_uuid": gpu_uuid(device), "calibrated_gbps": self.calibrated_gbps}
        places = {
            "stage": context.plan.stage_names,
            "group": group_of(config, context.ranks.size, context.ranks.rank),
            "part": part_of(config, context.ranks.rank),
        }
        plan |= {key: place for key, place in places.items() if place}
        plan |= plan_facts(context.plan)
        plan |= {
            "update_rule": type(update_rule(config.optim)).__name__,
            "threads": torch.get_num_threads(),
            "waiting": self.waiting or "as OpenMP does",
        }
        return schema.RunStarted(
            run_id=self.run.run_id,
            name=config.name,
            num_params=config.num_params,
            pid=os.getpid(),
            config=as_tables(with_sums_of(config, context.plan.job)),
            plan=plan,
            backend=asdict(kernels.backend()),
            machine=asdict(self.machine),
            start_step=self.step,
            peak_flops=self.peak_flops,
        )

    def introduction(self) -> str:
        """Return the lines that a run begins with."""
        config, context, backend = self.config, self.context, kernels.backend()
        threads = f"{torch.get_num_threads()} threads{f' {self.waiting}' if self.waiting else ''}"
        where = self.machine.cpu if self.device_name == "CPU" else self.device_name
        return (
            f"{config.name}: {format_count(config.num_params)} parameters, "
            f"{format_count(config.batch_tokens)} tokens per step, {config.train.steps} steps\n"
            f"compute: {where}, {context.precision}{f' ({context.why})' if context.why else ''}, "
            f"{threads}; updates: {backend.name} {backend.isa}, {backend.threads} threads\n"
            f"data: {format_count(len(context.train_tokens))} tokens to train on"
            + (f", {format_count(len(context.val_tokens))} held out" if context.val_tokens else "")
            + f"\nrun: {self.run.path}"
            + (f"; resuming after step {self.step}" if self.step else "")
        )

    def warnings(self) -> Iterator[tuple[str, str]]:
        """Yield (code, message) for what is known before the first step."""
        documents, tokens = self.context.batches.cut_documents()
        if documents:
            yield (
                "documents-cut",
                f"{format_count(documents)} documents are longer than data.seq_len = "
                f"{self.config.data.seq_len} and lose their ends, {format_count(tokens)} of "
                f"{format_count(len(self.context.train_tokens))} tokens: raise data.seq_len, or "
                'set data.packing = "isolated"',
            )
        if problems := self.context.plan.problems:
            yield "plan", f"according to the plan the job may not fit: {' '.join(problems)}"


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


def _update_bytes(spec: StepSpec) -> int:
    """Count the bytes that updates move through one rank's host memory in a step."""

    def of_one(bucket: BucketSpec) -> float:
        gradient = 4 if spec.holds_sum(bucket) else bucket.weight_bytes
        moved = bucket.format.traffic_per_param(bucket.moments, bucket.weight_bytes, gradient)
        return moved * bucket.params

    return round(sum(map(of_one, spec.buckets)) / spec.ranks)
