"""Decisions over the access order of the step before: loads ahead and evictions.

Pure functions over block numbers, standard library only. The program calls them at every use, in
the engine and in the plan alike.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from typing import NamedTuple


class AccessOrder:
    """The access order of the step before, and the position of this step in it.

    Attributes:
        missed: uses in this pass that the order did not contain.
    """

    def __init__(self) -> None:
        self._order: list[int] = []
        self._uses: list[int] = []
        self._next = 0
        self.missed = 0

    @property
    def differs(self) -> bool:
        """True if this pass left the known order; one that goes on after its end (training after
        an evaluation) has not."""
        return bool(self.missed) and self._uses[: len(self._order)] != self._order

    @property
    def seen(self) -> Sequence[int]:
        """The uses of this pass so far."""
        return self._uses

    @property
    def future(self) -> Sequence[int]:
        """The uses that are still to come; empty where nothing is known."""
        return self._order[self._next :]

    def used(self, block: int) -> None:
        """A block is used. This pass skips the uses that the order has before the block's next."""
        if not self._uses or self._uses[-1] != block:
            self._uses.append(block)
        if self._next and self._order[self._next - 1] == block:
            return
        try:
            self._next = self._order.index(block, self._next) + 1
        except ValueError:
            self.missed += 1

    def restart(self) -> None:
        """A pass has ended: its uses become the order, unless it was only the order's beginning."""
        if len(self._uses) >= len(self._order) or self.missed:
            self._order = self._uses
        self._uses, self._next, self.missed = [], 0, 0


def next_use(block: int, future: Sequence[int]) -> int:
    """Return the position of the next use of `block`; the end if there is none."""
    return future.index(block) if block in future else len(future)


def victim(evictable: Collection[int], future: Sequence[int]) -> int | None:
    """Return the block to evict: the one needed last (Belady 1966); None if none can go."""
    return max(evictable, key=lambda block: (next_use(block, future), block), default=None)


class Pool(NamedTuple):
    """Blocks that share some slots."""

    members: Container[int]
    slots: Sequence[int]

    def of(self, blocks: Collection[int]) -> set[int]:
        return {block for block in blocks if block in self.members}


def prefetches(
    resident: Collection[int],
    pinned: Collection[int],
    future: Sequence[int],
    pools: Sequence[Pool],
) -> list[tuple[int, int | None]]:
    """Return (block to load, block to evict for it or None for a free slot), soonest needed first.

    No block is evicted that is needed before the one that takes its slot, and none is loaded before
    one that is needed sooner: its load would delay that one's.
    """
    loaded, moves = set(resident), list[tuple[int, int | None]]()
    for block in dict.fromkeys(future):
        if block in loaded:
            continue
        leaving = None
        pool = next(pool for pool in pools if block in pool.members)
        if len(in_pool := pool.of(loaded)) >= len(pool.slots):
            leaving = victim(in_pool - set(pinned), future)
            if leaving is None or next_use(leaving, future) <= next_use(block, future):
                break
            loaded.discard(leaving)
        loaded.add(block)
        moves.append((block, leaving))
    return moves
