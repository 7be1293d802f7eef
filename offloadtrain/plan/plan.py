"""A job on a machine: memory by owner, step time, and whether it fits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from math import ceil, inf, prod

from offloadtrain.config.batch_split import replicas, shards, shared
from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import num_block_params
from offloadtrain.config.units import format_bytes, parse_bytes
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.automatic import FULL, decided, largest_share
from offloadtrain.plan.costs.costs import Costs
from offloadtrain.plan.costs.disk import SaveCost, Wear, save_cost, wear
from offloadtrain.plan.costs.microbatch import Activations, Trace
from offloadtrain.plan.layout import blocks_of
from offloadtrain.plan.placement import Placement, place, resolved
from offloadtrain.plan.times import Prediction, predict
from offloadtrain.plan.tracing.tracer import activations, together
from offloadtrain.step.layout.buffer_table import added, disk_owners
from offloadtrain.step.layout.placement import with_second_copies
from offloadtrain.step.layout.state_tiers import sums_bytes
from offloadtrain.step.layout.tiers import Tier

PROCESS = "Python, torch"
UPDATE_BYTES = 128 << 20
"""Bytes of temporaries of an update on a GPU (`kernels.on_device`)."""

ESTIMATE_FACTOR = 2
"""A job is refused if even its estimated activations divided by this do not fit. Tests hold the
estimate to 5 %; the margin is for other kernels, and for memory that other programs may free."""

PROCESS_BYTES = {"cpu": 512 << 20, "cuda": 3 << 30}
"""Host memory of one process: torch on the CPU, or with CUDA's libraries."""


@dataclass(frozen=True)
class Plan:
    """Memory and step time of one rank of a job.

    Attributes:
        job: as requested, with resolved precision and decisions.
        name: name of the machine.
        hosts: number of hosts.
        local_ranks: ranks on each host.
        placed: placement without second copies of the state.
        requested: the job before the plan decided its open options ("auto").
    """

    job: Config
    name: str
    machine: Machine
    placed: Placement
    requested: Config | None = field(default=None, kw_only=True, compare=False)

    @property
    def ranks(self) -> int:
        """Number of all ranks, including other pipeline stages and tensor parallel parts."""
        return self.placed.spec.replicas * self.job.ranks.pipeline * self.job.ranks.tensor

    @property
    def hosts(self) -> int:
        return ceil(self.ranks / self.machine.gpus)

    @property
    def local_ranks(self) -> int:
        return min(self.ranks, self.machine.gpus)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placements of the rank: one, or several for a rank with several stages."""
        return (self.placed,)

    @cached_property
    def activations(self) -> Activations:
        of_stages = (activations(placed, on_cpu=self.machine.on_cpu) for placed in self.placements)
        return together(list(of_stages))

    @property
    def stage_names(self) -> str:
        """The rank's pipeline stages and their contents; "" without stages."""
        return ""

    @property
    def engine_device(self) -> dict[str, int]:
        """Owner → bytes on each device, without activations and other memory of torch."""
        return added(placed.device() for placed in self.placements)

    @property
    def _least_device(self) -> dict[str, int]:
        """As `engine_device`, with a lower bound on activations."""
        least = max(placed.least_activation_bytes for placed in self.placements)
        return self.engine_device | {"activations": least}

    @property
    def frozen_bytes(self) -> int:
        """Device bytes of frozen weights that are not streamed."""
        return sum(placed.frozen_bytes for placed in self.placements)

    @cached_property
    def device(self) -> dict[str, int]:
        """Owner → bytes on each device, at the peak."""
        owners = self.engine_device | self.activations.owners()
        if frozen := self.frozen_bytes:
            owners["frozen weights"] = frozen
        if self.placed.spec.has_state_on(Tier.DEVICE) and not self.machine.on_cpu:
            owners["Adam at work"] = UPDATE_BYTES
        return owners

    @property
    def process_bytes(self) -> int:
        """Host memory of one rank outside tensors."""
        return PROCESS_BYTES["cpu" if self.machine.on_cpu else "cuda"]

    @property
    def second_copy_budget(self) -> int:
        """Host bytes of a rank available to the state and its second copies."""
        other_bytes = self.process_bytes + self.built_bytes
        other_bytes += sum(self.device.values()) if self.machine.on_cpu else 0
        return max(self.machine.host_memory_bytes // self.local_ranks - other_bytes, 0)

    @cached_property
    def with_copies(self) -> Placement:
        """The placement with as many second copies of the state as fit."""
        spec = with_second_copies(self.placed.spec, self.second_copy_budget)
        return replace(self.placed, spec=spec)

    @cached_property
    def host(self) -> dict[str, int]:
        """Owner → bytes of one rank in host memory during a step."""
        further = (placed.host() for placed in self.placements[1:])
        return added([self.with_copies.host(), *further]) | {PROCESS: self.process_bytes}

    @cached_property
    def needed(self) -> dict[str, int]:
        """As `host`, without optional second copies."""
        return added(placed.host() for placed in self.placements) | {PROCESS: self.process_bytes}

    @cached_property
    def disk(self) -> dict[str, int]:
        """Owner → bytes of one rank on the disk."""
        return disk_owners(self.with_copies.spec)

    @property
    def wear(self) -> Wear:
        """Bytes that all ranks of a host write to its drive."""
        prediction = self.prediction
        return wear(prediction.disk, self.machine, self.local_ranks, prediction.seconds)

    @cached_property
    def prediction(self) -> Prediction:
        return predict(self.with_copies, self.machine)

    @property
    def most_tokens_per_s(self) -> float:
        """Upper bound on tokens/s in any schedule, without a simulation; infinite for pipelines."""
        if self.job.ranks.pipeline > 1:
            return inf
        placed = self.with_copies
        tokens = placed.config.batch_tokens * placed.spec.replicas
        return tokens / Costs(placed, self.machine).least_s

    def stage_lines(self) -> Iterator[str]:
        """Yield a line for each pipeline stage; none without stages."""
        yield from ()

    @property
    def device_room(self) -> int:
        """Bytes available to tensors on each device; on a CPU see `host_room`."""
        room = max(self.machine.gpu_memory_bytes - self.machine.gpu_reserved_bytes, 0)
        limit = self.job.device.process_memory_limit
        return min(room, parse_bytes(limit)) if limit else room

    @property
    def host_room(self) -> int:
        return self.machine.host_memory_bytes

    @property
    def host_peaks(self) -> Mapping[str, int]:
        """Peak bytes of one host with all its ranks, by moment: while the model is built, in a
        step, and during a checkpoint, which is streamed from the state."""
        return self._peaks(self.host, self.device)

    def _peaks(self, host: Mapping[str, int], device: Mapping[str, int]) -> dict[str, int]:
        device_bytes = sum(device.values()) if self.machine.on_cpu else 0
        still = sum(self.engine_device.values()) + self.frozen_bytes
        still = still if self.machine.on_cpu else 0
        state = sum(host.values()) - host.get("block inputs", 0)
        peaks = {
            "init": state + still + self.built_bytes,
            "step": sum(host.values()) + device_bytes,
            "checkpoint": sum(host.values()) + still,
        }
        return {moment: size * self.local_ranks for moment, size in peaks.items()}

    @property
    def built_bytes(self) -> int:
        """Bytes of the fp32 weights of the largest part that is created at once, and of a flat copy
        of its largest tensor. transformers creates a model with random weights as a whole, on the
        ranks of every stage."""
        is_random = self.job.hf is not None and self.job.hf.init == "random"
        if (hf := self.job.hf if is_random else self.placed.config.hf) is not None:
            params = [sum(prod(p.sizes) for p in part.params) for part in hf.parts or ()]
            tensors = (prod(param.sizes) for part in hf.parts or () for param in part.params)
            return 4 * (sum(params) if hf.init == "random" else max(params)) + 4 * max(tensors)
        shape = self.placed.config.model
        table = shape.vocab_size * shape.d_model
        return 4 * max(num_block_params(shape), table) + 4 * table

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint of all ranks, without buffers: all stages, the experts of all
        ranks, and tensors that tensor parallel ranks share once."""
        spec, part = self.placed.spec, self.placed.config
        blocks = spec.blocks
        if part.stage is not None or part.ranks.tensor > 1:
            ranks = replace(part.ranks, tensor=1)
            undivided = replace(part, stage=None, model=self.job.model, hf=self.job.hf, ranks=ranks)
            blocks = blocks_of(undivided, spec.ranks)
        buckets = [
            bucket
            for block in blocks
            for bucket in block.buckets
            for _ in range(spec.ranks // bucket.ranks)  # experts: fewer ranks share each bucket
        ]
        trained = sum(
            field.nbytes(bucket.numel, bucket.weight_bytes)
            for bucket in buckets
            for field in bucket.format.fields(bucket.moments)
        )
        in_use = sum(bucket.nbytes for bucket in buckets) if self.placed.spec.is_delayed else 0
        frozen = sum(bucket.nbytes for block in blocks for bucket in block.frozen)
        return trained + in_use + frozen + self.placed.frozen_bytes

    @property
    def spill_bytes(self) -> int:
        """Bytes of all ranks' host memory for copies that a save makes."""
        spec = self.placed.spec
        of_one = sum(
            placed.spec.spill_bytes(b) for placed in self.placements for b in placed.spec.buckets
        )
        return spec.replicas * self.job.ranks.tensor * of_one

    @property
    def save(self) -> SaveCost | None:
        """Cost of a checkpoint; None if the machine's disk was not measured."""
        if not self.machine.disk_gbps:
            return None
        rate = 1e9 * self.machine.disk_gbps
        write_s = self.checkpoint_bytes / rate
        # Each copy of the state writes its share of what all copies spill.
        spill_s = self.spill_bytes / self.placed.spec.copies / rate
        return save_cost(write_s, self.prediction.seconds, spill_s)

    @property
    def problems(self) -> list[str]:
        """Sentences on what does not fit; empty if the job can be trained."""
        return self._problems(self.needed, self.device)

    @property
    def certain_problems(self) -> list[str]:
        """All `problems`, if no estimation error can explain them, else []. Engine memory is exact,
        activations are divided by ESTIMATE_FACTOR, and Python and torch are left out."""
        engine = {owner: size for owner, size in self.needed.items() if owner != PROCESS}
        guessed = self.activations.owners()
        sure = {owner: size // ESTIMATE_FACTOR for owner, size in guessed.items()}
        sure["frozen weights"] = self.frozen_bytes
        cannot = self._problems(engine, self.engine_device | sure)
        return self.problems if cannot else []

    def _problems(self, host: Mapping[str, int], device: Mapping[str, int]) -> list[str]:
        problems = []
        used = sum(device.values())
        if not self.machine.on_cpu and used > self.device_room:
            problems.append(_too_much("the device", used, self.device_room, device))
        limit = self.job.offload.memory.host_limit
        limited = {owner: size for owner, size in host.items() if owner != PROCESS}
        if limit is not None and (used := sum(limited.values())) > limit:
            problems.append(_too_much("offload.host_memory_limit", used, limit, limited))
        moment, peak = max(self._peaks(host, device).items(), key=lambda item: item[1])
        if peak > self.host_room:
            owners = dict(host) | (dict(device) if self.machine.on_cpu else {})
            many = {owner: size * self.local_ranks for owner, size in owners.items()}
            problems.append(_too_much(f"the host ({moment})", peak, self.host_room, many))
        return problems

    @property
    def device_has_room(self) -> bool:
        """True if the device's part fits; always on a CPU, which has only host memory."""
        if self.machine.on_cpu:
            return True
        room = self.device_room  # cheap bound first: activations need a trace
        return sum(self._least_device.values()) <= room and sum(self.device.values()) <= room

    @property
    def has_room(self) -> bool:
        """True if everything fits, and the device is not fuller than estimates allow."""
        if self.machine.on_cpu:
            return self.fits
        used = sum(self.device.values()) + self._more_experts_bytes
        return self.fits and used <= self.device_room * FULL

    @property
    def _more_experts_bytes(self) -> int:
        """Additional activation bytes of a rank whose experts get twice the mean of tokens."""
        return self.activations.total if self.job.ranks.expert > 1 else 0

    @property
    def share_that_fits(self) -> float:
        """Largest share of the state that still fits on the device; 0 on a CPU, whose device memory
        is host memory."""
        if self.machine.on_cpu:
            return 0.0
        other_bytes = sum(self.device.values()) - sum(self.placed.device().values()) + UPDATE_BYTES
        other_bytes += self._more_experts_bytes
        return largest_share(self.placed, int(self.device_room * FULL) - other_bytes)

    def sums_that_fit(self, full: float) -> int:
        """Return the largest share of gradient sums, in percent, that still fits on the device, for
        a plan with none there. 100 on a CPU, where both tiers are host memory.

        Args:
            full: share of the device's memory that may be used.
        """
        if self.machine.on_cpu:
            return 100
        used = sum(self.device.values()) + self._more_experts_bytes
        room = int(self.device_room * full) - used
        if (limit := self.job.offload.memory.device_limit) is not None:
            room = min(room, limit - sum(self.engine_device.values()))
        return bisect_right(
            range(1, 101),
            room,
            key=lambda n: sum(sums_bytes(placed.spec, n / 100) for placed in self.placements),
        )

    def divisions(self) -> Sequence[tuple[int, ...]]:
        """Return divisions of layers into stages to try, best last; (): equal numbers of layers."""
        return ((),)

    @property
    def missing_bytes(self) -> int:
        """Bytes that exceed the memory of a device and a host."""
        host = max(self._peaks(self.needed, self.device).values()) - self.host_room
        device = 0 if self.machine.on_cpu else sum(self.device.values()) - self.device_room
        return max(host, 0) + max(device, 0)

    @cached_property
    def fits(self) -> bool:
        # Cheap bound first: activations need a trace.
        return not self._problems(self.needed, self._least_device) and not self.problems


def make(
    job: Config,
    name: str,
    machine: Machine,
    ranks: int = 1,
    trace: Trace | None = None,
    stage: int | None = None,
) -> Plan:
    """Plan a job for `ranks` ranks, and decide the options that it leaves open (`automatic`).

    Args:
        trace: traces a microbatch of the model; None: estimates are from the model's shape.
        stage: the pipeline rank to plan; None: the one that needs the most memory.

    Raises:
        PlanError: the machine cannot run the job with any memory, or the placement is
            contradictory.
        ConfigError: the ranks cannot share the batch.
    """
    job = resolved(job, machine)
    if machine.on_cpu and ranks > machine.gpus:
        machine = replace(machine, gpus=ranks)

    def planned(candidate: Config) -> Plan:
        return _placed(candidate, name, machine, ranks, trace, stage)

    return replace(planned(decided(job, planned)), requested=job)


def _placed(
    job: Config, name: str, machine: Machine, ranks: int, trace: Trace | None, stage: int | None
) -> Plan:
    part, count = shared(job, ranks), shards(job, ranks)
    copies = replicas(job, ranks) // count
    if job.ranks.pipeline == 1:
        return Plan(job, name, machine, place(part, count, trace=trace, copies=copies))
    # Imported by name: that package imports this one, and the core never imports it.
    plan_stages = import_module("offloadtrain.parallel.pipeline.plan").plan_stages
    divided: Plan = plan_stages(job, name, machine, part, count, copies, trace, stage)
    return divided


def _too_much(where: str, needed: int, room: int, owners: Mapping[str, int]) -> str:
    largest = sorted(owners.items(), key=lambda item: -item[1])[:4]
    named = ", ".join(f"{owner} {format_bytes(size)}" for owner, size in largest)
    return f"{where} needs {format_bytes(needed)} and has {format_bytes(room)}. Largest: {named}"
