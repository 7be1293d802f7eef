"""Activation offload: the tensors of [Note: Offloaded activations] in
`step.program.activations`."""

from __future__ import annotations

from collections import deque
from itertools import count
from zlib import crc32

import torch
from torch import Tensor

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine.interpreter import Interpreter
from offloadtrain.engine.memory.memory_map import BlockInputs
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
        saved = self._program.activation_saved(number, flat.numel(), name_of(tensor.dtype))
        self._interpreter.run(saved)
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
        # Compute waits for this input only; the next one comes beside this block's backward.
        self._interpreter.run(self._program.activation_needed(number))
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
        if len(set(self._parts.all_gather_host([checksum])[:, 0].tolist())) > 1:
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
                self._interpreter.run(self._program.activation_dropped(number))

    def _check_freed(self) -> None:
        # A write on compute may have run before, beside or behind the copy: its bytes cannot be
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
