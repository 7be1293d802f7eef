"""The trace of a job's microbatch, where a plan needs more than that of our transformer's shape.

With `offload.activation = "offload_saved"` each tensor that autograd saves goes to the host by its
own size, which the layout of the host's memory needs. With `offload.recompute_blocks = "auto"` a
model of transformers is traced itself.
"""

from __future__ import annotations

from offloadtrain.config.batch_split import shared
from offloadtrain.config.job import Config
from offloadtrain.hardware.machine import Machine
from offloadtrain.integrations.hf_trace import HfTrace
from offloadtrain.plan.costs.microbatch import Trace
from offloadtrain.plan.placement import resolved
from offloadtrain.plan.tracing.tracer import ShapeTrace


def needed_trace(job: Config, machine: Machine, ranks: int) -> Trace | None:
    """Return the trace that a plan of this job must have; None: that of its shape is enough."""
    needed = job.offload.activations.mode == "offload_saved"
    # Of other models than ours the shape estimates activations, too coarsely to fill a device.
    needed = needed or (job.hf is not None and job.offload.activations.recompute_blocks == "auto")
    return tracer_of(job, machine, ranks) if needed else None


def tracer_of(job: Config, machine: Machine, ranks: int) -> Trace:
    """Return what traces a microbatch of one rank; nothing is traced yet.

    Raises:
        PlanError: the machine does not support device, precision or state format.
        ConfigError: the ranks cannot share the batch.
    """
    of_rank = shared(resolved(job, machine), ranks)
    if of_rank.hf is not None:
        return HfTrace(of_rank, machine.on_cpu)
    return ShapeTrace(machine.on_cpu)
