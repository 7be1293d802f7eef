"""Which block's weights move when: decisions over the order of use that a step was seen to have.

Pure functions over block numbers, standard library only. The engine asks them at every use; whoever
simulates a step asks the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile


class AccessOrder:
    """Where a step is in the order of use that the step before it was seen to have.

    Attributes:
        missed: uses in this pass that the order did not foresee.
    """

    def __init__(self) -> None:
        self._order: list[int] = []
        self._seen: list[int] = []
        self._next = 0
        self.missed = 0

    @property
    def differs(self) -> bool:
        """Whether this pass left the known order; one that goes on behind its end (training after
        an evaluation) has not."""
        return bool(self.missed) and self._seen[: len(self._order)] != self._order

    @property
    def future(self) -> Sequence[int]:
        """The uses that are still to come; empty where nothing is known."""
        return self._order[self._next :]

    def used(self, block: int) -> None:
        """A block is used. What the order has before its next mention is left out by this pass."""
        if not self._seen or self._seen[-1] != block:
            self._seen.append(block)
        if self._next and self._order[self._next - 1] == block:
            return
        try:
            self._next = self._order.index(block, self._next) + 1
        except ValueError:
            self.missed += 1

    def restart(self) -> None:
        """A pass has ended: from now on the order is what it was seen to be."""
        if len(self._seen) >= len(self._order) or self.missed:
            self._order = self._seen
        self._seen, self._next, self.missed = [], 0, 0


class ReduceOrder:
    """In which order blocks send their gradients: on several ranks one order for all of them, and a
    block that is ready before its turn waits.

    Attributes:
        seen: blocks in the order in which they became ready in this pass.
    """

    def __init__(self, order: Sequence[int], *, free: bool) -> None:
        """`free`: whoever is ready has its turn."""
        self._order = list(order)
        self._free = free
        self._next = 0
        self.seen: dict[int, None] = {}

    def ready(self, block: int) -> list[int]:
        """Whose turn it is, now that `block` is ready."""
        self.seen[block] = None
        if self._free:
            return [block]
        due = list(takewhile(lambda b: b in self.seen, self._order[self._next :]))
        self._next += len(due)
        return due

    def rest(self) -> list[int]:
        """Who has not had a turn in this pass, in order; where all are free, who was not ready."""
        if self._free:
            return [block for block in self._order if block not in self.seen]
        return self._order[self._next :]

    def restart(self) -> None:
        """A pass has ended."""
        self._next = 0
        self.seen = {}

    def agree(self, order: Sequence[int]) -> None:
        """From the next pass on."""
        self._order = list(order)


def next_use(block: int, future: Sequence[int]) -> int:
    """How many uses away the next one of `block` is; beyond the end where there is none."""
    return future.index(block) if block in future else len(future)


def victim(evictable: Collection[int], future: Sequence[int]) -> int | None:
    """The block to evict: the one that is needed last (Belady 1966); None where none can go."""
    return max(evictable, key=lambda block: (next_use(block, future), block), default=None)


def prefetches(
    resident: Collection[int], pinned: Collection[int], future: Sequence[int], slots: int
) -> list[tuple[int, int | None]]:
    """(block to load, block to evict for it or None for a free slot), the soonest needed first.

    Nothing is evicted that is needed before what takes its place.
    """
    held, moves = set(resident), list[tuple[int, int | None]]()
    for block in dict.fromkeys(future):
        if block in held:
            continue
        leaving = None
        if len(held) >= slots:
            leaving = victim(held - set(pinned), future)
            if leaving is None or next_use(leaving, future) <= next_use(block, future):
                break
            held.discard(leaving)
        held.add(block)
        moves.append((block, leaving))
    return moves
