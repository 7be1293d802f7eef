"""Flat layout: the parameters of a block in buffers that are transferred as a unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offloadtrain.engine.buffers import MemoryMap
from offloadtrain.engine.division import Usage
from offloadtrain.optim import AnyRule, MatrixRule, keeps_whole
from offloadtrain.runtime.dtypes import name_of
from offloadtrain.runtime.kernels import Layout
from offloadtrain.runtime.lanes import Buffer
from offloadtrain.runtime.process_group import ALONE, Ranks
from offloadtrain.runtime.tensor_parts import LocalPart, is_distributed, local
from offloadtrain.step.layout.block_spec import BucketSpec, MatrixSpec, padded, placed
from offloadtrain.step.layout.buffers import BufferKey, Memory
from offloadtrain.step.layout.formats import StateFormat, format_for


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A parameter's elements in its bucket's flat buffers, at the same place in each of them.

    Attributes:
        index: position in `model.named_parameters()`: the order in which norms are added.
        numel, shape, stride: those of this rank's part of the parameter, so that any dense
            memory format is preserved.
        local: its `data` is this rank's part; the parameter itself, unless it is a DTensor.
        global_shape: full shape of the parameter and of its gradient.
    """

    name: str
    param: nn.Parameter
    index: int
    offset: int
    numel: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    local: nn.Parameter | LocalPart
    global_shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, param: nn.Parameter, index: int, offset: int) -> Slot:
        local_tensor = local(param)
        part = LocalPart(param) if is_distributed(param) else param
        shape, stride = tuple(local_tensor.shape), dense_stride(local_tensor)
        at = index, offset, local_tensor.numel()
        return cls(name, param, *at, shape, stride, part, tuple(param.shape))

    def view(self, flat: Tensor) -> Tensor:
        """View the parameter's elements of an unsharded flat buffer, in the parameter's shape."""
        return self.shaped(flat[self.offset : self.offset + self.numel])

    def shaped(self, piece: Tensor) -> Tensor:
        """View (numel,) elements in the parameter's shape; scales, with one value per block, stay
        1-D."""
        return piece.as_strided(self.shape, self.stride) if piece.numel() == self.numel else piece

    def flattened(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape, on any device, as (numel,) on the host, in the
        order of the parameter's memory: a view if it has that order already, otherwise a copy."""
        if tensor.device.type == "cpu" and tensor.stride() == self.stride:
            return tensor.as_strided((self.numel,), (1,))
        flat = torch.empty(self.numel, dtype=tensor.dtype, device="cpu")
        self.shaped(flat).copy_(tensor)
        return flat


@dataclass(slots=True, eq=False)
class Bucket:
    """Parameters of one block with one working dtype and one set of hyperparameters.

    Attributes:
        spec: sizes and formats; padding holds zeros.
        group: index into `param_groups`.
        sharers: the ranks that share this bucket.
        lo, hi: this rank's shard: the elements of the bucket that its state has, in any tier; all
            of them for a single rank.
        layout: the elements of its slots that are in the shard, for the kernels.
        params: parameters of its slots.
        memory: the buffers of the step.
        place: version of the working weights that parameters are views of; for a streamed block,
            its present or last slot.
        copy: number of the copy that is the current state.
        version: number of the version that loads read, if a streamed block has two versions.
        usage: which of its entries a step has used; None: all of it is updated in every step.
        missed_steps: steps of the run in which its parameters were not updated.
    """

    spec: BucketSpec
    group: int
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    sharers: Ranks
    lo: int
    hi: int
    layout: Layout = field(init=False)
    params: list[nn.Parameter] = field(init=False)
    memory: MemoryMap = field(init=False)
    place: int = 0
    copy: int = 0
    version: int = 0
    usage: Usage | None = None
    missed_steps: int = 0

    def buffer(self, kind: Memory) -> Buffer:
        """Return a buffer of this bucket."""
        return self.memory[BufferKey(self.spec.name, kind)]

    @property
    def working(self) -> Buffer:
        """The device weights that compute uses: parameters are views of them."""
        # Called for every saved weight: a plain tuple equals the BufferKey and is cheaper to make.
        return self.memory[self.spec.name, Memory.WORKING, self.place, 0]  # type: ignore[index]

    @property
    def versions(self) -> list[Buffer]:
        """Working weights of a block that stays on the device: one or two versions."""
        keys = self.memory.table.of_bucket[self.name]
        return [self.memory[key] for key in keys if key.kind is Memory.WORKING]

    @property
    def state_kind(self) -> Memory:
        """The kind of memory that has the state between steps."""
        in_file = BufferKey(self.name, Memory.STATE_FILE) in self.memory.table.rows
        return Memory.STATE_FILE if in_file else Memory.STATE

    @property
    def state(self) -> tuple[Buffer, ...]:
        """The format's fields, master weights first; none for frozen weights. If they are on the
        disk: views of the mapped file, valid only while the lanes are idle."""
        fields = range(len(self.format.fields(self.spec.moments)) if self.is_trained else 0)
        keys = (BufferKey(self.name, self.state_kind, self.copy, number) for number in fields)
        return tuple(self.memory[key] for key in keys)

    @property
    def is_trained(self) -> bool:
        """True if updates change it: it has state and a gradient."""
        return self.name in self.memory.table.staging

    @property
    def sources(self) -> Sequence[BufferKey]:
        """The memory that loads of its weights read, one per version; empty if it stays on the
        device."""
        return self.memory.table.sources.get(self.name, ())

    @property
    def loads_masters(self) -> bool:
        """Loads of its weights read a field of its masters, not a snapshot: a write into the
        weights leaves the other fields unchanged."""
        return bool(self.sources) and self.sources[self.version].kind is self.state_kind

    @property
    def home(self) -> Buffer:
        """The weights between two uses: the device memory that compute reads, or, for a streamed
        block, the memory that loads read, in any tier, which holds this rank's shard."""
        return self.memory[self.sources[self.version]] if self.sources else self.working

    @property
    def moves(self) -> bool:
        """True if the address of its working weights changes."""
        return bool(self.sources) or len(self.versions) > 1

    def __post_init__(self) -> None:
        self.params = [slot.param for slot in self.slots]
        owned = [(slot, *self.piece(slot)) for slot in self.slots]
        nonempty = [(slot, lo, hi) for slot, lo, hi in owned if lo < hi]
        self.layout = Layout(
            [slot.offset + lo - self.lo for slot, lo, _ in nonempty],
            [hi - lo for _, lo, hi in nonempty],
            [slot.index for slot, _, _ in nonempty],
            [lo for _, lo, _ in nonempty],
        )

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def numel(self) -> int:
        """Number of elements over all shards, including padding."""
        return self.spec.numel

    @property
    def format(self) -> StateFormat:
        """The format of its state."""
        return self.spec.format

    @property
    def shard_numel(self) -> int:
        """Number of elements of this rank's shard."""
        return self.spec.shard_numel

    def piece(self, slot: Slot) -> tuple[int, int]:
        """Return [lo, hi) of a parameter's elements that are in the shard, in memory order."""
        return _piece(slot, self.lo, self.hi)

    def pieces(self, slot: Slot) -> list[tuple[int, int]]:
        """Return [lo, hi) of a parameter's elements in the shard of each rank, in rank order."""
        starts = range(0, self.numel, self.shard_numel)
        return [_piece(slot, lo, lo + self.shard_numel) for lo in starts]

    def show(self, slot: Slot) -> None:
        """Make a parameter a view of `home`, unless `home` is a shard."""
        flat = self.home.flat
        if flat.numel() >= self.numel:
            slot.local.data = slot.view(flat)

    def weights_of(self, slot: Slot) -> Tensor:
        """View the shard's part of a parameter in `home`: (n,)."""
        (lo, hi), flat = self.piece(slot), self.home.flat
        # `home` holds all of the weights, or only the shard.
        first = 0 if flat.numel() >= self.numel else self.lo
        start = slot.offset + lo - first if lo < hi else 0
        return flat[start : start + hi - lo]

    def assembled(self, slot: Slot, shard: Tensor) -> Tensor:
        """Return a parameter's values, in its shape, from the shards of all `sharers`: (n,) fp32 on
        the host each. A collective; for a single rank, a view of its shard."""
        if self.sharers.is_single:
            return slot.shaped(shard)
        values = torch.empty(slot.numel, dtype=torch.float32, device="cpu")
        values[slice(*self.piece(slot))] = shard
        self.sharers.assemble(values, self.pieces(slot))
        return slot.shaped(values)

    def state_of(self, slot: Slot) -> tuple[Tensor, ...]:
        """View the shard's part of a parameter's state: 1-D pieces of the buffers, in the order of
        the fields."""
        first, last = self.piece(slot)
        if first == last:  # rounding up would return another parameter's scale
            return tuple(buffer.flat[:0] for buffer in self.state)
        start, pieces = slot.offset - self.lo, []
        for buffer in self.state:
            per = self.shard_numel // buffer.flat.numel()
            lo, hi = (start + first) // per, -(-(start + last) // per)
            pieces.append(buffer.flat[lo:hi])
        return tuple(pieces)


def _piece(slot: Slot, lo: int, hi: int) -> tuple[int, int]:
    first = min(max(lo - slot.offset, 0), slot.numel)
    return first, max(first, min(hi - slot.offset, slot.numel))


def pack(
    name: str,
    group: int,
    dtype: torch.dtype,
    params: Iterable[tuple[str, nn.Parameter]],
    order: Mapping[nn.Parameter, int],
    state: str,
    ranks: Ranks = ALONE,
    rule: AnyRule | None = None,
    entries: Mapping[str, int] | None = None,
) -> Bucket:
    """Lay parameters out consecutively, each aligned, and divide the buffer into shards. For a
    rule that needs full tensors, no parameter is divided.

    Args:
        state: the format of 16-bit buckets.
        rule: the update rule; None for frozen parameters.
        entries: parameter → number of entries in it, for parameters that are skipped while unused.
    """
    named_params = list(params)
    sizes = [local(param).numel() for _, param in named_params]
    lay_out = placed if keeps_whole(rule) else _in_order
    offsets, numel = lay_out(sizes, ranks.size)
    slots = [
        Slot.of(full_name, p, order[p], at)
        for at, (full_name, p) in sorted(
            zip(offsets, named_params, strict=True), key=lambda pair: pair[0]
        )
    ]
    of_matrices = isinstance(rule, MatrixRule)
    matrices = [MatrixSpec(slot.offset, *slot.shape) for slot in slots] if of_matrices else []
    spec = BucketSpec(
        name,
        numel,
        sum(sizes),
        name_of(dtype),
        format_for(state, name_of(dtype)),
        ranks.size,
        () if rule is None else rule.moments,
        tuple(matrices),
        keeps_whole(rule) and not of_matrices,
        experts=sum((entries or {}).get(slot.name, 0) for slot in slots),
    )
    return Bucket(spec, group, dtype, tuple(slots), ranks, *ranks.shard(numel))


def _in_order(sizes: Sequence[int], ranks: int) -> tuple[list[int], int]:
    return [padded(sizes[:count]) for count in range(len(sizes))], padded(sizes, ranks)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's strides if it is dense (any memory format), else contiguous strides."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


Delivered = Sequence[tuple[Slot, Tensor]]
"""Parameters of a bucket, in its order, with the gradients that they received."""
