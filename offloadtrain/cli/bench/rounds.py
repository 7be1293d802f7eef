"""Interleaved timing: every case runs once per round, and ratios are taken within rounds.

Memory bandwidth on a shared machine changes by a factor of two within the hour. Two cases are
compared by the median of their ratios within rounds, never by two medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Case = Callable[[], object]
Name = TypeVar("Name")
Row = dict[str, Any]
"""Figures of a case by name: a line of a table, or a JSON object."""

SETTLE_S = 0.02
"""Pause before each case: torch's threads spin for a while after their last loop."""


def measure(
    cases: Mapping[Name, Case],
    rounds: int,
    on_round: Callable[[int], None],
    clock: Callable[[], float] = time.perf_counter,
    *,
    warm: int = 1,
) -> dict[Name, list[float]]:
    """Return the seconds of each case by round; uncounted first rounds compile and touch pages.

    Args:
        on_round: called with the number of each round, including uncounted ones.
        warm: number of uncounted rounds.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in cases}
    for number in range(rounds + warm):
        on_round(number)
        for name, run in cases.items():
            time.sleep(SETTLE_S)
            start = clock()
            run()
            if number >= warm:
                seconds[name].append(clock() - start)
    return seconds


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Context in which torch computes with `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def ratio(above: list[float] | None, below: list[float] | None) -> float | None:
    """Return the median of the ratios within rounds; None if a case is absent."""
    if not above or not below:
        return None
    return statistics.median(a / b for a, b in zip(above, below, strict=True))
