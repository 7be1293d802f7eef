"""Flat layout: the parameters of a block in buffers that move as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offloadtrain.engine.experts import Experts
from offloadtrain.engine.local_part import LocalPart, local
from offloadtrain.engine.offloaded_parameter import gradient_of
from offloadtrain.optim import AnyRule, MatrixRule, keeps_whole
from offloadtrain.runtime.dtypes import name_of
from offloadtrain.runtime.kernels import Layout
from offloadtrain.runtime.lanes import Buffer
from offloadtrain.runtime.process_group import ALONE, Ranks
from offloadtrain.runtime.tensor_parts import is_distributed
from offloadtrain.step.spec.block_spec import BucketSpec, MatrixSpec
from offloadtrain.step.spec.bucket_layout import padded, placed
from offloadtrain.step.spec.formats import StateFormat, format_for


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One parameter's elements in its bucket's flat buffers, the same in each of them.

    Attributes:
        index: position in `model.named_parameters()`: the order in which norms are added.
        numel, shape, stride: those of what this rank holds of the parameter, so that any dense
            memory format is kept.
        local: its `data` is what this rank holds; the parameter itself, unless it is a DTensor.
        global_shape: the parameter's, and its gradient's.
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
        held = local(param)
        part = LocalPart(param) if is_distributed(param) else param
        shape, stride, whole = tuple(held.shape), dense_stride(held), tuple(param.shape)
        return cls(name, param, index, offset, held.numel(), shape, stride, part, whole)

    def gradient(self) -> Tensor | None:
        """Return what this rank holds of the gradient, if there is one."""
        grad = gradient_of(self.param)
        if grad is None or not isinstance(self.local, LocalPart):
            return grad
        return self.local.of_gradient(grad)

    def view(self, flat: Tensor) -> Tensor:
        """View the parameter's elements of a whole flat buffer, shaped as the parameter."""
        return self.shaped(flat[self.offset : self.offset + self.numel])

    def shaped(self, piece: Tensor) -> Tensor:
        """View (numel,) elements in the parameter's shape; one value per block stays 1-D."""
        return piece.as_strided(self.shape, self.stride) if piece.numel() == self.numel else piece

    def flattened(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape, on any device, as (numel,) on the host, in the
        order of the parameter's memory: a view where it has that order, otherwise a copy."""
        if tensor.device.type == "cpu" and tensor.stride() == self.stride:
            return tensor.as_strided((self.numel,), (1,))
        flat = torch.empty(self.numel, dtype=tensor.dtype, device="cpu")
        self.shaped(flat).copy_(tensor)
        return flat


@dataclass(slots=True, eq=False)
class Bucket:
    """Parameters of one block with one working dtype and one set of hyperparameters.

    Every buffer on the host, and `device_shard`, is this rank's shard: elements [lo, hi) of the
    whole. A single rank's shard is the whole.

    Attributes:
        spec: its sizes and formats; padding holds zeros.
        group: index into `param_groups`.
        sharers: the ranks that share it.
        lo, hi: the shard.
        working: device, working dtype: the weights that compute uses; parameters are views of it.
            For a streamed block: in the slot that it has, or had last.
        layout: the elements of its slots that are in the shard, as the kernels know them.
        device_shard: device, working dtype: the shard of a block that is gathered for its use.
        state: host: the format's fields, master weights first; none for frozen weights. Where it
            is on the disk: views of the mapped file, to be used while the lanes are empty.
        other: host: a second copy of `state`, which speculative updates are written into.
        pending: host, working dtype: the rounded new weights until their upload, where they wait
            longer than the gradient's memory is free.
        snapshot: host, working dtype: a streamed block's weights of the step in progress, where an
            update may run inside its backward; or the frozen weights of a streamed block.
        gradient: host, or a view of the mapped file: the only microbatch's gradient in the working
            dtype and then, where nothing else holds them, the rounded new weights; or the fp32 sum
            over microbatches.
        spill: host, bytes: what a save copies of the state, until it is written.
        sum: device: the fp32 sum over microbatches, where `gradient` on the host gets a copy of it.
        weight_files: the weights of a block that is streamed from the disk, where they are not in
            its state: views of the mapped file.
        streamed: its block's weights are loaded into a device slot for their use.
        other_working: device: a second version of `working`; see [Note: Two versions] in
            `step.program.two_versions`.
        other_device_shard: device: the same of `device_shard`.
        loads_in_turn: of a streamed block, two versions of which are kept.
        version: of two versions, the one that loads read.
        other_gradient: a second sum beside `gradient`, for the next step.
        used: device: a byte for each of its `experts`, whose numbers and steps are there.
    """

    spec: BucketSpec
    group: int
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    sharers: Ranks
    lo: int
    hi: int
    layout: Layout = field(init=False)
    working: Buffer = field(init=False)
    device_shard: Buffer | None = None
    state: tuple[Buffer, ...] = ()
    other: tuple[Buffer, ...] = ()
    pending: Buffer | None = None
    snapshot: Buffer | None = None
    gradient: Buffer | None = None
    spill: Buffer | None = None
    sum: Buffer | None = None
    weight_files: tuple[Buffer, ...] = ()
    streamed: bool = False
    other_working: Buffer | None = None
    other_device_shard: Buffer | None = None
    loads_in_turn: bool = False
    version: int = 0
    other_gradient: Buffer | None = None
    used: Buffer | None = None
    experts: Experts | None = None

    @property
    def versions(self) -> list[Buffer]:
        """Its working weights on the device, in the order of `Ref.copy` while none was shown."""
        return [self.working, *([self.other_working] if self.other_working else [])]

    @property
    def moves(self) -> bool:
        """Its working weights are at several addresses in turn."""
        return self.streamed or self.other_working is not None

    def __post_init__(self) -> None:
        owned = [(slot, *self.piece(slot)) for slot in self.slots]
        held = [(slot, lo, hi) for slot, lo, hi in owned if lo < hi]
        self.layout = Layout(
            [slot.offset + lo - self.lo for slot, lo, _ in held],
            [hi - lo for _, lo, hi in held],
            [slot.index for slot, _, _ in held],
            [lo for _, lo, _ in held],
        )

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def numel(self) -> int:
        """Elements of the whole, padding included."""
        return self.spec.numel

    @property
    def format(self) -> StateFormat:
        """The format of its state."""
        return self.spec.format

    @property
    def shard_numel(self) -> int:
        """Elements of each buffer on the host."""
        return self.spec.shard_numel

    def piece(self, slot: Slot) -> tuple[int, int]:
        """Return [lo, hi) of a parameter's elements, in the order of its memory, in the shard."""
        return _piece(slot, self.lo, self.hi)

    def pieces(self, slot: Slot) -> list[tuple[int, int]]:
        """Return [lo, hi) of a parameter's elements in the shard of each rank, in rank order."""
        starts = range(0, self.numel, self.shard_numel)
        return [_piece(slot, lo, lo + self.shard_numel) for lo in starts]

    @property
    def load_source(self) -> Buffer:
        """The copy of a streamed block's weights that loads read."""
        shards = [self.device_shard, self.other_device_shard]
        on_host = [self.snapshot, self.pending]
        # The working weights may be in the state, which frozen parameters have not.
        state = self.state[:1] if self.format.holds_weight else ()
        # Two versions are in the order of `step.program.places`.
        found = [*shards, *(state if self.loads_in_turn else ()), *on_host, *state]
        if self.weight_files:
            return self.weight_files[self.version]
        return [buffer for buffer in found if buffer is not None][self.version]

    @property
    def in_use(self) -> Tensor:
        """The shard of the weights that forward uses, where they lie between two uses: (n,)."""
        return self.load_source.flat if self.streamed else self.working.flat[self.lo : self.hi]

    def weights_of(self, slot: Slot) -> Tensor:
        """View the shard's part of a parameter in `in_use`: (n,)."""
        lo, hi = self.piece(slot)
        start = slot.offset + lo - self.lo if lo < hi else 0
        return self.in_use[start : start + hi - lo]

    def state_of(self, slot: Slot) -> tuple[Tensor, ...]:
        """View the shard's part of a parameter's state: 1-D pieces of the buffers, in the order of
        the fields."""
        first, last = self.piece(slot)
        if first == last:  # of a scale, too, which rounding up would take from another parameter
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
    experts: Mapping[str, int] | None = None,
) -> Bucket:
    """Lay parameters out one after the other, each aligned, and divide the whole into shards;
    those that the rule needs whole, so that none is divided.

    Args:
        state: the format of 16-bit buckets.
        rule: the one that updates them; None for frozen ones.
        experts: parameter → experts in it, of parameters that are skipped where they are unused.
    """
    given = list(params)
    sizes = [local(param).numel() for _, param in given]
    lay_out = placed if keeps_whole(rule) else _in_order
    offsets, numel = lay_out(sizes, ranks.size)
    slots = [
        Slot.of(full_name, p, order[p], at)
        for at, (full_name, p) in sorted(zip(offsets, given, strict=True), key=lambda one: one[0])
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
        experts=sum((experts or {}).get(slot.name, 0) for slot in slots),
    )
    bucket = Bucket(spec, group, dtype, tuple(slots), ranks, *ranks.shard(numel))
    if experts and spec.experts:
        bucket.experts = Experts(slots, [experts[slot.name] for slot in slots])
    return bucket


def _in_order(sizes: Sequence[int], ranks: int) -> tuple[list[int], int]:
    return [padded(sizes[:count]) for count in range(len(sizes))], padded(sizes, ranks)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's own strides if it is dense (any memory format), else contiguous ones."""
    return tuple(
        torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
    )
