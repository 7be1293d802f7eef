"""Step time and memory of published systems: ZeRO, ZeRO-Offload, their baselines, pipelines.

An analytic model of their software on a `Machine`. It checks machine constants and memory equations
against publications (`benchmarks/validate_plan.py`, docs/validation.md). Plans of offloadtrain
itself use its own schedule, not this model. Standard library only.

One set of constants serves all published cells: the machine file, and `Software`.

Pipeline schedules (GPipe, PipeDream-Flush, 2BW) have memory and time as in PipeDream-2BW
(arXiv:2006.09503, section 3 and appendix A), and the bubble as in GPipe (arXiv:1811.06965,
section 2.3). Stages are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from offloadtrain.config.model_shape import ModelShape, num_params
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.costs.device_time import Kernels, Seconds, block_seconds, head_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The efficiency of the measured software: DeepSpeed and PyTorch of 2020.

    None of these is a property of the hardware, so they are not in a machine file. The first
    three are calibrated so that the median errors of ZeRO-Offload's figures 8 to 11 are jointly
    low. The others are taken from sources.

    Attributes:
        compute_share: rate of forward and backward during the engine's hooks and copies, relative
            to the kernels alone. DeepSpeed's tutorial log, 18.27 s, gives 0.72.
        adam_share: Adam's rate within a step, relative to CPU-Adam alone (ZeRO-Offload, table 4):
            0.64 is 0.40 s per 10^9 parameters. DeepSpeed's tutorial log gives 0.45,
            the savings of delayed updates in figure 9 give 0.17 to 0.45.
        contention: slowdown of host work with several unbound ranks. Figure 11 alone gives 1.6
            between 1 GPU and 2.
        ring_share: share of a host's links used by one ring between hosts: one of a DGX-2's eight
            adapters of 12.5 GB/s (ZeRO). ZeRO-Infinity's figure 2b has 60 to 100 of 100 GB/s.
        bucket_bytes: two buckets of 5e8 16-bit gradients (DeepSpeed's default and overlap_comm).
        host_bytes: bytes per parameter that a rank owns: fp32 weight, gradient and moments,
            page-locked 16-bit copy.
        sum_bytes: bytes per owned parameter of the sum of 16-bit gradients, with accumulation.
    """

    compute_share: float = 0.685
    adam_share: float = 0.64
    contention: float = 1.4
    ring_share: float = 0.125
    bucket_bytes: float = 2e9
    host_bytes: float = 18.0
    sum_bytes: float = 2.0


MEGATRON = Kernels(level="eager", attention="scores")
"""The kernels of Megatron-LM in 2020, which the papers' runs use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run; a step has `micro_steps` microbatches on each data parallel rank.

    Attributes:
        micro_batch: sequences per rank; `with_largest_micro_batch` finds what memory allows.
        micro_steps: may be fractional: papers fix the global batch, which may not divide.
        mp: GPUs that split every matrix (Megatron).
        inputs: storage of layer inputs for recompute: "keep": complete on each GPU; "split": among
            the `mp` GPUs (ZeRO-R's Pa); "host": the split part on the host (Pa+cpu).
        stage: ZeRO stage; 0 is PyTorch's DDP.
        offload: optimizer state and gradients are on the host.
        dpu: the delayed update of ZeRO-Offload: Adam overlaps the next step's compute.
        recompute: recompute everything but each layer's input.
        all_params: parameters of the complete model; 0: counted from its shape.
        computed: seconds of a microbatch's forward and backward by kernels alone; None: from the
            shape.
    """

    shape: ModelShape
    micro_batch: int
    micro_steps: float = 1.0
    gpus: int = 1
    mp: int = 1
    stage: int = 2
    offload: bool = True
    dpu: bool = False
    recompute: bool = True
    inputs: Literal["keep", "split", "host"] = "keep"
    kernels: Kernels = MEGATRON
    all_params: int = 0
    computed: Seconds | None = None

    @property
    def ranks(self) -> int:
        return self.gpus // self.mp

    @property
    def params(self) -> float:
        """Parameters of one GPU's part of the model."""
        return (self.all_params or num_params(self.shape)) / self.mp

    @property
    def owned(self) -> float:
        """Parameters in this rank's optimizer state."""
        return self.params / (self.ranks if self.stage else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a step, divided by what the GPU does or waits for; the parts add up.

    Attributes:
        transfers: gradient copies that backward does not hide.
        gradients: the pass that unscales gradients and computes their norm.
        optimizer: the part of Adam that the GPU waits for.
        h2d: copy of updated weights.
        communication: collectives.
    """

    forward: float
    backward: float
    transfers: float
    gradients: float
    optimizer: float
    h2d: float
    communication: float

    @property
    def step(self) -> float:
        compute = self.forward + self.backward
        update = self.gradients + self.optimizer + self.h2d
        return compute + self.transfers + update + self.communication


# ── counts ──


def zero_bytes(params: float, ranks: int, stage: int, k: float = 12) -> float:
    """Model state of one GPU (ZeRO, table 1): weights, gradients, k bytes of optimizer."""
    weights, grads, optimizer = 2 * params, 2 * params, k * params
    if stage >= 1:
        optimizer /= ranks
    if stage >= 2:
        grads /= ranks
    if stage >= 3:
        weights /= ranks
    return weights + grads + optimizer


def layer_bytes(shape: ModelShape, micro_batch: int, mp: int = 1) -> float:
    """Activations of one layer, 16-bit (arXiv:2205.05198, equations 1 and 2)."""
    attention = 5 * shape.num_heads * shape.max_seq_len / shape.d_model
    return input_bytes(shape, micro_batch) / 2 * (10 + (24 + attention) / mp)


def input_bytes(shape: ModelShape, micro_batch: int) -> float:
    """The input of one layer, 16-bit, which recompute saves."""
    return 2.0 * micro_batch * shape.max_seq_len * shape.d_model


# ── memory ──

_OPTIMIZER_BYTES = 16
"""Bytes per parameter of ZeRO's optimizer on the GPU: fp32 weight and moments, and during the
update an fp32 gradient of the owned part."""


def gpu_bytes(run: Run, software: Software) -> float:
    """Peak bytes of one GPU, in backward."""
    if run.stage:
        buckets = software.bucket_bytes
    else:
        buckets = 2 * run.params  # DDP's copy of the gradients
    return _state_bytes(run) + _activation_bytes(run) + buckets


def _state_bytes(run: Run) -> float:
    if not run.offload:
        k = _OPTIMIZER_BYTES if run.stage else 12
        return zero_bytes(run.params, run.ranks, run.stage, k)
    weights = 2 * run.params / (run.ranks if run.stage == 3 else 1)
    return weights + (0 if run.stage >= 2 else 2 * run.params)


def _activation_bytes(run: Run) -> float:
    """Saved activations, plus the larger of a layer's recompute and the logits."""
    shape, layer = run.shape, layer_bytes(run.shape, run.micro_batch, run.mp)
    # 16-bit logits and the loss's fp32 softmax
    logits = 6 * run.micro_batch * shape.max_seq_len * shape.vocab_size / run.mp
    if run.recompute:
        return shape.num_layers * _kept_input(run) + max(layer, logits)
    return shape.num_layers * layer + logits


def _kept_input(run: Run) -> float:
    """Bytes of a layer's input on a GPU."""
    if run.inputs == "host":
        return 0.0
    return input_bytes(run.shape, run.micro_batch) / (run.mp if run.inputs == "split" else 1)


def host_bytes(run: Run, machine: Machine, software: Software) -> float:
    """Bytes of one host."""
    if not run.offload:
        return 0.0
    each = software.host_bytes + (software.sum_bytes if _sums_on_host(run) else 0)
    return each * run.owned * min(run.gpus, machine.gpus)


def too_large_for(run: Run, machine: Machine, software: Software) -> str:
    """Return the memory that is too small: "GPU", "host", or empty."""
    if gpu_bytes(run, software) > machine.gpu_memory_bytes - machine.gpu_reserved_bytes:
        return "GPU"
    return "host" if host_bytes(run, machine, software) > machine.host_memory_bytes else ""


# ── time ──


def step_times(run: Run, machine: Machine, software: Software) -> Times:
    """Seconds of one step, from the machine's rates."""
    microbatch = _compute(run, machine, software)
    computed = microbatch * run.micro_steps
    transfers = _transfers(run, machine, microbatch.backward)
    gradients, optimizer = _update(run, machine, software)
    if run.dpu:
        optimizer = max(0.0, optimizer - (computed.forward + computed.backward + transfers))
    return Times(
        forward=computed.forward,
        backward=computed.backward,
        transfers=transfers,
        gradients=gradients,
        optimizer=optimizer,
        h2d=2 * run.owned / pcie(run.gpus, machine, machine.h2d_gbps) if run.offload else 0.0,
        communication=_tensor_parallel(run, machine, software)
        + _data_parallel(run, machine, software),
    )


def compute_seconds(
    shape: ModelShape, micro_batch: int, machine: Machine, kernels: Kernels, *, recompute: bool
) -> Seconds:
    """Seconds of one microbatch of full-length sequences; backward includes the recompute."""
    tokens = micro_batch * shape.max_seq_len
    block = block_seconds(shape, shape.max_seq_len, tokens, machine, "fp16", kernels)
    head = head_seconds(shape, tokens, machine, "fp16", kernels)
    again = Seconds(0.0, block.forward if recompute else 0.0)
    return (block + again) * shape.num_layers + head


def _compute(run: Run, machine: Machine, software: Software) -> Seconds:
    """Seconds of one microbatch; backward includes the recompute."""
    kernels = replace(run.kernels, split=run.mp)
    computed = run.computed or compute_seconds(
        run.shape, run.micro_batch, machine, kernels, recompute=run.recompute
    )
    return computed * (1 / software.compute_share)


def _sums_on_host(run: Run) -> bool:
    """Return True if the host sums the gradients of several microbatches. Stages 0 and 1 hold
    complete gradients on the GPU, and sum them there."""
    return run.offload and run.stage >= 2 and run.micro_steps > 1


def _transfers(run: Run, machine: Machine, backward: float) -> float:
    """Return the seconds of gradient copies that backward does not hide.

    Accumulation (`async_accumulate_grad_in_cpu_via_gpu`): each microbatch after the first copies
    the running sum up, each before the last copies the new sum down, both 16-bit, while backward
    waits. The last copies fp32 down once, overlapping backward.
    """
    if not run.offload:
        return 0.0
    sums = max(0.0, run.micro_steps - 1) if _sums_on_host(run) else 0.0
    up, down = (pcie(run.gpus, machine, rate) for rate in (machine.h2d_gbps, machine.d2h_gbps))
    last = max(0.0, 4 * run.owned / down - backward)
    return sums * 2 * run.owned * (1 / up + 1 / down) + last


def pcie(gpus: int, machine: Machine, alone: float) -> float:
    """Return bytes/s of one GPU's link to the host while this many GPUs copy."""
    return 1e9 * min(alone, machine.host_link_gbps / min(gpus, machine.gpus))


def _update(run: Run, machine: Machine, software: Software) -> tuple[float, float]:
    """Seconds of the gradient pass and of Adam.

    The pass reads fp32 gradients for the norm, then reads and writes them to unscale: 12 bytes.
    Adam reads weight, gradient and two moments and writes all but the gradient: 28.
    """
    if not run.offload:
        return 12 * run.owned / (1e9 * machine.hbm_gbps), 28 * run.owned / (1e9 * machine.hbm_gbps)
    neighbours = min(run.gpus, machine.gpus)
    slowed = software.contention if neighbours > 1 else 1.0
    seconds = run.owned * neighbours * slowed / (1e9 * machine.dram_gbps)
    return 12 * seconds, 28 * seconds / software.adam_share


def _tensor_parallel(run: Run, machine: Machine, software: Software) -> float:
    """Seconds of the all-reduces within layers: 8bsh(t-1)/t elements, half of them in forward.

    Split inputs are gathered again before the recompute; those on the host cross the bus twice.
    """
    shared = (run.mp - 1) / run.mp
    each = input_bytes(run.shape, run.micro_batch)
    link = _ring(run.mp, machine, software)
    passes = 1.5 if run.recompute else 1.0
    seconds = passes * 2 * 4 * each * shared / link
    if run.inputs != "keep":
        seconds += each * shared / link
    if run.inputs == "host":
        rates = machine.h2d_gbps, machine.d2h_gbps
        seconds += sum(each / run.mp / pcie(run.gpus, machine, rate) for rate in rates)
    return run.shape.num_layers * run.micro_steps * seconds


def _ring(gpus: int, machine: Machine, software: Software) -> float:
    """Return bytes/s of a ring over this many GPUs, which fill the hosts one by one."""
    if gpus <= machine.gpus:
        return 1e9 * machine.gpu_link_gbps
    return 1e9 * min(machine.gpu_link_gbps, machine.node_link_gbps * software.ring_share)


def _data_parallel(run: Run, machine: Machine, software: Software) -> float:
    """Seconds of reduce-scatters and all-gathers; each pass moves all weights once."""
    passes = {0: 2.0, 1: 2.0, 2: run.micro_steps + 1, 3: 3 * run.micro_steps}[run.stage]
    moved = 2 * run.params * (run.ranks - 1) / run.ranks
    return passes * moved / _ring(run.gpus, machine, software)


# ── pipelines ──

Schedule = Literal["gpipe", "flush", "2bw"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A model divided into `stages`, one GPU each, with `replicas` data parallel copies.

    Attributes:
        micro_batches: microbatches per step and replica.
        recompute: recompute everything but each stage's input.
    """

    shape: ModelShape
    micro_batch: int
    micro_batches: int
    stages: int
    replicas: int = 1
    recompute: bool = True
    kernels: Kernels = MEGATRON


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRow:
    """One schedule of a pipeline; bytes are those of one GPU of the stage.

    Attributes:
        weights_bytes: all versions of the 16-bit weights. 2BW has two, except on the last stage,
            where each microbatch's backward follows its forward.
        state_bytes: 16-bit gradients and the fp32 state of Adam.
        activation_bytes: stashed activations and those being computed.
        step_s: time until the next step can start.
        bubble: share of `step_s` in which a stage is idle.
        stale: updates use gradients computed with the previous weights.
    """

    schedule: Schedule
    weights_bytes: float
    state_bytes: float
    activation_bytes: float
    step_s: float
    bubble: float
    stale: bool


def pipeline_row(
    schedule: Schedule, pipe: Pipeline, machine: Machine, stage: int = 0
) -> PipelineRow:
    """Return memory of one stage (counted from 0) and step time of one schedule."""
    params = num_params(pipe.shape) / pipe.stages
    turn, sync = _stage_seconds(pipe, machine), _sync_seconds(pipe, machine)
    if schedule == "2bw":  # no flush: the sync of one step overlaps the next
        step = max(pipe.micro_batches * turn, sync)
    else:
        step = (pipe.micro_batches + pipe.stages - 1) * turn + sync
    return PipelineRow(
        schedule=schedule,
        weights_bytes=2 * params * _versions(schedule, pipe, stage),
        state_bytes=14 * params,
        activation_bytes=_stashed_bytes(schedule, pipe, stage),
        step_s=step,
        bubble=1 - pipe.micro_batches * turn / step,
        stale=schedule == "2bw",
    )


def _versions(schedule: Schedule, pipe: Pipeline, stage: int) -> int:
    return 2 if schedule == "2bw" and stage < pipe.stages - 1 else 1


def _stashed_bytes(schedule: Schedule, pipe: Pipeline, stage: int) -> float:
    """Bytes of stashed microbatches: all in GPipe, else those between this stage and the last."""
    in_flight = pipe.stages - stage
    stashed = pipe.micro_batches if schedule == "gpipe" else min(in_flight, pipe.micro_batches)
    inputs = stashed * input_bytes(pipe.shape, pipe.micro_batch)
    layers_bytes = layer_bytes(pipe.shape, pipe.micro_batch) * pipe.shape.num_layers / pipe.stages
    return inputs + (layers_bytes if pipe.recompute else stashed * layers_bytes)


def _stage_seconds(pipe: Pipeline, machine: Machine) -> float:
    """Seconds of one microbatch on one stage, with the transfers of its input and gradient."""
    total = compute_seconds(
        pipe.shape, pipe.micro_batch, machine, pipe.kernels, recompute=pipe.recompute
    )
    compute = (total.forward + total.backward) / pipe.stages
    moved = 2 * input_bytes(pipe.shape, pipe.micro_batch) if pipe.stages > 1 else 0.0
    return compute + moved / _link(pipe.stages, machine)


def _sync_seconds(pipe: Pipeline, machine: Machine) -> float:
    """Seconds of the all-reduce of a stage's 16-bit gradients among replicas."""
    gradients = 2 * num_params(pipe.shape) / pipe.stages
    moved = 2 * gradients * (pipe.replicas - 1) / pipe.replicas
    return moved / _link(pipe.stages * pipe.replicas, machine)


def _link(gpus: int, machine: Machine) -> float:
    """Bytes per second of one GPU; between hosts, all GPUs of a host share its links."""
    if gpus <= machine.gpus:
        return 1e9 * machine.gpu_link_gbps
    return 1e9 * min(machine.gpu_link_gbps, machine.node_link_gbps / machine.gpus)
