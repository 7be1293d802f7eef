"""What autograd saves for backward, on the host: [Note: Offloaded saved tensors].

[Note: Offloaded saved tensors]
With activation = "offload_saved" nothing runs again. Whatever the model's forward saves goes the
way of [Note: Offloaded activations] in `step.program.activations`, if its memory has
`offload_saved_above` bytes or more. What moves is memory, not tensors: queries, keys and values cut
out of one product are one copy, and a tensor that several operations save is one. Backward views it
as each of them saved it. A copy stands for tensors of one version of one version counter: a tensor
and its views. Others may share the memory and be changed in place without it (the gates of an
LSTM's cell, which `unsafe_chunk` cuts): they get copies of their own. Weights and buffers of the
model stay where they are: saving them elsewhere would not give their memory back.
"""

from __future__ import annotations

import logging
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from offloadtrain.config.units import format_bytes
from offloadtrain.engine.autograd.activation_offload import ActivationOffloader, OffloadedActivation
from offloadtrain.runtime.tensor_parts import is_distributed

_log = logging.getLogger(__name__)


class _View:
    """Stands for a saved tensor: how it views memory that is on the host."""

    __slots__ = ("_conj", "_dtype", "_memory", "_neg", "_offset", "_shape", "_stride")

    def __init__(self, memory: _Memory, tensor: Tensor) -> None:
        self._memory = memory
        self._dtype = tensor.dtype
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()
        self._conj, self._neg = tensor.is_conj(), tensor.is_neg()

    def unpack(self) -> Tensor:
        flat = self._memory.unpack().view(self._dtype)
        view = flat.as_strided(self._shape, self._stride, self._offset)
        view = view.conj() if self._conj else view
        return torch._neg_view(view) if self._neg else view


class _Memory:
    """Memory on the host; from its first use in backward until all its views are gone, on the
    device too.

    Attributes:
        version: that of the tensors which it was copied for.
    """

    __slots__ = ("__weakref__", "_back", "_moved", "_root", "_storage", "version")

    def __init__(self, moved: OffloadedActivation, root: Tensor, version: int) -> None:
        """`root`: the tensor whose version counter it is."""
        self._moved = moved
        self._back: Tensor | None = None
        # While it refers to the tensor no other one gets its address, which `_known` goes by.
        self._root = torch._C._WeakTensorRef(root)  # type: ignore[attr-defined]
        self._storage = StorageWeakRef(root.untyped_storage())
        self.version = version

    def stands_for(self, tensor: Tensor) -> bool:
        """Tell whether the bytes of a tensor of the same counter are those that were copied."""
        same = self._storage.cdata == tensor.untyped_storage()._cdata
        return same and not self._storage.expired() and self.version == tensor._version

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
        self._known: dict[int, weakref.ref[_Memory]] = {}
        """A tensor with a version counter → what its memory was moved to; gone with that."""
        self._largest = 0  # of what is too small
        self._is_settled = False  # something was moved, or the user knows that nothing is
        self._of_model = _storages(model)

    def begin(self) -> None:
        """A forward of the model begins."""
        model = self._model()
        assert model is not None  # it is running
        self._of_model = _storages(model)  # a buffer may be another tensor by now
        if self._largest and not self._is_settled:
            self._is_settled = True
            _log.warning(
                "activation = 'offload_saved' has moved nothing: the largest memory that forward "
                "saved has %s, and offload_saved_above is %s: set it lower, or activation = 'keep'",
                format_bytes(self._largest),
                format_bytes(self._least),
            )

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
        if storage._cdata in self._of_model or nbytes % tensor.element_size():
            return False
        if nbytes < max(self._least, 1):
            self._largest = max(self._largest, nbytes)
            return False
        return True

    def offload(self, tensor: Tensor) -> _View:
        """Copy the memory of a tensor to the host, if it is not on its way already.

        Raises:
            ActivationError: memory was changed in place before its copy was done.
            HostMemoryError: beyond the host memory limit.
        """
        root = tensor if tensor._base is None else tensor._base
        key = root._cdata
        ref = self._known.get(key)
        memory = ref() if ref is not None else None
        if memory is None or not memory.stands_for(tensor):
            count = tensor.untyped_storage().nbytes() // tensor.element_size()
            flat = _as_in_memory(tensor).as_strided((count,), (1,), 0).view(torch.uint8)
            memory = _Memory(self._offloader.offload(flat), root, tensor._version)
            self._known[key] = weakref.ref(memory, partial(_forget, self._known, key))
            self._is_settled = True
        return _View(memory, tensor)

    def reset(self) -> None:
        """The step was given up and the lanes are empty: forget all memory moved so far."""
        self._known.clear()
        self._offloader.reset()


Offloader = ActivationOffloader | SavedOffloader


def _forget(known: dict[int, Any], key: int, gone: weakref.ref[_Memory]) -> None:
    # On any thread. The tensor may have newer memory by now.
    if known.get(key) is gone:
        del known[key]


def _as_in_memory(tensor: Tensor) -> Tensor:
    """View a tensor without its lazy conjugate and negative bits."""
    view = tensor.detach()
    view = view.conj() if view.is_conj() else view
    return torch._neg_view(view) if view.is_neg() else view


def _storages(model: nn.Module) -> frozenset[int]:
    """Return the memory of a model's own tensors."""
    tensors = (
        tensor for tensor in (*model.parameters(), *model.buffers()) if not is_distributed(tensor)
    )
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)
