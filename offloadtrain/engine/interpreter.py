"""Runs the program's operations: kind → function, ref → memory, lane → stream or thread.

[Note: Salvage]
A step is decided when its norm is known: by then all of its gradients are on the host, and only
Adam remains, bucket by bucket, on the host. The device is not needed for it. So after a failure the
state on the host is that of a completed step, or can be brought to it:

  before the decision   the updates of the previous step are finished; the step itself is abandoned
  after the decision    its updates are finished as well
  neither               if Adam has run in place inside backward (`updates_early`), before
                        all gradients were ready: that state is between two steps; or if
                        matrices of a decided step were not orthogonalized, which needs the device

The journal stores each launch of Adam until the host lane is known to have run it. Launches that
did not run are run with the same operands and hyperparameters by the thread that salvages.
Operations that were decided and not launched are run after them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any, NamedTuple, ParamSpec
from zlib import crc32

import torch
from torch import Tensor

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine.bucket import Bucket, Delivered, Slot
from offloadtrain.engine.buffers import Ranges
from offloadtrain.engine.saved_state import StateWriter
from offloadtrain.optim import AnyRule, MatrixRule
from offloadtrain.runtime import kernels
from offloadtrain.runtime.disk_arena import DiskArena
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.runtime.kernels import KernelCalls
from offloadtrain.runtime.lanes import HostProgress, Lanes, Range, copy, views
from offloadtrain.runtime.lanes import Operation as Function
from offloadtrain.runtime.process_group import ALONE, LostRankError, Ranks, is_of_exchange
from offloadtrain.runtime.tensor_parts import local
from offloadtrain.step.program.operations import (
    Allocate,
    Free,
    HostWait,
    Kind,
    Lane,
    Launch,
    Operation,
    Operations,
    Record,
    Ref,
    Swap,
    Undefined,
    Wait,
)

P = ParamSpec("P")


class SalvageError(OffloadTrainError):
    """The state on the host is not that of a completed step, and cannot be brought to it."""


Call = Callable[[], object]


@dataclass(slots=True)
class _Adam:
    """A launch of Adam.

    Attributes:
        number: its position among the operations of the host lane, 1-based.
        run: calls it with its operands.
        decided: its result counts: in place, its step is decided; out of place, the copies of the
            state are swapped.
    """

    bucket: str
    number: int
    run: Call
    in_place: bool
    decided: bool


class UpdateJournal:
    """The launches of Adam that the host lane may not have run yet, in order."""

    def __init__(self) -> None:
        self._open: deque[_Adam] = deque()
        self.unlaunched: Sequence[Operation] = ()
        """Operations of a decided step that will not be launched."""
        self.of_matrices: set[str] = set()
        """Buckets whose Adam needs results of the device."""

    def launches(self, op: Launch, run: Call, progress: HostProgress, *, decided: bool) -> None:
        """Adam is about to be launched on the host lane.

        Args:
            decided: its step is decided.
        """
        assert op.update is not None
        # Drop launches that have run and count: a failure does not affect them. In order: every
        # launch after one that has not run has not run either.
        while self._open and self._open[0].number <= progress.ended:
            if self._open[0].in_place and not self._open[0].decided:
                break
            self._open.popleft()
        in_place = not op.update.out_of_place
        number = progress.launched + 1
        self._open.append(_Adam(op.owner, number, run, in_place, decided and in_place))

    def decide(self) -> None:
        """The step is decided: updates that ran in place inside its backward count."""
        for update in self._open:
            update.decided = update.decided or update.in_place

    def swapped(self, bucket: str) -> None:
        """The last update into the other copy of the bucket's state becomes its state."""
        for update in reversed(self._open):
            if update.bucket == bucket and not update.in_place:
                update.decided = True
                return

    def forget(self) -> None:
        """The lanes are idle, and the complete state was replaced."""
        self._open.clear()

    def finish(
        self,
        progress: HostProgress,
        call_of: Callable[[Launch], Call],
        swap: Callable[[Swap], None],
    ) -> None:
        """Run the updates that were decided and have not run. The host lane has stopped for good.

        Args:
            call_of: makes the call of a launch.
            swap: carries out the operation.

        Raises:
            SalvageError: nothing was run.
        """
        self._check(progress)
        remaining: list[Call] = []
        for op in self.unlaunched:
            if isinstance(op, Swap):
                self.swapped(op.bucket)
                swap(op)
            elif isinstance(op, Launch) and op.kind is Kind.ADAM:
                remaining.append(call_of(op))
        missing = (update for update in self._open if update.number > progress.ended)
        for run in (*(update.run for update in missing if update.decided), *remaining):
            run()
        self._open.clear()
        self.unlaunched = ()

    def _check(self, progress: HostProgress) -> None:
        in_place = [update for update in self._open if update.in_place]
        begun = [update for update in in_place if update.number <= progress.begun]
        if early := [update for update in begun if not update.decided]:
            raise SalvageError(
                f"Adam of {len(early)} buckets ran inside a backward that did not end: the state "
                "is between two steps. With offload.skip_nonfinite = true no update runs before "
                "all gradients of its step are on the host"
            )
        pending = [
            update.bucket
            for update in in_place
            if update.decided and update.number > progress.ended
        ]
        kinds = (Kind.DIRECTION, Kind.ADAM)
        unlaunched = [op for op in self.unlaunched if isinstance(op, Launch) and op.kind in kinds]
        pending += [op.owner for op in unlaunched]
        self.of_matrices.update(op.owner for op in unlaunched if op.kind is Kind.DIRECTION)
        if lost := self.of_matrices.intersection(pending):
            raise SalvageError(
                f"the update of {len(lost)} buckets of matrices was decided, and the device has "
                "not orthogonalized them: the state is between two steps. Go on from a checkpoint"
            )
        if torn := [update for update in begun if update.number > progress.ended]:
            raise SalvageError(
                f"Adam of '{torn[0].bucket}' itself failed, in the midst of the state"
            )


class RankDigests:
    """Checksums of this rank's actions since ranks last compared them."""

    def __init__(self) -> None:
        self._collectives = 0
        self._weights: dict[str, int] = {}

    def add_collective(self, name: str) -> None:
        """Add a collective; the checksum depends on the order."""
        self._collectives = crc32(name.encode(), self._collectives)

    def add_weights(self, name: str, values: Tensor) -> None:
        """Add values that were written into a parameter or buffer without the engine."""
        flat = local(values.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)
        self._weights[name] = crc32(flat.numpy().data, self._weights.get(name, 0))

    def take_collectives(self) -> int:
        """Return the checksum of the collectives, and start a new one."""
        digest, self._collectives = self._collectives, 0
        return digest

    def take_weights(self) -> dict[str, int]:
        """Return name → checksum of the written weights, and start new checksums."""
        weights, self._weights = self._weights, {}
        return weights


class Functions:
    """Makes the function of a launch, whose arguments are the views of its reads, then of its
    writes.

    Attributes:
        delivered: bucket → its gradients, from `.grad` until the launch of their last gather.
        groups: the optimizer's `param_groups`; each launch reads their hyperparameters again.
        rules: one per group.
        seed: seed of stochastic rounding.
        writer: receives the data of the next launches of `WRITE`.
        digests: checksums of collectives, and of weights that the user has written.
        disk: moves state, gradients and weights between their file and host memory.
    """

    def __init__(
        self,
        buckets: Iterable[Bucket],
        lanes: Lanes,
        ranks: Ranks,
        rules: Sequence[AnyRule],
        groups: Sequence[Mapping[str, Any]],
        disk: DiskArena,
        *,
        seed: int,
        parts: Ranks = ALONE,
    ) -> None:
        """`parts`: the ranks that store the other parts of block inputs."""
        self.delivered: dict[str, Delivered] = {}
        self.seed = seed
        self.writer: StateWriter | None = None
        self.digests = RankDigests()
        self._buckets = {bucket.name: bucket for bucket in buckets}
        self._lanes = lanes
        self._ranks = ranks
        self.disk = disk
        self._parts = parts
        self.rules = rules
        self.groups = groups
        self._targets: dict[tuple[str, int, Ref], Targets] = {}
        """(bucket, start of a piece, staging) → destination of the gradients."""
        self._makers: dict[Kind, Callable[[Launch], Function]] = {
            Kind.GATHER: self._gather,
            Kind.REDUCE_SCATTER: self._collective,
            Kind.ALL_REDUCE: self._collective,
            Kind.GATHER_INPUT: self._collective,
            Kind.DIRECTION: self._direction,
            Kind.ORTHOGONALIZE: self._orthogonalize,
            Kind.ADAM: self._adam,
            Kind.ALL_GATHER: self._collective,
            Kind.ROUND_SUM: self._round_sum,
            Kind.WRITE: self._write,
            Kind.READ_STATE: lambda _: disk.read,
            Kind.READ_GRADIENT: lambda _: disk.read,
            Kind.READ_WEIGHTS: lambda _: disk.read,
            Kind.WRITE_STATE: lambda _: disk.write,
            Kind.WRITE_GRADIENT: lambda _: disk.write,
            Kind.WRITE_WEIGHTS: lambda _: disk.write,
            Kind.ACCUMULATE: self._accumulate,
            Kind.NORM: self._norm,
            Kind.NO_GRADIENT: lambda _: KernelCalls(kernels.zero, keeps=True),
            Kind.CAST: lambda _: KernelCalls(kernels.cast, keeps=True),
            Kind.PUBLISH: lambda _: KernelCalls(kernels.copy, keeps=True),
        }
        self._alike = _ALIKE
        if any(bucket.usage for bucket in self._buckets.values()):
            # Only buckets with a `usage` read the marks of used experts.
            self._alike = {kind: fn for kind, fn in _ALIKE.items() if kind != Kind.WEIGHTS_UP}
            self._makers |= {Kind.MARK: self._mark, Kind.WEIGHTS_UP: self._weights_up}
        self._captured: dict[tuple[Kind, str, bool, int], Function] = {}
        """The functions of `_CAPTURED` kinds, with their captured calls."""

    def of(self, op: Launch) -> Function:
        """Return the function of this launch."""
        if alike := self._alike.get(op.kind):
            return alike
        if op.kind is Kind.NORM and op.lane is Lane.COMPUTE:
            return self._norm_gathered(op)
        if op.kind not in _CAPTURED:
            return self._makers[op.kind](op)
        key = (op.kind, op.owner, op.first, len(op.writes))
        if key not in self._captured:
            self._captured[key] = self._makers[op.kind](op)
        return self._captured[key]

    def close(self) -> None:
        """Nothing will be launched any more: drop the functions, which refer to this object."""
        self._makers.clear()
        self._captured.clear()

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return the present hyperparameters of every group."""
        return [self._values_of(number) for number in range(len(self.groups))]

    def _values_of(self, group: int) -> dict[str, Any]:
        """Copy the hyperparameters of a group. Its update runs on a lane later, when a scheduler
        may have changed them: it writes into a learning rate that is a tensor."""
        values = {name: value for name, value in self.groups[group].items() if name != "params"}
        return {
            name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            for name, value in values.items()
        }

    @contextmanager
    def average(self, update: Callable[..., None]) -> Iterator[None]:
        """Within this context launches of `AVERAGE` call `update` with the name and the state of
        their bucket. The reference to `update`, which may keep the optimizer alive, is dropped at
        the end."""
        self._makers[Kind.AVERAGE] = lambda op: partial(update, op.owner)
        yield
        del self._makers[Kind.AVERAGE]

    def _gather(self, op: Launch) -> Function:
        """Return a function that copies gradients into a flat buffer, grouped by rank, zeros for
        missing ones: see [Note: Pieces of a shard]."""
        bucket, delivered = self._buckets[op.owner], self.delivered.get(op.owner, ())
        # With the last piece the function is the only owner of the gradients: they are freed when
        # it has run on compute, before the next node of backward allocates.
        if op.hi == bucket.hi - bucket.lo:
            self.delivered.pop(op.owner, None)

        # True if every parameter of the bucket has a gradient, as in nearly every step.
        complete = len(delivered) == len(bucket.slots)
        key = (op.owner, op.lo, op.writes[0])

        def gather(flat: Tensor) -> None:
            if (targets := self._targets.get(key) if complete else None) is None:
                shard_numel = bucket.hi - bucket.lo
                each = range(bucket.spec.ranks if op.hi - op.lo < shard_numel else 1)
                starts = [rank * shard_numel + op.lo for rank in each]
                targets = targets_of(flat, starts, [slot for slot, _ in delivered])
                if complete:
                    self._targets[key] = targets
            sources = []
            for number, cut in targets.sources:
                gradient = delivered[number][1]
                if cut is not None:
                    gradient = flat_gradient(*delivered[number])[slice(*cut)]
                sources.append(gradient)
            with torch.no_grad():
                if targets.gaps:
                    torch._foreach_zero_(targets.gaps)
                if sources:
                    torch._foreach_copy_(targets.views, sources)

        return gather

    def _collective(self, op: Launch) -> Function:
        # Called by the launching thread, in launch order: ranks compare digests when they exchange
        # the norm, so that mismatched collectives are detected in the step in which they ran.
        self.digests.add_collective(op.name)
        HEARTBEAT.collective_of = op.name
        sent = op.writes[0].nbytes
        if op.kind is Kind.ALL_REDUCE:
            # Traffic of a reduce-scatter and an all-gather of the shard.
            self._lanes.totals.comm_bytes += 2 * self._ranks.copies.sent_bytes(sent)
            return self._ranks.copies.all_reduce
        of_input = op.kind is Kind.GATHER_INPUT
        ranks = self._parts if of_input else self._buckets[op.owner].sharers
        self._lanes.totals.comm_bytes += ranks.sent_bytes(sent)
        return ranks.reduce_scatter if op.kind is Kind.REDUCE_SCATTER else ranks.all_gather

    def _accumulate(self, op: Launch) -> Function:
        layout, first = self._buckets[op.owner].layout, op.first

        def accumulate(staged: Tensor, total: Tensor) -> None:
            kernels.accumulate(total, staged, first)

        def measure(staged: Tensor, total: Tensor, squares: Tensor) -> None:
            kernels.accumulate_squares(total, staged, first, layout, squares)

        return KernelCalls(measure if len(op.writes) > 1 else accumulate, keeps=True)

    def _round_sum(self, op: Launch) -> Function:
        dtype = self._buckets[op.owner].dtype

        def round_sum(total: Tensor) -> None:
            # In parts, so that the temporary is small.
            for part in total.split(_ROUNDED_AT_ONCE):
                part.copy_(part.to(dtype))

        return round_sum

    def _norm(self, op: Launch) -> Function:
        layout = self._buckets[op.owner].layout

        def measure(flat: Tensor, squares: Tensor) -> None:
            kernels.sum_squares_many(flat, layout, squares)

        return KernelCalls(measure, keeps=True)

    def _norm_gathered(self, op: Launch) -> Function:
        """See [Note: Measured in the gather] in `step.program.gradients`."""
        bucket, delivered = self._buckets[op.owner], self.delivered.get(op.owner, ())
        silent: set[int] = set()
        if len(delivered) < len(bucket.slots):
            silent = {slot.index for slot in bucket.slots} - {slot.index for slot, _ in delivered}

        def measure(squares: Tensor) -> None:
            # By views: a list of indices would be copied to the device, and this thread would wait.
            if silent:
                torch._foreach_zero_([squares[index] for index in silent])
            dense = []
            for slot, grad in delivered:
                ordered = grad if grad.stride() == slot.stride else flat_gradient(slot, grad)
                # In the dtype of the copy to the host: the parameters' dtype, and nearly always
                # autograd's.
                if ordered.dtype is not bucket.dtype:
                    ordered = ordered.to(bucket.dtype)
                dense.append((slot.index, ordered))
            kernels.sum_squares_each(dense, squares)

        return measure

    def _adam(self, op: Launch) -> Function:
        bucket, update = self._buckets[op.owner], op.update
        assert update is not None
        group = self._values_of(bucket.group)
        rule, seed = self.rules[bucket.group], self.seed
        if isinstance(rule, MatrixRule):
            return self._apply(bucket, rule, group)
        if bucket.usage is not None:
            return bucket.usage.update(op, bucket, rule, group, seed)
        format, layout = bucket.spec.format, bucket.layout
        emits = not format.holds_weight
        fields = len(op.writes) - emits

        def adam(grad: Tensor, *rest: Tensor) -> None:
            after = rest[-fields:]
            rule.update(
                format,
                rest[:fields] if update.out_of_place else after,
                grad,
                rest[-fields - 1] if emits else None,
                layout,
                group=group,
                step=update.step - bucket.missed_steps,
                grad_scale=update.grad_scale,
                seed=seed,
                out=after if update.out_of_place else None,
            )

        return KernelCalls(adam) if rule.calls_only_kernels(format) else adam

    def _mark(self, op: Launch) -> Function:
        usage = self._buckets[op.owner].usage
        assert usage is not None
        return usage.mark(op, self.delivered.get(op.owner, ()))

    def _weights_up(self, op: Launch) -> Function:
        usage = self._buckets[op.owner].usage
        return copy if usage is None else usage.upload(op, self._lanes.totals)

    def _direction(self, op: Launch) -> Function:
        bucket, update, seed = self._buckets[op.owner], op.update, self.seed
        rule, group = self.rules[bucket.group], self._values_of(bucket.group)
        assert update is not None and isinstance(rule, MatrixRule)

        def direction(grad: Tensor, target: Tensor, *state: Tensor) -> None:
            rule.direction(
                bucket.format,
                state,
                grad,
                target,
                bucket.layout,
                group=group,
                step=update.step - bucket.missed_steps,
                grad_scale=update.grad_scale,
                seed=seed,
            )

        calls_only_kernels = rule.calls_only_kernels(bucket.format)
        return KernelCalls(direction) if calls_only_kernels else direction

    def _orthogonalize(self, op: Launch) -> Function:
        bucket = self._buckets[op.owner]
        rule, group = self.rules[bucket.group], self._values_of(bucket.group)
        slot = next(slot for slot in bucket.slots if slot.offset == bucket.lo + op.lo)
        assert isinstance(rule, MatrixRule)

        def orthogonalize(flat: Tensor, workspace: Tensor) -> None:
            with torch.no_grad():
                rule.orthogonalize(slot.shaped(flat), workspace, group=group)

        return orthogonalize

    def _apply(self, bucket: Bucket, rule: MatrixRule, group: Mapping[str, Any]) -> Function:
        """Return the function of an `ADAM` of matrices."""
        fields, emits = len(bucket.state), not bucket.format.holds_weight
        shapes = [slot.shape for slot in bucket.slots if bucket.lo <= slot.offset < bucket.hi]

        def apply(update: Tensor, *rest: Tensor) -> None:
            state, working = rest[-fields:], rest[0] if emits else None
            rule.apply(bucket.format, state, update, working, bucket.layout, shapes, group=group)

        return KernelCalls(apply) if rule.calls_only_kernels(bucket.format) else apply

    def _write(self, op: Launch) -> Function:
        writer = self.writer
        assert writer is not None

        def write(*fields: Tensor) -> None:
            writer.write(op.owner, list(zip(op.written, fields, strict=True)))

        return write if op.owner else writer.finish


class Targets(NamedTuple):
    """Destinations of some parameters' gradients in a piece of staging.

    Attributes:
        views: a view of staging for each copy.
        sources: for each copy, the index of its gradient among the delivered gradients, and the
            part [first, last) of it that is copied; None for all of it.
        gaps: elements of staging that no gradient is written to.
    """

    views: list[Tensor]
    sources: list[tuple[int, tuple[int, int] | None]]
    gaps: list[Tensor]


def targets_of(flat: Tensor, starts: Sequence[int], slots: Sequence[Slot]) -> Targets:
    """Make the views for gradients of `slots`, grouped by rank.

    Args:
        flat: (ranks · n,) on the device, working dtype, or fp32 if ranks sum in fp32.
        starts: for each rank, index in the bucket of the first of its n elements.
    """
    targets, count = Targets([], [], []), flat.numel() // len(starts)
    for rank, lo in enumerate(starts):
        piece = flat[rank * count : (rank + 1) * count]
        # Elements [lo, hi) of the bucket; elements before `end` have views already.
        hi, end = lo + piece.numel(), lo
        for number, slot in enumerate(slots):
            first, last = max(lo, slot.offset), min(hi, slot.offset + slot.numel)
            if first >= last:
                continue
            if first > end:
                targets.gaps.append(piece[end - lo : first - lo])
            view, is_complete = piece[first - lo : last - lo], last - first == slot.numel
            targets.views.append(slot.shaped(view) if is_complete else view)
            cut = None if is_complete else (first - slot.offset, last - slot.offset)
            targets.sources.append((number, cut))
            end = last
        if end < hi:
            targets.gaps.append(piece[end - lo :])
    return targets


def flat_gradient(slot: Slot, grad: Tensor) -> Tensor:
    """Return a gradient as (numel,) in the order of the parameter's memory: a view if it has
    that order already, otherwise a copy."""
    if grad.stride() == slot.stride:
        return torch.as_strided(grad, (slot.numel,), (1,), grad.storage_offset())
    flat = torch.empty(slot.numel, dtype=grad.dtype, device=grad.device)
    slot.shaped(flat).copy_(grad)
    return flat


def _spill(*views: Tensor) -> None:
    """Copy each view of the first half to the corresponding view of the second half."""
    half = len(views) // 2
    for source, target in zip(views[:half], views[half:], strict=True):
        kernels.copy(source, target)


_ROUNDED_AT_ONCE = 16 << 20
"""Number of values rounded per call."""

_CAPTURED = frozenset({Kind.ACCUMULATE, Kind.NORM, Kind.NO_GRADIENT, Kind.CAST, Kind.PUBLISH})
"""Kinds whose launches repeat over a few sets of operands."""

_ALIKE: dict[Kind, Function] = {
    Kind.ROUND: lambda wide, narrow: narrow.copy_(wide),
    Kind.GRAD_DOWN: copy,
    Kind.COPY: copy,
    Kind.NORMS_DOWN: copy,
    Kind.ADD: lambda staged, grad: grad.add_(staged),
    Kind.MATRIX_UP: copy,
    Kind.MATRIX_DOWN: copy,
    Kind.WEIGHTS_UP: copy,
    Kind.SPILL: KernelCalls(_spill),
    Kind.LOAD: copy,
    Kind.ACTIVATION_DOWN: copy,
    Kind.ACTIVATION_UP: copy,
    Kind.KEEP_INPUT: copy,
    Kind.FETCH_PART: copy,
}
"""Functions that are equal for every launch of a kind."""


class CutShortError(OffloadTrainError):
    """An exception interrupted the operations of a step."""


class Interpreter:
    """Runs operations of the program, which has no tensors, on lanes, which have no blocks.

    Attributes:
        failure: the exception that interrupted operations. The program assumes that all of them
            ran, so nothing more runs until the step is abandoned and both restart from idle memory.
        is_inconsistent: weights or state may be between two steps then: no restart is possible.
        lock: held from an event of the program until its operations are launched.
        journal: the updates that may be unfinished; see [Note: Salvage].
    """

    def __init__(
        self,
        lanes: Lanes,
        memory: Ranges,
        functions: Functions,
        change: Callable[[Operation], None],
        *,
        describe_lost_rank: Callable[[str], str] = str,
        unsalvageable: str = "",
    ) -> None:
        """
        Args:
            change: carries out an operation that changes where weights and state are.
            describe_lost_rank: name of a failed collective → error message.
            unsalvageable: why no update can be finished without the device; "" if it can.
        """
        self._unsalvageable = unsalvageable
        self._lanes = lanes
        self._memory = memory
        self._functions = functions
        self._change, self._describe_lost_rank = change, describe_lost_rank
        self._updating = False
        self.lock = RLock()
        self.journal = UpdateJournal()
        self.failure: BaseException | None = None
        self.is_inconsistent = False

    def run(self, event: Callable[P, Operations], *args: P.args, **kwargs: P.kwargs) -> None:
        """Report an event to the program and run its operations in order; returns when the last
        is launched.

        Raises:
            CutShortError: earlier operations were interrupted.
            LostRankError: a collective has failed.
        """
        # torch's selective checkpoint would treat loads on this thread as operations of the model.
        modes = torch.utils._python_dispatch
        if torch._C._len_torch_dispatch_stack() and (
            type(modes._get_current_dispatch_mode()).__module__ == "torch.utils.checkpoint"
        ):
            with modes._pop_mode_temporarily():
                return self.run(event, *args, **kwargs)
        # Other threads may read parameters: the operations of an event are launched before the next
        # event.
        with self.lock:
            if self.failure is not None:
                self.require_intact()
            todo = iter(event(*args, **kwargs))
            lanes, memory = self._lanes, self._memory
            try:
                for op in todo:
                    # By exact type, frequent types first: a match statement takes three
                    # times as many instructions, on the thread that launches compute.
                    if type(op) is Launch:
                        self._launch(op)
                    elif type(op) is Record:
                        # The event keeps the lanes' own event, for waits that may refer to it
                        # later.
                        op.event.real = lanes.record(op.event.lane)
                    elif type(op) is Wait:
                        lanes.wait(op.lane, op.event.real, op)
                    elif type(op) is Undefined:
                        lanes.undefine(memory[op.ref], op.lane)
                    elif type(op) is HostWait:
                        lanes.host_wait(op.event.real, op.why)
                    elif type(op) is Allocate:
                        memory.inputs.allocate(op.ref, lanes)
                    elif type(op) is Free:
                        # Compute has waited for the copy: the allocator may reuse the memory.
                        memory.inputs.free(op.ref)
                    else:
                        if type(op) is Swap:
                            self.journal.swapped(op.bucket)
                        # Parameters change their views when the operations are launched, not when
                        # the lanes run them. Compute waits for the load before it reads a new view.
                        self._change(op)
            # Waits and records may be missing from here on: later launches could race.
            except BaseException as error:
                self.failure, self.is_inconsistent = error, self._updating
                if self._updating:
                    self.journal.unlaunched = tuple(todo)
                raise

    def run_update(self, event: Callable[P, Operations], *args: P.args, **kwargs: P.kwargs) -> None:
        """As `run`, for operations that change weights or state in ways that cannot be repeated."""
        with self.lock:
            self._updating = True
            try:
                self.run(event, *args, **kwargs)
            finally:
                self._updating = False

    def require_intact(self) -> None:
        """Raises CutShortError if earlier operations were interrupted."""
        if self.failure is not None:
            remedy = "zero_grad() gives the step up"
            if self.is_inconsistent:
                remedy = "close() and offload again"
            raise CutShortError(
                f"{type(self.failure).__name__} ({self.failure}) cut the operations of a step "
                f"short: {remedy}"
            )

    def salvage(self, failure: BaseException) -> None:
        """Finish the decided updates, without the device. Nothing will be launched any more.

        Raises:
            SalvageError: the state is between two steps, or not on the host; nothing was run.
        """
        if self._unsalvageable:
            raise SalvageError(self._unsalvageable)
        self.failure, self.is_inconsistent = self.failure or failure, True
        # Waits only for the host lane: its last operation may still write the state.
        self._lanes.abandon()
        self.journal.finish(self._lanes.host_progress(), self._call_of, self._change)

    def _launch(self, op: Launch) -> None:
        lookup = self._memory.__getitem__
        reads, writes = list(map(lookup, op.reads)), list(map(lookup, op.writes))
        function = self._functions.of(op)
        # Updates on the device are lost with it: the journal only has updates on the host.
        if op.kind is Kind.DIRECTION and op.lane is Lane.HOST:
            self.journal.of_matrices.add(op.owner)
        if op.kind is Kind.ADAM and op.lane is Lane.HOST:
            progress, call = self._lanes.host_progress(), partial(_call, function, reads, writes)
            self.journal.launches(op, call, progress, decided=self._updating)
        HEARTBEAT.beats += 1
        try:
            self._lanes.launch(op.lane, op.name, function, reads, writes)
        except RuntimeError as error:
            if not is_of_exchange(error):
                raise
            raise LostRankError(self._describe_lost_rank(op.name)) from error

    def _call_of(self, op: Launch) -> Call:
        reads, writes = ([self._memory[ref] for ref in refs] for refs in (op.reads, op.writes))
        return partial(_call, self._functions.of(op), reads, writes)


def _call(function: Function, reads: Sequence[Range], writes: Sequence[Range]) -> None:
    function(*views(reads, writes))
