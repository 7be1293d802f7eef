"""How long a step takes: the schedule that the engine follows, with a machine's rates.

[Note: What a step costs]
Every operation of `schedule.program` gets seconds:
* forward, backward: FLOPs over the machine's rate at the model's width; backward is twice the
  forward, and once more where activations are recomputed;
* gather: a copy within the device's memory;
* d2h, h2d, load: bytes over the link, of which GPUs of one host have no more than their part;
* reduce-scatter, all-gather: (n-1)/n of the bytes over the link among GPUs; over that among hosts,
  where there are several;
* accumulate, norm, adam, show: bytes of memory traffic over DRAM's rate, which ranks of a host
  divide; Adam as measured, where it was.
Launching costs nothing, kernels of one lane do not slow those of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from offloadtrain.plan.layout import Block, Bucket
from offloadtrain.plan.machine import Machine, MachineError
from offloadtrain.plan.memory import STATES, doubled_blocks, input_bytes, pends
from offloadtrain.plan.placement import Placement
from offloadtrain.schedule import DECIDE, BlockShape, Op, Steady, StepShape, steady
from offloadtrain.shapes import block_flops_per_token, flops_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One optimizer step in the long run.

    Attributes:
        busy_s: lane → seconds of work.
        exposed_s: lane → seconds that the device waited for it.
        tokens_per_s: of all ranks.
        tflops: of one rank: 6·N + 12·L·d·T per token, recompute not counted.
        hardware_tflops: of one rank, recompute counted.
        mfu: share of the data sheet's FLOPs, recompute not counted; None where that is not known.
        d2h_bytes, h2d_bytes, comm_bytes: of one rank; loads are among `h2d_bytes`.
        dram_bytes: that the host's part of a step moves through memory, of one rank.
    """

    seconds: float
    busy_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    tokens_per_s: float
    tflops: float
    hardware_tflops: float
    mfu: float | None
    d2h_bytes: int
    h2d_bytes: int
    comm_bytes: int
    dram_bytes: int

    @property
    def exposed(self) -> float:
        return sum(self.exposed_s.values())


def predict(placed: Placement, machine: Machine, copies_room: int) -> Prediction:
    """Simulate a step of one of `placed.ranks` ranks, which fill one host after the other.

    Args:
        copies_room: bytes that second copies of the state may grow into.

    Raises:
        MachineError: the machine has not the precision or the links.
    """
    costs = _Costs(placed, machine, copies_room)
    found = _steady(costs)
    parked = costs.parked_s
    busy = dict(found.busy)
    for lane, spent in parked.items():
        busy[lane] = busy.get(lane, 0.0) + spent
    seconds = max(found.seconds, *busy.values())
    exposed = dict(found.exposed)
    if seconds > found.seconds:  # block inputs on their way are more than what hides them
        lane = max(busy, key=lambda name: busy[name])
        exposed[lane] = exposed.get(lane, 0.0) + seconds - found.seconds
    return _prediction(costs, seconds, busy, exposed)


_MICRO_STEPS = (2, 3)
"""Simulated in place of more of them: each one beyond takes what the third adds to two."""


def _steady(costs: _Costs) -> Steady:
    count = costs.shape.micro_steps
    few, some = _MICRO_STEPS
    if count <= some:
        return steady(costs.shape, costs.seconds)
    one, two = (steady(replace(costs.shape, micro_steps=n), costs.seconds) for n in (few, some))

    def beyond(a: float, b: float) -> float:
        return b + (count - some) * (b - a)

    def lanes(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
        return {lane: max(beyond(a.get(lane, 0.0), b.get(lane, 0.0)), 0.0) for lane in {*a, *b}}

    return Steady(
        beyond(one.seconds, two.seconds),
        lanes(one.busy, two.busy),
        lanes(one.exposed, two.exposed),
    )


def _prediction(
    costs: _Costs, seconds: float, busy: Mapping[str, float], exposed: Mapping[str, float]
) -> Prediction:
    placed, machine = costs.placed, costs.machine
    tokens = placed.config.batch_tokens
    flops = flops_per_token(placed.config.model, placed.config.data.seq_len) * tokens
    again = costs.recomputed_flops * placed.config.train.grad_accum_steps
    down, up, sent = costs.moved_bytes
    peak = machine.peak_tflops * 1e12
    return Prediction(
        seconds=seconds,
        busy_s=busy,
        exposed_s=exposed,
        tokens_per_s=tokens * placed.ranks / seconds,
        tflops=flops / seconds / 1e12,
        hardware_tflops=(flops + again) / seconds / 1e12,
        mfu=flops / seconds / peak if peak else None,
        d2h_bytes=down,
        h2d_bytes=up,
        comm_bytes=sent,
        dram_bytes=round(costs.dram_bytes),
    )


class _Costs:
    """Seconds of every operation."""

    def __init__(self, placed: Placement, machine: Machine, copies_room: int) -> None:
        self.placed, self.machine, self._copies_room = placed, machine, copies_room
        self._blocks = {block.name: block for block in placed.blocks}
        self._buckets = {bucket.name: bucket for bucket in placed.buckets}
        self._local = min(placed.ranks, machine.gpus)
        if placed.ranks > machine.gpus and not machine.node_link_gbps:
            raise MachineError(
                f"{placed.ranks} GPUs are asked for, and the machine has {machine.gpus} on its "
                "only host: take fewer, or a --machine file with more, or with node_link_gbps"
            )
        config = placed.config
        self._tokens = config.train.micro_batch * config.data.seq_len
        self._rate = machine.flops(config.device.precision, config.model.d_model)

    @cached_property
    def shape(self) -> StepShape:
        placed, config = self.placed, self.placed.config
        speculates = config.optim.update == "speculative"
        guessed = doubled_blocks(placed, self._copies_room) if speculates else 0
        alone = placed.blocks[: len(placed.blocks) - guessed] if speculates else ()
        return StepShape(
            blocks=tuple(self._block(block) for block in placed.blocks),
            mode="early" if placed.early else config.optim.update,
            micro_steps=config.train.grad_accum_steps,
            slots=max(placed.slots, 1),
            staging_slots=placed.staging_slots,
            pieces={name: placed.pieces(bucket) for name, bucket in self._buckets.items()},
            among_ranks=placed.ranks > 1,
            kept_on_device=placed.kept_on_device,
            whole_gradients=placed.stage == 1,
            staged_up=frozenset(self._staged_up()),
            unguessed=frozenset(bucket.name for block in alone for bucket in block.buckets),
        )

    def _block(self, block: Block) -> BlockShape:
        names = tuple(bucket.name for bucket in block.buckets)
        return BlockShape(block.name, names, block.name in self.placed.streamed)

    def _staged_up(self) -> list[str]:
        placed = self.placed
        if not placed.sums or placed.config.optim.state != "fp32":
            return []
        return [
            bucket.name
            for block in placed.blocks
            if not placed.from_host(block)
            for bucket in block.buckets
            if not pends(placed, block, bucket)
        ]

    def seconds(self, op: Op) -> float:
        """Of one operation."""
        kind, _, name = op.name.partition(" ")
        if op.name == DECIDE:
            return 0.0
        if kind in ("forward", "backward"):
            return self._computed_s(kind, name)
        return self._moved_s(kind, self._buckets[name])

    def _computed_s(self, kind: str, name: str) -> float:
        flops = self._flops[name] * self._tokens
        if kind == "forward":
            return flops / self._rate
        again = flops if self._recomputes(name) else 0.0
        return (2 * flops + again) / self._rate

    def _recomputes(self, name: str) -> bool:
        keeps = self.placed.config.device.activation == "keep"
        return not keeps and self._blocks[name].repeated

    @cached_property
    def _flops(self) -> dict[str, float]:
        """Block → forward FLOPs per token; the head's are the last block's."""
        model, seq_len = self.placed.config.model, self.placed.config.data.seq_len
        layers = block_flops_per_token(model, seq_len)
        count = sum(block.repeated for block in self.placed.blocks)
        flops = {block.name: layers if block.repeated else 0.0 for block in self.placed.blocks}
        last = self.placed.blocks[-1].name
        flops[last] += 2.0 * model.vocab_size * model.d_model
        if not count:  # one layer, whose modules are blocks: all of it in the last of them
            flops[last] += layers
        return flops

    @property
    def recomputed_flops(self) -> float:
        """Of a microbatch, by blocks that run their forward again."""
        again = (self._flops[name] for name in self._blocks if self._recomputes(name))
        return sum(again) * self._tokens

    def _moved_s(self, kind: str, bucket: Bucket) -> float:
        machine, weight = self.machine, self.placed.weight_bytes
        shard, pieces = bucket.shard_numel, self.placed.pieces(bucket)
        match kind:
            case "gather":
                wide = weight + self.placed.reduced_bytes
                return bucket.numel * wide / pieces / (machine.hbm_gbps * 1e9)
            case "reduce-scatter":
                return self._collective_s(bucket.numel * self.placed.reduced_bytes) / pieces
            case "all-gather":
                return self._collective_s(bucket.numel * weight)
            case "d2h":
                return shard * weight / pieces / self._link(machine.d2h_gbps)
            case "h2d" | "load":
                return shard * weight / self._link(machine.h2d_gbps)
            case "adam":
                return shard / self._adam_rate
        passes = pieces if kind == "accumulate" else 1
        return shard * self._traffic(kind) / passes / self._dram

    def _collective_s(self, nbytes: int) -> float:
        """A ring over all ranks: among the GPUs of a host, and where there are more, over the
        links of each host, which its GPUs share."""
        ranks, machine = self.placed.ranks, self.machine
        inside = nbytes * (ranks - 1) / ranks / (machine.gpu_link_gbps * 1e9)
        nodes = ceil(ranks / machine.gpus)
        if nodes == 1:
            return inside
        return max(inside, nbytes * (nodes - 1) / nodes / (machine.node_link_gbps * 1e9))

    def _link(self, alone_gbps: float) -> float:
        """Bytes per second of one rank's way between host and device; where the state is on the
        device, of a copy within."""
        if not self.placed.offloaded:
            return 1e9 * self.machine.hbm_gbps / 2
        return 1e9 * min(alone_gbps, self.machine.host_link_gbps / self._local)

    @property
    def _dram(self) -> float:
        """Bytes per second of one rank's cores; of the device where Adam runs there."""
        machine = self.machine
        if not self.placed.offloaded:
            return 1e9 * machine.hbm_gbps
        whole = machine.dram_gbps if self._local == 1 else machine.shared_dram_gbps
        return 1e9 * whole / self._local

    @property
    def _adam_rate(self) -> float:
        """Parameters per second of one rank."""
        state = self.placed.config.optim.state
        measured: float = getattr(self.machine, f"{state}_gparams")
        if measured and self.placed.offloaded:
            return 1e9 * measured / self._local
        return self._dram / self._traffic("adam")

    def _traffic(self, kind: str) -> float:
        """Bytes of memory traffic per parameter."""
        weight = self.placed.weight_bytes
        gradient = 4 if self.placed.sums else weight
        match kind:
            case "accumulate":
                return weight + 8
            case "norm":
                return gradient
            case "show":
                return 2 * weight
        state = self.placed.config.optim.state
        kept = sum((one.nbytes or weight) / one.per_block for one in STATES[state])
        return gradient + 2 * kept + (weight if state == "fp32" else 0)

    @cached_property
    def moved_bytes(self) -> tuple[int, int, int]:
        """Of a step: down, up, to other ranks."""
        placed, weight = self.placed, self.placed.weight_bytes
        micro_steps = placed.config.train.grad_accum_steps
        every = sum(bucket.shard_numel for bucket in placed.buckets)
        streamed = [block for block in placed.blocks if block.name in placed.streamed]
        loads = sum(block.numel for block in streamed) // placed.ranks
        loaded = self._loads_per_step() * loads // max(len(streamed), 1)
        from_host = 0 if placed.kept_on_device else loaded
        up = every - (0 if placed.kept_on_device else loads) + from_host
        parked = input_bytes(placed) * self._parked_inputs
        bus = placed.offloaded
        gathers = every - loads + loaded
        sent = (placed.ranks - 1) * (micro_steps * every * placed.reduced_bytes + gathers * weight)
        down = micro_steps * every * weight if bus else 0
        return down + parked, (up * weight if bus else 0) + parked, sent

    def _loads_per_step(self) -> int:
        """Of streamed blocks: forward and backward of every microbatch, but for what the slots
        still hold from one to the other."""
        count, slots = len(self.placed.streamed), self.placed.slots
        if not count:
            return 0
        micro_steps = self.placed.config.train.grad_accum_steps
        return max(2 * micro_steps * (count - slots) + slots, count)

    @property
    def _parked_inputs(self) -> int:
        config = self.placed.config
        layers = sum(block.repeated for block in self.placed.blocks)
        parks = config.device.activation == "offload"
        return layers * config.train.grad_accum_steps if parks else 0

    @property
    def parked_s(self) -> dict[str, float]:
        """Lane → seconds of block inputs on their way down and up."""
        if not self._parked_inputs:
            return {}
        nbytes = input_bytes(self.placed) * self._parked_inputs
        machine = self.machine
        return {
            "d2h": nbytes / self._link(machine.d2h_gbps),
            "load": nbytes / self._link(machine.h2d_gbps),
        }

    @property
    def dram_bytes(self) -> float:
        """Of the host's kernels in a step; what the bus moves is not among it."""
        placed = self.placed
        if not placed.offloaded:
            return 0.0
        params = sum(bucket.shard_numel for bucket in placed.buckets)
        shown = placed.config.optim.update != "exact" or placed.early
        sums = placed.config.train.grad_accum_steps * self._traffic("accumulate")
        per_param = self._traffic("adam") + (sums if placed.sums else self._traffic("norm"))
        streamed = sum(b.numel for b in placed.blocks if placed.from_host(b)) // placed.ranks
        return params * per_param + (streamed * self._traffic("show") if shown else 0)
