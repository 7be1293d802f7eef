"""What stands for a saved tensor in a graph, until backward unpacks it: see [Note: Handles] in
`saved_tensor_hooks.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket
from offloadtrain.engine.local_part import local, rebuilt
from offloadtrain.engine.residency import Residency

Kept = tuple[Tensor, "int | Reading"]
"""Stands for a tensor where it is: with its version, or for weights of a block that stays on the
device with their reading. A tuple and no class: a graph has twenty of them for each layer."""


class Packed(Protocol):
    """Stands for a tensor that is elsewhere."""

    def unpack(self) -> Tensor: ...


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class ChangedInPlaceError(OffloadTrainError):
    """A tensor that backward needs was changed in place after forward saved it."""


class Reading:
    """A graph's reads of one block's weights, as one forward saved them. While an object that
    stands for a saved tensor refers to it the block counts as read: "delayed" uploads nothing over
    these weights.

    Attributes:
        generation: that of the weights when the graph was built.
        clock: the time of that, in forwards of modules.
    """

    __slots__ = ("block", "clock", "generation")

    def __init__(self, block: Block, clock: int) -> None:
        self.block = block
        self.generation = block.generation
        self.clock = clock
        block.packed()

    def begin(self) -> None:
        """Backward reads the weights from here on: compute waits for the block's load.

        Raises:
            StaleGraphError: they were replaced since the graph was built.
        """
        self.block.unpacked(self.generation, self.clock)

    def __del__(self) -> None:
        self.block.released(self.generation)


class Handle:
    """Stands for a saved view of a streamed block's weights in a graph."""

    __slots__ = ("_bucket", "_offset", "_reading", "_shape", "_stride")

    def __init__(self, reading: Reading, bucket: Bucket, tensor: Tensor) -> None:
        self._reading = reading
        self._bucket = bucket
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset() - bucket.working.flat.storage_offset()

    def unpack(self) -> Tensor:
        """View the weights where they are now, in the saved shape and strides; raises
        StaleGraphError."""
        self._reading.begin()
        # Behind the use: only then is `working` the slot of this use.
        view = self._bucket.working.strided(self._shape, self._stride, self._offset)
        # With create_graph=True backward saves what it reads, past every hook, and the slot goes to
        # another block before that is needed.
        return view.clone() if torch.is_grad_enabled() else view


class PartHandle:
    """Stands for saved weights of a streamed block that are a DTensor: this rank holds a part."""

    __slots__ = ("_handle", "_like")

    def __init__(self, reading: Reading, bucket: Bucket, tensor: Tensor) -> None:
        self._handle = Handle(reading, bucket, local(tensor))
        # Mesh, placements and shape without the memory, which the slot's next block gets.
        self._like = rebuilt(tensor, torch.empty_like(local(tensor), device="meta"))

    def unpack(self) -> Tensor:
        """View this rank's part where it is now; raises StaleGraphError."""
        return rebuilt(self._like, self._handle.unpack())


class PassedOn:
    """Stands for a tensor that outer hooks have packed, those of a user's recompute for
    instance."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, outer: Hooks, tensor: Tensor) -> None:
        self._packed = outer[0](tensor)
        self._unpack = outer[1]

    def unpack(self) -> Tensor:
        return self._unpack(self._packed)


class WhileStreaming:
    """Stands for a tensor that is no weight, and reports how far backward is. Saved in the forward
    of streamed blocks it stands for them as well: [Note: Recompute without hooks]."""

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
        # Blocks whose forward came later give up their pins: the loads below need slots.
        self._residency.passed(self._clock)
        if type(self._packed) is tuple:
            tensor = unpack(self._packed)
        # Before the block's own use, since it may run other blocks again, which need slots too.
        else:
            with self._residency.unpacking():
                tensor = unpack(self._packed)
        for reading in self._readings:
            reading.begin()
        return tensor


def pass_on(tensor: Tensor, outer: Hooks | None) -> Kept | PassedOn:
    if outer is not None:
        return PassedOn(outer, tensor)
    # Detached: an operation that saves its own result would keep itself alive.
    saved = tensor.detach() if tensor.requires_grad else tensor
    return saved, saved._version


def unpack(packed: Any) -> Tensor:
    """Return the tensor that `packed` stands for.

    Raises:
        StaleGraphError: weights were replaced since the graph was built.
        ChangedInPlaceError: another tensor was changed since.
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
