"""Activation offload: inputs of recomputes are copied to the host in forward, and back in backward.

[Note: Offloaded activations]
With activation = "offload" the inputs of a block's recompute are copied to pinned
memory on the d2h lane as soon as autograd saves them, and freed on the device. In backward they
are fetched on the load lane, each one ahead of its use: the last saved is needed first. The device
memory of such an input must outlive its copy. So a short queue owns it, and compute waits for the
copy before the queue frees it: torch's allocator reuses memory in the order of compute.
Host buffers are stored by size and reused from the second micro-step on. With "offload_saved" all
large memory that autograd saves is moved in this way, with a longer queue. Memory that backward
needs while the queue still owns it, usually the logits, is taken from the queue without a load.

[Note: Allocation]
Allocation is an operation on compute's stream. torch's allocator returns memory that compute
kernels launched earlier may still use, and in deterministic mode torch fills new memory there. So
an allocation counts as a write on compute, and the lane that fills the memory waits for the event
after it.

[Note: Partitioned activations]
Ranks that hold parts of a layer's matrices all have the same, full input of it. With
`partition_activations` (ZeRO-R Pa) each of t ranks stores 1/t of it: on the host (Pa+cpu), or with
activation = "recompute" in a buffer of the device. In backward the part is copied
back to its place in the full input, and an all-gather on the comm lane adds the others, one input
ahead of its use. An input whose number of elements t does not divide is stored in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from offloadtrain.step.layout.buffers import Memory
from offloadtrain.step.layout.formats import ITEMSIZE
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.operations import Dependencies, Free, Kind, Lane, Launch, Ref

_LEAVING = 2
"""Number of inputs in flight to the host: one that is copied, one after it."""
_LEAVING_SAVED, _SAVED_AHEAD = 8, 4
"""Number of saved tensors in flight to the host, and number fetched ahead of their use. Operations
of a block save several at about the same time, and the next product overlaps their copies. In
backward a tensor that was taken from the queue leaves it as many uses later."""


@dataclass(slots=True)
class _Saved:
    """A block input.

    Attributes:
        host: its host buffer.
        there: its device memory in forward.
        back: its device memory in backward.
        before: number of the input saved just before it in the same forward.
        fetched: it is being fetched, or was.
        handed_over: compute owns it.
    """

    host: Ref
    there: Ref
    back: Ref
    before: int | None
    fetched: bool = False
    handed_over: bool = False


_COPIES = {
    Memory.HOST_ACTIVATION: ((Kind.ACTIVATION_DOWN, Lane.D2H), (Kind.ACTIVATION_UP, Lane.LOAD)),
    Memory.KEPT_ACTIVATION: ((Kind.KEEP_INPUT, Lane.COMPUTE), (Kind.FETCH_PART, Lane.COMM)),
}
"""Kind of memory for block inputs → operations that save an input, and fetch it for recompute."""


class ActivationPath:
    """Moves block inputs; the caller numbers them.

    Attributes:
        last: number of the input saved last in this forward.
    """

    def __init__(self, spec: StepSpec, part: int, order: Dependencies) -> None:
        """`part`: index of the part that this rank stores."""
        self._order = order
        self._parts = spec.input_parts
        self._part = part if self._parts > 1 else 0
        self._memory = spec.input_memory
        self._save, self._fetch_back = _COPIES[self._memory]
        self._stays = spec.offloads_saved
        self._most_leaving = _LEAVING_SAVED if self._stays else _LEAVING
        self._ahead = _SAVED_AHEAD if self._stays else 1
        self._saved: dict[int, _Saved] = {}
        self.last: int | None = None
        self._leaving: dict[Ref, int] = {}
        """Device memory → number of the input; oldest first."""
        self._free: dict[int, list[int]] = {}
        """Bytes → free host buffers of that size."""
        self._sizes: list[int] = []
        """Bytes of every host buffer."""

    def save(self, number: int, numel: int, dtype: str) -> None:
        """Autograd has saved a block input that compute has just written."""
        lo, hi = self._part_of_rank(numel)
        nbytes = (hi - lo) * ITEMSIZE[dtype]
        if free := self._free.get(nbytes):
            buffer = free.pop()
        else:
            buffer = len(self._sizes)
            self._sizes.append(nbytes)
        host = Ref(self._memory, buffer, 0, 0, hi - lo, dtype)
        there = Ref(Memory.ACTIVATION, number, 0, 0, numel, dtype)
        # The user's forward is no launch: this event represents its write of the input. The copy
        # waits for compute up to here, not for the block's forward.
        forward = self._order.record(Lane.COMPUTE, "the forward before it")
        self._order.was_written([there], forward)
        # d2h, concurrently with the block's own forward; a part that stays on the device on
        # compute, before it. It waits for the last fetch from its buffer.
        self._order.launch(Launch(*self._save, "", (there._replace(lo=lo, hi=hi),), (host,)))
        # The queue owns the device memory until compute has waited for the copy: see `_let_go`.
        self._leaving[there] = number
        # A part that stays on the device was copied by compute itself, which need not wait.
        self._let_go(0 if self._save[1] is Lane.COMPUTE else self._most_leaving)
        self._saved[number] = _Saved(host, there, there._replace(copy=1), self.last)
        self.last = number

    def need(self, number: int) -> None:
        """Backward is about to recompute the block: fetch its input, and prefetch the next one."""
        entry = self._saved[number]
        # Backward saves no inputs that would push the last ones out of the queue.
        if self._stays:
            first_to_free = number + _LEAVING_SAVED
            for ref in [ref for ref, saved in self._leaving.items() if saved >= first_to_free]:
                self._free_one(ref)
        else:
            self._let_go(0)
        on_device = entry.there in self._leaving
        if not on_device:
            self._fetch(entry)
        for before in islice(self._before(entry), self._ahead):
            # A fetched saved tensor stays while its graph lives: other nodes may read it too.
            if not (self._stays and (before.handed_over or before.there in self._leaving)):
                self._fetch(before)
        entry.handed_over = True
        # Compute made an input that the queue still owns (until its copy is done): no wait.
        if not on_device:
            # Compute waits for this input only: the next one arrives during the block's backward.
            self._order.needs(Lane.COMPUTE, [entry.back], "recompute")
            # Compute has waited and is the only user from here on: autograd owns the memory.
            self._order.forget([entry.back])

    def _before(self, entry: _Saved) -> Iterator[_Saved]:
        """Yield the inputs saved before this one in the same forward, last first."""
        while entry.before is not None and (before := self._saved.get(entry.before)) is not None:
            yield before
            entry = before

    def drop(self, number: int) -> None:
        """The graph of the input was freed."""
        entry = self._saved.pop(number)
        # A prefetch may still write this memory: the queue owns it until compute has waited.
        if entry.fetched and not entry.handed_over:
            self._leaving[entry.back] = number
        # Free at once: the next copy into the buffer waits for the fetch that may still read it.
        self._give_back(int(entry.host.owner))
        if self._stays and not self._saved:
            self._let_go(0)  # there may be no later forward that pushes them out

    def reset(self) -> None:
        """The lanes are idle and no graph needs an input: all host buffers are free."""
        self._saved, self.last = {}, None
        self._leaving.clear()
        self._free.clear()
        for buffer in range(len(self._sizes)):
            self._give_back(buffer)

    def _give_back(self, buffer: int) -> None:
        self._free.setdefault(self._sizes[buffer], []).append(buffer)

    def _fetch(self, entry: _Saved) -> None:
        if entry.fetched and not entry.handed_over:
            return
        # Handed over before: a retained graph runs backward again and needs a new copy.
        entry.fetched, entry.handed_over = True, False
        self._order.allocate(entry.back)
        lo, hi = self._part_of_rank(entry.back.hi)
        part = entry.back._replace(lo=lo, hi=hi)
        # load, concurrently with recompute and backward of the next block: waits for its copy
        # to the host.
        self._order.launch(Launch(*self._fetch_back, "", (entry.host,), (part,)))
        if hi - lo < entry.back.hi:
            # comm, concurrently with the same: waits for this rank's part.
            self._order.launch(Launch(Kind.GATHER_INPUT, Lane.COMM, "", (), (entry.back,)))

    def _part_of_rank(self, numel: int) -> tuple[int, int]:
        """Return the range [lo, hi) of elements that this rank stores: all of them if the number of
        parts does not divide `numel`."""
        if numel % self._parts:
            return 0, numel
        count = numel // self._parts
        return self._part * count, (self._part + 1) * count

    def _let_go(self, most: int) -> None:
        while len(self._leaving) > most:
            self._free_one(next(iter(self._leaving)))

    def _free_one(self, ref: Ref) -> None:
        del self._leaving[ref]
        # The allocator reuses this memory on compute next, without a launch that could wait for the
        # copy: compute waits here. Because of the queue this is a wait for an old copy.
        self._order.overwrites(Lane.COMPUTE, [ref], "the allocator")
        self._order.forget([ref])
        self._order.operations.append(Free(ref))
