"""Activation offload: the tensors of [Note: Offloaded activations] in
`step.program.activations`.

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
    """A block input changed while it was copied to the host, or its step was given up."""


class OffloadedActivation:
    """Stands for a block input in a graph; its host memory is free when the graph is freed."""

    __slots__ = ("_number", "_offloader", "like")

    def __init__(self, offloader: ActivationOffloader, number: int, tensor: Tensor) -> None:
        self._offloader = offloader
        self._number = number
        self.like = torch.empty_like(tensor, device="meta")

    def unpack(self) -> Tensor:
        return self._offloader.fetch(self._number)

    # On any thread, in the midst of a launch even: only a queue is touched.
    def __del__(self) -> None:
        self._offloader.dropped.append(self._number)


class ActivationOffloader:
    """Reports block inputs to the program: saved, needed, gone.

    Attributes:
        device: the compute device.
        dropped: numbers of inputs whose graph is gone and not yet reported: a graph may be freed at
            any moment, on any thread.
    """

    def __init__(
        self,
        program: Program,
        interpreter: Interpreter,
        tensors: BlockInputs,
        parts: Ranks = ALONE,
    ) -> None:
        """`parts`: the ranks that have the same inputs, where each keeps a part."""
        self._program = program
        self._parts = parts if program.spec.input_parts > 1 else ALONE
        self._compares = not self._parts.is_single
        self._interpreter = interpreter
        self._tensors = tensors
        self._numbers = count()
        self.device = tensors.device
        self.dropped: deque[int] = deque()

    def wants(self, tensor: Tensor) -> bool:
        """Tell whether it is a block input that crosses the bus in one flat copy."""
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
        """Copy a tensor of the compute device to the host; its device memory is free once the copy
        is done.

        Raises:
            ActivationError: an earlier input was changed in place before its copy was done.
            HostMemoryError: beyond the host memory limit.
        """
        # First, so that this input can take a host buffer that is free by now.
        self._tell_dropped()
        if self._compares:
            self._compare(tensor)
        number, flat = next(self._numbers), tensor.detach().view(-1)
        offloaded = OffloadedActivation(self, number, tensor)
        # Holds the tensor after autograd has let go of it: d2h still reads it.
        self._tensors.leaving[number] = flat, flat._version
        self._tensors.likes[number] = offloaded.like
        saved = self._program.activation_saved
        self._interpreter.run(saved, number, flat.numel(), name_of(tensor.dtype))
        self._check_freed()
        return offloaded

    def fetch(self, number: int) -> Tensor:
        """Return the input on the device again; compute waits for it.

        Raises:
            ActivationError: the input's step was given up, or one was changed in place.
        """
        if number not in self._tensors.likes:
            raise ActivationError(
                "a block input is needed whose step was given up after an exception: run the "
                "forward again before backward"
            )
        self._tell_dropped()
        # The first forward is over: later ones make their inputs in the same way.
        self._compares = False
        # Compute waits for this input only; the next one comes during this block's backward.
        self._interpreter.run(self._program.activation_needed, number)
        self._check_freed()
        if number in self._tensors.leaving:  # it is taken from there
            _check_unchanged(*self._tensors.leaving[number])
        # Autograd owns it from here on and frees it in the order of compute, which has waited.
        return self._tensors.take(number)

    def _compare(self, tensor: Tensor) -> None:
        """Compare the inputs of the first forward among the ranks that are to keep parts of them.

        Raises:
            ActivationError: they differ, so that parts of them would be parts of nothing.
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
        """The step was given up and the lanes are empty: forget all inputs saved so far."""
        self._tensors.clear()

    def _tell_dropped(self) -> None:
        while self.dropped:
            number = self.dropped.popleft()
            if self._tensors.likes.pop(number, None) is not None:
                self._interpreter.run(self._program.activation_dropped, number)

    def _check_freed(self) -> None:
        # A write on compute may have run before, during or after the copy: its bytes cannot be
        # trusted. The last reference to the tensor goes here.
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
        """Tell whether this is the copy of a tensor's bytes: its storage is that of the copied one,
        whose version counter it shares, and was not changed in place since."""
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
            # As it lies in memory, without lazy conjugate and negative bits.
            view = tensor.detach()
            view = view.conj() if view.is_conj() else view
            view = torch._neg_view(view) if view.is_neg() else view
            flat = view.as_strided((count,), (1,), 0).view(torch.uint8)
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


def _storages(model: nn.Module) -> frozenset[int]:
    """Return the memory of a model's own tensors."""
    tensors = (
        tensor for tensor in (*model.parameters(), *model.buffers()) if not is_distributed(tensor)
    )
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)
