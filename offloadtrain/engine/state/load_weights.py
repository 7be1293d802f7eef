"""A model's weights into the engine's memory, one module at a time.

[Note: Meta parameters]
A model built under `torch.device("meta")` has shapes and no memory. Its modules get memory and
values one after the other, in the order of registration. Each block's weights go into the state
before the next block's are made, so the host never holds more than one block in fp32 beside the
state. A parameter stays the same object, so that ties and parameter groups hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from zlib import crc32

import torch
from torch import Tensor, nn

from offloadtrain.config.offload import OffloadConfig
from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.engine.checks.model_checks import ModelError, keeps_fp32
from offloadtrain.engine.division import Division
from offloadtrain.engine.local_part import LocalPart, is_divided, local, part_as, rebuilt
from offloadtrain.engine.partition import Part
from offloadtrain.optim import AnyRule, Rule
from offloadtrain.runtime import kernels
from offloadtrain.runtime.dtypes import PRECISIONS
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.runtime.tensor_parts import is_distributed

_log = logging.getLogger(__name__)

_CHUNK = 1 << 20
"""Elements; a multiple of the kernels' block. Some megabytes: worth the kernels' threads."""

ParamInit = Callable[[nn.Module], None]
"""Fills the parameters and buffers that a module owns itself; called once per module."""


@torch.no_grad()
def adopt_weights(
    model: nn.Module,
    parts: Sequence[Part],
    blocks: Sequence[Block],
    rules: Sequence[AnyRule],
    config: OffloadConfig,
    device: torch.device,
    division: Division,
    param_init_fn: ParamInit | None,
) -> None:
    """Set masters from the weights as given, make parameters views, move the rest to the device.

    Raises:
        ModelError: for values beyond the range of the working weights.
        RankError: parts hold other values of what each has whole.
    """
    ranks = division.replicas
    block_of = {block.module: block for block in blocks}
    full, dtype = keeps_fp32(model, config.weights.keep_fp32), PRECISIONS[config.precision]
    on_host = {slot.param for block in blocks for b in block.frozen for slot in b.slots}
    sizes = [sum(param.nbytes for _, param in part.parameters) for part in parts]
    agreed: set[nn.Parameter] = set()
    for number, part in enumerate(parts):
        HEARTBEAT.advance("reading weights", sum(sizes[:number]), sum(sizes))
        for module in part.module.modules() if part.repeated else (part.module,):
            materialise(module, param_init_fn)
        # Tied ones are those of an earlier part, which may have left the device.
        new = {p: name for name, p in part.parameters if p not in agreed}
        agreed.update(new)
        # Ranks that hold other parts of a parameter have other values: its sharers agree.
        for sharers in dict.fromkeys((ranks, ranks.of_experts)):
            _agree_on([p for p in new if division.sharers(p) is sharers], sharers.everyone)
        undivided = {name: p for p, name in new.items() if not is_divided(p)}
        if not division.parts.is_single:
            # Not overwritten: a module may divide itself without DTensors, which is detected here.
            values = [local(tensor.detach()) for tensor in undivided.values()]
            division.check_same_weights([*undivided], _checksums(values))
        if part.module in block_of:
            for bucket in block_of[part.module].buckets:
                _adopt(bucket, rules[bucket.group], device)
            for bucket in block_of[part.module].frozen:
                _move_to_host(bucket)
            # The host has a shard, which a full parameter cannot view: NaN until the first use.
            if not ranks.is_single and any(b.streamed for b in block_of[part.module].held):
                block_of[part.module].leave_device()
        for _, param in part.parameters:
            if not param.requires_grad and param not in on_host:
                keep = not param.is_floating_point() or param in full
                # A copy in any case: `param_init_fn` may have given a view of a file.
                must_copy = param_init_fn is not None
                param.data = param.data.to(device, None if keep else dtype, copy=must_copy)
    HEARTBEAT.advance("reading weights", sum(sizes), sum(sizes))
    trained = {slot.param for block in blocks for b in block.buckets for slot in b.slots}
    for module in model.modules():
        materialise(module, param_init_fn)
        for param in module.parameters(recurse=False):
            # Empty ones, which no bucket holds.
            if param not in trained and param.requires_grad:
                param.data = param.data.to(device, dtype)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                _agree_on([buffer], ranks.everyone)
                module._buffers[name] = buffer.to(device)


def view_weights(model: nn.Module, blocks: Sequence[Block], config: OffloadConfig) -> None:
    """Do what `adopt_weights` does to parameters, where there are no values to move."""
    for bucket in (bucket for block in blocks for bucket in block.buckets):
        for slot in bucket.slots:
            slot.param.data = slot.view(bucket.working.flat)
    full, dtype = keeps_fp32(model, config.weights.keep_fp32), PRECISIONS[config.precision]
    for param in model.parameters():
        if not param.requires_grad and param.is_floating_point() and param not in full:
            param.data = param.data.to(dtype)


class Given:
    """A state dict on its way into the model, whose values may be wider than the parameters.

    torch rounds them into the parameters; the masters take them as they are. If the parameters hold
    all of these 16-bit values already, all masters stay: so a checkpoint's model may be loaded
    after its optimizer.
    """

    def __init__(self, model: nn.Module, values: Mapping[str, Tensor]) -> None:
        """`values`: by the model's own names. Compares them with the parameters as they are."""
        self.names = frozenset(values)
        self._values: dict[nn.Parameter, list[Tensor]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            value = values.get(name)
            # Of tied names, torch loads the last one last.
            if value is not None and value.numel() == param.numel():
                self._values.setdefault(param, []).insert(0, value)
        self.new = any(
            value.dtype != param.dtype or not _equal(value, param)
            for param, loaded in self._values.items()
            for value in loaded
        )

    def of(self, name: str, param: nn.Parameter) -> Tensor:
        """Return the given values that the parameter holds, rounded; its own if none of them is."""
        for value in self._values.get(param, ()):
            if _equal(value, param):
                return value.reshape(param.shape)
        _log.warning(
            "'%s' was loaded from a tensor of another name or shape, as some module has changed: "
            "its master weight is what the parameter holds, rounded to %s",
            name,
            str(param.dtype).removeprefix("torch."),
        )
        return param.data


def _equal(value: Tensor, param: nn.Parameter) -> bool:
    """Tell whether the parameter holds the value, as torch rounds it."""
    return torch.equal(value.reshape(param.shape).to(param), param.data)


@torch.no_grad()
def adopt_loaded(
    slots: Iterable[tuple[Bucket, Slot]],
    written: Collection[nn.Parameter],
    given: Given | None,
    rules: Sequence[AnyRule],
    told: Callable[[Bucket, Slot, Tensor], None] | None = None,
) -> bool:
    """Set the masters of the parameters that were written, from `given` or from their own values.

    The lanes must be empty: masters are the host lane's otherwise.

    Args:
        told: gets the values of each.

    Returns:
        True if the state has rounded some of them in its own way, so that the parameters have to
        follow.

    Raises:
        ModelError: for values beyond the range of the working weights.
    """
    rounded = False
    for bucket, slot in slots:
        if slot.param in written:
            values = slot.local.data
            if given is not None:
                values = part_as(slot.param, given.of(slot.name, slot.param))
            _check_range(slot.name, values, bucket.dtype)
            if told is not None:
                told(bucket, slot, values)
            set_master(bucket, slot, rules[bucket.group], values)
            rounded = rounded or (bucket.format.holds_weight and values.dtype != bucket.dtype)
    return rounded


def set_master(bucket: Bucket, slot: Slot, rule: Rule, values: Tensor) -> None:
    """Set this rank's part of one parameter's master weights, from values of its shape, of any
    dtype, on any device."""
    first, last = bucket.piece(slot)
    flat, state = slot.flattened(values.detach())[first:last], bucket.state_of(slot)
    fields = bucket.format.fields(rule.moments)
    # In chunks that a cache holds, in one buffer: new memory costs more than what is done in it.
    wide = torch.empty(min(_CHUNK, flat.numel()), dtype=torch.float32, device=state[0].device)
    for lo in range(0, flat.numel(), _CHUNK):
        piece = flat[lo : lo + _CHUNK]
        masters = _widened(piece, wide[: piece.numel()])
        rule.set_master(bucket.format, kernels.cut(fields, state, lo, lo + piece.numel()), masters)


def _widened(values: Tensor, buffer: Tensor) -> Tensor:
    """Return host values in fp32 on the buffer's device: in the buffer, unless they are so already.

    By the kernels' threads where they can: torch's spin while they wait for each other, which costs
    ten times the conversion where other processes want the cores.
    """
    if values.dtype is torch.float32 and values.device == buffer.device:
        return values
    if buffer.is_cpu and values.dtype in PRECISIONS.values():
        kernels.accumulate(buffer, values, first=True)
        return buffer
    return buffer.copy_(values)


def _adopt(bucket: Bucket, rule: Rule, device: torch.device) -> None:
    for slot in bucket.slots:
        _check_range(slot.name, slot.local.data, bucket.dtype)
        set_master(bucket, slot, rule, slot.local.data)
        if isinstance(slot.local, LocalPart):
            slot.local.move(device, bucket.dtype)
        # The given memory is freed here, one parameter at a time. The view has no values until the
        # first upload (`Engine.emit`), before which nothing reads it.
        if not bucket.streamed:
            slot.local.data = slot.view(bucket.working.flat)
        elif bucket.shard_numel == bucket.numel:
            slot.local.data = slot.view(bucket.load_source.flat)
    # Padding is uploaded and gathered with the rest: it must hold numbers.
    if not bucket.streamed:
        bucket.working.flat.zero_()


def _move_to_host(bucket: Bucket) -> None:
    """Copy frozen weights of a streamed block to the memory that its loads read."""
    for slot in bucket.slots:
        _check_range(slot.name, slot.local.data, bucket.dtype)
        lo, hi = bucket.piece(slot)
        bucket.weights_of(slot).copy_(slot.flattened(slot.local.data)[lo:hi])
        if bucket.shard_numel == bucket.numel:
            slot.local.data = slot.view(bucket.load_source.flat)


def _agree_on(tensors: Sequence[Tensor], ranks: Ranks) -> None:
    """Give all ranks the values of rank 0; sends only values that differ."""
    if ranks.is_single or not tensors:
        return
    values = [local(tensor.detach()) for tensor in tensors]
    sums = ranks.all_gather_host(_checksums(values))
    for value, of_ranks in zip(values, sums.T, strict=True):
        if not bool((of_ranks == of_ranks[0]).all()):
            first = value.cpu().contiguous()
            ranks.broadcast(first)
            value.copy_(first)


def _checksums(values: Sequence[Tensor]) -> list[float]:
    on_host = (value.cpu().contiguous().reshape(-1).view(torch.uint8) for value in values)
    return [float(crc32(each.numpy().data)) for each in on_host]


def materialise(module: nn.Module, param_init_fn: ParamInit | None) -> None:
    """Give memory and values to the meta parameters and buffers that a module owns itself."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if not any(tensor.is_meta for tensor in tensors):
        return
    assert param_init_fn is not None, "check_model lets meta parameters pass only with one"
    # Swapped and not replaced: other modules and parameter groups refer to the same object.
    for param in module.parameters(recurse=False):
        if param.is_meta:
            values = torch.empty_like(local(param), device="cpu")
            like = rebuilt(param, values) if is_distributed(param) else values
            torch.utils.swap_tensors(param, nn.Parameter(like, param.requires_grad))
    module._apply(
        lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor,
        recurse=False,
    )
    param_init_fn(module)


def _check_range(name: str, master: Tensor, dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    if dtype is torch.float16 and not bool((master.abs() <= limit).all()):
        raise ModelError(
            f"parameter '{name}' has values beyond the range of fp16 (largest "
            f"{master.abs().max().item():.4g}, limit {limit:.4g}): use precision = 'bf16' or 'fp32'"
        )
