"""The placement of a job: one rank's part of the job and the spec of its step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from offloadtrain.config.errors import DeviceMemoryError, InputError, OffloadTrainError
from offloadtrain.config.job import Config
from offloadtrain.config.offload import PRECISIONS, STATE_PRECISIONS, OptionError
from offloadtrain.hardware.machine import Machine
from offloadtrain.hardware.peak_flops import has_fp8
from offloadtrain.optim import MatrixRule
from offloadtrain.optim.update_rules import update_rule
from offloadtrain.plan.costs.microbatch import Trace, TracedStep
from offloadtrain.plan.layout import blocks_of, num_tensors, parts_of, working_dtype
from offloadtrain.step.layout import buffer_table, placement
from offloadtrain.step.layout.buffers import Memory, by_owner, span_bytes
from offloadtrain.step.layout.formats import ITEMSIZE
from offloadtrain.step.layout.step_spec import StepSpec


class PlanError(OffloadTrainError):
    """The requested placement is impossible."""


class PlanOptionError(InputError, PlanError):
    """The job's options are wrong: no amount of memory makes this placement possible."""


@dataclass(frozen=True)
class Placement:
    """One rank's view of a distributed job.

    Attributes:
        config: the rank's part of the job (`batch_split.shared`), with resolved precision.
        spec: the spec of the rank's step.
        trace: traces a microbatch of the model. None: activations are those of the shipped
            transformer in this shape (`tracing.tracer`), and times are counted from the shape.
        in_flight: number of microbatches whose activations are in memory at once.
    """

    config: Config
    spec: StepSpec
    trace: Trace | None = None
    in_flight: int = 1

    @cached_property
    def traced(self) -> TracedStep | None:
        """The traced microbatch, or None without a trace."""
        return None if self.trace is None else self.trace(self.config)

    @property
    def weight_bytes(self) -> int:
        """Bytes per element of a working weight, and of an activation."""
        return ITEMSIZE[PRECISIONS[self.config.offload.precision]]

    @property
    def repeated(self) -> int:
        """Number of repeated blocks."""
        return sum(block.repeated for block in self.spec.blocks)

    @property
    def recomputed(self) -> int:
        """Number of blocks whose forward runs again in backward."""
        return sum(block.recomputed for block in self.spec.blocks)

    @property
    def block_inputs(self) -> tuple[int, ...]:
        """Bytes of each tensor that `activation` moves to the host."""
        if self.config.offload.activations.mode not in ("offload", "offload_saved"):
            return ()
        if self.traced is not None:
            return tuple(map(self._of_part, self.traced.block_inputs)) * self.in_flight
        return self._kept_inputs

    @property
    def _kept_inputs(self) -> tuple[int, ...]:
        """Bytes of this rank's parts of layer inputs that are kept for recompute."""
        return (self._of_part(self.hidden_bytes),) * self.recomputed * self.in_flight

    def _of_part(self, nbytes: int) -> int:
        """Return this rank's bytes of an input; an input that does not divide evenly is kept
        whole."""
        rest = nbytes // self.weight_bytes % self.spec.input_parts
        return nbytes // (1 if rest else self.spec.input_parts)

    @property
    def input_bytes(self) -> int:
        """Bytes of one layer's inputs; for a traced model, the mean that each block moves."""
        if self.traced is not None:
            moving = self.recomputed or self.repeated or len(self.spec.blocks)
            return sum(self.traced.block_inputs) // moving
        return self.hidden_bytes

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a microbatch's hidden states between two layers."""
        tokens = self.config.train.micro_batch * self.config.data.seq_len
        return tokens * self.config.model.d_model * self.weight_bytes

    @property
    def least_activation_bytes(self) -> int:
        """Lower bound on activation bytes of the shipped transformer, known without a trace: layer
        inputs that stay on the device, and logits with their gradient."""
        config, stage = self.config, self.config.stage
        if self.trace is not None or config.hf is not None:
            return 0
        nbytes = 0
        stays = config.offload.activations.mode in ("keep", "recompute", "selective")
        if stays and self.spec.input_parts == 1:
            nbytes = self.repeated * self.hidden_bytes * self.in_flight
        if not config.train.chunked_loss and (stage is None or stage.is_last):
            tokens = config.train.micro_batch * config.data.seq_len
            nbytes += 2 * tokens * config.model.vocab_size * self.weight_bytes
        return nbytes

    def host(self) -> dict[str, int]:
        """Return owner → bytes of one rank's host memory, equal to its Ledger after a step."""
        owners = buffer_table.host_owners(self.spec)
        pool = buffer_table.pools(self.spec)[Memory.HOST_ACTIVATION]
        inputs = [pool.buffer(size) for size in self.block_inputs]
        if not inputs:
            return owners
        padding = span_bytes(inputs) - sum(row.nbytes for row in inputs)
        return buffer_table.added([owners, by_owner(inputs), {"padding": padding}])

    def device(self) -> dict[str, int]:
        """Return owner → bytes of one device, without activations and other memory of torch."""
        owners = buffer_table.device_owners(self.spec)
        if self.spec.input_parts > 1 and not self.block_inputs:
            owners["block inputs"] = sum(self._kept_inputs)
        return owners

    @property
    def frozen_bytes(self) -> int:
        """Device bytes of frozen weights that are not streamed; torch owns them."""
        parts = (part for part in parts_of(self.config) if part.name not in self.spec.streamed)
        frozen = (param for part in parts for param in part.params if not param.trained)
        return sum(
            prod(param.sizes) * ITEMSIZE[working_dtype(param, self.config.offload)]
            for param in frozen
        )


def place(
    config: Config,
    ranks: int = 1,
    available_bytes: int | None = None,
    trace: Trace | None = None,
    copies: int = 1,
    in_flight: int = 1,
    **rows: Any,
) -> Placement:
    """Lay out the step of one rank.

    Args:
        config: the rank's part of the job, with resolved precision.
        ranks: number of ranks that share a copy of the state.
        available_bytes: host memory for the state and its second copies; None: no second
            copies.
        trace: see `Placement`.
        copies: number of such groups of ranks.
        in_flight: see `Placement`.
        rows: further fields of the spec, for a stage of a pipeline without flushes.

    Raises:
        PlanError: a device limit is too small for the slots and the unstreamed part, or
            "offload_saved" has no trace. PlanOptionError: options conflict, or Muon has no matrix.
    """
    if config.offload.activations.mode == "offload_saved" and trace is None:
        raise PlanError(
            "offload.activation = 'offload_saved': what it moves to the host is known from a trace "
            "of the model, which this search does not make: plan the job by itself (offloadtrain "
            "plan JOB), or set 'offload' or 'recompute'"
        )
    try:
        spec = placement.lay_out(
            blocks_of(config, ranks),
            config.offload,
            ranks=ranks,
            num_tensors=num_tensors(config),
            available_bytes=available_bytes,
            copies=copies,
            parts=config.ranks.tensor,
            **rows,
        )
    except DeviceMemoryError as error:
        raise PlanError(f"offload.{error}") from None
    except OptionError as error:
        raise PlanOptionError(f"offload.{error}") from None
    of_matrices = isinstance(update_rule(config.optim), MatrixRule)
    if of_matrices and not any(bucket.matrices for bucket in spec.buckets):
        raise PlanOptionError(
            'optim.name = "muon" updates the matrices of layers in a list, and the model has no '
            'such list that is trained: use optim.name = "adamw", or more layers'
        )
    placed = Placement(config, spec, trace, in_flight)
    _ = placed.traced  # here, so that a failed trace is an error of the placement
    return placed


def resolved(job: Config, machine: Machine) -> Config:
    """Return the job with "auto" precision resolved for the machine.

    Raises:
        PlanError: the machine does not support device, precision or state format.
    """
    kind, where = job.device.kind, machine.gpu or "its CPU"
    if kind != "auto" and (kind == "cpu") != machine.on_cpu:
        raise PlanError(
            f"device.kind = {kind!r}, but the machine computes on {where}: choose another machine, "
            'or set device.kind = "auto"'
        )
    has_products = machine.on_cpu or machine.fp8_tflops or has_fp8(machine.gpu)
    if (fp8 := job.offload.compute.fp8) != "off" and not has_products:
        raise PlanError(
            f"offload.fp8 = {fp8!r}: {where} has no FP8 products, which begin with "
            'compute capability 8.9 (Ada, Hopper): set offload.fp8 = "off"'
        )
    precision = job.offload.precision
    if precision == "auto":
        precision = machine.auto_precision
    elif precision not in machine.precisions:
        raise PlanError(
            f"offload.precision = {precision!r}, but {where} does not support it: set "
            f"offload.precision = {' or '.join(machine.precisions)}"
        )
    state = job.offload.state.format
    if precision not in STATE_PRECISIONS[state]:
        raise PlanError(
            f"offload.state = {state!r} does not support offload.precision = {precision!r} on "
            f"{where}: set offload.state = fp32"
            + (" or int8" if precision in STATE_PRECISIONS["int8"] else "")
        )
    return replace(job, offload=job.offload.replace(precision=precision))
