"""Saved-tensor hooks: saved weights become handles, other saved tensors refer to their block.

[Note: Handles]
Autograd saves weights for backward and does not notice that an upload replaced them: the version
counter of a parameter that views a flat buffer does not change. So every saved tensor in
a block's flat buffer is replaced by an object that stores the block's generation; unpacking an old
generation raises an error. Each block's pre-forward hook pushes the saved-tensor hooks, innermost,
and chained to the hooks that are active (recompute pushes its own). If they were pushed only once,
around the model's forward, they would miss all recomputed forwards.

[Note: Recompute without hooks]
A user's recompute may start inside a module's forward, after its hooks (`checkpoint` around
`forward`, as in transformers): no hook runs when it is recomputed. But it starts from saved inputs.
So every tensor saved inside the forward of a streamed block also refers to that block: unpacking
the tensor loads the block. Until the tensor is freed the graph counts as reading the block's
weights, which such a recompute leaves in the graph as plain views of the slot.

Saved tensors that pass through hooks lose autograd's check for in-place changes; it is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine.autograd.hooks import has_ended
from offloadtrain.engine.autograd.offload import Offloader
from offloadtrain.engine.autograd.selective import engine_code, unpacking
from offloadtrain.engine.block import Block, Residency
from offloadtrain.engine.bucket import Bucket
from offloadtrain.engine.buffers import AddressMap
from offloadtrain.runtime.tensor_parts import is_distributed, local, rebuilt
from offloadtrain.step.program.streaming import StreamError

Kept = tuple[Tensor, "int | Reading"]
"""A saved tensor that is not moved: with its version, or, for weights of a block that stays on the
device, with their `Reading`. A tuple for speed: a graph has twenty of them per layer."""


class Packed(Protocol):
    """Replaces a saved tensor in the graph; `unpack` returns the tensor."""

    def unpack(self) -> Tensor: ...


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class ChangedInPlaceError(OffloadTrainError):
    """A tensor that backward needs was changed in place after forward saved it."""


class Reading:
    """A graph's reads of one block's weights, as one forward saved them. While an object that
    replaces a saved tensor refers to it, the block counts as read: "delayed" uploads nothing over
    these weights.

    Attributes:
        generation: generation of the weights when the graph was built.
        clock: time when the graph was built, in forwards of modules.
    """

    __slots__ = ("block", "clock", "generation")

    def __init__(self, block: Block, clock: int) -> None:
        self.block = block
        self.generation = block.graphs.generation
        self.clock = clock
        block.graphs.packed(block.views.ranges)

    def begin(self) -> None:
        """Backward reads the weights from here on: compute waits for the block's load.

        Raises:
            StaleGraphError: the weights were replaced since the graph was built.
        """
        block, graphs = self.block, self.block.graphs
        # Fast path: usually the previous node has read the same block.
        if (
            self.generation == graphs.generation
            and self.generation in graphs.spans
            and block.source.is_at(block, self.clock)
        ):
            return
        block.unpacked(self.generation, self.clock)

    def __del__(self) -> None:
        self.block.graphs.released(self.generation)


class Handle:
    """Replaces a saved view of a streamed block's weights in a graph."""

    __slots__ = ("_bucket", "_offset", "_reading", "_shape", "_stride")

    def __init__(self, reading: Reading, bucket: Bucket, tensor: Tensor) -> None:
        self._reading = reading
        self._bucket = bucket
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset() - bucket.working.flat.storage_offset()

    def unpack(self) -> Tensor:
        """View the weights at their present address, in the saved shape and strides; raises
        StaleGraphError."""
        self._reading.begin()
        # After `begin`: only then is `working` the slot of this use.
        view = self._bucket.working.strided(self._shape, self._stride, self._offset)
        # With create_graph=True backward saves what it reads without calling hooks, and the slot is
        # reused before the saved tensor is needed.
        return view.clone() if torch.is_grad_enabled() else view


class PartHandle:
    """Replaces saved weights of a streamed block that are a DTensor: this rank has a part of
    them."""

    __slots__ = ("_handle", "_like")

    @engine_code
    def __init__(self, reading: Reading, bucket: Bucket, tensor: Tensor) -> None:
        self._handle = Handle(reading, bucket, local(tensor))
        # Mesh, placements and shape without memory: the slot will hold another block.
        self._like = rebuilt(tensor, torch.empty_like(local(tensor), device="meta"))

    def unpack(self) -> Tensor:
        """View this rank's part at its present address; raises StaleGraphError."""
        return rebuilt(self._like, self._handle.unpack())


class PassedOn:
    """A tensor packed by outer hooks, such as those of a user's recompute."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, outer: Hooks, tensor: Tensor) -> None:
        self._packed = outer[0](tensor)
        self._unpack = outer[1]

    def unpack(self) -> Tensor:
        with unpacking():
            return self._unpack(self._packed)


class WhileStreaming:
    """Replaces a tensor that is not a weight, and reports the progress of backward. If it was saved
    in the forward of streamed blocks, unpacking it also loads them: [Note: Recompute without
    hooks]."""

    __slots__ = ("_clock", "_packed", "_readings", "_residency")

    def __init__(
        self,
        packed: Kept | Packed,
        residency: Residency,
        readings: Sequence[Reading],
        clock: int,
    ) -> None:
        self._packed = packed
        self._residency = residency
        self._readings = readings
        self._clock = clock

    def unpack(self) -> Tensor:
        # Unpins blocks with a later forward: the loads below need slots.
        self._residency.passed(self._clock)
        if type(self._packed) is tuple:
            tensor = unpack(self._packed)
        # Before the block's own use: this may recompute other blocks, which need slots too.
        else:
            self._residency.unpacking += 1
            try:
                tensor = unpack(self._packed)
            finally:
                self._residency.unpacking -= 1
        for reading in self._readings:
            reading.begin()
        return tensor


def pass_on(tensor: Tensor, outer: Hooks | None) -> Kept | PassedOn:
    if outer is not None:
        return PassedOn(outer, tensor)
    # Detached: an operation that saves its result would keep itself alive.
    saved = tensor.detach() if tensor.requires_grad else tensor
    return saved, saved._version


PassOn = Callable[[Tensor, Hooks | None], "Kept | Packed"]


def unpack(packed: Any) -> Tensor:
    """Return the tensor that `packed` replaces.

    Raises:
        StaleGraphError: weights were replaced since the graph was built.
        ChangedInPlaceError: another tensor was changed in place since it was saved.
    """
    if type(packed) is not tuple:
        unpacked: Tensor = packed.unpack()
        return unpacked
    tensor: Tensor = packed[0]
    guard: int | Reading = packed[1]
    if isinstance(guard, Reading):
        guard.begin()
    elif tensor._version != guard:
        raise ChangedInPlaceError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place "
            f"after it was saved: it is at version {tensor._version}, and was at {guard}. Write "
            "x = x + y in place of x += y; torch.autograd.set_detect_anomaly(True) tells where "
            "it was saved"
        )
    return tensor


# torch's public context manager cannot be chained: it hides the outer hooks.
_autograd = torch._C._autograd

_Owner = tuple[Block, Bucket]
_HANDLE: type[Handle | PartHandle] = Handle


class SavedTensors:
    """Determines the block that a tensor's bytes belong to, and packs the tensors that autograd
    saves.

    Attributes:
        within: streamed blocks whose forward is running.
    """

    def __init__(self, residency: Residency) -> None:
        self.within: Sequence[Block] = ()
        self._clock = 0
        """Number of module forwards so far: tensors that are saved later have a higher number."""
        self._readings: dict[Block, Reading] = {}
        """Readings of the running forward: all tensors that it saves share them."""
        self._readings_within: tuple[Reading, ...] | None = None
        self._owners: AddressMap[_Owner | Callable[[Tensor], _Owner | None]] = AddressMap()
        """Owner of the tensors of a buffer; for a slot, a function from a tensor to its owner."""
        self._residency = residency if residency.memory.slots else None
        for block in residency.blocks.values():
            for bucket in block.buckets if block.source is not residency else ():
                for version in bucket.versions:
                    self._owners.add(version.flat, (block, bucket))
        for number, slot in enumerate(residency.memory.slots):
            self._owners.add(slot, partial(residency.owner, number))
        for block in residency.streamed:
            for bucket in block.all_buckets:
                self._owners.add(block.views.placeholder(bucket), partial(_raise_absent, block))

    def push(
        self,
        offloader: Offloader | None = None,
        frame: FrameType | None = None,
        begin: Callable[[Hooks], PassOn] | None = None,
    ) -> Chain | None:
        """Push the hooks as the innermost of this thread; returns None if they are already
        innermost or not needed, else the argument for `pop`.

        Args:
            offloader: takes the saved tensors that it moves to the host.
            frame: frame of the forward; see [Note: Interrupted forwards] in `hooks.py`.
            begin: for a run of a recomputed forward: the outer hooks → `Chain.pass_on`.
        """
        if not torch.is_grad_enabled():
            return None
        while (top := _innermost()) is not None and has_ended(top.frame):
            _autograd._pop_saved_tensors_default_hooks()
        outer = _top_hooks()
        if top is not None and top.saved is self:
            if top.offloader is offloader:
                return None
            outer = top.outer
        onward = pass_on if begin is None or outer is None else begin(outer)
        chain = Chain(self, outer, offloader, frame, onward)
        _autograd._push_saved_tensors_default_hooks(chain, unpack)
        return chain

    @staticmethod
    def pop(chain: Chain | None) -> None:
        """Pop the hooks that `push` has pushed. If an interrupt has left other hooks on top of
        them, or has removed them, they are only turned off."""
        if chain is None:
            return
        if _innermost() is chain:
            _autograd._pop_saved_tensors_default_hooks()
        # The graph keeps the hooks alive, and a frame would keep the forward's arguments alive.
        chain.is_off, chain.frame = True, None

    def enter(
        self, blocks: Sequence[Block], streamed: Sequence[Block], *, again: bool
    ) -> Sequence[Block]:
        """A forward that reads these blocks begins; returns the previous `within`.

        Args:
            streamed: the blocks that tensors saved in this forward refer to.
        """
        outside = self.within
        self._clock += 1
        for block in blocks:
            clock = block.clock
            if not again:
                clock.last = self._clock
            # With `in_order`, the last forward is not the recomputed one.
            counts = torch.is_grad_enabled() and not (again and clock.in_order)
            if counts and not clock.first:
                clock.first = clock.last
        self.set_within(streamed or outside)
        return outside

    def set_within(self, blocks: Sequence[Block]) -> None:
        """A forward begins or has ended; in the latter case `blocks` is what `enter` returned."""
        self.within = blocks
        # From here on only the graph keeps its readings alive: they end with its nodes.
        self._readings.clear()
        self._readings_within = None

    def pack(
        self, tensor: Tensor, outer: Hooks | None, offloader: Offloader | None, pass_on: PassOn
    ) -> Any:
        """Return the object that replaces a tensor in the graph; for the arguments see `Chain`."""
        owner, handle = self._owners.find(tensor), _HANDLE
        if owner is None and type(tensor) is not Tensor and is_distributed(tensor):
            owner, handle = self._owners.find(local(tensor)), PartHandle
        # Autograd does not notice that an upload or a load replaces the weights: the reading does.
        if isinstance(owner, tuple):
            if tensor.dtype is owner[1].dtype:
                return tensor.detach(), self._reading(owner[0])
        elif owner is not None:
            in_slot = owner(tensor if handle is _HANDLE else local(tensor))
            if in_slot is not None and tensor.dtype is in_slot[1].dtype:
                return handle(self._reading(in_slot[0]), in_slot[1], tensor)
        packed: Kept | Packed
        if offloader is not None and offloader.wants(tensor):
            packed = offloader.offload(tensor)
        else:
            packed = pass_on(tensor, outer)
        if self._residency is None:
            return packed
        if self._readings_within is None:
            self._readings_within = tuple(map(self._reading, self.within))
        return WhileStreaming(packed, self._residency, self._readings_within, self._clock)

    def _reading(self, block: Block) -> Reading:
        reading = self._readings.get(block)
        if reading is None or reading.generation != block.graphs.generation:
            reading = self._readings[block] = Reading(block, self._clock)
        return reading


def _raise_absent(block: Block, _: Tensor) -> NoReturn:
    option = "more resident_blocks" if block.spec.repeated else f'keep_whole = ["{block.name}"]'
    raise StreamError(
        f"weights of block '{block.name}' are read outside its forward, while they are on the "
        "host, or in shards: only modules that are called can be streamed. Leave this one on the "
        f"device: {option}"
    )


def in_checkpoint() -> bool:
    """Return True if tensors saved now go to a user's recompute (torch's non-reentrant
    checkpoint)."""
    top = _innermost()
    outer = _top_hooks() if top is None else top.outer
    return outer is not None and outer[0].__module__ == checkpoint.__module__


def are_covered() -> bool:
    """Return True if a user's hooks, other than a recompute's, are inside the engine's: they would
    store weights of a streamed block as plain views of a slot that is reused."""
    top = _top_hooks()
    if top is None or isinstance(top[0], Chain):
        return False
    return not in_checkpoint()


def _top_hooks() -> Hooks | None:
    """Return the innermost hooks of this thread."""
    hooks: Hooks | None = _autograd._top_saved_tensors_default_hooks(False)
    return hooks


def _innermost() -> Chain | None:
    """Return the innermost hooks of this thread if they are an engine's, else None."""
    hooks = _top_hooks()
    return hooks[0] if hooks is not None and isinstance(hooks[0], Chain) else None


class Chain:
    """An engine's hooks, chained to the hooks that were active when they were pushed.

    A user's selective checkpoint (torch 2.14) stores tensors outside the graph, and offers them
    to the user's hooks only: it skips hooks with `_checkpoint_internal`.

    Attributes:
        saved, offloader: pack saved tensors until `is_off` is set.
        outer: the hooks around these.
        pass_on: packs a tensor that neither `saved` nor `offloader` takes.
        frame: frame of the forward that they were pushed for.
    """

    __slots__ = ("frame", "is_off", "offloader", "outer", "pass_on", "saved")
    _checkpoint_internal = True

    def __init__(
        self,
        saved: SavedTensors,
        outer: Hooks | None,
        offloader: Offloader | None,
        frame: FrameType | None,
        pass_on: PassOn,
    ) -> None:
        self.saved = saved
        self.outer = outer
        self.offloader = offloader
        self.frame = frame
        self.pass_on = pass_on
        self.is_off = False

    @property
    def _user_hooks(self) -> Hooks | None:
        """The hooks around these, for torch."""
        return self.outer

    def __call__(self, tensor: Tensor) -> Any:
        """Return the object that replaces a tensor in the graph."""
        if self.is_off or has_ended(self.frame):
            return pass_on(tensor, self.outer)
        return self.saved.pack(tensor, self.outer, self.offloader, self.pass_on)
