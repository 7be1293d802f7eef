"""What autograd saves for backward, on the host: [Note: Offloaded saved tensors].

[Note: Offloaded saved tensors]
With activation = "offload_saved" nothing runs again. Whatever the model's forward saves goes the
way of [Note: Offloaded activations] in `step.activations`, if its memory has `offload_saved_above`
bytes or more. What moves is memory, not tensors: queries, keys and values cut out of one product
are one copy, and a tensor that several operations save is one. Backward views it as each of them
saved it. Weights and buffers of the model stay where they are: saving them elsewhere would not give
their memory back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from offloadtrain.engine.autograd.activation_offload import ActivationOffloader, OffloadedActivation
from offloadtrain.runtime.tensor_parts import is_distributed


class _View:
    """Stands for a saved tensor: how it views memory that is on the host."""

    __slots__ = ("_dtype", "_memory", "_offset", "_shape", "_stride")

    def __init__(self, memory: _Memory, tensor: Tensor) -> None:
        self._memory = memory
        self._dtype = tensor.dtype
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()

    def unpack(self) -> Tensor:
        whole = self._memory.unpack().view(self._dtype)
        return whole.as_strided(self._shape, self._stride, self._offset)


class _Memory:
    """Memory on the host; from its first use in backward until all its views are gone, on the
    device too."""

    __slots__ = ("__weakref__", "_back", "_moved", "version")

    def __init__(self, moved: OffloadedActivation, version: int) -> None:
        self._moved = moved
        self._back: Tensor | None = None
        self.version = version

    def unpack(self) -> Tensor:
        if self._back is None:
            self._back = self._moved.unpack()
        return self._back


class SavedOffloader:
    """Moves what a model's forward saves."""

    def __init__(self, offloader: ActivationOffloader, model: nn.Module, least_bytes: int) -> None:
        """`least_bytes`: smaller memory stays on the device."""
        self._offloader = offloader
        self._model = weakref.ref(model)
        self._least = least_bytes
        self._of_model: frozenset[int] = frozenset()
        self._known: dict[int, tuple[StorageWeakRef, weakref.ref[_Memory]]] = {}

    def begin(self) -> None:
        """A forward of the model begins."""
        model = self._model()
        assert model is not None  # it is running
        self._of_model = frozenset(_storages((*model.parameters(), *model.buffers())))
        self._known = {key: one for key, one in self._known.items() if not one[0].expired()}

    def wants(self, tensor: Tensor) -> bool:
        """Tell whether its memory is the forward's own, and large enough."""
        if (
            tensor.layout is not torch.strided
            or tensor.device.type != self._offloader.device.type
            or is_distributed(tensor)
        ):
            return False
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        return (
            nbytes >= max(self._least, 1)
            and nbytes % tensor.element_size() == 0
            and storage._cdata not in self._of_model
        )

    def offload(self, tensor: Tensor) -> _View:
        """Copy the memory of a tensor to the host, if it is not on its way already.

        Raises:
            ActivationError: memory was changed in place before its copy was done.
            HostMemoryError: beyond the host memory limit.
        """
        storage = tensor.untyped_storage()
        found = self._known.get(storage._cdata)
        memory = found[1]() if found is not None and not found[0].expired() else None
        if memory is None or memory.version != tensor._version:
            count = storage.nbytes() // tensor.element_size()
            whole = tensor.detach().as_strided((count,), (1,), 0).view(torch.uint8)
            memory = _Memory(self._offloader.offload(whole), tensor._version)
            self._known[storage._cdata] = StorageWeakRef(storage), weakref.ref(memory)
        return _View(memory, tensor)

    def reset(self) -> None:
        """The step was given up and the lanes are empty: forget all memory moved so far."""
        self._known.clear()
        self._offloader.reset()


Offloader = ActivationOffloader | SavedOffloader


def _storages(tensors: Iterable[Tensor]) -> Iterable[int]:
    for tensor in tensors:
        if not is_distributed(tensor):
            yield tensor.untyped_storage()._cdata
