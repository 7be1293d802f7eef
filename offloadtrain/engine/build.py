"""From a model to an engine: blocks, buckets, memory, and the weights moved into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket, Slot, pack
from offloadtrain.engine.checks import ModelError, keeps_fp32
from offloadtrain.engine.cut import Part, cut
from offloadtrain.engine.engine import Engine
from offloadtrain.engine.gradients import Gradients
from offloadtrain.engine.modes import Delayed, Early, Exact, Speculative
from offloadtrain.engine.parking import Parking
from offloadtrain.engine.ring import Ring
from offloadtrain.engine.streamer import Streamer, block_bytes
from offloadtrain.engine.update import Updates
from offloadtrain.errors import OffloadTrainError
from offloadtrain.memory import Arena, HostMemoryError, Ledger, Request, available_bytes
from offloadtrain.optim import LossScaler, UpdateRule, format_for
from offloadtrain.transfer import Buffer, Lanes
from offloadtrain.units import format_bytes


class DeviceMemoryError(OffloadTrainError):
    """The device memory limit is below what the engine needs."""


_RING_SLOTS = 2
"""One is filled while the other is copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `offload()` was asked for, resolved.

    Attributes:
        host_memory_limit: bytes that the engine may hold on the host; None: what is available.
        working: "device", or "host": repeated blocks are streamed.
        device_slots: how many streamed blocks are on the device at once.
        resident_blocks: how many repeated blocks stay there all the same; None: as many as
            device_memory_limit leaves room for.
        device_memory_limit: bytes that the engine may hold on the device.
        activation: "keep"; "recompute": repeated modules keep their inputs only; "offload": and
            these on the host.
    """

    device: torch.device
    dtype: torch.dtype
    clip_norm: float | None
    skip_nonfinite: bool
    grad_accum_steps: int
    pin_memory: bool
    state: str
    seed: int
    update: str
    warmup_steps: int
    host_memory_limit: int | None
    working: str
    device_slots: int
    resident_blocks: int | None
    device_memory_limit: int | None
    activation: str

    @property
    def accumulates(self) -> bool:
        return self.grad_accum_steps > 1

    @property
    def updates_early(self) -> bool:
        """In mode "exact": nothing global has to be known before a bucket is updated."""
        free = self.clip_norm is None and not self.skip_nonfinite
        return self.update == "exact" and free

    @property
    def weights_wait(self) -> bool:
        """New weights wait for their upload longer than their gradient's memory is free."""
        return self.update != "exact" or (self.updates_early and self.accumulates)


def build(
    model: nn.Module,
    rule: UpdateRule,
    groups: Sequence[Mapping[str, Any]],
    settings: Settings,
    *,
    lanes: Lanes,
    arena: Arena,
    ledger: Ledger,
) -> tuple[Engine, list[Block]]:
    """Cut the model, move its weights into flat buffers, make the engine.

    After it every trainable parameter is a view of a flat buffer on the device, its fp32 value is
    in the arena, and frozen parameters and buffers are on the device.
    """
    parts = cut(model)
    blocks, entries = _blocks(parts, model, groups, settings, lanes)
    buckets = [bucket for block in blocks for bucket in block.buckets]
    streamed = streamed_blocks(blocks, settings)
    for block in streamed:
        for bucket in block.buckets:
            bucket.streamed = True
    squares = _map_host(arena, blocks, rule, settings, sum(1 for _ in model.parameters()))
    for block in blocks:
        if block not in streamed:
            _map_device(block, ledger, settings)
    streamer = _streamer(streamed, lanes, ledger, settings) if streamed else None
    host_ring = Ring("host staging", lanes, lambda: _host_slots(arena, buckets))
    if settings.accumulates:
        host_ring.prepare()
    device_ring = Ring(
        "gradient staging", lanes, lambda: _device_slots(ledger, buckets, settings.device)
    )
    device_ring.prepare()
    gradients = Gradients(
        lanes,
        blocks,
        device_ring=device_ring,
        host_ring=host_ring,
        squares=squares,
        grad_accum_steps=settings.grad_accum_steps,
    )
    _adopt_weights(model, buckets, rule, settings)
    scaler = LossScaler() if settings.dtype is torch.float16 else None
    updates = Updates(lanes, rule, groups, host_ring, seed=settings.seed)
    engine = Engine(
        model,
        blocks,
        entries,
        lanes=lanes,
        gradients=gradients,
        updates=updates,
        mode=_mode(lanes, updates, settings),
        streamer=streamer,
        recomputed=[p.module for p in parts if p.repeated and settings.activation != "keep"],
        parking=Parking(lanes, settings.device, partial(_map_input, arena))
        if settings.activation == "offload"
        else None,
        clip_norm=settings.clip_norm,
        skip_nonfinite=settings.skip_nonfinite,
        scaler=scaler,
        grad_accum_steps=settings.grad_accum_steps,
    )
    return engine, blocks


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
    full = keeps_fp32(model)
    owner: dict[nn.Parameter, Block] = {}
    blocks: list[Block] = []
    for part in parts:
        owned = [(name, p) for name, p in part.parameters if p in group_of and p not in owner]
        buckets = _buckets(part.name, owned, order, group_of, full, settings)
        if buckets:
            blocks.append(Block(part.name, part.module, buckets, lanes, repeated=part.repeated))
            owner.update((p, blocks[-1]) for _, p in owned)
    entries = {
        part.module: list(dict.fromkeys(owner[p] for _, p in part.parameters if p in owner))
        for part in parts
    }
    return blocks, entries


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
        key = (group_of[param], torch.float32 if param in full else settings.dtype)
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
        )
        for i, ((group, dtype), params) in enumerate(sorted_in.items())
    )


def streamed_blocks(blocks: Sequence[Block], settings: Settings) -> list[Block]:
    """Repeated blocks that do not stay on the device; those that do are spread evenly.

    Raises:
        DeviceMemoryError: if device_memory_limit holds not even the rest and the slots.
    """
    repeated = [block for block in blocks if block.repeated]
    limit = settings.device_memory_limit
    if settings.working == "device":
        if limit is not None:
            _resident_within(blocks, [], settings, limit)
        return []
    stay = settings.resident_blocks
    if stay is None:
        stay = 0 if limit is None else _resident_within(blocks, repeated, settings, limit)
    stay = min(stay, len(repeated))
    kept = {repeated[(2 * i + 1) * len(repeated) // (2 * stay)] for i in range(stay)}
    return [block for block in repeated if block not in kept]


def _resident_within(
    blocks: Sequence[Block], repeated: Sequence[Block], settings: Settings, limit: int
) -> int:
    """How many of the repeated blocks can stay on the device."""
    buckets = [bucket for block in blocks for bucket in block.buckets]
    sizes = [block_bytes(block) for block in repeated]
    rest = sum(map(block_bytes, blocks)) - sum(sizes) + _RING_SLOTS * _largest_bytes(buckets)
    least = rest + settings.device_slots * max(sizes, default=0)
    if least > limit and rest + sum(sizes) > limit:
        keys = "working = 'host'" if settings.working == "device" else "device_slots = 1"
        raise DeviceMemoryError(
            f"device_memory_limit is {format_bytes(limit)}, and the engine needs "
            f"{format_bytes(least)}: {format_bytes(rest)} for gradient staging and blocks that "
            f"stay on the device, the rest for {settings.device_slots} slots. Raise it, or set "
            f"{keys}"
        )
    if rest + sum(sizes) <= limit:
        return len(repeated)
    return sum(1 for n in range(1, len(sizes)) if least + sum(sorted(sizes)[-n:]) <= limit)


def _map_device(block: Block, ledger: Ledger, settings: Settings) -> None:
    for bucket in block.buckets:
        flat = ledger.device_tensor("working weights", bucket.numel, bucket.dtype, settings.device)
        bucket.working = Buffer(f"working {bucket.name}", flat)


def _streamer(
    blocks: Sequence[Block], lanes: Lanes, ledger: Ledger, settings: Settings
) -> Streamer:
    """Slots of the largest block's size; until its first load a block's weights are nowhere."""
    nbytes = max(map(block_bytes, blocks))
    count = min(settings.device_slots, len(blocks))
    memories = [
        ledger.device_tensor("streaming slots", nbytes, torch.uint8, settings.device)
        for _ in range(count)
    ]
    return Streamer(lanes, blocks, memories)


def _map_input(arena: Arena, nbytes: int) -> Tensor:
    return arena.map([Request("block inputs", nbytes, torch.uint8)])[0]


def _mode(lanes: Lanes, updates: Updates, settings: Settings) -> Exact:
    if settings.update == "delayed":
        return Delayed(lanes, updates, settings.warmup_steps)
    if settings.update == "speculative":
        return Speculative(lanes, updates)
    return (Early if settings.updates_early else Exact)(lanes, updates)


def _map_host(
    arena: Arena,
    blocks: Sequence[Block],
    rule: UpdateRule,
    settings: Settings,
    num_params: int,
) -> Buffer:
    """Map everything the host keeps, bucket by bucket; returns the sums of squares."""
    buckets = [bucket for block in blocks for bucket in block.buckets]
    norms = Request("norms", num_params, torch.float64)
    base = [norms, *(r for b in buckets for r in _requests(b, rule, settings, doubled=False))]
    doubled = _doubled(blocks, rule, settings, sum(request.span_bytes for request in base))
    requests = [r for b in buckets for r in _requests(b, rule, settings, doubled=b in doubled)]
    tensors: Iterator[Tensor] = iter(arena.map([norms, *requests]))
    squares = Buffer("norms", next(tensors))
    for bucket in buckets:
        _give_host(bucket, tensors, rule, settings, doubled=bucket in doubled)
    return squares


def _give_host(
    bucket: Bucket,
    tensors: Iterator[Tensor],
    rule: UpdateRule,
    settings: Settings,
    *,
    doubled: bool,
) -> None:
    """Take a bucket's memory in the order of `_requests`."""
    fields = bucket.format.fields(rule.moments)
    bucket.state = tuple(Buffer(f"{f.name} {bucket.name}", next(tensors)) for f in fields)
    gradient = Buffer(f"gradient {bucket.name}", next(tensors))
    bucket.grad_sum, bucket.grad = (gradient, None) if settings.accumulates else (None, gradient)
    if _pends(bucket, settings, doubled):
        bucket.pending = Buffer(f"pending weights {bucket.name}", next(tensors))
    if _is_shown(bucket, settings):
        bucket.shown = Buffer(f"shown weights {bucket.name}", next(tensors))
    if doubled:
        other = (Buffer(f"other {f.name} {bucket.name}", next(tensors)) for f in fields)
        bucket.other = tuple(other)


def _pends(bucket: Bucket, settings: Settings, doubled: bool) -> bool:
    """Whether new weights need memory of their own until their upload."""
    if bucket.streamed:
        return not bucket.format.holds_weight
    early = doubled or settings.update != "speculative"
    return settings.weights_wait and early and not bucket.format.holds_weight


def _is_shown(bucket: Bucket, settings: Settings) -> bool:
    """Whether loads cannot read where an update writes: it may run inside backward."""
    return bucket.streamed and (settings.update != "exact" or settings.updates_early)


_OWNERS = {"master": "master weights", "weight": "host weights"}


def _requests(
    bucket: Bucket, rule: UpdateRule, settings: Settings, *, doubled: bool
) -> list[Request]:
    kept = [
        (
            _OWNERS.get(field.name, field.name),
            field.numel(bucket.numel),
            field.dtype or bucket.dtype,
        )
        for field in bucket.format.fields(rule.moments)
    ]
    requests = [Request(*one) for one in kept]
    if settings.accumulates:
        requests.append(Request("gradient sums", bucket.numel, torch.float32))
    else:
        requests.append(Request("gradients", bucket.numel, bucket.dtype))
    if _pends(bucket, settings, doubled):
        requests.append(Request("pending weights", bucket.numel, bucket.dtype))
    if _is_shown(bucket, settings):
        requests.append(Request("shown weights", bucket.numel, bucket.dtype))
    if doubled:
        requests += [Request("other copy of the state", *one[1:]) for one in kept]
    return requests


_HEADROOM = 0.9
"""Of the available host memory that speculation may fill: the rest of the machine lives too."""


def _doubled(
    blocks: Sequence[Block], rule: UpdateRule, settings: Settings, base_bytes: int
) -> set[Bucket]:
    """Buckets with a second copy of their state: the last blocks first, whose gradients come
    first, as far as the memory limit goes."""
    limit = settings.host_memory_limit
    if limit is not None and base_bytes > limit:
        raise HostMemoryError(
            f"the engine needs {format_bytes(base_bytes)} of host memory and host_memory_limit is "
            f"{format_bytes(limit)}: raise it, or take a narrower state ('split16', 'int8')"
        )
    if settings.update != "speculative":
        return set()
    room = (available_bytes() * _HEADROOM if limit is None else limit) - base_bytes
    doubled: set[Bucket] = set()
    for block in reversed(blocks):
        both, one = (
            sum(
                r.span_bytes for b in block.buckets for r in _requests(b, rule, settings, doubled=d)
            )
            for d in (True, False)
        )
        room -= both - one
        if room < 0:
            break
        doubled.update(block.buckets)
    return doubled


def _largest_bytes(buckets: Sequence[Bucket]) -> int:
    return max(bucket.numel * bucket.dtype.itemsize for bucket in buckets)


def _host_slots(arena: Arena, buckets: Sequence[Bucket]) -> list[Tensor]:
    request = Request("host staging", _largest_bytes(buckets), torch.uint8)
    return arena.map([request] * _RING_SLOTS)


def _device_slots(ledger: Ledger, buckets: Sequence[Bucket], device: torch.device) -> list[Tensor]:
    nbytes = _largest_bytes(buckets)
    return [
        ledger.device_tensor("gradient staging", nbytes, torch.uint8, device)
        for _ in range(_RING_SLOTS)
    ]


def _adopt_weights(
    model: nn.Module, buckets: Sequence[Bucket], rule: UpdateRule, settings: Settings
) -> None:
    """Masters from the weights as given; parameters become views; the rest moves to the device."""
    with torch.no_grad():
        for bucket in buckets:
            for slot in bucket.slots:
                _check_range(slot.name, slot.param.data, bucket.dtype)
                set_master(bucket, slot, rule, slot.param.data)
                flat = bucket.visible.flat if bucket.streamed else bucket.working.flat
                slot.param.data = slot.view(flat)
            if not bucket.streamed:
                bucket.working.flat.zero_()
        moved = {slot.param for bucket in buckets for slot in bucket.slots}
        full = keeps_fp32(model)
        for param in model.parameters():
            if param not in moved:
                dtype = settings.dtype if param.is_floating_point() and param not in full else None
                param.data = param.data.to(settings.device, dtype)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(settings.device)


def set_master(bucket: Bucket, slot: Slot, rule: UpdateRule, values: Tensor) -> None:
    """One parameter's master weights from values of its shape, of any dtype, on any device."""
    master = slot.flattened(values.detach().float())
    rule.set_master(bucket.format, bucket.state_of(slot), master)


def _check_range(name: str, master: Tensor, dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    if dtype is torch.float16 and not bool((master.abs() <= limit).all()):
        raise ModelError(
            f"parameter '{name}' has values beyond the range of fp16 (largest "
            f"{master.abs().max().item():.4g}, limit {limit:.4g}): use precision = 'bf16' or 'fp32'"
        )
