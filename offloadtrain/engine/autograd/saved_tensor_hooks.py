"""Saved-tensor hooks: saved weights become handles, other saved tensors remember their block.

[Note: Handles]
Autograd saves weights for backward and does not notice that an upload replaced them: the version
counter of a parameter that views a flat buffer does not change. So every saved tensor that lies in
a block's flat buffer is replaced by a handle that knows the block's generation; unpacking an old
one raises an error. The hooks are pushed by each block's own pre-forward hook, innermost, and
chained to the hooks that are active (recompute pushes its own). Pushed once around the whole
forward, they would miss all that runs again in backward.

[Note: Recompute without hooks]
A user's recompute may start inside a module's forward, behind its hooks (`checkpoint` around
`forward`, as in transformers): no hook fires when it runs again. But it starts from saved inputs.
So every tensor saved inside the forward of a streamed block also stands for that block: unpacking
it loads the block. Until it is freed the graph counts as reading the block's weights, which such a
recompute leaves in the graph as plain views of the slot.

Saved tensors that pass through hooks lose autograd's check for changes in place; it is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine.autograd.activation_offload import ActivationOffloader, OffloadedActivation
from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket
from offloadtrain.engine.residency import Residency
from offloadtrain.step.streaming import StreamError

# The public context manager cannot be chained: it hides the outer hooks.
_autograd = torch._C._autograd

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

_UNPACK = methodcaller("unpack")
"""Every class here that stands for a tensor has the method."""


class ChangedInPlaceError(OffloadTrainError):
    """A tensor that backward needs was changed in place after forward saved it."""


class Handle:
    """Stands for a saved view of a block's weights in a graph."""

    __slots__ = ("_bucket", "_offset", "_stride", "block", "clock", "generation", "shape")

    def __init__(self, block: Block, bucket: Bucket, tensor: Tensor, clock: int) -> None:
        self.block = block
        self.generation = block.generation
        self.clock = clock
        self.shape = tensor.shape
        self._bucket = bucket
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset() - bucket.working.flat.storage_offset()
        # Until `__del__` the block counts as read: "delayed" uploads nothing over these weights.
        block.packed()

    def unpack(self) -> Tensor:
        """View the weights where they are now, in the saved shape and strides.

        Raises:
            StaleGraphError: they were replaced since the graph was built.
        """
        # Compute waits for the block's load here. Only then is `working` the slot of this use.
        self.block.unpacked(self.generation, self.clock)
        flat = self._bucket.working.flat
        offset = flat.storage_offset() + self._offset
        return torch.as_strided(flat, self.shape, self._stride, offset)

    def __del__(self) -> None:
        self.block.released()


class SavedTensor:
    """Stands for a saved tensor that is no weight."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached: an operation that saves its own result would keep itself alive.
        self._tensor = tensor.detach() if tensor.requires_grad else tensor
        self._version = tensor._version

    def unpack(self) -> Tensor:
        """Return the tensor; raises ChangedInPlaceError if it was changed since."""
        if self._tensor._version != self._version:
            raise ChangedInPlaceError(
                f"a tensor of shape {tuple(self._tensor.shape)} that backward needs was changed in "
                f"place after it was saved: it is at version {self._tensor._version}, and was at "
                f"{self._version}. Write x = x + y in place of x += y; "
                "torch.autograd.set_detect_anomaly(True) tells where it was saved"
            )
        return self._tensor


class PassedOn:
    """Stands for a tensor that outer hooks have packed, those of a user's recompute for
    instance."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, outer: _Hooks, tensor: Tensor) -> None:
        self._packed = outer[0](tensor)
        self._unpack = outer[1]

    def unpack(self) -> Tensor:
        return self._unpack(self._packed)


class WhileStreaming:
    """Stands for a tensor that is no weight, and reports how far backward is. Saved in the forward
    of streamed blocks it stands for them as well: [Note: Recompute without hooks]."""

    __slots__ = ("_blocks", "_clock", "_generations", "_packed", "_residency")

    def __init__(
        self,
        packed: SavedTensor | PassedOn | OffloadedActivation,
        residency: Residency,
        blocks: tuple[Block, ...],
        clock: int,
    ) -> None:
        self._packed = packed
        self._residency = residency
        self._blocks = blocks
        self._clock = clock
        self._generations = [block.generation for block in blocks]
        for block in blocks:
            block.packed()

    def unpack(self) -> Tensor:
        # Blocks whose forward came later give up their pins: the loads below need slots.
        self._residency.passed(self._clock)
        # Before the block's own use, since it may run other blocks again, which need slots too.
        with self._residency.unpacking():
            tensor = self._packed.unpack()
        for block, generation in zip(self._blocks, self._generations, strict=True):
            block.unpacked(generation, self._clock)
        return tensor

    def __del__(self) -> None:
        for block in self._blocks:
            block.released()


class SavedTensors:
    """Finds the block that a tensor's bytes belong to, and packs what autograd saves.

    Attributes:
        within: streamed blocks whose forward is running.
    """

    def __init__(self) -> None:
        self.within: tuple[Block, ...] = ()
        self._clock = 0
        """Counts forwards of modules: what is saved later has a higher number."""
        self._owners: dict[int, tuple[Block, Bucket]] = {}
        self._absent: dict[int, Block] = {}
        self._residency: Residency | None = None

    def register(self, block: Block) -> None:
        """Add a block that stays on the device."""
        for bucket in block.buckets:
            self._owners[_address(bucket.working.flat)] = (block, bucket)

    def register_streamed(self, residency: Residency) -> None:
        """Add the streamed blocks, whose memory on the device changes."""
        self._residency = residency
        for block in residency.streamed:
            for bucket in block.held:
                self._absent[_address(block.placeholder(bucket))] = block

    def owner(self, tensor: Tensor) -> Block | None:
        """Return the block whose working weights this tensor views, if any.

        Raises:
            StreamError: if they are not on the device.
        """
        found = self._find(tensor)
        return found[0] if found else None

    def push(self, offloader: ActivationOffloader | None = None) -> bool:
        """Make the hooks the innermost of this thread; returns False if they are already, or not
        needed. `offloader`: offloads block inputs."""
        if not torch.is_grad_enabled():
            return False
        own, outer = _innermost()
        if own is not None and own.offloader is offloader:
            return False
        chain = _Chain(self, outer, offloader)
        _autograd._push_saved_tensors_default_hooks(chain.pack, _UNPACK)
        return True

    @staticmethod
    def pop() -> None:
        _autograd._pop_saved_tensors_default_hooks()

    def enter(self, blocks: Sequence[Block], *, again: bool) -> tuple[Block, ...]:
        """A forward that reads these blocks begins; returns the previous `within`."""
        outside = self.within
        self._clock += 1
        for block in blocks:
            block.clock = block.clock if again else self._clock
        self.within = tuple(block for block in blocks if block.streamed) or outside
        return outside

    def pack(
        self, tensor: Tensor, outer: _Hooks | None, offloader: ActivationOffloader | None
    ) -> Any:
        """Return the object that stands for a tensor in the graph; `outer`: the hooks that were
        active before."""
        found = self._find(tensor)
        if found is not None and tensor.dtype == found[1].dtype:
            return Handle(*found, tensor, self._clock)
        packed: SavedTensor | PassedOn | OffloadedActivation
        if offloader is not None and offloader.wants(tensor):
            packed = offloader.offload(tensor)
        else:
            packed = SavedTensor(tensor) if outer is None else PassedOn(outer, tensor)
        if self._residency is None:
            return packed
        return WhileStreaming(packed, self._residency, self.within, self._clock)

    def _find(self, tensor: Tensor) -> tuple[Block, Bucket] | None:
        # A fake tensor is asked for nothing: each answer is an operation that is dispatched.
        fake = isinstance(tensor, FakeTensor)
        if tensor.layout is not torch.strided or (not fake and tensor.is_meta):
            return None
        try:
            address = _address(tensor)
        # Tensor subclasses without storage cannot lie in a flat buffer.
        except RuntimeError:
            return None
        if address in self._absent:
            raise StreamError(
                f"weights of block '{self._absent[address].name}' are read outside its forward, "
                "while they are on the host: only modules that are called can be streamed. Leave "
                "this one on the device: working = 'device', or more resident_blocks"
            )
        found = self._owners.get(address)
        if found is None and self._residency is not None:
            found = self._residency.owner(tensor)
        return found


def in_checkpoint() -> bool:
    """Tell whether tensors saved now go to a user's recompute (torch's non-reentrant
    checkpoint)."""
    outer = _innermost()[1]
    return outer is not None and outer[0].__module__ == checkpoint.__module__


def _innermost() -> tuple[_Chain | None, _Hooks | None]:
    """Return the engine's hooks if they are the innermost of this thread, and those around them."""
    hooks: _Hooks | None = _autograd._top_saved_tensors_default_hooks(False)
    own = getattr(hooks[0], "__self__", None) if hooks is not None else None
    return (own, own.outer) if isinstance(own, _Chain) else (None, hooks)


def _address(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    # A fake tensor's storage has no memory: the object itself stands for it.
    return storage._cdata if isinstance(tensor, FakeTensor) else storage.data_ptr()


class _Chain:
    """Our hooks over the ones that were active when they were pushed."""

    __slots__ = ("_saved", "offloader", "outer")

    def __init__(
        self, saved: SavedTensors, outer: _Hooks | None, offloader: ActivationOffloader | None
    ) -> None:
        self._saved = saved
        self.outer = outer
        self.offloader = offloader

    def pack(self, tensor: Tensor) -> Any:
        return self._saved.pack(tensor, self.outer, self.offloader)
