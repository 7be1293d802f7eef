"""From a model to an engine: blocks, buckets, memory, and the weights moved into them."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from offloadtrain.config.errors import ModelError
from offloadtrain.config.offload import OffloadConfig
from offloadtrain.engine.autograd.forward_hooks import ForwardHooks
from offloadtrain.engine.autograd.offload import ActivationOffloader, Offloader, SavedOffloader
from offloadtrain.engine.autograd.selective import default_policy
from offloadtrain.engine.block import Block, Residency
from offloadtrain.engine.bucket import Bucket, pack
from offloadtrain.engine.buffers import BlockInputs, MemoryMap, Ranges
from offloadtrain.engine.checks import has_compiled, keeps_fp32
from offloadtrain.engine.division import Division, entries_in
from offloadtrain.engine.engine import Engine
from offloadtrain.engine.gradients import Gradients
from offloadtrain.engine.interpreter import Functions, Interpreter
from offloadtrain.engine.norm import NormMeasure
from offloadtrain.engine.partition import Part, partition
from offloadtrain.engine.relayout import Earlier
from offloadtrain.engine.weights import ParamInit, adopt_weights, view_weights
from offloadtrain.hardware.host_memory import available_bytes
from offloadtrain.optim import AnyRule
from offloadtrain.runtime.arena import Arena, Ledger
from offloadtrain.runtime.disk_arena import DiskArena
from offloadtrain.runtime.dtypes import PRECISIONS
from offloadtrain.runtime.lanes import Lanes
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.step.layout import placement
from offloadtrain.step.layout.block_spec import BlockSpec
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.program import Program

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Resources:
    """Lanes and allocators of an engine. An engine that replaces another takes them over.

    Attributes:
        arena: host memory.
        disk: the file of the buffers on the disk; each engine has its own file.
        ledger: counts the bytes of all of them.
    """

    lanes: Lanes
    arena: Arena
    disk: DiskArena
    ledger: Ledger


def disk_arena(config: OffloadConfig, ledger: Ledger) -> DiskArena:
    return DiskArena(ledger, config.memory.scratch_dir, in_memory=config.memory.scratch_in_memory)


class Release:
    """The finalizer of an optimizer.

    If an optimizer goes out of scope, the model gets its weights back, as with `close()`. At the
    end of the process it does not: the weights are no longer read, and the host may have no room
    for a copy of them. The reference to the optimizer is dead in the first case only.

    Attributes:
        engine: weak, as the engine refers to the model, which may refer to the optimizer. A hook of
            the model keeps the engine alive until it is closed.
    """

    engine: Callable[[], Engine | None] = staticmethod(lambda: None)

    def __init__(
        self,
        optimizer: object,
        resources: Resources,
        joined: Sequence[Ranks],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.resources, self._joined = resources, joined
        # Runs if the optimizer is dropped without close(), and at the end of the process.
        self.finalizer = weakref.finalize(optimizer, self)

    def __call__(self) -> None:
        """Release the lanes, the memory that they use, and process groups whose world is gone."""
        try:
            engine = self.engine()
            if self._optimizer() is None and engine is not None and not engine.guard.closed:
                # Gathering shards takes a collective, and ranks drop their optimizers at different
                # times.
                if engine.residency.gathers:
                    _log.warning(
                        "an optimizer whose weights are in shards (zero_stage = 3) went out of "
                        "scope: the weights of its layers are gone, and their parameters are "
                        "empty. Keep a reference to it, take dict(optimizer.full_weights()) on all "
                        "ranks, then call optimizer.close()"
                    )
                engine.close()
        finally:
            # Drains first: copies and kernels in flight use the arena's memory and the file.
            self.resources.lanes.close()
            self.resources.arena.close()
            self.resources.disk.close()
            for ranks in self._joined:
                ranks.let_go()


def build(
    model: nn.Module,
    rules: Sequence[AnyRule],
    groups: Sequence[Mapping[str, Any]],
    config: OffloadConfig,
    resources: Resources,
    *,
    device: torch.device,
    division: Division,
    param_init_fn: ParamInit | None,
    has_values: bool = True,
    earlier: Earlier | None = None,
) -> Engine:
    """Partition the model, move its weights into flat buffers, create the engine.

    Afterwards every trainable parameter is a view of a flat buffer and its fp32 value is in the
    arena, or on the disk. Frozen parameters and buffers are on the device, except the frozen
    parameters of streamed blocks, which are in the arena. `rules`: one per group. Without
    `has_values` nothing is moved: parameters and memory are fake.

    Args:
        earlier: the previous layout of the same model, whose state is moved. The caller then
            allocates the remaining buffers.
    """
    parts, ranks = partition(model), division.replicas
    missed, room, late = (earlier.missed, earlier.num_bytes, True) if earlier else ({}, 0, False)
    lanes, arena, disk = resources.lanes, resources.arena, resources.disk
    ledger = resources.ledger
    blocks, entries = make_blocks(parts, model, groups, rules, config, division, lanes, missed)
    spec = lay_out(model, blocks, config, division, available_bytes() + room)
    program = Program(spec, ranks.rank, division.parts.rank)
    memory = MemoryMap(program.table, device, arena=arena, disk=disk, ledger=ledger, is_late=late)
    buckets = [bucket for block in blocks for bucket in block.all_buckets]
    shared = buckets, lanes, ranks, rules, groups, disk
    functions = Functions(*shared, seed=config.state.seed, parts=division.parts)
    residency = Residency(blocks, program, memory)
    ranges = Ranges(memory, BlockInputs(device))
    interpreter = residency.interpreter = Interpreter(
        *(lanes, ranges, functions, residency.change),
        describe_lost_rank=residency.describe_lost_rank,
        unsalvageable=spec.lost_with_device,
    )
    in_order = division.in_order
    gradients = Gradients(blocks, program, interpreter, functions, ranks, in_order=in_order)
    trained = [bucket for block in blocks for bucket in block.buckets]
    # Before any hook or launch: this thread writes masters that the host lane owns later.
    if has_values:
        adopt_weights(model, parts, blocks, rules, config, device, division, param_init_fn, earlier)
    else:
        view_weights(model, blocks, config)
    forward_hooks = ForwardHooks(
        *(model, blocks, entries, lanes),
        residency=residency,
        offloader=_offloader(model, program, interpreter, ranges.inputs, division.parts),
        **_layer_modes(parts, config),
    )
    norm = NormMeasure(trained, program, interpreter, memory, gradients, functions, division)
    return Engine(
        forward_hooks,
        lanes=lanes,
        program=program,
        interpreter=interpreter,
        functions=functions,
        gradients=gradients,
        norm_measure=norm,
        residency=residency,
    )


def _layer_modes(parts: Sequence[Part], config: OffloadConfig) -> dict[str, Any]:
    """Return the arguments of `ForwardHooks` about layers that are recomputed or compiled."""
    activations = config.activations
    budget, selects = activations.compiled_budget, activations.mode == "selective"
    again = [part.module for part in recomputed_parts(parts, config)]
    layers = [part.module for part in parts if part.repeated and config.compute.compile_blocks]
    with_budget = again if activations.recomputes else layers
    compiled = {module: budget if module in with_budget else None for module in layers}
    return {
        "recomputed": [module for module in again if module not in compiled or budget is None],
        "compiled": compiled,
        "policy": (activations.policy or default_policy) if selects else None,
    }


def lay_out(
    model: nn.Module,
    blocks: Sequence[Block],
    config: OffloadConfig,
    division: Division,
    available_bytes: int,
) -> StepSpec:
    """Make the spec of the model's step; mark the streamed blocks and the tiers of state.

    Raises:
        HostMemoryError, DeviceMemoryError: a limit is below the memory that the engine needs.
    """
    spec = placement.lay_out(
        [block.spec for block in blocks],
        config,
        ranks=division.replicas.size,
        num_tensors=division.first + sum(1 for _ in model.parameters()),
        available_bytes=available_bytes,
        weight_versions=division.weight_versions,
        gradient_sums=division.gradient_sums,
        update_policy=division.update_policy,
        copies=division.replicas.copies.size,
        parts=division.parts.size,
    )
    placement.check_host_limit(spec)
    for block, laid_out in zip(blocks, spec.blocks, strict=True):
        block.spec, block.streamed = laid_out, block.name in spec.streamed
        for bucket, bucket_spec in zip(block.buckets, laid_out.buckets, strict=True):
            bucket.spec = bucket_spec
        block.graphs.versions = spec.versions_on_device(block.name)
        # Frozen weights of a block that stays on the device are not in a bucket: they never move.
        block.frozen = block.frozen if laid_out.frozen else ()
    return spec


def make_blocks(
    parts: Sequence[Part],
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    rules: Sequence[AnyRule],
    config: OffloadConfig,
    division: Division,
    lanes: Lanes,
    missed: Mapping[nn.Parameter, int] | None = None,
) -> tuple[list[Block], dict[nn.Module, list[Block]]]:
    """Make all blocks, and return them with a map from each module to the blocks its forward reads.

    A parameter belongs to the first part that refers to it; later parts wait for its block.

    Args:
        rules: one per group.
        missed: parameter → steps that it has missed; see `Bucket.missed_steps`.

    Raises:
        ModelError: two buckets would have the same name.
    """
    order = {param: index for index, param in enumerate(model.parameters(), division.first)}
    group_of = {p: i for i, g in enumerate(groups) for p in g["params"] if p.requires_grad}
    full = keeps_fp32(model, config.weights.keep_fp32)
    skipped = entries_in(model, config.skip_unused)
    ranks = division.replicas.size
    streams, compiles = config.streams_among(ranks), config.compute.compile_blocks
    root = "(root)" if any(part.name == "root" for part in parts) else "root"
    owner: dict[nn.Parameter, Block] = {}
    blocks: list[Block] = []
    again = recomputed_parts(parts, config)
    for part in parts:
        owned = [(name, p) for name, p in part.parameters if p in group_of and p not in owner]
        label = part.name or root
        buckets = _buckets(
            label, owned, order, group_of, rules, full, config, division, skipped, missed
        )
        may_leave = part.repeated if streams else False
        may_leave = may_leave or (part.leaf and config.zero_stage_among(ranks) == 3)
        # Frozen parameters of a part that may be streamed are loaded with its trained parameters.
        still = [
            (name, p)
            for name, p in (part.parameters if may_leave else ())
            if not p.requires_grad and p.is_floating_point() and p.numel() and p not in owner
        ]
        frozen = _buckets(f"{label} frozen", still, order, {}, (), full, config, division, {})
        if buckets or frozen:
            trained_specs = tuple(bucket.spec for bucket in buckets)
            frozen_specs = tuple(bucket.spec for bucket in frozen)
            kind = part.repeated, part.leaf, part in again
            spec = BlockSpec(label, trained_specs, frozen_specs, *kind)
            compiled = (part.repeated and compiles) or has_compiled(part.module)
            block = Block(spec, part.module, buckets, frozen, lanes, compiled=compiled)
            blocks.append(block)
            owner.update((p, block) for _, p in (*owned, *still))
        if blocks:
            then = *blocks[-1].spec.then, *(name or root for name in part.tied)
            blocks[-1].spec = replace(blocks[-1].spec, then=then)
    # The names of a user's modules can cause this.
    counts = Counter(bucket.name for block in blocks for bucket in block.all_buckets)
    if (twice := next((name for name, count in counts.items() if count > 1), None)) is not None:
        raise ModelError(
            f"two modules of the model would both be called '{twice}' here: rename the one that is "
            f"called '{twice}' in named_modules()"
        )
    entries = {
        part.module: list(dict.fromkeys(owner[p] for _, p in part.parameters if p in owner))
        for part in parts
    }
    return blocks, entries


def recomputed_parts(parts: Sequence[Part], config: OffloadConfig) -> Sequence[Part]:
    """Return the parts whose forward is recomputed in backward."""
    return config.activations.recomputed_of([part for part in parts if part.repeated])


def _buckets(
    name: str,
    owned: Sequence[tuple[str, nn.Parameter]],
    order: Mapping[nn.Parameter, int],
    group_of: Mapping[nn.Parameter, int],
    rules: Sequence[AnyRule],
    full: set[nn.Parameter],
    config: OffloadConfig,
    division: Division,
    skipped: Mapping[str, int],
    missed: Mapping[nn.Parameter, int] | None = None,
) -> tuple[Bucket, ...]:
    """Make a bucket per (parameter group, working dtype, sharing ranks, skipped or not, steps
    missed) of a block's parameters."""
    dtype = PRECISIONS[config.precision]
    sorted_in: dict[tuple[int, torch.dtype, Ranks, bool, int], list[tuple[str, nn.Parameter]]] = {}
    for full_name, param in owned:
        working_dtype = torch.float32 if param in full else dtype
        shared_by, late = division.sharers(param), (missed or {}).get(param, 0)
        key = (group_of.get(param, 0), working_dtype, shared_by, full_name in skipped, late)
        sorted_in.setdefault(key, []).append((full_name, param))
    several, buckets = len(sorted_in) > 1, []
    for i, ((group, dtype, shared_by, _, late), params) in enumerate(sorted_in.items()):
        bucket = pack(
            f"{name}/{i}" if several else name,
            group,
            dtype,
            params,
            order,
            config.state.format,
            shared_by,
            rules[group] if rules else None,
            skipped,
        )
        bucket.missed_steps = late
        if bucket.spec.experts and division.skipping is not None:
            counts = [skipped[slot.name] for slot in bucket.slots]
            bucket.usage = division.skipping.usage_of(bucket.slots, counts)
        buckets.append(bucket)
    return tuple(buckets)


def _offloader(
    model: nn.Module, program: Program, interpreter: Interpreter, inputs: BlockInputs, parts: Ranks
) -> Offloader | None:
    """Return the object that takes tensors from autograd and offloads them, or None."""
    spec, moves = program.spec, ActivationOffloader(program, interpreter, inputs, parts)
    if spec.offloads_saved:
        return SavedOffloader(moves, model, spec.config.activations.offload_saved_above)
    return moves if spec.moves_inputs else None
