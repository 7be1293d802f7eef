"""Traces only a few of several equal layers, and of several equal pieces of a loss.

[Note: Layers that are alike]
Two layers are alike if they have equal classes, equal shapes and dtypes of their tensors, equal
plain attributes, and references to the same other objects. An integer that counts the layers is a
layer's index and may differ. A list of the model or its configuration with an entry per layer
belongs to the layers' descriptions: a layer with a sliding window is not like a layer without.

A run is a pattern of layers (one, or an attention layer and a Mamba layer) that repeats several
times in a row. The first four and the last three units are traced. This module cannot tell whether
a forward depends on the index: `with_skipped_layers` compares the traces next to the gap.

[Note: Extending a trace]
Seven units of a run were traced (see `alike`): A B C D, a gap, X Y Z. The stretch of a unit lasts
from its start to the start of the next unit. In forward and in backward, the stretches of D, X and
Y must have the same operations, FLOPs, bytes and block inputs, and the memory in use must grow by
the same amount from each to the next: the memory that one unit saves for backward. Two equal
differences are three points on a line, and the line fills the gap. Between the forward and the
backward of the gap, the memory that its units save is added to every moment. No moment is left out,
so the peak is that of the full model. Forward may leave a few scalars per unit more than backward
frees, such as the balance of a layer's experts, which the loss sums: they count in the
forward of layers. The other units may differ, because they overlap with the modules around the
layers and with block inputs on their way to the host and back. If D, X and Y differ, nothing is
extended, and the caller traces the full model.

[Note: Pieces that are alike]
Three pieces run: the first, the last of the same size, and the last. The work of the first piece is
counted again for each skipped piece. Each piece starts with the memory that the previous piece left
allocated. The second traced piece starts with the memory of the first, as a skipped piece would, so
no skipped piece has a higher peak than a traced one.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from offloadtrain.engine.partition import partition
from offloadtrain.plan.costs.microbatch import Work
from offloadtrain.plan.tracing.meter import GRADIENTS, Meter, Place, Segment

TRACED, BEFORE = 7, 4
"""Traced units of a run, and how many of them come before the skipped ones."""
_LONGEST_UNIT = 8

SCALARS = 64
"""Most bytes that the forward of a unit leaves for the loss alone."""

Signature = dict[str, object]


@dataclass(frozen=True, slots=True)
class Run:
    """Layers of a list that repeat a pattern.

    Attributes:
        container: the list's qualified name.
        names: qualified names of all its layers.
        start: index of the run's first layer.
        period: layers per unit of the pattern.
        units: number of repetitions.
    """

    container: str
    names: tuple[str, ...]
    start: int
    period: int
    units: int

    @property
    def skipped(self) -> range:
        """Indices of the layers that are not traced."""
        first = self.start + BEFORE * self.period
        return range(first, first + (self.units - TRACED) * self.period)


def runs_of(model: nn.Module, recomputed: Collection[nn.Module] = ()) -> tuple[Run, ...]:
    """Return, in order, the longest run of each list of layers that shortens the trace.

    A list whose first layers are recomputed is treated as two lists: recomputed and other layers.
    """
    runs: list[Run] = []
    for container, layers in _lists(model):
        names = tuple(f"{container}.{at}" if container else str(at) for at in range(len(layers)))
        kinds = _kinds(model, layers)
        again = sum(layer in recomputed for layer in layers)
        for first, end in ((0, again), (again, len(layers))):
            run = _longest(Run(container, names, first, 1, 0), kinds[:end])
            runs += [run] if run.units > TRACED else []
    return tuple(runs)


def uniform_runs(container: str, layers: int, again: int) -> tuple[Run, ...]:
    """Return the runs of a list of equal layers, of which the first `again` are recomputed."""
    names = tuple(f"{container}.{number}" for number in range(layers))
    runs = (Run(container, names, lo, 1, hi - lo) for lo, hi in ((0, again), (again, layers)))
    return tuple(run for run in runs if run.units > TRACED)


def _lists(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield name and layers of each list whose children are all blocks."""
    blocks = {part.module for part in partition(model) if part.repeated}
    for name, module in model.named_modules():
        layers = list(module.children())
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        if listed and len(layers) > TRACED and len(set(layers)) == len(module):
            if blocks.issuperset(layers):
                yield name, layers


def _longest(none: Run, kinds: Sequence[int]) -> Run:
    """Return the run that skips the most layers, starting at `none.start` or later; `none`, which
    has no units, if no run skips any."""
    best = none
    for period in range(1, _LONGEST_UNIT + 1):
        start = none.start
        while start < len(kinds):
            # Count the repetitions of the pattern that starts here.
            end = start + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            run = replace(none, start=start, period=period, units=(end - start) // period)
            if len(run.skipped) > len(best.skipped):
                best = run
            start = end - period + 1  # a run that starts inside this one is no longer
    return best


def _kinds(model: nn.Module, layers: Sequence[nn.Module]) -> list[int]:
    """Return a number per layer, equal for layers that are alike."""
    inside = {module for layer in layers for module in layer.modules()}
    owners = Counter(param for layer in layers for param in layer.parameters())
    for module in model.modules():
        if module not in inside:
            owners.update(module.parameters(recurse=False))
    signatures = [dict(_attributes(layer)) for layer in layers]
    for at, layer in enumerate(layers):
        if any(owners[param] > 1 for param in layer.parameters()):
            signatures[at]["tied"] = str(at)
    _leave_out_indices(signatures)
    for key, entries in _listed(model, len(layers)):
        for signature, entry in zip(signatures, entries, strict=True):
            signature[key] = _plain(entry)
    distinct: list[Signature] = []
    for signature in signatures:
        if signature not in distinct:
            distinct.append(signature)
    return [distinct.index(signature) for signature in signatures]


def _attributes(layer: nn.Module) -> Iterator[tuple[str, object]]:
    for name, module in layer.named_modules():
        yield f"{name}:", type(module)
        for key, value in vars(module).items():
            if key != "_modules":
                yield f"{name}.{key}", _plain(value)


def _plain(value: Any) -> object:
    """Return a key for comparing values; objects that are not plain are compared by identity."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | type):
        return value
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device, value.requires_grad
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return value.__func__, type(value.__self__)
    if isinstance(value, partial):
        return value.func, _plain(value.args), _plain(value.keywords)
    if isinstance(value, Mapping):  # keys of hooks are unique numbers
        named = all(isinstance(key, str) for key in value)
        return tuple((key if named else "", _plain(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, set | frozenset):
        return frozenset(_plain(item) for item in value)
    return id(value)


def _leave_out_indices(signatures: Sequence[Signature]) -> None:
    """Drop integers that count the layers, from all signatures."""
    for key in set().union(*signatures):
        entries = [
            (at, signature[key]) for at, signature in enumerate(signatures) if key in signature
        ]
        numbers = [(at, value) for at, value in entries if type(value) is int]
        if len(numbers) == len(entries) > 1 and len({value - at for at, value in numbers}) == 1:
            for at, _ in entries:
                del signatures[at][key]


def _listed(model: nn.Module, count: int) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield lists with one entry per layer, in modules and their configurations."""
    owners = {
        id(owner): owner for module in model.modules() for owner in (module, *_configs(module))
    }
    for number, owner in enumerate(owners.values()):
        for key, value in vars(owner).items():
            if isinstance(value, list | tuple) and len(value) == count:
                yield f"{number}.{key}", value


def _configs(module: nn.Module) -> Iterator[Any]:
    config = vars(module).get("config")
    if hasattr(config, "__dict__"):
        yield config
        yield from (
            value for value in vars(config).values() if type(value).__name__.endswith("Config")
        )


def fake_model(model: nn.Module, mode: FakeTensorMode, runs: Sequence[Run] = ()) -> Any:
    """Return a copy of a module with fake parameters and buffers, on the CPU, without the skipped
    layers of the runs. Tied parameters stay tied. The module itself, with real or meta tensors,
    does not change."""
    with mode:
        stands_for: dict[int, Any] = {}
        left_out = [model.get_submodule(run.names[at]) for run in runs for at in run.skipped]
        for tensor in _tensors(model, left_out):
            # Only the data: a copy made under autograd would not be a leaf.
            fake = torch.empty_like(tensor.detach(), device="cpu")
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            stands_for[id(tensor)] = fake
        for name in {run.container for run in runs}:
            container = model.get_submodule(name)
            # A shallow copy without the skipped layers; `deepcopy` below makes the others fake.
            short = copy.copy(container)
            remaining = [layer for layer in container.children() if layer not in left_out]
            short._modules = {str(at): layer for at, layer in enumerate(remaining)}
            stands_for[id(container)] = copy.deepcopy(short, stands_for)
        return copy.deepcopy(model, stands_for)


def _tensors(model: nn.Module, left_out: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Yield parameters and buffers of all modules outside of `left_out`."""
    outside = {inner for layer in left_out for inner in layer.modules()}
    for module in model.modules():
        if module not in outside:
            yield from module.parameters(recurse=False)
            yield from module.buffers(recurse=False)


PeakBytes = tuple[int, int, int, int]
"""Bytes (saved in layers' forward, made in backward, outside of layers, of gradients)."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A segment of a trace; `peak_bytes` is None if no tensor was made in it."""

    place: Place
    work: Work
    input_sizes: tuple[int, ...]
    peak_bytes: PeakBytes | None


def moment_of(segment: Segment, repeated: set[str]) -> Moment:
    """Return a segment as a `Moment`; `repeated` are the names of the layers' blocks."""
    sizes = tuple(segment.input_sizes)
    return Moment(segment.place, segment.work, sizes, _peak_bytes(segment, repeated))


def _peak_bytes(segment: Segment, repeated: set[str]) -> PeakBytes | None:
    if not segment.peak:
        return None
    peak = segment.at_peak
    saved = sum(size for at, size in peak.items() if not at.backward and at.block in repeated)
    gradients = peak.get(GRADIENTS, 0)
    working = sum(size for at, size in peak.items() if at.backward) - gradients
    return saved, working, segment.peak - saved - working - gradients, gradients


def with_skipped_layers(moments: Sequence[Moment], run: Run) -> list[Moment] | None:
    """Return the moments including a run's skipped layers; None if the traced layers differ."""
    cuts = _cuts(moments, run)
    if cuts is None:
        return None
    back = 2 * TRACED - BEFORE
    forward = [moments[lo:hi] for lo, hi in pairwise(cuts[BEFORE - 1 : BEFORE + 3])]
    backward = [moments[lo:hi] for lo, hi in pairwise(cuts[back - 2 : back + 2])]
    saved, freed = _difference(forward, run), _difference(backward[::-1], run)
    if saved is None or freed is None:
        return None
    if not all(0 <= until_loss <= SCALARS for until_loss in _plus(saved, freed, -1)):
        return None
    return _filled(moments, cuts, run, saved, freed)


def _cuts(moments: Sequence[Moment], run: Run) -> list[int] | None:
    """Return where the forward of each unit starts, then where the backward of each starts, in step
    order; None if the units do not run one by one."""
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
    """Return the growth of the peak from each stretch to the next; None if it is not constant, or
    the stretches differ in anything else."""
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
    """Return True if two moments are equal except for their peaks."""
    either = (first.peak_bytes is None) == (second.peak_bytes is None)
    return either and replace(first, peak_bytes=None) == replace(second, peak_bytes=None)


def _filled(
    moments: Sequence[Moment], cuts: Sequence[int], run: Run, saved: PeakBytes, freed: PeakBytes
) -> list[Moment]:
    """`saved`: bytes that the forward of one unit leaves; `freed`: those of them that its backward
    frees."""
    skipped, back = run.units - TRACED, 2 * TRACED - BEFORE
    forward = moments[cuts[BEFORE - 1] : cuts[BEFORE]]
    between = moments[cuts[BEFORE] : cuts[back]]
    backward = moments[cuts[back - 1] : cuts[back]]
    filled = list(moments[: cuts[BEFORE]])
    for units in range(1, skipped + 1):
        filled += [_later(moment, run, units, saved) for moment in forward]
    for moment in between:
        in_forward = moment.place.block in run.names and not moment.place.backward
        filled.append(_later(moment, run, skipped, saved if in_forward else freed))
    for units in reversed(range(skipped)):
        filled += [_later(moment, run, units, freed) for moment in backward]
    return filled + list(moments[cuts[back] :])


def _later(moment: Moment, run: Run, units: int, saved: PeakBytes = (0, 0, 0, 0)) -> Moment:
    """Return the moment `units` units later, with `saved` bytes more in use for each of them."""
    place, peak_bytes = moment.place, moment.peak_bytes
    if place.block in run.names and (at := run.names.index(place.block)) >= run.start:
        place = replace(place, block=run.names[at + units * run.period])
    if peak_bytes is not None:
        peak_bytes = _plus(peak_bytes, saved, units)
    return replace(moment, place=place, peak_bytes=peak_bytes)


def _plus(base: PeakBytes, more: PeakBytes, times: int) -> PeakBytes:
    most = [size + times * each for size, each in zip(base, more, strict=True)]
    return most[0], most[1], most[2], most[3]


Piece = TypeVar("Piece")

_BOTH_ENDS = 3
"""Number of traced pieces: the first, the last of the same size, and the last."""


class AlikePieces:
    """Traces a few of a loss's equal pieces; implements `model.piece_sizes.Few`."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def each(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        left_out = len(pieces) - _BOTH_ENDS
        if left_out < 1:
            yield from pieces
            return
        before = self._next_segment()
        yield pieces[0]
        self._repeat(before, left_out)
        yield from pieces[1 + left_out :]

    def made(self, pieces: Sequence[Piece], make: Callable[[Piece], Tensor]) -> list[Tensor]:
        left_out = len(pieces) - _BOTH_ENDS
        if left_out < 1:
            return [make(piece) for piece in pieces]
        before = self._next_segment()
        first = make(pieces[0])
        self._repeat(before, left_out)
        # Their memory counts, but making all of them, maybe thousands, is one operation.
        middle = first.new_empty((left_out, *first.shape)).unbind()
        return [first, *middle, *(make(piece) for piece in pieces[1 + left_out :])]

    def _next_segment(self) -> int:
        """Start a segment at the same place, and return its number."""
        self._meter.place = self._meter.place
        return len(self._meter.segments) - 1

    def _repeat(self, before: int, times: int) -> None:
        """Add the work since segment `before` again, `times` times."""
        work = Work()
        for segment in self._meter.segments[before:]:
            work.add(segment.work)
        self._next_segment()
        for _ in range(times):
            self._meter.segments[-1].work.add(work)
