"""Activations on the host: the inputs that recompute starts from, down in forward, up in backward.

[Note: Offloaded activations]
With activation = "offload" the inputs that a block's recompute starts from are copied to pinned
memory on the d2h lane as soon as autograd saves them, and let go of on the device. In backward they
come back on the load lane, each one ahead of its use: the last saved is needed first. The device
memory of such an input must outlive its copy, so a short queue holds it, and compute waits for the
copy before the queue lets go: torch's allocator gives memory out again in the order of compute.
Host buffers are kept by size and used again from the second micro-step on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from offloadtrain.step.dependencies import Dependencies
from offloadtrain.step.formats import ITEMSIZE
from offloadtrain.step.operations import Free, Kind, Lane, Launch, Memory, Ref

_LEAVING = 2
"""Inputs whose copy to the host may be in flight: one that is copied, one behind it."""


@dataclass(slots=True)
class _Saved:
    """One block input.

    Attributes:
        host: its buffer; `back`: its memory on the device in backward.
        before: the number of the one saved just before it in the same forward.
        fetched: on its way back, or there. taken: compute has it.
    """

    host: Ref
    back: Ref
    before: int | None
    fetched: bool = False
    taken: bool = False


class ActivationPath:
    """Moves block inputs, which the caller has numbered."""

    def __init__(self, order: Dependencies) -> None:
        self._order = order
        self._saved: dict[int, _Saved] = {}
        self._last: int | None = None
        self._leaving: deque[Ref] = deque()
        self._free: dict[int, list[int]] = {}
        """Bytes → host buffers of that size that nothing refers to."""
        self._sizes: list[int] = []
        """Of every host buffer, in bytes."""

    def restart(self) -> None:
        """Another forward begins: what it saves first has none before it."""
        self._last = None

    def save(self, number: int, numel: int, dtype: str) -> None:
        """Autograd has saved a block input that compute has just written."""
        host = Ref(
            Memory.HOST_ACTIVATION, self._buffer(numel * ITEMSIZE[dtype]), 0, 0, numel, dtype
        )
        there = Ref(Memory.ACTIVATION, number, 0, 0, numel, dtype)
        # The copy runs beside the block's own forward, and starts behind what compute has by now.
        forward = self._order.record(Lane.COMPUTE, "the forward before it")
        self._order.was_written([there], forward)
        self._order.launch(Launch(Kind.ACTIVATION_DOWN, Lane.D2H, "", (there,), (host,)))
        self._leaving.append(there)
        self._let_go(_LEAVING)
        self._saved[number] = _Saved(host, there._replace(copy=1), self._last)
        self._last = number

    def need(self, number: int) -> None:
        """Backward is about to run the block again: its input comes back, and the one that will be
        needed next is on its way meanwhile."""
        self._let_go(0)
        one = self._saved[number]
        self._fetch(one)
        before = None if one.before is None else self._saved.get(one.before)
        if before is not None:
            self._fetch(before)
        self._order.needs(Lane.COMPUTE, [one.back], "recompute")
        one.taken = True
        self._order.forget([one.back])  # compute's alone from here on

    def drop(self, number: int) -> None:
        """Its graph is gone."""
        one = self._saved.pop(number)
        if one.fetched and not one.taken:  # its memory stays until the copy into it is done
            self._leaving.append(one.back)
        self._give_back(int(one.host.owner))

    def reset(self) -> None:
        """Nothing is on its way, and no graph needs anything: all host buffers are free."""
        self._saved, self._last = {}, None
        self._leaving.clear()
        self._free.clear()
        for buffer in range(len(self._sizes)):
            self._give_back(buffer)

    def _buffer(self, nbytes: int) -> int:
        if self._free.get(nbytes):
            return self._free[nbytes].pop()
        self._sizes.append(nbytes)
        return len(self._sizes) - 1

    def _give_back(self, buffer: int) -> None:
        self._free.setdefault(self._sizes[buffer], []).append(buffer)

    def _fetch(self, one: _Saved) -> None:
        if one.fetched and not one.taken:
            return
        one.fetched, one.taken = True, False  # a graph that is kept needs it once more
        # The allocator may take this memory from what compute still works on.
        so_far = self._order.record(Lane.COMPUTE, "whatever had it before")
        self._order.was_read([one.back], so_far)
        self._order.launch(Launch(Kind.ACTIVATION_UP, Lane.LOAD, "", (one.host,), (one.back,)))

    def _let_go(self, most: int) -> None:
        while len(self._leaving) > most:
            ref = self._leaving.popleft()
            # Whoever gets this memory next is compute's: it comes behind the copy.
            self._order.overwrites(Lane.COMPUTE, [ref], "the allocator")
            self._order.forget([ref])
            self._order.operations.append(Free(ref))
