"""The model's weights: moved into the engine's memory module by module, and read, written and saved
as full tensors or state dicts of an offloaded model.

[Note: Meta parameters]
A model built under `torch.device("meta")` has shapes and no memory. Its modules get memory and
values one after the other, in the order of registration. Each block's weights are copied into the
state before the next block's are made, so the host never holds more than one block in fp32 in
addition to the state. A parameter stays the same object, so that ties and parameter groups hold.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from offloadtrain.config.errors import ModelError
from offloadtrain.config.offload import OffloadConfig
from offloadtrain.engine.autograd.hooks import OfOneModel
from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.engine.checks import keeps_fp32
from offloadtrain.engine.division import Division
from offloadtrain.engine.norm import EngineError
from offloadtrain.engine.parameters import past_the_class
from offloadtrain.engine.partition import Part
from offloadtrain.engine.relayout import Earlier
from offloadtrain.engine.state import StateIO, decoded, master
from offloadtrain.engine.step_report import Phase
from offloadtrain.optim import AnyRule, Rule
from offloadtrain.runtime import kernels
from offloadtrain.runtime.dtypes import PRECISIONS
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.runtime.tensor_parts import (
    LocalPart,
    is_distributed,
    is_divided,
    local,
    part_as,
    rebuilt,
)

_log = logging.getLogger(__name__)

_CHUNK = 1 << 20
"""Number of elements; a multiple of the kernels' block. Some megabytes: worth the kernels'
threads."""

ParamInit = Callable[[nn.Module], None]
"""Fills the parameters and buffers that a module owns directly; called once per module."""


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
    earlier: Earlier | None = None,
) -> None:
    """Set masters from the original weights, make parameters views, move the rest to the device.

    Args:
        earlier: the previous layout, whose masters and moments move to the blocks.

    Raises:
        ModelError: for values beyond the range of the working weights.
        RankError: parameters that all `parts` hold in full differ.
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
        # Tied parameters belong to an earlier part, which may have left the device.
        new = {p: name for name, p in part.parameters if p not in agreed}
        agreed.update(new)
        # Ranks that hold other parts of a parameter have other values: only its sharers agree.
        for sharers in dict.fromkeys((ranks, ranks.of_experts)):
            _agree_on([p for p in new if division.sharers(p) is sharers], sharers.everyone)
        if not division.parts.is_single:
            undivided = {name: p for p, name in new.items() if not is_divided(p)}
            # Only compared, because a module may divide itself without DTensors: detect this.
            values = [local(tensor.detach()) for tensor in undivided.values()]
            division.check_same_weights([*undivided], _checksums(values))
        if part.module in block_of:
            for bucket in block_of[part.module].buckets:
                _adopt(bucket, rules[bucket.group], device, earlier)
            for bucket in block_of[part.module].frozen:
                _move_to_host(bucket, None if ranks.is_single else earlier)
            # A full parameter cannot view a shard: NaN until the first use.
            if any(b.home.flat.numel() < b.numel for b in block_of[part.module].all_buckets):
                block_of[part.module].leave_device()
        for _, param in part.parameters:
            if not param.requires_grad and param not in on_host:
                keep = not param.is_floating_point() or param in full
                # Always a copy in these cases: `param_init_fn` may have assigned a view of a file.
                must_copy = param_init_fn is not None or (earlier is not None and param in earlier)
                param.data = param.data.to(device, None if keep else dtype, copy=must_copy)
        if earlier is not None:
            earlier.moved(param for _, param in part.parameters)
    HEARTBEAT.advance("reading weights", sum(sizes), sum(sizes))
    trained = {slot.param for block in blocks for b in block.buckets for slot in b.slots}
    for module in model.modules():
        materialise(module, param_init_fn)
        for param in module.parameters(recurse=False):
            if param not in trained and param.requires_grad:  # empty: in no bucket
                param.data = param.data.to(device, dtype)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                _agree_on([buffer], ranks.everyone)
                module._buffers[name] = buffer.to(device)


def view_weights(model: nn.Module, blocks: Sequence[Block], config: OffloadConfig) -> None:
    """Change parameters as `adopt_weights` does, without values to move."""
    for bucket in (bucket for block in blocks for bucket in block.buckets):
        for slot in bucket.slots:
            slot.param.data = slot.view(bucket.working.flat)
    full, dtype = keeps_fp32(model, config.weights.keep_fp32), PRECISIONS[config.precision]
    for param in model.parameters():
        if not param.requires_grad and param.is_floating_point() and param not in full:
            param.data = param.data.to(dtype)


class LoadedValues:
    """A state dict that is being loaded, whose values may be wider than the parameters.

    torch rounds them into the parameters; the masters get the exact values. If the parameters
    already have all of these 16-bit values, all masters stay: so a checkpoint's model may be loaded
    after its optimizer.
    """

    def __init__(self, model: nn.Module, values: Mapping[str, Tensor]) -> None:
        """`values`: by parameter name of the model. Compares them with the present parameters."""
        self.names = frozenset(values)
        self._values: dict[nn.Parameter, list[Tensor]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            value = values.get(name)
            # Of tied names, torch loads the last name last, and its value stays: it comes first.
            if value is not None and value.numel() == param.numel():
                self._values.setdefault(param, []).insert(0, value)
        self.new = any(
            value.dtype != param.dtype or not _equal(value, param)
            for param, loaded in self._values.items()
            for value in loaded
        )

    def of(self, name: str, param: nn.Parameter) -> Tensor:
        """Return the loaded values that the parameter holds, rounded; its own values if there are
        none."""
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
    """Return True if the parameter holds the value, as torch rounds it."""
    return torch.equal(value.reshape(param.shape).to(param), param.data)


@torch.no_grad()
def adopt_loaded(
    slots: Iterable[tuple[Bucket, Slot]],
    written: Collection[nn.Parameter],
    loaded: LoadedValues | None,
    overwritten: Mapping[nn.Parameter, Tensor],
    rules: Sequence[AnyRule],
    on_adopted: Callable[[Bucket, Slot, Tensor], None] | None = None,
) -> bool:
    """Set the masters of the parameters that were written, from `loaded` or from their present
    values.

    The lanes must be idle: otherwise masters belong to the host lane.

    Args:
        overwritten: see `ParameterGuard`.
        on_adopted: called with the values of each.

    Returns:
        True if the state format has rounded some of them differently, so that the parameters must
        be updated from it.

    Raises:
        ModelError: for values beyond the range of the working weights.
    """
    rounded = False
    for bucket, slot in slots:
        if slot.param in written:
            values = shown = slot.local.data
            if loaded is not None:
                values = part_as(slot.param, loaded.of(slot.name, slot.param))
            _check_range(slot.name, values, bucket.dtype)
            if on_adopted is not None:
                on_adopted(bucket, slot, values)
            if slot.param in overwritten:
                # The old masters are restored first, so that elements with unchanged values keep
                # theirs.
                values = values.clone()
                slot.view(bucket.home.flat).copy_(overwritten[slot.param])
            set_master(bucket, slot, rules[bucket.group], values, only_changed=loaded is None)
            if not bucket.sources:
                view = slot.view(bucket.working.flat)
                # User code has set `data` to other memory.
                if view.data_ptr() != shown.data_ptr():
                    slot.local.data = view.copy_(shown)
            rounded = rounded or (bucket.format.holds_weight and values.dtype != bucket.dtype)
    return rounded


def set_master(
    bucket: Bucket, slot: Slot, rule: Rule, values: Tensor, *, only_changed: bool = False
) -> None:
    """Set this rank's part of a parameter's master weights, from values in its shape, of any
    dtype, on any device.

    Args:
        only_changed: user code wrote into some of the values: masters that round to
            their value stay unchanged, as they are more precise.
    """
    first, last = bucket.piece(slot)
    flat, state = slot.flattened(values.detach())[first:last], bucket.state_of(slot)
    fields = bucket.format.fields(rule.moments)
    # In chunks that fit the cache, through one buffer: new memory costs more than the work in it.
    wide = torch.empty(min(_CHUNK, flat.numel()), dtype=torch.float32, device=state[0].device)
    for lo in range(0, flat.numel(), _CHUNK):
        piece = flat[lo : lo + _CHUNK]
        masters = wide[: piece.numel()]
        if piece.dtype is torch.float32 and piece.device == wide.device:
            masters = piece
        elif wide.is_cpu and piece.dtype in PRECISIONS.values():
            # On the kernels' threads: torch's threads spin while they wait for each other, which
            # costs ten times the conversion if other processes want the cores.
            kernels.accumulate(masters, piece, first=True)
        else:
            masters.copy_(piece)
        target = kernels.cut(fields, state, lo, lo + piece.numel())
        if only_changed:
            before = decoded(bucket, target, piece.numel())
            # Not all formats round to even: these contain the weight itself.
            weights = target[0] if bucket.format.holds_weight else before
            same = (weights.to(piece) == piece).to(masters.device)
            masters = torch.where(same, before.to(masters.device), masters)
        rule.set_master(bucket.format, target, masters)


def _adopt(
    bucket: Bucket, rule: Rule, device: torch.device, earlier: Earlier | None = None
) -> None:
    for slot in bucket.slots:
        values = slot.local.data if earlier is None else earlier.carry(bucket, slot, rule)
        if values is not None:
            _check_range(slot.name, values, bucket.dtype)
            set_master(bucket, slot, rule, values)
        if isinstance(slot.local, LocalPart):
            slot.local.move(device, bucket.dtype)
        # The original memory is freed here, one parameter at a time. The view has no values until
        # the first upload (`Engine.emit`), before which nothing reads it.
        bucket.show(slot)
    # Padding is uploaded and gathered with the weights: it must be finite.
    bucket.working.flat.zero_()


def _move_to_host(bucket: Bucket, earlier: Earlier | None) -> None:
    """Copy frozen weights of a streamed block to the memory that its loads read; `earlier`: the
    layout that has a shard of them."""
    for slot in bucket.slots:
        if earlier is not None:
            earlier.carry_frozen(bucket, slot)
            continue
        _check_range(slot.name, slot.local.data, bucket.dtype)
        lo, hi = bucket.piece(slot)
        bucket.weights_of(slot).copy_(slot.flattened(slot.local.data)[lo:hi])
        bucket.show(slot)


def _agree_on(tensors: Sequence[Tensor], ranks: Ranks) -> None:
    """Broadcast the values of rank 0 to all ranks; sends only tensors that differ."""
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
    """Allocate and fill the meta parameters and buffers that a module owns directly."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if not any(tensor.is_meta for tensor in tensors):
        return
    assert param_init_fn is not None, "check_model lets meta parameters pass only with one"
    # Swapped, not replaced: other modules and parameter groups refer to the same object.
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


class _StateDictHook(OfOneModel):
    """Refers to the optimizer weakly, and to its engine strongly: if the optimizer is
    dropped in a reference cycle, the engine must outlive it to give the model its weights."""

    __slots__ = ("_call", "_engine", "_from_public_api", "_owner")

    def __init__(self, owner: WeightsIO, engine: object, call: Callable[..., None]) -> None:
        self._owner, self._engine, self._call = weakref.ref(owner), engine, call

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if (owner := self._owner()) is not None:
            self._call(owner, *args)


def _before_saving(owner: WeightsIO, *_: Any) -> None:
    # torch reads the parameters next, without a forward whose hooks would wait for uploads.
    owner.require_whole_weights()
    owner.synchronize()


def _copy_to_host(owner: WeightsIO, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Copy tensors to the host: views of a flat buffer would be saved with all of it."""
    # Tied names share one copy.
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    for name, value in state_dict.items():
        if name.startswith(prefix) and isinstance(value, Tensor) and not value.requires_grad:
            # A DTensor itself has no memory, and address 0.
            key = (local(value).data_ptr(), value.shape)
            # Always a copy: the next upload writes the memory that the parameter views.
            if key not in copies:
                copies[key] = value.detach().to("cpu", copy=True)
            state_dict[name] = copies[key]


def _before_loading(
    owner: WeightsIO, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *_: Any
) -> None:
    """Wait for uploads and register the values, which the masters adopt without rounding."""
    if local_metadata.get("assign_to_params_buffers"):
        raise ModelError(
            "load_state_dict(assign=True) would replace the parameters that the optimizer trains: "
            "leave assign out. The values are copied, and fp32 ones become the masters in full"
        )
    owner.require_whole_weights()
    # torch writes the parameters next: an upload in flight would overwrite them.
    owner.synchronize()
    entries = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
    owner.expect_weights({k: v for k, v in entries.items() if isinstance(v, Tensor)})


def attach_state_dict_hooks(
    model: nn.Module, owner: WeightsIO, engine: object
) -> list[RemovableHandle]:
    """Attach hooks to the root module; see the functions."""
    hook = partial(_StateDictHook, owner, engine)
    return [
        model.register_state_dict_pre_hook(hook(_before_saving)),
        model.register_state_dict_post_hook(hook(_copy_to_host)),
        model.register_load_state_dict_pre_hook(hook(_before_loading)),
        model.register_load_state_dict_post_hook(
            hook(lambda owner, _: owner.adopt_written_weights())
        ),
    ]


class WeightsIO(StateIO):
    """The part of `OffloadOptimizer` that reads and writes weights for users of the model.

    Attributes:
        model: the trained model.
        device: the compute device.
    """

    model: nn.Module
    device: torch.device
    _incoming: LoadedValues | None = None
    """Values that are being written into the model."""

    def require_whole_weights(self) -> None:
        """Raises ModelError if parameters are in shards (ZeRO stage 3)."""
        if self._engine.residency.gathers:
            raise ModelError(
                f"the weights are in shards on {self.ranks.size} ranks (zero_stage = 3): a rank "
                "has no state dict of its own. On every rank, take "
                "dict(optimizer.full_weights()), or save a checkpoint"
            )

    @torch.no_grad()
    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (parameter name, a copy of its working weights on the host), block by block.

        All ranks must exhaust the iterator: each block is gathered in a collective.
        """
        # The copies block this thread: waiting for each block separately would gain nothing.
        self.synchronize()
        for name, weights in self.working_weights():
            # Blocking: the slot may be reused when the generator continues.
            yield name, weights.to("cpu", copy=True)

    @torch.no_grad()
    def working_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (parameter name, its newest working weights on the device), block by block:
        to send them to an inference engine, for example.

        Tied parameters are yielded once, by their first name; buffers are not yielded. The iterator
        waits for the upload of each block, and loads streamed blocks, each during the use of the
        previous one. Update mode "delayed" ends its delay, as in `synchronize()`.

        Each tensor is the memory that forward uses, not a copy: read it on the current stream,
        before requesting the next item, and do not run the model in between. All ranks must
        exhaust the iterator; with `zero_stage` 3 each block is gathered in a collective.
        """
        self._engine.end_delay()
        done: set[nn.Parameter] = set()
        for block in self._blocks:
            # Compute waits for the block's upload or load; the next block is loaded meanwhile.
            block.source.use(block)
            for slot in (slot for bucket in block.all_buckets for slot in bucket.slots):
                done.add(slot.param)
                with past_the_class():
                    weights = slot.local.data
                yield slot.name, weights
        for name, param in self.model.named_parameters():
            if param not in done:
                yield name, param.detach()

    def master_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (parameter name, a copy of its fp32 master weights on the host, in the parameter's
        shape), one at a time, in the order of `model.named_parameters()`.

        Frozen parameters have no master: they yield the weights that forward uses, widened to fp32,
        or integers unchanged. All ranks must exhaust the iterator, and each receives full tensors.
        No step may run meanwhile.

        Raises:
            EngineError: after close().
        """
        if self._engine.guard.phase is Phase.CLOSED:
            raise EngineError("master_weights() after close(), which gives their memory back")
        # This thread reads masters that Adam on the host lane may still write.
        self.settle()
        yield from self._assembled(master)

    @torch.no_grad()
    def _assembled(
        self, shard_of: Callable[[Bucket, Slot], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the items of `master_weights`, from these shards of trained parameters."""
        slot_of = {s.param: (b, s) for k in self._blocks for b in k.all_buckets for s in b.slots}
        closed = self._engine.guard.closed  # frozen weights are in their parameters again
        for name, param in self.model.named_parameters():
            bucket, slot = slot_of.get(param, (None, None))
            if bucket is not None and slot is not None and (bucket.is_trained or not closed):
                if bucket.is_trained:
                    shard = shard_of(bucket, slot)
                else:
                    shard = bucket.weights_of(slot).to("cpu", torch.float32, copy=True)
                yield name, bucket.assembled(slot, shard)
            elif param.is_floating_point():
                yield name, param.detach().to("cpu", torch.float32, copy=True)
            else:
                yield name, param.detach().to("cpu", copy=True)

    def adopt_written_weights(self) -> None:
        """Set the masters of the parameters that user code wrote; moments stay.

        After `model.load_state_dict` they are the loaded values, without rounding of fp32 values.
        If all of them are 16-bit values that the parameters had already, all masters stay;
        otherwise each value becomes its master. Without `load_state_dict` they are the parameters'
        values, if these differ from the rounded masters.
        Every rank must load the same values, or the next step raises a RankError.
        Between backward and `step()`, the step updates the new masters by its gradient. `step()`
        and methods that read the state call this method if parameters were written.

        Raises:
            ModelError: for values beyond the range of the working weights.
            UpdateError: between backward and `step()`, if Adam runs inside backward
                (`skip_nonfinite` off and no `clip_norm`).
        """
        # This thread writes masters, which Adam in flight still uses.
        self.synchronize()
        self._engine.program.mode.before_masters_change()
        incoming, self._incoming = self._incoming, None
        written = frozenset(self._parameter_guard.written())
        if incoming is not None and not incoming.new:
            written = frozenset()
        report = None if self.ranks.is_single else self._tell_written
        overwritten = self._parameter_guard.overwritten
        if adopt_loaded(self._slots(), written, incoming, overwritten, self._rules, report):
            self._engine.emit()
        if report is not None:
            self._tell_untrained(written, incoming)
        self._parameter_guard.renew()

    def before_weights_are_written(self, bucket: Bucket, slot: Slot) -> None:
        """User code is about to write into the memory that the parameter views."""
        overwritten = self._parameter_guard.overwritten
        is_loaded = self._incoming is not None
        if bucket.loads_masters and not is_loaded and slot.param not in overwritten:
            overwritten[slot.param] = slot.local.data.clone()

    def _tell_written(self, bucket: Bucket, slot: Slot, values: Tensor) -> None:
        """Each rank stores only its shard of the written values: the next step compares the full
        values, or the model would be pieced together from different ones."""
        if bucket.sharers is self.ranks:
            self._engine.functions.digests.add_weights(slot.name, values)

    def _tell_untrained(
        self, written: frozenset[nn.Parameter], incoming: LoadedValues | None
    ) -> None:
        """Record the written frozen parameters and buffers, which every rank stores in full: the
        next step compares them, or ranks would train with different models. Running statistics may
        differ among ranks."""
        values = [(n, p) for n, p in self.model.named_parameters() if not p.requires_grad]
        changed = [(name, param.data) for name, param in values if param in written]
        if incoming is not None:
            norms = (
                m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)
            )
            statistics = {id(x) for m in norms if m.track_running_stats for x in m.buffers()}
            buffers = [(n, x) for n, x in self.model.named_buffers() if id(x) not in statistics]
            changed += [(name, buffer) for name, buffer in buffers if name in incoming.names]
        for name, value in changed:
            self._engine.functions.digests.add_weights(name, value)

    @torch.no_grad()
    def expect_weights(self, values: Mapping[str, Tensor]) -> None:
        """Values, by parameter name of the model, are about to be written into it; raises as
        `adopt_written_weights`."""
        self._engine.program.mode.before_masters_change()
        self.take_over_writes()
        self._incoming = LoadedValues(self.model, values)
