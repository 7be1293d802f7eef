"""From the trace of a model with fewer layers to that of the whole one.

[Note: Extending a trace]
Seven units of a run were traced (see `alike`): A B C D, a gap, X Y Z. The stretch of a unit is what
runs from its start to the next one's. In forward and in backward, the stretches of D, X and Y must
have the same operations, FLOPs, bytes and block inputs, and what is held must differ by the same
amount from each to the next: what one unit saves. Two equal differences are three points on a line,
and the line fills the gap. All that happens between the gap's forward and its backward holds more
by what the units in it save. No moment is left out, so the peak is the whole model's. The others
may differ: they meet what is around the layers, and block inputs on their way to the host and back.
Where D, X and Y differ, nothing is extended, and the caller traces the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from offloadtrain.sizing.alike import BEFORE, TRACED, Run
from offloadtrain.sizing.meter import GRADIENTS, Place, Segment
from offloadtrain.sizing.operation_work import Count

Held = tuple[int, int, int, int]
"""Bytes saved in the forward of layers, made in backward, outside of layers, and of gradients."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A segment of a trace; `held` at its peak, None if it made no tensor."""

    place: Place
    work: Count
    input_sizes: tuple[int, ...]
    held: Held | None


def moments_of(segments: Sequence[Segment], repeated: set[str]) -> list[Moment]:
    """`repeated`: names of the blocks that are layers."""
    return [
        Moment(one.place, one.work, tuple(one.input_sizes), _held(one, repeated))
        for one in segments
    ]


def _held(segment: Segment, repeated: set[str]) -> Held | None:
    if not segment.peak:
        return None
    peak = segment.at_peak
    saved = sum(size for at, size in peak.items() if not at.backward and at.block in repeated)
    gradients = peak.get(GRADIENTS, 0)
    working = sum(size for at, size in peak.items() if at.backward) - gradients
    return saved, working, segment.peak - saved - working - gradients, gradients


def extended(moments: Sequence[Moment], run: Run) -> list[Moment] | None:
    """Return the moments with the skipped layers of a run; None if the traced ones differ."""
    cuts = _cuts(moments, run)
    if cuts is None:
        return None
    back = 2 * TRACED - BEFORE
    forward = [moments[lo:hi] for lo, hi in pairwise(cuts[BEFORE - 1 : BEFORE + 3])]
    backward = [moments[lo:hi] for lo, hi in pairwise(cuts[back - 2 : back + 2])]
    saved = _difference(forward, run)
    if saved is None or saved != _difference(backward[::-1], run):
        return None
    return _filled(moments, cuts, run, saved)


def _cuts(moments: Sequence[Moment], run: Run) -> list[int] | None:
    """Return where the forward of each unit starts and where the backward of each starts, in the
    order of the step; None if they do not run one by one."""
    first: dict[Place, int] = {}
    for at, moment in enumerate(moments):
        first.setdefault(moment.place, at)
    units = range(run.start, run.start + TRACED * run.period, run.period)
    places = [Place(run.names[unit]) for unit in units]
    places += [Place(run.names[unit + run.period - 1], True) for unit in reversed(units)]
    cuts = [first.get(place, -1) for place in places]
    in_order = all(lo < hi for lo, hi in pairwise(cuts))
    return cuts if in_order and cuts[0] >= 0 else None


def _difference(stretches: Sequence[Sequence[Moment]], run: Run) -> Held | None:
    """Return what each stretch holds more than the one before; None if that is not one number, or
    the stretches differ in anything else."""
    found: set[Held] = set()
    for earlier, later in pairwise(stretches):
        if len(earlier) != len(later):
            return None
        for one, two in zip(earlier, later, strict=True):
            if not _same(_later(one, run, 1), two):
                return None
            if one.held is not None and two.held is not None:
                found.add(_plus(two.held, one.held, -1))
    return found.pop() if len(found) == 1 else None


def _same(one: Moment, two: Moment) -> bool:
    """Whether two moments are equal but for how much is held."""
    either = (one.held is None) == (two.held is None)
    return either and replace(one, held=None) == replace(two, held=None)


def _filled(moments: Sequence[Moment], cuts: Sequence[int], run: Run, saved: Held) -> list[Moment]:
    """`saved`: by one unit."""
    skipped, back = run.units - TRACED, 2 * TRACED - BEFORE
    forward = moments[cuts[BEFORE - 1] : cuts[BEFORE]]
    between = moments[cuts[BEFORE] : cuts[back]]
    backward = moments[cuts[back - 1] : cuts[back]]
    found = list(moments[: cuts[BEFORE]])
    for units in range(1, skipped + 1):
        found += [_later(one, run, units, saved) for one in forward]
    found += [_later(one, run, skipped, saved) for one in between]
    for units in reversed(range(skipped)):
        found += [_later(one, run, units, saved) for one in backward]
    return found + list(moments[cuts[back] :])


def _later(moment: Moment, run: Run, units: int, saved: Held = (0, 0, 0, 0)) -> Moment:
    """Return a moment as it is so many units later in the model, where each has saved more."""
    place, held = moment.place, moment.held
    if place.block in run.names and (at := run.names.index(place.block)) >= run.start:
        place = replace(place, block=run.names[at + units * run.period])
    if held is not None:
        held = _plus(held, saved, units)
    return replace(moment, place=place, held=held)


def _plus(held: Held, more: Held, times: int) -> Held:
    most = [size + times * each for size, each in zip(held, more, strict=True)]
    return most[0], most[1], most[2], most[3]
