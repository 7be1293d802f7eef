"""Block inputs on the host: what recompute keeps goes down in forward and comes up in backward.

[Note: Parking]
With activation = "offload" the inputs that a block's recompute starts from are *parked*: copied to
pinned memory on the d2h lane as soon as they are saved, and let go of on the device. In backward
they come back on the load lane, each one ahead of its use: the last parked is needed first. The
device memory of a parked tensor must outlive its copy, so a short queue holds it, and compute waits
for the copy before the queue lets go: torch's allocator gives memory out again in the order of
compute. Host memory is kept by size and used again from the second micro-step on.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.runtime.lanes import PARKED, Buffer, Lane, LaneEvent, Lanes, copy

_LEAVING = 2
"""Tensors whose copy may be in flight."""


class ParkingError(OffloadTrainError):
    """A block input changed while it was on its way to the host."""


class _Berth:
    """Host memory of one parked tensor."""

    __slots__ = ("free_after", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.free_after: LaneEvent | None = None

    def buffer(self, dtype: torch.dtype) -> Buffer:
        return Buffer("parked input", self.memory.view(dtype))


class Parked:
    """Stands for a block input in a graph; gives its host memory back when the graph goes."""

    __slots__ = ("__weakref__", "_yard", "before", "berth", "like", "returning")

    def __init__(self, yard: Parking, berth: _Berth, tensor: Tensor) -> None:
        self._yard = yard
        self.berth = berth
        self.like = torch.empty_like(tensor, device="meta")
        self.before: weakref.ref[Parked] | None = None
        """Parked just before this one in the same forward."""
        self.returning: tuple[LaneEvent, Tensor] | None = None
        """On the device again after the event."""

    def unpack(self) -> Tensor:
        return self._yard.bring_back(self)

    def __del__(self) -> None:
        self._yard.abandon(self)


class Parking:
    """Where block inputs wait for their backward."""

    def __init__(
        self, lanes: Lanes, device: torch.device, allocate: Callable[[int], Tensor]
    ) -> None:
        """`allocate`: maps so many bytes of host memory, uint8."""
        self._lanes = lanes
        self._device = device
        self._allocate = allocate
        self._free: dict[int, list[_Berth]] = {}
        self._leaving: deque[tuple[LaneEvent, Tensor, int]] = deque()
        """After the event nobody but compute needs the tensor; its version when it was saved."""
        self._last: weakref.ref[Parked] | None = None

    def wants(self, tensor: Tensor) -> bool:
        """Whether it is a block input that crosses the bus in one piece."""
        return (
            tensor.requires_grad
            and tensor.is_floating_point()
            and tensor.layout is torch.strided
            and tensor.device.type == self._device.type
            and tensor.numel() > 0
            and tensor.is_contiguous()
        )

    def restart(self) -> None:
        """Another forward begins."""
        self._last = None

    def park(self, tensor: Tensor) -> Parked:
        """Copy a tensor to the host; its device memory is free once the copy is done."""
        flat = tensor.detach().view(-1)
        berth = self._berth(flat.numel() * flat.element_size())
        if berth.free_after is not None:
            self._lanes.wait(Lane.D2H, berth.free_after, "the host memory of a block input")
            berth.free_after = None
        ready = self._lanes.record(Lane.COMPUTE)
        self._lanes.wait(Lane.D2H, ready, "a block input is computed")
        source, target = Buffer("block input", flat).whole, berth.buffer(tensor.dtype).whole
        self._lanes.launch(Lane.D2H, PARKED[0], copy, [source], [target])
        self._leaving.append((self._lanes.record(Lane.D2H), flat, flat._version))
        self._let_go(_LEAVING)
        parked = Parked(self, berth, tensor)
        parked.before, self._last = self._last, weakref.ref(parked)
        return parked

    def bring_back(self, parked: Parked) -> Tensor:
        """On the device again, and on its way the one that will be needed next."""
        self._let_go(0)
        event, tensor = parked.returning or self._load(parked)
        parked.returning = None
        before = parked.before() if parked.before is not None else None
        if before is not None and before.returning is None:
            before.returning = self._load(before)
        self._lanes.wait(Lane.COMPUTE, event, "a block input is back")
        return tensor

    def abandon(self, parked: Parked) -> None:
        """Its graph is gone. Called at any moment: only lists change."""
        if parked.returning is not None:
            event, tensor = parked.returning
            self._leaving.append((event, tensor, tensor._version))
        size = parked.berth.memory.numel()
        self._free.setdefault(size, []).append(parked.berth)

    def _berth(self, nbytes: int) -> _Berth:
        free = self._free.get(nbytes)
        return free.pop() if free else _Berth(self._allocate(nbytes))

    def _load(self, parked: Parked) -> tuple[LaneEvent, Tensor]:
        tensor = torch.empty_like(parked.like, device=self._device)
        # The allocator may have taken this memory from what compute still works on.
        ready = self._lanes.record(Lane.COMPUTE)
        self._lanes.wait(Lane.LOAD, ready, "the device memory of a block input")
        source = parked.berth.buffer(tensor.dtype).whole
        target = Buffer("block input", tensor.view(-1)).whole
        self._lanes.launch(Lane.LOAD, PARKED[1], copy, [source], [target])
        parked.berth.free_after = self._lanes.record(Lane.LOAD)
        return parked.berth.free_after, tensor

    def _let_go(self, keep: int) -> None:
        while len(self._leaving) > keep:
            event, tensor, version = self._leaving.popleft()
            self._lanes.wait(Lane.COMPUTE, event, "the copy of a block input")
            if tensor._version != version:
                raise ParkingError(
                    f"a block input of {tensor.numel()} elements was changed in place after its "
                    "block had saved it: write x = x + y in place of x += y between blocks, or set "
                    "activation = 'recompute'"
                )
