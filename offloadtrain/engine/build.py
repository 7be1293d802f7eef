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
from offloadtrain.engine.collectives import Collectives
from offloadtrain.engine.cut import Part, cut
from offloadtrain.engine.device_memory import (
    RING_SLOTS,
    host_staging_bytes,
    make_reduction,
    make_streamer,
    map_resident,
    streamed_blocks,
)
from offloadtrain.engine.engine import Engine
from offloadtrain.engine.gradients import Gradients
from offloadtrain.engine.host_memory import check_room, map_host
from offloadtrain.engine.modes import Delayed, Early, Exact, Speculative
from offloadtrain.engine.parking import Parking
from offloadtrain.engine.passages import Passages
from offloadtrain.engine.reduce import Reduction
from offloadtrain.engine.ring import Ring
from offloadtrain.engine.settings import Settings
from offloadtrain.engine.streamer import Streamer
from offloadtrain.engine.update import Updates
from offloadtrain.memory import Arena, Ledger, Request
from offloadtrain.optim import LossScaler, UpdateRule, format_for
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
    laid = lay_out(model, rule, groups, settings, lanes=lanes, arena=arena, ledger=ledger)
    blocks, streamer, collectives = laid.blocks, laid.streamer, laid.collectives
    gradients = Gradients(
        lanes,
        blocks,
        ranks=settings.ranks,
        reduction=laid.reduction,
        host_ring=laid.host_ring,
        squares=laid.squares,
        grad_accum_steps=settings.grad_accum_steps,
    )
    adopt_weights(model, laid.parts, blocks, rule, settings, param_init_fn)
    updates = Updates(lanes, rule, groups, laid.host_ring, collectives, seed=settings.seed)
    passages = Passages(
        model,
        blocks,
        laid.entries,
        lanes,
        streamer=streamer,
        recomputed=_recomputed(laid.parts, settings),
        parking=_parking(inputs, ledger, lanes, settings),
    )
    engine = Engine(
        blocks,
        passages,
        lanes=lanes,
        gradients=gradients,
        updates=updates,
        mode=_mode(lanes, updates, settings),
        streamer=streamer,
        collectives=collectives,
        clip_norm=settings.clip_norm,
        skip_nonfinite=settings.skip_nonfinite,
        scaler=LossScaler() if settings.dtype is torch.float16 else None,
        grad_accum_steps=settings.grad_accum_steps,
    )
    return engine, blocks


@dataclass(frozen=True, slots=True)
class Laid:
    """A model cut into blocks, with memory for all of it and no values."""

    parts: list[Part]
    blocks: list[Block]
    entries: dict[nn.Module, list[Block]]
    squares: Buffer
    streamer: Streamer | None
    collectives: Collectives
    host_ring: Ring
    reduction: Reduction


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
    collectives = Collectives(lanes, settings.ranks)
    streamer = None
    if streamed:
        streamer = make_streamer(streamed, lanes, collectives, ledger, settings)
    return Laid(
        parts,
        blocks,
        entries,
        squares,
        streamer,
        collectives,
        _host_ring(arena, buckets, lanes, settings),
        make_reduction(buckets, lanes, collectives, ledger, settings),
    )


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


def _mode(lanes: Lanes, updates: Updates, settings: Settings) -> Exact:
    if settings.update == "delayed":
        return Delayed(lanes, updates, settings.warmup_steps, alone=settings.ranks.alone)
    if settings.update == "speculative":
        return Speculative(lanes, updates)
    return (Early if settings.updates_early else Exact)(lanes, updates)


def _host_ring(arena: Arena, buckets: Sequence[Bucket], lanes: Lanes, settings: Settings) -> Ring:
    """Staging for gradients that are summed, and for weights that have nowhere else to wait."""

    def slots(nbytes: int) -> list[Tensor]:
        return arena.map([Request("host staging", nbytes, torch.uint8)] * RING_SLOTS)

    ring = Ring("host staging", lanes, host_staging_bytes(buckets), slots)
    if settings.accumulates:
        ring.prepare()
    return ring
