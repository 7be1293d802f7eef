"""Predicts the time of a step by simulating the engine's schedule with each operation's cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.costs.costs import Costs
from offloadtrain.plan.costs.device_time import NOTHING, Seconds
from offloadtrain.plan.costs.disk import MICRO_STEPS, DiskLoad
from offloadtrain.plan.placement import Placement
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.proof.simulate import Steady, bound, steady


@dataclass(frozen=True, slots=True)
class Exchange:
    """Bytes that one rank sends to other ranks in a step, and their time."""

    num_bytes: int
    seconds: float

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.num_bytes + other.num_bytes, self.seconds + other.seconds)


@dataclass(frozen=True, slots=True)
class Sent:
    """Communication of one rank in a step, in addition to the collectives of ZeRO.

    Attributes:
        copies: all-reduces with ranks that hold the same shard in other copies of the state.
        parts: all-reduces of tensor parallel, during which the device is idle.
        experts: exchange of tokens with experts of other ranks, during which the device is idle.
    """

    copies: Exchange
    parts: Exchange
    experts: Exchange

    def __add__(self, other: Sent) -> Sent:
        return Sent(
            self.copies + other.copies, self.parts + other.parts, self.experts + other.experts
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One optimizer step in steady state.

    Attributes:
        busy_s: lane → seconds of work.
        launch_s: seconds in which the host launches a step, a lower bound of its time.
        none_right_s: `seconds` if every prediction of `update = "speculative"` is wrong, for
            example if all gradients are clipped; other values assume right ones. None in other
            modes.
        exposed_s: lane → seconds in which the device waited for it.
        tokens_per_s: tokens/s of all ranks.
        tflops: Tflop/s of one rank: 6·N + 12·L·d·T per token, without recompute.
        hardware_tflops: Tflop/s of one rank, with recompute.
        mfu: share of the data sheet's FLOP/s, without recompute; None if unknown.
        d2h_bytes, h2d_bytes, comm_bytes: bytes of one rank; `h2d_bytes` includes loads.
        sent: communication of one rank; `comm_bytes` includes `sent.copies`.
        dram_bytes: memory traffic of one rank's host kernels.
        disk: disk load of one rank.
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
    sent: Sent
    dram_bytes: int
    disk: DiskLoad
    launch_s: float
    none_right_s: float | None = None

    @property
    def forward_again(self) -> float:
        """Share of the forward's FLOPs that backward executes again."""
        return 3 * (self.hardware_tflops / self.tflops - 1)

    @property
    def exposed(self) -> float:
        return sum(self.exposed_s.values())

    @property
    def bound(self) -> tuple[float, str]:
        """(seconds, name) of the busiest lane, or link that lanes share: no schedule is faster."""
        return bound(self.busy_s)


def predict(placed: Placement, machine: Machine) -> Prediction:
    """Simulate a step of one of `placed.spec.ranks` ranks, which fill the hosts one by one; a
    pipeline stage is simulated as if it never waited for other stages.

    Raises:
        MachineError: the machine does not have the precision or the links.
    """
    costs = Costs(placed, machine)
    count, (few, some) = costs.spec.config.grad_accum_steps, MICRO_STEPS

    def step(*, clipped: bool = False) -> Steady:
        if count <= some:
            return _of_layers(costs, costs.spec, clipped)
        specs = (with_micro_steps(costs.spec, n) for n in (few, some))
        small, large = (_of_layers(costs, spec, clipped) for spec in specs)
        return _beyond(small, large, count - some)

    predicted = _prediction(costs, step())
    if costs.spec.config.update != "speculative":
        return predicted
    none_right = _prediction(costs, step(clipped=True))
    return replace(predicted, none_right_s=none_right.seconds)


def compute_seconds(placed: Placement, machine: Machine) -> Seconds:
    """Return the compute seconds of a rank's microbatch, recompute included.

    Raises:
        MachineError: as in `predict`.
    """
    return sum(Costs(placed, machine).computed.values(), NOTHING)


_LAYERS, _FEW_LAYERS = 14, (8, 12)
"""Models with more than `_LAYERS` equal layers are extrapolated from `_FEW_LAYERS`: each further
layer adds the same time. Simulating the largest models completely would take seconds."""


def _of_layers(costs: Costs, spec: StepSpec, clipped: bool) -> Steady:
    nbytes, layers = costs.placed.input_bytes, sum(block.repeated for block in spec.blocks)
    # A delayed update may end after its own step, so its time is not linear in the layers.
    if layers <= _LAYERS or spec.config.update != "exact" or not _alike(spec):
        return steady(spec, costs.seconds, nbytes, clipped=clipped)
    few, some = _FEW_LAYERS
    small, large = (steady(_with_layers(spec, n), costs.seconds, nbytes) for n in (few, some))
    return _beyond(small, large, (layers - some) / (some - few))


def _alike(spec: StepSpec) -> bool:
    """Return True if all layers have buckets of the same sizes in the same places."""
    layers = [block for block in spec.blocks if block.repeated]
    kinds = {
        (
            block.name in spec.streamed,
            block.name in spec.second_copies,
            block.recomputed,
            block.then,
            tuple(replace(bucket, name="") for bucket in block.all_buckets),
        )
        for block in layers
    }
    return len(kinds) == 1


def _with_layers(spec: StepSpec, count: int) -> StepSpec:
    """Return the spec with only its first `count` layers."""
    layers = [block for block in spec.blocks if block.repeated]
    left_out = {block.name for block in layers[count:]}
    return replace(spec, blocks=tuple(block for block in spec.blocks if block.name not in left_out))


def _beyond(small: Steady, large: Steady, times: float) -> Steady:
    """Return `large` plus `times` the difference between `large` and `small`."""

    def beyond(a: float, b: float) -> float:
        return b + times * (b - a)

    def lanes(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
        return {lane: max(beyond(a.get(lane, 0.0), b.get(lane, 0.0)), 0.0) for lane in {**a, **b}}

    return Steady(
        beyond(small.seconds, large.seconds),
        lanes(small.busy, large.busy),
        lanes(small.exposed, large.exposed),
        beyond(small.launches, large.launches),
    )


def with_micro_steps(spec: StepSpec, count: int) -> StepSpec:
    return replace(spec, config=spec.config.replace(grad_accum_steps=count))


def _prediction(costs: Costs, step: Steady) -> Prediction:
    placed, machine = costs.placed, costs.machine
    tokens, micro_steps = placed.config.batch_tokens, placed.config.train.grad_accum_steps
    launch_s = costs.launch_s(step.launches)
    seconds = max(step.seconds, launch_s)
    flops, again = costs.flops * micro_steps, costs.recomputed_flops * micro_steps
    down, up, sent = costs.moved_bytes
    peak = machine.peak_tflops * 1e12
    return Prediction(
        seconds=seconds,
        busy_s=step.busy,
        exposed_s=step.exposed,
        tokens_per_s=tokens * placed.spec.replicas / seconds,
        tflops=flops / seconds / 1e12,
        hardware_tflops=(flops + again) / seconds / 1e12,
        mfu=flops / seconds / peak if peak else None,
        d2h_bytes=down,
        h2d_bytes=up,
        comm_bytes=sent + costs.copies.sent_bytes * micro_steps,
        sent=_sent(costs, micro_steps),
        dram_bytes=round(costs.dram_bytes),
        disk=costs.disk,
        launch_s=launch_s,
    )


def _sent(costs: Costs, micro_steps: int) -> Sent:
    copies, parts, experts = costs.copies, costs.parts, costs.experts
    experts_s = experts.exchanges * experts.exchange_s
    return Sent(
        Exchange(copies.sent_bytes * micro_steps, copies.seconds * micro_steps),
        Exchange(parts.sent_bytes * micro_steps, parts.sums * parts.sum_s * micro_steps),
        Exchange(experts.sent_bytes * micro_steps, experts_s * micro_steps),
    )
