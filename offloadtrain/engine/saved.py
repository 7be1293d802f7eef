"""Saved weights become handles.

[Note: Handles]
Autograd saves weights for backward and never notices that an upload replaced them: the version
counter of a parameter that views a flat buffer does not move. So every saved tensor that lies in a
block's flat buffer is replaced by a handle that knows the block's generation; unpacking with an
old one raises. The hooks that do this are pushed by each block's own pre-forward hook, innermost,
and
chained to whatever hooks are active (recompute pushes its own): pushed once around the whole
forward they would miss everything that runs again in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket
from offloadtrain.engine.parking import Parked, Parking
from offloadtrain.engine.streamer import Streamer, StreamError

_autograd = (
    torch._C._autograd
)  # the public context manager cannot be chained: it hides the outer hooks

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Handle:
    """Stands for a saved view of a block's weights in a graph."""

    __slots__ = ("_bucket", "_offset", "_stride", "block", "generation", "shape")

    def __init__(self, block: Block, bucket: Bucket, tensor: Tensor) -> None:
        self.block = block
        self.generation = block.generation
        self.shape = tensor.shape
        self._bucket = bucket
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset() - bucket.working.flat.storage_offset()
        block.packed()

    def view(self) -> Tensor:
        """The weights, if they are still those of the graph; raises StaleGraphError otherwise."""
        self.block.unpacked(self.generation)
        flat = self._bucket.working.flat
        offset = flat.storage_offset() + self._offset
        return torch.as_strided(flat, self.shape, self._stride, offset)

    def __del__(self) -> None:
        self.block.released()


class SavedWeights:
    """Finds the block that a tensor's bytes belong to, and packs such tensors as handles."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[Block, Bucket]] = {}
        self._absent: dict[int, Block] = {}
        self._streamer: Streamer | None = None

    def register(self, block: Block) -> None:
        """Of a block that stays on the device."""
        for bucket in block.buckets:
            self._owners[_address(bucket.working.flat)] = (block, bucket)

    def register_streamed(self, streamer: Streamer) -> None:
        """Blocks whose place on the device is the streamer's to tell."""
        self._streamer = streamer
        for block in streamer.blocks:
            for bucket in block.held:
                self._absent[_address(block.placeholder(bucket))] = block

    def owner(self, tensor: Tensor) -> Block | None:
        """The block whose working weights this tensor is a view of.

        Raises:
            StreamError: if they are not on the device.
        """
        found = self._find(tensor)
        return found[0] if found else None

    def push(self, parking: Parking | None = None) -> bool:
        """Make the hooks the innermost of this thread; False where they are so already or not
        needed. `parking`: what is not a weight, and wants to, is parked."""
        if not torch.is_grad_enabled():
            return False
        outer: _Hooks | None = _autograd._top_saved_tensors_default_hooks(False)
        innermost = getattr(outer[0], "__self__", None) if outer is not None else None
        if isinstance(innermost, _Chain):
            if innermost.parking is parking:
                return False
            outer = innermost.outer
        chain = _Chain(self, outer, parking)
        _autograd._push_saved_tensors_default_hooks(chain.pack, chain.unpack)
        return True

    @staticmethod
    def pop() -> None:
        _autograd._pop_saved_tensors_default_hooks()

    def handle(self, tensor: Tensor) -> Handle | None:
        found = self._find(tensor)
        if found is None or tensor.dtype != found[1].dtype:
            return None
        return Handle(*found, tensor)

    def _find(self, tensor: Tensor) -> tuple[Block, Bucket] | None:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return None
        try:
            address = _address(tensor)
        except RuntimeError:  # tensor subclasses without storage cannot lie in a flat buffer
            return None
        if address in self._absent:
            raise StreamError(
                f"weights of block '{self._absent[address].name}' are read outside its forward, "
                "while they are on the host: only modules that are called can be streamed. Leave "
                "this one on the device: working = 'device', or more resident_blocks"
            )
        found = self._owners.get(address)
        if found is None and self._streamer is not None:
            found = self._streamer.owner(tensor)
        return found


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Chain:
    """Our hooks over the ones that were active when they were pushed."""

    __slots__ = ("_saved", "outer", "parking")

    def __init__(self, saved: SavedWeights, outer: _Hooks | None, parking: Parking | None) -> None:
        self._saved = saved
        self.outer = outer
        self.parking = parking

    def pack(self, tensor: Tensor) -> Any:
        handle = self._saved.handle(tensor)
        if handle is not None:
            return handle
        if self.parking is not None and self.parking.wants(tensor):
            return self.parking.park(tensor)
        return tensor if self.outer is None else (self.outer[1], self.outer[0](tensor))

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Handle):
            return packed.view()
        if isinstance(packed, Parked):
            return packed.unpack()
        if isinstance(packed, tuple):
            unpack_outer, inner = packed
            return unpack_outer(inner)  # type: ignore[no-any-return]
        return packed  # type: ignore[no-any-return]
