"""Activation offload: the tensors of [Note: Offloaded activations] in
`step.program.activations`.

[Note: Offloaded saved tensors]
With activation = "offload_saved" nothing is recomputed. Every tensor that the model's forward
saves is offloaded as in [Note: Offloaded activations] in `step.program.activations`, if its storage
has `offload_saved_above` bytes or more. The unit is the storage, not the tensor: queries, keys and
values cut out of one product are one copy, and a tensor that several operations save is one.
Backward recreates each saved tensor as a view of the copy. A copy is valid for one version of one
version counter, which a tensor shares with its views. Other tensors may share the storage and be
changed in place without changing this version (the gates of an LSTM's cell, which `unsafe_chunk`
cuts): they get their own copies. Weights and buffers of the model stay where they are: copying them
to the host would not free their memory.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from functools import partial
from itertools import count
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.config.units import format_bytes
from offloadtrain.engine.buffers import BlockInputs
from offloadtrain.engine.interpreter import Interpreter
from offloadtrain.runtime.dtypes import name_of
from offloadtrain.runtime.process_group import ALONE, Ranks
from offloadtrain.runtime.tensor_parts import is_distributed
from offloadtrain.step.program.program import Program


class ActivationError(OffloadTrainError):
    """A block input was changed before its copy to the host was complete, or its step was
    abandoned."""


class OffloadedActivation:
    """Replaces a block input in a graph; its host memory is freed with the graph."""

    __slots__ = ("_number", "_offloader", "like")

    def __init__(self, offloader: ActivationOffloader, number: int, tensor: Tensor) -> None:
        self._offloader = offloader
        self._number = number
        self.like = torch.empty_like(tensor, device="meta")

    def unpack(self) -> Tensor:
        return self._offloader.fetch(self._number)

    # Runs on any thread, even in the middle of a launch: it only appends to a queue.
    def __del__(self) -> None:
        self._offloader.dropped.append(self._number)


class ActivationOffloader:
    """Reports block inputs to the program when they are saved, needed or dropped.

    Attributes:
        device: the compute device.
        dropped: numbers of inputs whose graph was freed, not yet reported to the program: a graph
            may be freed at any moment, on any thread.
    """

    def __init__(
        self,
        program: Program,
        interpreter: Interpreter,
        tensors: BlockInputs,
        parts: Ranks = ALONE,
    ) -> None:
        """`parts`: the ranks that have equal inputs, if each of them stores a part; else
        `ALONE`."""
        self._program = program
        self._parts = parts if program.spec.input_parts > 1 else ALONE
        self._compares = not self._parts.is_single
        self._interpreter = interpreter
        self._tensors = tensors
        self._numbers = count()
        self.device = tensors.device
        self.dropped: deque[int] = deque()

    def wants(self, tensor: Tensor) -> bool:
        """Return True if the tensor is a block input that can be moved in one flat copy."""
        return (
            tensor.requires_grad
            and tensor.is_floating_point()
            and tensor.layout is torch.strided
            and tensor.device.type == self.device.type
            and tensor.numel() > 0
            and tensor.is_contiguous()
            and not is_distributed(tensor)
        )

    def offload(self, tensor: Tensor) -> OffloadedActivation:
        """Copy a tensor of the compute device to the host; its device memory is freed after the
        copy.

        Raises:
            ActivationError: an earlier input was changed in place before its copy was complete.
            HostMemoryError: the host memory limit is exceeded.
        """
        # First, so that this input can use host buffers that have become free.
        self._tell_dropped()
        if self._compares:
            self._compare(tensor)
        number, flat = next(self._numbers), tensor.detach().view(-1)
        offloaded = OffloadedActivation(self, number, tensor)
        # Keeps the tensor alive after autograd has released it: d2h still reads it.
        self._tensors.leaving[number] = flat, flat._version
        self._tensors.likes[number] = offloaded.like
        saved = self._program.activation_saved
        self._interpreter.run(saved, number, flat.numel(), name_of(tensor.dtype))
        self._check_freed()
        return offloaded

    def fetch(self, number: int) -> Tensor:
        """Return the input on the device; compute waits for it.

        Raises:
            ActivationError: the input's step was abandoned, or an input was changed in place.
        """
        if number not in self._tensors.likes:
            raise ActivationError(
                "a block input is needed whose step was given up after an exception: run the "
                "forward again before backward"
            )
        self._tell_dropped()
        # The first forward is over; later forwards make their inputs in the same way.
        self._compares = False
        # Compute waits for this input only; the next input is loaded during this block's backward.
        self._interpreter.run(self._program.activation_needed, number)
        self._check_freed()
        if number in self._tensors.leaving:  # not freed yet: it is returned from there
            _check_unchanged(*self._tensors.leaving[number])
        # Autograd owns it from here on and frees it in the order of compute, which has waited.
        return self._tensors.take(number)

    def _compare(self, tensor: Tensor) -> None:
        """Compare the inputs of the first forward among the ranks that are to store parts of them.

        Raises:
            ActivationError: the inputs differ, so that their parts would not form a tensor.
        """
        checksum = crc32(tensor.detach().cpu().view(-1).view(torch.uint8).numpy().tobytes())
        checksums = self._parts.all_gather_host([checksum])
        if not bool((checksums == checksums[0]).all()):
            raise ActivationError(
                f"a block input of shape {tuple(tensor.shape)} differs among the "
                f"{self._parts.size} ranks of 'tp', so they cannot keep a part of it each: with "
                "sequence parallel, or another dropout on each rank, leave out "
                "partition_activations"
            )

    def reset(self) -> None:
        """The step was abandoned and the lanes are empty: drop all inputs saved so far."""
        self._tensors.clear()

    def _tell_dropped(self) -> None:
        while self.dropped:
            number = self.dropped.popleft()
            if self._tensors.likes.pop(number, None) is not None:
                self._interpreter.run(self._program.activation_dropped, number)

    def _check_freed(self) -> None:
        # A write on compute may have run before, during or after the copy: its bytes cannot be
        # trusted. This drops the last reference to the tensor.
        while self._tensors.freed:
            _check_unchanged(*self._tensors.freed.pop())


def _check_unchanged(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise ActivationError(
            f"memory of {tensor.nbytes} bytes that goes to the host was changed in place "
            "after it had been saved for backward: write x = x + y in place of x += y, or "
            "set activation = 'recompute' or 'keep'"
        )


_log = logging.getLogger(__name__)


class _View:
    """Replaces a saved tensor: describes its view of storage that is on the host."""

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
    """A storage on the host; also on the device from its first use in backward until its views are
    freed.

    Attributes:
        version: version of the tensors at the time of the copy.
    """

    __slots__ = ("__weakref__", "_back", "_moved", "_root", "_storage", "version")

    def __init__(self, moved: OffloadedActivation, root: Tensor, version: int) -> None:
        """`root`: the tensor whose version counter is compared."""
        self._moved = moved
        self._back: Tensor | None = None
        # A weak reference keeps the tensor's address, the key of `_known`, from being reused.
        self._root = torch._C._WeakTensorRef(root)  # type: ignore[attr-defined]
        self._storage = StorageWeakRef(root.untyped_storage())
        self.version = version

    def stands_for(self, tensor: Tensor) -> bool:
        """Return True if this is a copy of the tensor's bytes: its storage is the copied storage,
        it shares the version counter, and it was not changed in place since."""
        same = self._storage.cdata == tensor.untyped_storage()._cdata
        return same and not self._storage.expired() and self.version == tensor._version

    def unpack(self) -> Tensor:
        if self._back is None:
            self._back = self._moved.unpack()
        return self._back


class SavedOffloader:
    """Offloads the tensors that a model's forward saves."""

    def __init__(self, offloader: ActivationOffloader, model: nn.Module, least_bytes: int) -> None:
        """`least_bytes`: storages with fewer bytes stay on the device."""
        self._offloader = offloader
        self._model = weakref.ref(model)
        self._least = least_bytes
        self._known: dict[int, weakref.ref[_Memory]] = {}
        """Address of a tensor with a version counter → copy of its storage; weak."""
        self._largest = 0  # bytes of the largest storage below the limit
        self._is_settled = False  # something was offloaded, or the user was warned that nothing is
        self._of_model = _storages(model)

    def begin(self) -> None:
        """A forward of the model begins."""
        model = self._model()
        assert model is not None  # it is running
        self._of_model = _storages(model)  # the user may have replaced a buffer
        if self._largest and not self._is_settled:
            self._is_settled = True
            _log.warning(
                "activation = 'offload_saved' has moved nothing: the largest memory that forward "
                "saved has %s, and offload_saved_above is %s: set it lower, or activation = 'keep'",
                format_bytes(self._largest),
                format_bytes(self._least),
            )

    def wants(self, tensor: Tensor) -> bool:
        """Return True if the storage does not belong to the model and is large enough."""
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
        """Copy the storage of a tensor to the host, unless a valid copy exists.

        Raises:
            ActivationError: memory was changed in place before its copy was complete.
            HostMemoryError: the host memory limit is exceeded.
        """
        root = tensor if tensor._base is None else tensor._base
        key = root._cdata
        ref = self._known.get(key)
        memory = ref() if ref is not None else None
        if memory is None or not memory.stands_for(tensor):
            count = tensor.untyped_storage().nbytes() // tensor.element_size()
            # The raw bytes of the storage, without lazy conjugate and negative bits.
            view = tensor.detach()
            view = view.conj() if view.is_conj() else view
            view = torch._neg_view(view) if view.is_neg() else view
            flat = view.as_strided((count,), (1,), 0).view(torch.uint8)
            memory = _Memory(self._offloader.offload(flat), root, tensor._version)
            self._known[key] = weakref.ref(memory, partial(_forget, self._known, key))
            self._is_settled = True
        return _View(memory, tensor)

    def reset(self) -> None:
        """The step was abandoned and the lanes are empty: forget all copies made so far."""
        self._known.clear()
        self._offloader.reset()


Offloader = ActivationOffloader | SavedOffloader


def _forget(known: dict[int, Any], key: int, gone: weakref.ref[_Memory]) -> None:
    # Runs on any thread. The tensor may have a newer copy by now.
    if known.get(key) is gone:
        del known[key]


def _storages(model: nn.Module) -> frozenset[int]:
    """Return the addresses of the storages of the model's parameters and buffers."""
    tensors = (
        tensor for tensor in (*model.parameters(), *model.buffers()) if not is_distributed(tensor)
    )
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)
