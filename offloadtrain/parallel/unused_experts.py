"""Skips a bucket's experts that a step has not used: [Note: Unused experts] in
`step.layout.skipping`. The used experts are known when step() creates the functions of its
operations."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.config.errors import InputError
from offloadtrain.config.offload import OffloadConfig, OptionError
from offloadtrain.engine.bucket import Bucket, Delivered, Slot
from offloadtrain.engine.division import entries_in
from offloadtrain.optim import AnyRule, UpdateRule, keeps_whole
from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import BLOCK, KernelCalls, Layout
from offloadtrain.runtime.lanes import Buffer, Operation, copy
from offloadtrain.runtime.lanes.base import LaneTotals
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.runtime.tensor_parts import Share, local
from offloadtrain.step.layout.buffers import BufferKey, Memory
from offloadtrain.step.layout.skipping import STACKED_AXES, skips
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.program.operations import Launch

_UPDATES_KEPT = 4
"""Updates whose layouts stay alive; fewer are queued: a step waits for weights of earlier ones."""

_LASTING = (Memory.WORKING, Memory.DEVICE_SHARD, Memory.PENDING)
"""Memories that contain the new weights of a bucket until its next update."""

OTHERS = -1
"""Placeholder for the step count of an expert that another rank holds."""


class SkipError(InputError, ValueError):
    """`skip_unused` names parameters that cannot be skipped."""


@dataclass(slots=True)
class Run:
    """Neighbouring used experts in a shard with the same step count.

    Attributes:
        lo, hi: range of elements in the shard.
        next_expert: number of the expert that follows.
        rows: rows of their layout: offset, numel, id, first element in the parameter.
    """

    lo: int
    hi: int
    step: int
    next_expert: int
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)

    @property
    def layout(self) -> Layout:
        """Elements of each parameter, with offsets relative to `lo`."""
        offsets, numels, ids, firsts = zip(*self.rows, strict=True)
        return Layout([at - self.lo for at in offsets], numels, ids, firsts)

    def add(self, slot: Slot, begin: int, lo: int, hi: int) -> None:
        """Add elements [lo, hi) of a parameter that starts at element `begin` of the shard."""
        if self.rows and self.rows[-1][2] == slot.index:
            at, numel, id, first = self.rows.pop()
            self.rows.append((at, numel + hi - lo, id, first))
        else:
            self.rows.append((lo, hi - lo, slot.index, lo - begin))
        self.hi = hi


class Experts:
    """The experts of one bucket, numbered in the order of its parameters.

    Attributes:
        steps: (experts,) fp32: the number of steps in which each expert was updated.
        used: for each expert, True if it got a gradient in the last measured step, on any rank.
        delivered: numbers of unstacked experts that have got a gradient.
        uploads: ranges of the shard that the next upload copies; None: the complete shard.
    """

    def __init__(self, slots: Sequence[Slot], counts: Sequence[int]) -> None:
        """`counts`: number of experts in each parameter."""
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

    def _mark_stacked(self, delivered: Sequence[tuple[Slot, Tensor]], used: Tensor) -> None:
        """Mark the experts whose slice of a stacked gradient is not all zeros. Runs on compute,
        without a wait.

        Args:
            used: (experts,) uint8.
        """
        grads = {slot: grad for slot, grad in delivered}
        for slot, first, count in self._slots:
            if slot in grads and _is_stacked(slot, count):
                # NaN counts as a gradient, and -0.0 does not.
                marks = grads[slot].flatten(1).any(1)
                used[first : first + count].logical_or_(marks)

    def _note(self, delivered: Sequence[tuple[Slot, Tensor]], *, first: bool) -> None:
        """Record which unstacked experts have a gradient, which only the training thread knows."""
        if first:
            self.delivered.clear()
        here = {slot for slot, _ in delivered}
        unstacked = ((slot, at) for slot, at, count in self._slots if not _is_stacked(slot, count))
        self.delivered |= {at for slot, at in unstacked if slot in here}

    def advance(self) -> None:
        """Add 1 to the step counts of used experts, after a step that is not skipped."""
        self.steps += torch.tensor(self.used, dtype=torch.float32, device="cpu")

    def steps_of(self, slot: Slot) -> Tensor:
        """Return a view of a parameter's step counts: () for an unstacked expert, else
        (experts,)."""
        first, count = next((at, n) for other, at, n in self._slots if other is slot)
        return self.steps[first] if count == 1 else self.steps[first : first + count]

    def runs(self, lo: int, hi: int) -> list[tuple[Run, Layout]]:
        """Return the runs that the update of the shard [lo, hi) changes. Layouts stay alive until
        the kernels have read them."""
        runs: list[Run] = []
        for number, slot, begin, end in self._pieces(lo, hi):
            step = int(self.steps[number])
            if not runs or runs[-1].next_expert != number or runs[-1].step != step:
                runs.append(Run(begin - lo, begin - lo, step, number))
            runs[-1].add(slot, slot.offset - lo, begin - lo, end - lo)
            runs[-1].next_expert = number + 1
        layouts = [run.layout for run in runs]
        self._layouts.append(layouts)
        return list(zip(runs, layouts, strict=True))

    def _pieces(self, lo: int, hi: int) -> Iterator[tuple[int, Slot, int, int]]:
        """Yield (expert, its parameter, elements [begin, end) of the bucket) of used experts."""
        for slot, first, count in self._slots:
            each = slot.numel // count
            for number in range(count):
                begin = slot.offset + number * each
                begin, end = max(begin, lo), min(begin + each, hi)
                if begin < end and self.used[first + number]:
                    yield first + number, slot, begin, end

    def mark(self, op: Launch, delivered: Delivered) -> Operation:
        """Return the function of a `MARK`; called once per operation, on the training thread."""
        first = op.first
        self._note(delivered, first=first)

        def mark_stacked_experts(used: Tensor) -> None:
            if first:
                used.zero_()
            self._mark_stacked(delivered, used)

        return mark_stacked_experts

    def update(
        self, op: Launch, bucket: Bucket, rule: UpdateRule, group: Mapping[str, Any], seed: int
    ) -> Operation:
        """Return the function of an `ADAM` that does not touch the memory of unused experts."""
        update, format = op.update, bucket.format
        assert update is not None and not update.out_of_place
        runs = self.runs(bucket.lo, bucket.hi)
        fields, emits = format.fields(bucket.spec.moments), not format.holds_weight
        written = [(run.lo, run.hi) for run, _ in runs]
        # The upload may leave out unused experts if its target still contains their weights.
        on_device = bucket.spec.state_tier is Tier.DEVICE
        has_shard = BufferKey(bucket.name, Memory.DEVICE_SHARD) in bucket.memory
        partly = not on_device and (has_shard or not bucket.moves)
        self.uploads = written if partly else None
        # Memory that is reused between two updates must be filled with the weights of all experts.
        fills = emits and not partly and op.writes[0].memory not in _LASTING
        left = _gaps(written, bucket.shard_numel) if fills else []

        def adam(grad: Tensor, *rest: Tensor) -> None:
            after, working = rest[-len(fields) :], rest[0] if emits else None
            for lo, hi in left:
                assert working is not None
                kernels.cast(after[0][lo:hi], working[lo:hi])
            for run, layout in runs:
                lo, hi = run.lo, run.hi
                rule.update(
                    format,
                    kernels.cut(fields, after, lo, hi),
                    grad[lo:hi],
                    None if working is None else working[lo:hi],
                    layout,
                    group=group,
                    step=run.step,
                    grad_scale=update.grad_scale,
                    seed=seed,
                )

        return KernelCalls(adam) if rule.calls_only_kernels(format) else adam

    def upload(self, op: Launch, totals: LaneTotals) -> Operation:
        """Return the function of a `WEIGHTS_UP`, which copies only used experts if the update has
        set ranges. Subtracts the bytes that are not copied from `totals`."""
        if self.uploads is None:
            return copy
        # The ranges are valid for one upload, after their update; other uploads copy everything.
        ranges, self.uploads = self.uploads, None
        (source,) = op.reads
        moved = sum(hi - lo for lo, hi in ranges) * source.nbytes // (source.hi - source.lo)
        totals.h2d_bytes -= source.nbytes - moved

        def uploaded(staged: Tensor, target: Tensor) -> None:
            for lo, hi in ranges:
                # h2d: equivalent to one copy of all; the launch orders every part of it.
                copy(staged[lo:hi], target[lo:hi])

        return uploaded

    def steps_by_entry(self, slot: Slot, share: Share) -> list[int]:
        """Return the step counts of all experts of a parameter; `OTHERS` for experts of other
        ranks.

        Args:
            share: this rank's share of the parameter.
        """
        local_steps = self.steps_of(slot)
        first, total = _first_and_total(local_steps, share)
        steps = [OTHERS] * total
        steps[first : first + local_steps.numel()] = [
            int(step) for step in local_steps.reshape(-1).tolist()
        ]
        return steps

    def load_steps(self, slot: Slot, share: Share, steps: float | Sequence[float] | Tensor) -> None:
        """Set the step counts of a parameter's experts; a single number is used for all.

        Args:
            share: this rank's share of the parameter; `steps` are those of all its experts, or of
                the experts in the share.

        Raises:
            SkipError: `steps` has a wrong number of experts.
        """
        local_steps, loaded = self.steps_of(slot), torch.as_tensor(steps, dtype=torch.float32)
        first, total = _first_and_total(local_steps, share)
        if loaded.numel() == total:
            loaded = loaded.reshape(-1)[first : first + local_steps.numel()]
        if loaded.numel() not in (1, local_steps.numel()):
            raise SkipError(
                f"'{slot.name}' holds {local_steps.numel()} experts, and the state has the steps "
                f"of {loaded.numel()}"
            )
        local_steps.copy_(
            loaded.reshape(local_steps.shape)
            if loaded.numel() == local_steps.numel()
            else loaded.reshape(())
        )


def _is_stacked(slot: Slot, count: int) -> bool:
    """Return True if the parameter always gets a gradient, even if no expert is used. A rank may
    hold a single expert of a stacked parameter."""
    return count > 1 or len(slot.shape) >= STACKED_AXES


def _gaps(runs: Sequence[tuple[int, int]], numel: int) -> list[tuple[int, int]]:
    """Return the parts of [0, numel) that are in none of the runs, which must ascend."""
    edges = [0, *(edge for run in runs for edge in run), numel]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [(lo, hi) for lo, hi in pairs if lo < hi]


def check_skips(model: nn.Module, config: OffloadConfig, rule: AnyRule, *, whole: bool) -> None:
    """Raise SkipError or OptionError if experts cannot be skipped.

    Args:
        whole: the model is not a pipeline stage; names in a stage may belong to another stage.
    """
    patterns = config.skip_unused
    if not patterns:
        return
    if keeps_whole(rule):
        raise OptionError(
            f"skip_unused = {list(patterns)} and {type(rule).__name__}: it updates whole tensors, "
            "and skipping updates parts of them. Leave it out, or use ot.AdamW"
        )
    if whole:
        check_names(model, patterns)
    shapes = {name: local(p).shape for name, p in model.named_parameters()}
    for name, count in entries_in(model, patterns).items():
        if count > 1 and shapes[name][1:].numel() % BLOCK:
            raise SkipError(
                f"skip_unused names '{name}' of {tuple(shapes[name])}: each of its {count} experts "
                f"has {shapes[name][1:].numel():,} elements, and the state is divided at multiples "
                f"of {BLOCK} only. Leave it out of the pattern"
            )


def check_names(model: nn.Module, patterns: Sequence[str]) -> None:
    """Raise SkipError for a pattern of `skip_unused` that matches no parameter."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad and p.numel()]
    for pattern in patterns:
        if not any(skips(name, [pattern]) for name in trained):
            some = ", ".join(trained[:3])
            raise SkipError(
                f"skip_unused: no trained parameter is called '{pattern}'; there are {some}, …"
            )


def merged_steps(of_ranks: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Merge the step counts that each rank or stage returns for its experts, for a checkpoint."""
    merged: dict[str, list[int]] = {}
    for of_rank in of_ranks:
        for name, steps in of_rank.items():
            known = merged.get(name, steps)
            merged[name] = [max(pair) for pair in zip(known, steps, strict=True)]
    return merged


def _first_and_total(local_steps: Tensor, share: Share) -> tuple[int, int]:
    """Return the number of the first expert of a parameter on this rank, and the total number of
    its experts."""
    total = share.shape[0] if local_steps.ndim or len(share.shape) >= STACKED_AXES else 1
    if local_steps.numel() == total:
        return 0, total
    return share.ranges[0].at * total // prod(share.shape), total


class UnusedExperts:
    """Implements the `Skipping` protocol of `engine.division` for experts."""

    def usage_of(self, slots: Sequence[Slot], counts: Sequence[int]) -> Experts:
        return Experts(slots, counts)

    def agree(self, of_experts: Sequence[tuple[Experts, Buffer]], among: Sequence[Ranks]) -> None:
        """Set which experts of each bucket got a gradient, on this rank or another.

        Args:
            among: ranks that hold the same experts, or parts of them; tokens of other ranks were
                sent here.
        """
        # The marks are complete: the program's last operations have waited for them.
        marks = torch.cat([used.flat for _, used in of_experts]).cpu()
        first = 0
        for experts, _ in of_experts:
            marks[[first + number for number in experts.delivered]] = 1
            first += len(experts)
        for ranks in among:
            if not ranks.is_single:
                # Waits for the same backward on these ranks.
                marks = ranks.all_gather_host(marks.tolist()).amax(0)
        for experts, _ in of_experts:
            experts.used = (marks[: len(experts)] != 0).tolist()
            marks = marks[len(experts) :]
