"""The layers of each stage of a pipeline, so that all stages compute for about as long.

The last stage has the head beside its layers: of a model with a large vocabulary it takes as long
as several of them, and as every stage waits for the slowest, the last one gets fewer layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeAlias

from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.costs.costs import Costs
from offloadtrain.plan.placement import Placement

LEAST = 2
"""Layers of a stage."""

_Division: TypeAlias = tuple[int, int, tuple[int, ...]]
"""(the longest stage, the sum of squares, layers of each): of two, the smaller one is better."""


def balanced(stages: Sequence[Placement], machine: Machine) -> tuple[int, ...]:
    """Return the number of layers per stage that minimizes the compute time of the slowest stage.

    Args:
        stages: the stages of a pipeline, with the layers divided in any way.
    """
    before, layers, after = 0, list[int](), 0
    for stage in stages:
        computed = Costs(stage, machine).computed
        for block in stage.spec.blocks:
            seconds = computed[block.name].forward + computed[block.name].backward
            duration = round(
                1e9 * seconds
            )  # rounded, so that identical layers have identical durations
            if block.repeated:
                layers.append(duration)
            elif layers:
                after += duration
            else:
                before += duration
    return divided(layers, before, after, len(stages))


def divided(layers: Sequence[int], before: int, after: int, stages: int) -> tuple[int, ...]:
    """Divide layers so that the stage that takes longest takes least; of several such divisions,
    the one whose stages differ least, and then with fewer layers on the first stages, which hold
    the activations of more microbatches.

    Args:
        layers: nanoseconds of each.
        before, after: nanoseconds of the first stage before its layers, of the last after them.
    """
    ends = [0, *accumulate(layers)]
    outside = [before, *[0] * (stages - 2), after]
    best: dict[int, _Division] = {0: (0, 0, ())}
    """Of the first stages: where they end → their best division."""
    for stage in range(stages):
        next_best: dict[int, _Division] = {}
        most = len(layers) - LEAST * (stages - 1 - stage)
        for first, (longest, squares, each) in best.items():
            for end in range(first + LEAST, most + 1):
                duration = ends[end] - ends[first] + outside[stage]
                division = (max(longest, duration), squares + duration**2, (*each, end - first))
                next_best[end] = min(next_best.get(end, division), division)
        best = next_best
    return best[len(layers)][2]


def divisions_from(first: Sequence[int], last: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the divisions between two, and the last, each with one layer more where it belongs: out
    of the stage that has the most too many, into the one that lacks the most."""
    each = list(first)
    while any(more := [have - meant for have, meant in zip(each, last, strict=True)]):
        each[more.index(max(more))] -= 1
        each[more.index(min(more))] += 1
        yield tuple(each)
