"""What a run says of itself before its first step: a record, console lines, warnings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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
from offloadtrain.runtime import kernels
from offloadtrain.runtime.bandwidth import bandwidth
from offloadtrain.train.build import TrainingContext
from offloadtrain.train.log.records import plan_facts
from offloadtrain.train.log.run_memory import gpu_uuid
from offloadtrain.train.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
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
    device_name: str
    calibrated_gbps: dict[str, float]
    peak_flops: float | None

    @classmethod
    def of(
        cls,
        run: RunFolder,
        config: Config,
        context: TrainingContext,
        machine: SystemInfo,
        step: int,
        waiting: str,
    ) -> RunStart:
        """Look at the device, and measure its bus."""
        device, calibrated_gbps = context.optimizer.device, {}
        if on_gpu := device.type == "cuda":
            measured = bandwidth(device)
            calibrated_gbps = {"h2d": measured.h2d_gbps, "d2h": measured.d2h_gbps}
        name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
        flops = peak_flops(name, context.precision)
        return cls(
            run=run,
            config=config,
            context=context,
            machine=machine,
            step=step,
            waiting=waiting,
            device_name=name,
            calibrated_gbps=calibrated_gbps,
            peak_flops=flops and flops * context.ranks.size,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """What the run folder says of the run, too."""
        return {"name": self.config.name, "num_params": self.config.num_params}

    def record(self) -> schema.RunStarted:
        """Return the first record of this start."""
        return schema.RunStarted(
            run_id=self.run.run_id,
            pid=os.getpid(),
            config=as_tables(with_sums_of(self.config, self.context.plan.job)),
            plan=self._plan(),
            backend=asdict(kernels.backend()),
            machine=asdict(self.machine),
            start_step=self.step,
            peak_flops=self.peak_flops,
            **self.facts,
        )

    def _plan(self) -> dict[str, Any]:
        """Return the device of the run, and the planned bytes by tier and owner."""
        context, device = self.context, self.context.optimizer.device
        plan: dict[str, Any] = {
            "device": str(device),
            "precision": context.precision,
            "why": context.why,
        }
        if device.type == "cuda":
            plan |= {"gpu_uuid": gpu_uuid(device), "calibrated_gbps": self.calibrated_gbps}
        if stages := context.plan.stage_names:
            plan["stage"] = stages
        if group := group_of(self.config, context.ranks.size, context.ranks.rank):
            plan["group"] = group
        if part := part_of(self.config, context.ranks.rank):
            plan["part"] = part
        return (
            plan
            | plan_facts(context.plan)
            | {
                "update_rule": type(update_rule(self.config.optim)).__name__,
                "threads": torch.get_num_threads(),
                "waiting": self.waiting or "as OpenMP does",
            }
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

    @property
    def pins_in_vain(self) -> bool:
        """True if transfers are slow because host memory could not be page-locked."""
        optimizer, pin = self.context.optimizer, self.config.offload.memory.pin
        return optimizer.device.type == "cuda" and pin and not optimizer.pinned
