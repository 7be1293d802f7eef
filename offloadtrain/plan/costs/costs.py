"""The duration of each operation of a step on a machine.

[Note: What a step costs]
Every launch of the program (`step.program.program`) gets a duration:
* forward, backward: computed by `plan.costs.device_time`; with recompute, backward includes another
forward;
* gather, copy: a copy within the device's memory;
* d2h, h2d, load: bytes over the link, shared by the GPUs of a host;
* reduce-scatter, all-gather: (n-1)/n of the bytes over the link among GPUs, or among hosts if the
  ranks that share the state are on several;
* all-reduce of a shard over the copies of the state (hybrid sharding): twice that of the shard,
  over the link of the hosts that hold the copies;
* tensor parallel: twice that for each all-reduce over the parts, which compute waits for: two in a
  layer's forward, two in its backward, and one in a recomputed forward;
* expert parallel: in each layer two all-to-alls forward, two backward and two in a recomputed
  forward, which compute waits for; all experts get equally many tokens;
* accumulate, norm, direction, adam, show: bytes of memory traffic over DRAM's rate, divided by the
  ranks of a host; Adam at its measured rate if there is one, and accumulate and norm not faster
  than measured. For state on the device, over the rate of the device's memory;
* orthogonalize: FLOPs of Newton-Schulz over the machine's rate at the matrix' width; a matrix up
  or down: bytes over the link;
* reads and writes of state, gradients and weights on the disk: bytes over the drive's rate, divided
  by the ranks of a host; lanes that read share it.
Launches of copies and collectives take no time on a lane; a step takes at least as long as all of
its launches. Adam on the host and copies slow each other if that was measured
(`copying_gparams`, `adam_gbps` of a machine file): [Note: Adam beside copies] in
`Costs._slowed_s`. Out-of-place updates move more bytes: [Note: Adam into a second copy]. Other
lanes do not slow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from math import sqrt
from operator import attrgetter

from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import (
    ModelShape,
    again_flops_per_token,
    block_flops_per_token,
    flops_per_token,
)
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.costs.among_ranks import (
    AmongCopies,
    AmongExperts,
    AmongParts,
    links_s,
    most_hosts,
)
from offloadtrain.plan.costs.device_time import (
    NOTHING,
    STRIDED,
    Kernels,
    Level,
    Seconds,
    again_seconds,
    block_seconds,
    by_reading,
    head_seconds,
    launches,
    traced_seconds,
)
from offloadtrain.plan.costs.disk import DISK_LANES, disk_load
from offloadtrain.plan.placement import Placement
from offloadtrain.step.layout.block_spec import BlockSpec, BucketSpec, MatrixSpec
from offloadtrain.step.layout.formats import ADAM_MOMENTS
from offloadtrain.step.layout.step_spec import MATRIX_BYTES
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.program.operations import Kind, Launch
from offloadtrain.step.proof.drive import loads_outside

KERNELS = Kernels(strided=STRIDED)
"""The kernels of jobs: eager operations and flash attention."""


def kernels_of(model: ModelShape, *, compiled: bool, fp8: bool = False) -> Kernels:
    """Return the kernels of the shipped transformer's blocks in a job. Compiled blocks apply rotary
    positions in one kernel. Head and loss are never compiled, and never in FP8."""
    level: Level = "compiled" if compiled else "eager"
    strided = 0.0 if compiled else KERNELS.strided
    return replace(KERNELS, causal=model.is_causal, level=level, strided=strided, fp8=fp8)


def is_timed_in_fp8(job: Config, machine: Machine) -> bool:
    """Return True if layers' products are timed in FP8: the rate is known and casts are fused.
    Experts and adapters of transformers models stay in 16 bits, which a trace does not show."""
    in_16_bits = job.hf is not None and (job.hf.lora is not None or job.model.num_experts > 0)
    in_fp8 = (
        job.offload.compute.fp8 != "off" and job.offload.compute.compile_blocks and not in_16_bits
    )
    return in_fp8 and machine.fp8_tflops > 0 and not machine.on_cpu


CODEC_BYTES = {"split16": 520.0, "int8": 949.0}
"""State format → bytes per parameter that an update on the device moves if it is not Adam's, which
is compiled: torch operations decode and encode the state. `tests/plan/test_automatic.py` counts
them for Adam."""

PROGRAM_LAUNCH = 12
"""Number of torch operations whose launch takes as long as one launch of the program with its
events and waits: five of a small layer take 0.2 to 0.5 ms; torch's forward and backward, some 90
operations, 0.4 to 0.5 ms (`python -m benchmarks.launch_cost --time`)."""

MEASURED_BYTES = 60.0
"""Bytes per parameter that LAMB moves within the cache to compute a tensor's norms: of its 74 bytes
of operands, all but state and gradient, which come from memory. With them the ratio to AdamW's
time is 3.6 (measured with `python -m benchmarks.lamb_speed`)."""

_SHARD, _SENT = attrgetter("shard_bytes"), attrgetter("gathered_bytes")
"""Bytes of a loaded bucket that go up, and that go to other ranks."""

_NEWTON_SCHULZ_STEPS = 5
"""Iterations of Muon in a job."""


def newton_schulz_flops(matrix: MatrixSpec) -> float:
    """Return the FLOPs of `Muon.orthogonalize`: per iteration the Gram matrix, its square, and the
    product with the matrix."""
    short, long = sorted((matrix.rows, matrix.columns))
    return _NEWTON_SCHULZ_STEPS * (4.0 * short * short * long + 2.0 * short**3)


class Costs:
    """Durations of all operations of one rank."""

    def __init__(self, placed: Placement, machine: Machine) -> None:
        self.placed, self.machine, self.spec = placed, machine, placed.spec
        self._buckets = {
            bucket.name: bucket for block in self.spec.blocks for bucket in block.all_buckets
        }
        self.parts = AmongParts(placed, machine)
        self.copies = AmongCopies(self.spec, machine, self.parts.count)
        self.experts = AmongExperts(placed, machine)
        ranks = self.spec.replicas * placed.config.ranks.pipeline * self.parts.count
        self._local = min(ranks, machine.gpus)
        """Ranks of a host, including those of other stages and parts: they share its links, memory
        and cores."""
        machine.check_has(ranks)
        self.disk = disk_load(self.spec, machine, self._local)
        config = placed.config
        self._tokens = config.train.micro_batch * config.data.seq_len
        self._precision = config.offload.precision
        self._moved: dict[tuple[Kind, str], float] = {}
        """Cache: (kind, bucket) → seconds of one operation, which a simulation needs often."""

    def seconds(self, op: Launch) -> float:
        """Return the estimated duration of an operation, in seconds."""
        match op.kind:
            case Kind.DECIDE:
                return 0.0
            case Kind.FORWARD:
                return self.computed[op.owner].forward
            case Kind.BACKWARD:
                return self.computed[op.owner].backward
            case Kind.ACTIVATION_UP | Kind.MATRIX_UP:
                return op.writes[0].nbytes / self.bus(self.machine.h2d_gbps)
            case Kind.ACTIVATION_DOWN | Kind.MATRIX_DOWN | Kind.NORMS_DOWN:
                return op.writes[0].nbytes / self.bus(self.machine.d2h_gbps)
            case Kind.GATHER_INPUT:
                return self.parts.gather_s(op.writes[0].nbytes)
            case Kind.COPY | Kind.KEEP_INPUT | Kind.FETCH_PART:
                return 2 * op.writes[0].nbytes / (self.machine.hbm_gbps * 1e9)
            case Kind.ORTHOGONALIZE:
                # The matrix at this offset in the first rank's shard.
                bucket = self._buckets[op.owner]
                matrix = next(
                    candidate for candidate in bucket.matrices if candidate.offset == op.lo
                )
                width = sqrt(matrix.rows * matrix.columns)
                return newton_schulz_flops(matrix) / self.machine.flops(self._precision, width)
        if op.lane in DISK_LANES:
            return self.disk.seconds(op)
        key = op.kind, op.owner
        if (seconds := self._moved.get(key)) is None:
            seconds = self._moved[key] = self._moved_s(op.kind, self._buckets[op.owner])
        if op.update is not None and op.update.out_of_place:
            return max(seconds, self._into_second_copy_s(self._buckets[op.owner]))
        return seconds

    @cached_property
    def computed(self) -> dict[str, Seconds]:
        """Owner of a reading → seconds of forward and backward; the head counts in the last one."""
        in_fp8 = is_timed_in_fp8(self.placed.config, self.machine)
        if (traced := self.placed.traced) is not None:
            where = self._tokens, self.machine, self._precision
            times = {}
            for block in self.spec.blocks:
                kernels = replace(KERNELS, fp8=in_fp8 and block.repeated)
                alone = traced_seconds(traced.blocks[block.name], *where, kernels)
                times[block.name] = self.parts.added(alone, block)
            # Modules outside of blocks compute, too: frozen ones, and a head tied to the embedding.
            # They count in the first block, since a simulation of fewer layers lacks the last ones.
            first = self.spec.blocks[0].name
            for name in [name for name in traced.blocks if name not in times]:
                times[first] += traced_seconds(traced.blocks[name], *where, KERNELS)
            return by_reading(self.spec.blocks, times)
        model, seq_len = self.placed.config.model, self.placed.config.data.seq_len
        compiled = self.placed.config.offload.compute.compile_blocks
        kernels = kernels_of(model, compiled=compiled, fp8=in_fp8)
        where = self._tokens, self.machine, self._precision
        split = replace(kernels, split=self.parts.count)
        alone = block_seconds(model, seq_len, *where, split)
        exchanged_s = self.parts.sums_of_layer * self.parts.sum_s + 2 * self.experts.exchange_s
        layer = alone + Seconds(exchanged_s, exchanged_s)
        eager = kernels_of(model, compiled=False)  # not split: each rank computes it completely
        head = head_seconds(model, *where, eager) if self._has_head else NOTHING
        # A compiled forward is one node of the graph and runs again completely, unless a budget
        # divides it.
        if compiled and self.placed.config.offload.activations.mode != "selective":
            shorter = alone.forward
        else:
            selects = self._share_again == 0.0
            shorter = again_seconds(model, seq_len, *where, split, selects=selects)
            shorter *= self._share_again if compiled else 1.0
        again_s = shorter + self.parts.sum_s + 2 * self.experts.exchange_s
        last, by_block = self.spec.blocks[-1].name, dict[str, Seconds]()
        for block in self.spec.blocks:
            # one layer, whose modules are the blocks: its time counts in the last one
            computes = block.repeated or (block.name == last and not self.placed.repeated)
            by_block[block.name] = layer if computes else NOTHING
            if block.name == last:
                by_block[last] += head
            if block.recomputed:
                by_block[block.name] += Seconds(0.0, again_s)
        return by_reading(self.spec.blocks, by_block)

    def launch_s(self, of_program: float) -> float:
        """Return the seconds in which the host launches a step on a GPU: torch's operations, and
        `of_program` launches of the program."""
        if self.machine.on_cpu:
            return 0.0
        placed, config = self.placed, self.placed.config
        if placed.traced is not None:
            blocks = placed.traced.blocks.values()
            of_torch = sum(block.forward.launches + block.backward.launches for block in blocks)
        else:
            kernels = kernels_of(config.model, compiled=config.offload.compute.compile_blocks)
            forward, backward = launches(config.model, kernels)
            of_torch = placed.repeated * (forward + backward) + placed.recomputed * forward
        of_torch *= self.spec.config.grad_accum_steps
        return 1e-6 * self.machine.launch_us * (of_torch + PROGRAM_LAUNCH * of_program)

    @property
    def flops(self) -> float:
        """FLOPs of a microbatch without recompute."""
        if self.placed.traced is not None:
            return self.placed.traced.flops - self.placed.traced.recomputed
        model, seq_len = self.placed.config.model, self.placed.config.data.seq_len
        head = 6.0 * model.vocab_size * model.d_model
        layers = (flops_per_token(model, seq_len) - head) / self.parts.count
        return (layers + (head if self._has_head else 0.0)) * self._tokens

    @property
    def _has_head(self) -> bool:
        stage = self.placed.config.stage
        return stage is None or stage.is_last

    @property
    def _share_again(self) -> float:
        """Share of a recomputed layer's products that backward computes again."""
        offload = self.placed.config.offload
        if offload.activations.mode != "selective":
            return 1.0
        return (
            1.0 - (offload.activations.compiled_budget or 0.0)
            if offload.compute.compile_blocks
            else 0.0
        )

    @property
    def recomputed_flops(self) -> float:
        """FLOPs per microbatch of recompute, and of experts that each tensor parallel part
        repeats."""
        if self.placed.traced is not None:
            return self.placed.traced.recomputed
        model, seq_len = self.placed.config.model, self.placed.config.data.seq_len
        offload = self.placed.config.offload
        as_a_whole = offload.compute.compile_blocks and offload.activations.mode != "selective"
        of_layer = block_flops_per_token if as_a_whole else again_flops_per_token
        parts_flops = self.parts.flops_again
        layer = self._share_again * of_layer(model, seq_len) / self.parts.count + parts_flops
        return self._tokens * (layer * self.placed.recomputed + 3 * parts_flops * model.num_layers)

    def _moved_s(self, kind: Kind, bucket: BucketSpec) -> float:
        machine, weight = self.machine, bucket.weight_bytes
        shard, pieces = bucket.shard_numel, len(self.spec.pieces(bucket))
        reduced = self.spec.reduced_bytes(bucket)
        match kind:
            case Kind.GATHER:
                return bucket.numel * (weight + reduced) / pieces / (machine.hbm_gbps * 1e9)
            case Kind.MARK:
                return bucket.numel * weight / (machine.hbm_gbps * 1e9)
            case Kind.ROUND_SUM:
                return 2 * 4 * shard / (machine.hbm_gbps * 1e9)
            case Kind.ROUND:
                reduced = 4
                return shard * (weight + reduced) / pieces / (machine.hbm_gbps * 1e9)
            case Kind.REDUCE_SCATTER:
                return self._collective_s(bucket.numel * reduced, bucket.ranks) / pieces
            case Kind.ALL_GATHER:
                return self._collective_s(bucket.numel * weight, bucket.ranks)
            case Kind.ALL_REDUCE:
                return self.copies.sum_s(shard * reduced) / pieces
            case Kind.GRAD_DOWN:
                down = self._down_bytes(bucket)
                slower = machine.d2h_adam_gbps if self._updates_in_backward else 0.0
                return shard * down / pieces / self.bus(slower or machine.d2h_gbps)
            case Kind.LOAD if self.spec.weight_tier(bucket) is Tier.DEVICE:
                return 2 * shard * weight / (machine.hbm_gbps * 1e9)
            case Kind.WEIGHTS_UP:
                return shard * weight / self.bus(machine.h2d_adam_gbps or machine.h2d_gbps)
            case Kind.LOAD:
                return shard * weight / self.bus(machine.h2d_gbps)
            case Kind.ADAM:
                return shard / self._adam_rate(bucket) + self._slowed_s(bucket)
        passes = pieces if kind is Kind.ACCUMULATE else 1
        summing = kind in (Kind.ACCUMULATE, Kind.NORM)
        tier = self.spec.norm_tier(bucket) if summing else bucket.update_tier
        by_memory = shard * self._traffic(kind, bucket) / self._memory(tier)
        by_a_cpu = tier is Tier.HOST or self.machine.on_cpu
        by_arithmetic = self._measured_s(kind, shard) if by_a_cpu else 0.0
        return max(by_memory, by_arithmetic) / passes

    def _measured_s(self, kind: Kind, numel: int) -> float:
        """Return the seconds of a kernel that the CPU's arithmetic may bound; 0 if not measured."""
        machine = self.machine
        rates = {Kind.NORM: machine.norm_gparams, Kind.ACCUMULATE: machine.accumulate_gparams}
        rate = rates.get(kind, 0.0) * 1e9 / self._sharers
        return numel / rate if rate else 0.0

    def _collective_s(self, nbytes: int, ranks: int) -> float:
        """Return the seconds of a ring over the ranks that share a bucket in a copy of the state:
        among the GPUs of a host, or over the links between hosts, which a host's GPUs share. The
        rings of groups with other experts run at the same time."""
        machine, groups = self.machine, self.spec.ranks // ranks
        nodes = most_hosts(self.spec.ranks * self.parts.count, self.spec.copies, machine.gpus)
        nodes = min(nodes, ranks)
        leaving = nbytes * min(groups, machine.gpus) * (nodes - 1) / nodes
        return links_s(machine, nbytes * (ranks - 1) / ranks, leaving)

    def bus(self, alone_gbps: float) -> float:
        """Return one rank's bandwidth between host and device, in bytes/s."""
        return 1e9 * min(alone_gbps, self.machine.host_link_gbps / self._local)

    def _memory(self, tier: Tier) -> float:
        """Return the bandwidth of a tier's memory, in bytes/s."""
        if tier is Tier.DEVICE:
            return 1e9 * self.machine.hbm_gbps
        return self._dram

    @property
    def _sharers(self) -> int:
        """Divisor of a host's cores and memory bandwidth that gives one rank's share."""
        return max(self._local, self.machine.numa_nodes)

    @property
    def _dram(self) -> float:
        """Memory bandwidth of one rank's cores, in bytes/s."""
        machine = self.machine
        host_gbps = machine.dram_gbps if self._local == 1 else machine.shared_dram_gbps
        return 1e9 * host_gbps / self._sharers

    def _adam_rate(self, bucket: BucketSpec) -> float:
        """Return one rank's parameters/s; by memory bandwidth if Adam was not measured. The
        measured rate of Adam is scaled to other rules by the bytes that they move."""
        measured: float = getattr(self.machine, f"{bucket.format.name}_gparams", 0.0)
        moved = self._traffic(Kind.ADAM, bucket)
        moved += MEASURED_BYTES if bucket.whole_tensors else 0
        if measured and bucket.update_tier is Tier.HOST and not bucket.matrices:
            of_adam = bucket.format.traffic_per_param(
                ADAM_MOMENTS, bucket.weight_bytes, self._grad_bytes(bucket)
            )
            return 1e9 * measured * (of_adam / moved) / self._sharers
        if bucket.state_tier is Tier.DEVICE and (
            bucket.moments != ADAM_MOMENTS or bucket.whole_tensors
        ):
            moved = CODEC_BYTES.get(bucket.format.name, moved)
        return self._memory(bucket.update_tier) / moved

    @property
    def _updates_in_backward(self) -> bool:
        """True if Adam runs while gradients are copied down."""
        return self.spec.config.updates_early or self.spec.config.update != "exact"

    def _slowed_s(self, bucket: BucketSpec) -> float:
        """Return the seconds by which copies slow down Adam of a bucket on the host.

        [Note: Adam beside copies]
        A bucket's new weights go up while Adam of the next bucket runs; if updates run inside
        backward, the next gradient comes down at the same time. Adam is slowed only while a copy
        runs: one direction costs half as much as both, which is what a machine file contains.
        """
        name, machine = bucket.format.name, self.machine
        copying: float = getattr(machine, f"{name}_copying_gparams", 0.0)
        alone: float = getattr(machine, f"{name}_gparams", 0.0)
        if not (copying and alone) or bucket.update_tier is not Tier.HOST:
            return 0.0
        copies_s = self._moved_s(Kind.WEIGHTS_UP, bucket)
        if self._updates_in_backward:
            copies_s += len(self.spec.pieces(bucket)) * self._moved_s(Kind.GRAD_DOWN, bucket)
        return copies_s * max(1 - copying / alone, 0.0) / 2

    def _into_second_copy_s(self, bucket: BucketSpec) -> float:
        """Return the seconds of Adam's memory traffic for an out-of-place update of a bucket.

        [Note: Adam into a second copy]
        The overwritten lines are in no cache. Streaming stores need not read them, but when
        all threads are at the memory's limit an update takes as long as if they did: on an H100's
        Xeon `split16` runs at 4.9 to 5.2 Gparam/s; its 26 bytes at 138 GB/s give 5.3. In place it
        moves 18 bytes and reaches 7.1. An update that is bound by arithmetic loses nothing.
        """
        in_place = self._traffic(Kind.ADAM, bucket)
        overwritten = bucket.format.bytes_per_param(bucket.moments, bucket.weight_bytes)
        bandwidth = max(self._dram, in_place * self._adam_rate(bucket))
        return bucket.shard_numel * (in_place + overwritten) / bandwidth

    def _grad_bytes(self, bucket: BucketSpec) -> int:
        return 4 if self.spec.holds_sum(bucket) else bucket.weight_bytes

    def _down_bytes(self, bucket: BucketSpec) -> int:
        """Return the bytes per element of a gradient, or a gradient sum, that goes down."""
        summed = self.spec.sums_on_device(bucket) and self.spec.holds_sum(bucket)
        return 4 if summed else bucket.weight_bytes

    def _traffic(self, kind: Kind, bucket: BucketSpec) -> float:
        """Return the bytes of memory traffic per parameter."""
        weight = bucket.weight_bytes
        gradient = self._grad_bytes(bucket)
        match kind:
            case Kind.ACCUMULATE:
                return weight + 8
            case Kind.NORM:
                return gradient
            case Kind.PUBLISH:
                return 2 * weight
        if not bucket.matrices:
            moved = bucket.format.traffic_per_param(bucket.moments, weight, gradient)
            if bucket.whole_tensors:  # read again for the norms of tensors
                moved += bucket.format.bytes_per_param(bucket.moments, weight) + gradient
            return moved
        # Matrices: DIRECTION moves moments and the bf16 direction; ADAM masters and weights.
        masters = bucket.format.bytes_per_param((), weight)
        if kind is Kind.DIRECTION:
            every = bucket.format.bytes_per_param(bucket.moments, weight)
            return gradient + 2 * (every - masters) + MATRIX_BYTES
        return MATRIX_BYTES + 2 * masters + (0 if bucket.format.holds_weight else weight)

    @cached_property
    def moved_bytes(self) -> tuple[int, int, int]:
        """Bytes of a step: (down, up, to ranks that share this copy of the state)."""
        spec, micro_steps = self.spec, self.spec.config.grad_accum_steps
        on_host = spec.buckets_on(Tier.HOST)
        crossing = sum(bucket.shard_numel * bucket.weight_bytes for bucket in on_host)
        summed = sum(
            (bucket.ranks - 1)
            * bucket.shard_numel
            * (micro_steps * spec.reduced_bytes(bucket) + bucket.weight_bytes)
            for bucket in spec.buckets
        )
        streamed = [block for block in spec.blocks if block.name in spec.streamed]
        trained = [bucket for block in streamed for bucket in block.buckets]
        from_shards = not spec.config.weights.offloaded
        up = crossing
        if not from_shards:
            up += self._loaded(streamed, _SHARD) - sum(map(_SHARD, trained))
        inputs = sum(self.placed.block_inputs) * micro_steps
        sent = summed + self._loaded(streamed, _SENT) - sum(map(_SENT, trained))
        matrices = sum(matrix.numel for bucket in on_host for matrix in bucket.matrices_of(0))
        extra = matrices * MATRIX_BYTES + inputs
        down = sum(
            bucket.shard_numel
            * self._down_bytes(bucket)
            * (1 if spec.sums_on_device(bucket) else micro_steps)
            for bucket in on_host
        )
        return down + extra, up + extra, sent

    @property
    def least_moving_s(self) -> float:
        """Lower bound on a step's seconds: its bytes on the slowest of H2D, D2H and host DRAM."""
        down, up, _ = self.moved_bytes
        down_s, up_s = down / self.bus(self.machine.d2h_gbps), up / self.bus(self.machine.h2d_gbps)
        return max(down_s, up_s, self.dram_bytes / self._memory(Tier.HOST))

    @property
    def least_s(self) -> float:
        """Lower bound on the seconds of a step, in any schedule: those of compute, of each bus
        direction, and of Adam on the host. If a norm must be known first, Adam of all blocks runs
        between backward and the last block's forward."""
        spec, machine = self.spec, self.machine
        computed = sum(self.computed.values(), NOTHING)
        compute_s = spec.config.grad_accum_steps * (computed.forward + computed.backward)
        down, up, _ = self.moved_bytes
        bus_s = max(down / self.bus(machine.d2h_gbps), up / self.bus(machine.h2d_gbps))
        on_host = spec.buckets_on(Tier.HOST)
        adam_s = sum(bucket.shard_numel / self._adam_rate(bucket) for bucket in on_host)
        between_s = 0.0 if self._updates_in_backward else compute_s - computed.forward + adam_s
        return max(compute_s, bus_s, adam_s, between_s)

    def _loaded(self, streamed: Sequence[BlockSpec], bytes_of: Callable[[BucketSpec], int]) -> int:
        """Return the bytes of streamed blocks in forward and backward of all microbatches, without
        blocks that are still in slots. `bytes_of`: a loaded bucket → the bytes that it moves."""
        size_of = {block.name: sum(map(bytes_of, block.all_buckets)) for block in streamed}
        layers = [size_of[block.name] for block in streamed if block.repeated]
        slots, passes = self.spec.slots, 2 * self.spec.config.grad_accum_steps
        loads = max(passes * (len(layers) - slots) + slots, len(layers))
        of_layers = loads * sum(layers) // max(len(layers), 1)
        return of_layers + sum(size_of[at] * n for at, n in loads_outside(self.spec).items())

    @property
    def dram_bytes(self) -> float:
        """Memory traffic of the host's kernels in a step, without the bus."""
        return sum(map(self._dram_bytes_of, self.spec.buckets_on(Tier.HOST)))

    def _dram_bytes_of(self, bucket: BucketSpec) -> float:
        traffic, spec = self._traffic, self.spec
        per_param = traffic(Kind.ADAM, bucket)
        if bucket.matrices:
            per_param += traffic(Kind.DIRECTION, bucket)
        if spec.norm_tier(bucket) is Tier.HOST:
            sums = spec.config.grad_accum_steps * traffic(Kind.ACCUMULATE, bucket)
            per_param += sums if spec.accumulates else traffic(Kind.NORM, bucket)
        if spec.has_snapshot(bucket) and (bucket.format.holds_weight or spec.weight_versions == 1):
            per_param += traffic(Kind.PUBLISH, bucket)
        return bucket.shard_numel * per_param
