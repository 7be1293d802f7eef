"""From a model to an engine: blocks, buckets, memory, and the weights moved into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.engine.adopt import ParamInit, adopt_weights
from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket, pack
from offloadtrain.engine.checks import check_runs_twice, keeps_fp32
from offloadtrain.engine.cut import Part, cut
from offloadtrain.engine.device_memory import (
    RING_SLOTS,
    host_staging_bytes,
    map_resident,
    map_slots,
    map_staging,
    streamed_blocks,
)
from offloadtrain.engine.engine import Engine
from offloadtrain.engine.functions import Functions
from offloadtrain.engine.gradients import Gradients
from offloadtrain.engine.host_memory import check_room, map_host
from offloadtrain.engine.interpreter import Interpreter
from offloadtrain.engine.memory_map import MemoryMap, Staging
from offloadtrain.engine.parking import Parking
from offloadtrain.engine.passages import Passages
from offloadtrain.engine.residency import Residency
from offloadtrain.engine.settings import Settings
from offloadtrain.memory import Arena, Ledger, Request
from offloadtrain.offload_config import OffloadConfig
from offloadtrain.optim import LossScaler, UpdateRule, format_for
from offloadtrain.step.formats import format_for as format_for_spec
from offloadtrain.step.operations import Memory
from offloadtrain.step.program import Program
from offloadtrain.step.spec import BlockSpec, BucketSpec, StepSpec
from offloadtrain.transfer import Buffer, Lanes


def build(
    model: nn.Module,
    rule: UpdateRule,
    groups: Sequence[Mapping[str, Any]],
    settings: Settings,
    *,
    param_init_fn: ParamInit | None,
    lanes: Lanes,
    arena: Arena,
    inputs: Arena,
    ledger: Ledger,
) -> tuple[Engine, list[Block]]:
    """Cut the model, move its weights into flat buffers, make the engine.

    After it every trainable parameter is a view of a flat buffer on the device, its fp32 value is
    in the arena. Frozen parameters and buffers are on the device, but the frozen parameters of
    streamed blocks, which are in the arena. `inputs`: host memory for block inputs.
    """
    laid = lay_out(model, rule, groups, settings, arena=arena, ledger=ledger, lanes=lanes)
    blocks, ranks = laid.blocks, settings.ranks
    program = Program(spec_of(blocks, rule, settings, laid.squares.flat.numel()), ranks.rank)
    memory = MemoryMap(blocks, norms=laid.squares, slots=laid.slots, staging=laid.staging)
    functions = Functions(blocks, lanes, ranks, rule, groups, seed=settings.seed)
    residency = Residency(blocks, program, memory)
    interpreter = residency.interpreter = Interpreter(lanes, memory, functions, residency)
    gradients = Gradients(
        blocks, program, interpreter, functions, ranks=ranks, squares=laid.squares
    )
    adopt_weights(model, laid.parts, blocks, rule, settings, param_init_fn)
    passages = Passages(
        model,
        blocks,
        laid.entries,
        lanes,
        residency=residency,
        recomputed=_recomputed(laid.parts, settings),
        parking=_parking(inputs, ledger, lanes, settings),
    )
    engine = Engine(
        blocks,
        passages,
        lanes=lanes,
        program=program,
        interpreter=interpreter,
        functions=functions,
        gradients=gradients,
        residency=residency,
        ranks=ranks,
        scaler=LossScaler() if settings.dtype is torch.float16 else None,
    )
    return engine, blocks


def spec_of(
    blocks: Sequence[Block], rule: UpdateRule, settings: Settings, num_tensors: int
) -> StepSpec:
    def bucket(b: Bucket) -> BucketSpec:
        dtype = str(b.dtype).removeprefix("torch.")
        params = sum(slot.numel for slot in b.slots)
        form = format_for_spec(settings.state, dtype)
        return BucketSpec(b.name, b.numel, params, dtype, form, settings.ranks.size)

    config = OffloadConfig(
        state=settings.state,  # type: ignore[arg-type]
        state_on=settings.state_on,  # type: ignore[arg-type]
        update=settings.update,  # type: ignore[arg-type]
        warmup_steps=settings.warmup_steps,
        clip_norm=settings.clip_norm,
        skip_nonfinite=settings.skip_nonfinite,
        grad_accum_steps=settings.grad_accum_steps,
        working=settings.working,  # type: ignore[arg-type]
        device_slots=settings.device_slots,
        zero_stage=settings.zero_stage,
        reduction="fp32" if settings.reduction is torch.float32 else "working",
    )
    return StepSpec(
        tuple(
            BlockSpec(
                b.name, tuple(map(bucket, b.buckets)), tuple(map(bucket, b.frozen)), b.repeated
            )
            for b in blocks
        ),
        config,
        settings.ranks.size,
        num_tensors,
        tuple(rule.moments),
        frozenset(b.name for b in blocks if b.streamed),
        frozenset(b.name for b in blocks if any(bucket.other for bucket in b.buckets)),
    )


@dataclass(frozen=True, slots=True)
class Laid:
    """A model cut into blocks, with memory for all of it and no values."""

    parts: list[Part]
    blocks: list[Block]
    entries: dict[nn.Module, list[Block]]
    squares: Buffer
    slots: list[Tensor]
    staging: dict[Memory, Staging]


def lay_out(
    model: nn.Module,
    rule: UpdateRule,
    groups: Sequence[Mapping[str, Any]],
    settings: Settings,
    *,
    lanes: Lanes,
    arena: Arena,
    ledger: Ledger,
) -> Laid:
    """Cut the model and map what the engine holds, but for block inputs, whose size only the first
    forward shows."""
    parts = cut(model)
    blocks, entries = _blocks(parts, model, groups, settings, lanes)
    buckets = [bucket for block in blocks for bucket in block.buckets]
    streamed = streamed_blocks(blocks, settings)
    squares = map_host(arena, blocks, rule, settings, sum(1 for _ in model.parameters()))
    map_resident([block for block in blocks if block not in streamed], ledger, settings)
    slots = map_slots(streamed, ledger, settings)
    staging = map_staging(buckets, ledger, settings)
    staging[Memory.HOST_STAGING] = _host_staging(arena, buckets, settings)
    return Laid(parts, blocks, entries, squares, slots, staging)


def _blocks(
    parts: Sequence[Part],
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    settings: Settings,
    lanes: Lanes,
) -> tuple[list[Block], dict[nn.Module, list[Block]]]:
    """A parameter belongs to the first part that refers to it; later ones wait for its block."""
    order = {param: index for index, param in enumerate(model.parameters())}
    group_of = {param: i for i, group in enumerate(groups) for param in group["params"]}
    full = keeps_fp32(model, settings.keep_fp32)
    owner: dict[nn.Parameter, Block] = {}
    blocks: list[Block] = []
    for part in parts:
        owned = [(name, p) for name, p in part.parameters if p in group_of and p not in owner]
        buckets = _buckets(part.name, owned, order, group_of, full, settings)
        still = _streamable_frozen(part, owner, settings)
        frozen = _buckets(f"{part.name} frozen", still, order, {}, full, settings)
        if buckets or frozen:
            block = Block(
                part.name, part.module, buckets, lanes, frozen=frozen, repeated=part.repeated
            )
            blocks.append(block)
            owner.update((p, block) for _, p in (*owned, *still))
    entries = {
        part.module: list(dict.fromkeys(owner[p] for _, p in part.parameters if p in owner))
        for part in parts
    }
    return blocks, entries


def _streamable_frozen(
    part: Part, owner: Mapping[nn.Parameter, Block], settings: Settings
) -> list[tuple[str, nn.Parameter]]:
    """Frozen parameters of a repeated part, which come and go with its trained ones."""
    if not settings.streams or not part.repeated:
        return []
    return [
        (name, param)
        for name, param in part.parameters
        if not param.requires_grad
        and param.is_floating_point()
        and param.numel()
        and param not in owner
    ]


def _buckets(
    name: str,
    owned: Sequence[tuple[str, nn.Parameter]],
    order: Mapping[nn.Parameter, int],
    group_of: Mapping[nn.Parameter, int],
    full: set[nn.Parameter],
    settings: Settings,
) -> tuple[Bucket, ...]:
    """One bucket per (hyperparameters, working dtype) among a block's parameters."""
    sorted_in: dict[tuple[int, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
    for full_name, param in owned:
        key = (group_of.get(param, 0), torch.float32 if param in full else settings.dtype)
        sorted_in.setdefault(key, []).append((full_name, param))
    label = name or "root"
    several = len(sorted_in) > 1
    return tuple(
        pack(
            f"{label}/{i}" if several else label,
            group,
            dtype,
            params,
            order,
            format_for(settings.state, dtype),
            settings.ranks,
        )
        for i, ((group, dtype), params) in enumerate(sorted_in.items())
    )


def _recomputed(parts: Sequence[Part], settings: Settings) -> list[nn.Module]:
    chosen = [part for part in parts if part.repeated and settings.activation != "keep"]
    for part in chosen:
        check_runs_twice(part.name, part.module)
    return [part.module for part in chosen]


def _parking(arena: Arena, ledger: Ledger, lanes: Lanes, settings: Settings) -> Parking | None:
    if settings.activation != "offload":
        return None

    def map_input(nbytes: int) -> Tensor:
        request = Request("block inputs", nbytes, torch.uint8)
        check_room(request, ledger, settings.host_memory_limit)
        return arena.map([request])[0]

    return Parking(lanes, settings.device, map_input)


def _host_staging(arena: Arena, buckets: Sequence[Bucket], settings: Settings) -> Staging:
    """For gradients that are summed, and for weights that have nowhere else to wait; otherwise it
    is mapped when a slot is first asked for."""
    pieces: list[Tensor] = []

    def slot(number: str | int, _: int = 0) -> tuple[str, Tensor]:
        if not pieces:
            request = Request("host staging", host_staging_bytes(buckets), torch.uint8)
            pieces.extend(arena.map([request] * RING_SLOTS))
        return f"host staging[{number}]", pieces[int(number)]

    if settings.accumulates:
        slot(0)
    return slot
