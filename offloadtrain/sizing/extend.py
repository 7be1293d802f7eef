"""Extend the trace of a model with fewer layers to the full model.

[Note: Extending a trace]
Seven units of a run were traced (see `alike`): A B C D, a gap, X Y Z. The stretch of a unit lasts
from its start to the start of the next unit. In forward and in backward, the stretches of D, X and
Y must have the same operations, FLOPs, bytes and block inputs, and the memory in use must grow by
the same amount from each to the next: the memory that one unit saves for backward. Two equal
differences are three points on a line, and the line fills the gap. Between the forward and the
backward of the gap, the memory that its units save is added to every moment. No moment is left out,
so the peak is that of the full model. The other units may differ, because they overlap with the
modules around the layers and with block inputs on their way to the host and back. If D, X and Y
differ, nothing is extended, and the caller traces the full model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from offloadtrain.sizing.alike import BEFORE, TRACED, Run
from offloadtrain.sizing.meter import GRADIENTS, Place, Segment
from offloadtrain.sizing.operation_work import Count

PeakBytes = tuple[int, int, int, int]
"""Bytes saved in the forward of layers, made in backward, outside of layers, and of gradients."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A segment of a trace; `peak_bytes` is None if it made no tensor."""

    place: Place
    work: Count
    input_sizes: tuple[int, ...]
    peak_bytes: PeakBytes | None


def moments_of(segments: Sequence[Segment], repeated: set[str]) -> list[Moment]:
    """`repeated`: names of the blocks that are layers."""
    return [
        Moment(
            segment.place, segment.work, tuple(segment.input_sizes), _peak_bytes(segment, repeated)
        )
        for segment in segments
    ]


def _peak_bytes(segment: Segment, repeated: set[str]) -> PeakBytes | None:
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


def _difference(stretches: Sequence[Sequence[Moment]], run: Run) -> PeakBytes | None:
    """Return by how much the peak grows from each stretch to the next; None if it does not grow by
    the same amount everywhere, or the stretches differ in anything else."""
    differences: set[PeakBytes] = set()
    for earlier, later in pairwise(stretches):
        if len(earlier) != len(later):
            return None
        for first, second in zip(earlier, later, strict=True):
            if not _same(_later(first, run, 1), second):
                return None
            if first.peak_bytes is not None and second.peak_bytes is not None:
                differences.add(_plus(second.peak_bytes, first.peak_bytes, -1))
    return differences.pop() if len(differences) == 1 else None


def _same(first: Moment, second: Moment) -> bool:
    """Return whether two moments are equal except for their peaks."""
    either = (first.peak_bytes is None) == (second.peak_bytes is None)
    return either and replace(first, peak_bytes=None) == replace(second, peak_bytes=None)


def _filled(
    moments: Sequence[Moment], cuts: Sequence[int], run: Run, saved: PeakBytes
) -> list[Moment]:
    """`saved`: bytes that one unit saves."""
    skipped, back = run.units - TRACED, 2 * TRACED - BEFORE
    forward = moments[cuts[BEFORE - 1] : cuts[BEFORE]]
    between = moments[cuts[BEFORE] : cuts[back]]
    backward = moments[cuts[back - 1] : cuts[back]]
    filled = list(moments[: cuts[BEFORE]])
    for units in range(1, skipped + 1):
        filled += [_later(moment, run, units, saved) for moment in forward]
    filled += [_later(moment, run, skipped, saved) for moment in between]
    for units in reversed(range(skipped)):
        filled += [_later(moment, run, units, saved) for moment in backward]
    return filled + list(moments[cuts[back] :])


def _later(moment: Moment, run: Run, units: int, saved: PeakBytes = (0, 0, 0, 0)) -> Moment:
    """Return the moment of a layer `units` units later, when each of these units has saved more."""
    place, peak_bytes = moment.place, moment.peak_bytes
    if place.block in run.names and (at := run.names.index(place.block)) >= run.start:
        place = replace(place, block=run.names[at + units * run.period])
    if peak_bytes is not None:
        peak_bytes = _plus(peak_bytes, saved, units)
    return replace(moment, place=place, peak_bytes=peak_bytes)


def _plus(base: PeakBytes, more: PeakBytes, times: int) -> PeakBytes:
    most = [size + times * each for size, each in zip(base, more, strict=True)]
    return most[0], most[1], most[2], most[3]
