"""The experts of a bucket that a step skips where they are unused: [Note: Unused experts] in
`step.skipping`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.config.offload import OffloadConfig, OptionError
from offloadtrain.optim import AnyRule, keeps_whole
from offloadtrain.runtime.kernels import BLOCK, Layout
from offloadtrain.step.skipping import experts_in, skips

_UPDATES_KEPT = 4
"""Updates that a native queue may still have before it: the next step's weights need this one's."""


class SkipError(OffloadTrainError, ValueError):
    """`skip_unused` names what cannot be skipped."""


class Slot(Protocol):
    """What is asked of a parameter's place in its bucket; see `bucket.Slot`."""

    @property
    def name(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def numel(self) -> int: ...


@dataclass(slots=True)
class Run:
    """Neighbours in a shard that are used and have made as many steps.

    Attributes:
        lo, hi: elements of the shard.
        behind: the number of the expert behind them.
        rows: of their layout: offset, numel, id, first element in the parameter.
    """

    lo: int
    hi: int
    step: int
    behind: int
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)

    @property
    def layout(self) -> Layout:
        """The elements of each parameter, from `lo` on."""
        offsets, numels, ids, firsts = zip(*self.rows, strict=True)
        return Layout([at - self.lo for at in offsets], numels, ids, firsts)

    def add(self, slot: Slot, begin: int, lo: int, hi: int) -> None:
        """Add elements [lo, hi) of a parameter that begins at `begin` of the shard."""
        if self.rows and self.rows[-1][2] == slot.index:
            at, numel, id, first = self.rows.pop()
            self.rows.append((at, numel + hi - lo, id, first))
        else:
            self.rows.append((lo, hi - lo, slot.index, lo - begin))
        self.hi = hi


class Experts:
    """The experts of one bucket, numbered in the order of its parameters.

    Attributes:
        steps: (experts,) fp32: the steps that each was updated in.
        used: each got a gradient in the step that was measured last, on any rank.
        delivered: numbers of those with parameters of their own that have got a gradient.
        uploads: elements of the shard that the next upload brings; None: all of it.
    """

    def __init__(self, slots: Sequence[Slot], counts: Sequence[int]) -> None:
        """`counts`: experts in each parameter."""
        self._slots, first = [], 0
        for slot, count in zip(slots, counts, strict=True):
            self._slots.append((slot, first, count))
            first += count
        self.steps = torch.zeros(first, device="cpu")
        self.used = [True] * first
        self.delivered: set[int] = set()
        self.uploads: list[tuple[int, int]] | None = None
        self._layouts: deque[list[Layout]] = deque(maxlen=_UPDATES_KEPT)

    def __len__(self) -> int:
        return len(self.used)

    def mark(self, delivered: Sequence[tuple[Slot, Tensor]], used: Tensor) -> None:
        """Mark the experts whose slice of a stacked gradient is not all zeros, on compute: it waits
        for nothing.

        Args:
            used: (experts,) uint8.
        """
        grads = {slot: grad for slot, grad in delivered}
        for slot, first, count in self._slots:
            if count > 1 and slot in grads:
                # NaN counts as a gradient, and -0.0 does not.
                marks = grads[slot].flatten(1).any(1)
                used[first : first + count].logical_or_(marks)

    def note(self, delivered: Sequence[tuple[Slot, Tensor]], *, first: bool) -> None:
        """Note which parameters of their own have got a gradient: this thread knows it."""
        if first:
            self.delivered.clear()
        here = {slot for slot, _ in delivered}
        self.delivered |= {at for slot, at, count in self._slots if count == 1 and slot in here}

    def advance(self) -> None:
        """Count a step that is decided and not skipped."""
        self.steps += torch.tensor(self.used, dtype=torch.float32, device="cpu")

    def steps_of(self, slot: Slot) -> Tensor:
        """View a parameter's steps: () of an expert of its own, (experts,) of stacked ones."""
        first, count = next((at, n) for one, at, n in self._slots if one is slot)
        return self.steps[first] if count == 1 else self.steps[first : first + count]

    def runs(self, lo: int, hi: int) -> list[tuple[Run, Layout]]:
        """Return what the update of the shard [lo, hi) has to touch. Layouts live until the kernels
        have read them."""
        found: list[Run] = []
        for number, slot, begin, end in self._pieces(lo, hi):
            step = int(self.steps[number])
            if not found or found[-1].behind != number or found[-1].step != step:
                found.append(Run(begin - lo, begin - lo, step, number))
            found[-1].add(slot, slot.offset - lo, begin - lo, end - lo)
            found[-1].behind = number + 1
        layouts = [run.layout for run in found]
        self._layouts.append(layouts)
        return list(zip(found, layouts, strict=True))

    def _pieces(self, lo: int, hi: int) -> Iterator[tuple[int, Slot, int, int]]:
        """Yield (expert, its parameter, elements [begin, end) of the bucket) of the used ones."""
        for slot, first, count in self._slots:
            each = slot.numel // count
            for number in range(count):
                begin = slot.offset + number * each
                begin, end = max(begin, lo), min(begin + each, hi)
                if begin < end and self.used[first + number]:
                    yield first + number, slot, begin, end


def gaps(runs: Sequence[tuple[int, int]], numel: int) -> list[tuple[int, int]]:
    """Return what of [0, numel) is in none of the runs, which ascend."""
    edges = [0, *(edge for run in runs for edge in run), numel]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [(lo, hi) for lo, hi in pairs if lo < hi]


def skipped_in(model: nn.Module, patterns: Sequence[str]) -> dict[str, int]:
    """Return each trained parameter that `skip_unused` names → the number of experts in it."""
    if not patterns:
        return {}
    named = ((n, p) for n, p in model.named_parameters() if p.requires_grad and p.numel())
    return experts_in({n: tuple(p.shape) for n, p in named if skips(n, patterns)})


def check_skips(model: nn.Module, config: OffloadConfig, rule: AnyRule, *, alone: bool) -> None:
    """Raises SkipError, OptionError where experts cannot be skipped.

    Args:
        alone: every rank holds the whole model, or shards of all of it.
    """
    patterns = config.skip_unused
    if not patterns:
        return
    if not alone:
        raise OptionError(
            f"skip_unused = {list(patterns)} with a mesh that has an axis 'pp', 'tp' or 'ep', or "
            "in a pipeline: the steps of each expert would be in several places. Leave it out, or "
            "offload with data parallelism alone"
        )
    if keeps_whole(rule):
        raise OptionError(
            f"skip_unused = {list(patterns)} and {type(rule).__name__}: it updates whole tensors, "
            "and skipping updates parts of them. Leave it out, or use ot.AdamW"
        )
    _check_names(model, patterns)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    for name, count in skipped_in(model, patterns).items():
        if count > 1 and shapes[name][1:].numel() % BLOCK:
            raise SkipError(
                f"skip_unused names '{name}' of {tuple(shapes[name])}: each of its {count} experts "
                f"has {shapes[name][1:].numel():,} elements, and the state is divided at multiples "
                f"of {BLOCK} only. Leave it out of the pattern"
            )


def _check_names(model: nn.Module, patterns: Sequence[str]) -> None:
    trained = [name for name, p in model.named_parameters() if p.requires_grad and p.numel()]
    for pattern in patterns:
        if not any(skips(name, [pattern]) for name in trained):
            some = ", ".join(trained[:3])
            raise SkipError(
                f"skip_unused: no trained parameter is called '{pattern}'; there are {some}, …"
            )


def load_steps(experts: Experts, slot: Slot, steps: float | Sequence[float] | Tensor) -> None:
    """Set the steps of a parameter's experts; one number stands for all.

    Raises:
        SkipError: another number of experts.
    """
    own, given = experts.steps_of(slot), torch.as_tensor(steps, dtype=torch.float32)
    if given.numel() not in (1, own.numel()):
        raise SkipError(
            f"'{slot.name}' holds {own.numel()} experts, and the state has the steps of "
            f"{given.numel()}"
        )
    own.copy_(given.reshape(own.shape) if given.numel() == own.numel() else given.reshape(()))


def steps_by_name(experts: Mapping[str, tuple[Experts, Slot]]) -> dict[str, list[int]]:
    """Return parameter → the steps of its experts, for a checkpoint."""
    found = {name: one.steps_of(slot).reshape(-1) for name, (one, slot) in experts.items()}
    return {name: [int(step) for step in steps.tolist()] for name, steps in found.items()}
