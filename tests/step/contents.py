"""What a program leaves in memory: its operations done one after the other, on names for values.

Without a race that is what any speed of the lanes leaves there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from offloadtrain.step.layout.buffers import BufferKey, Memory
from offloadtrain.step.layout.formats import ITEMSIZE
from offloadtrain.step.program.operations import Kind, Launch, Operation, Ref, Undefined
from offloadtrain.step.program.places import BucketRefs
from offloadtrain.step.program.program import Program

Version = tuple[object, ...]
"""Of weights and state: what they were set to, and then (step, grad_scale, gradient) per update."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """Elements [lo, hi) of a bucket's shard.

    Attributes:
        sent: the deliveries that it is the sum of.
        summed: over the ranks that share the state.
        of_copies: and over those that hold copies of it.
    """

    bucket: str
    lo: int
    hi: int
    sent: tuple[int, ...]
    summed: bool
    of_copies: bool = True


Value = Gradient | Version
_Place = BufferKey


class Contents:
    """Memory of one rank.

    Attributes:
        read: bucket → the weights that compute has read of it, in order.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self._norms: dict[tuple[str, str], tuple[int, ...]] = {}
        """Tier and bucket → the deliveries whose squares are its sums there."""
        self.read: dict[str, list[Value]] = {}
        self._program = program
        self._rank = rank
        self._values_at: dict[_Place, list[tuple[int, int, Value]]] = {}
        """Bytes [lo, hi) and their value, none twice."""

    @property
    def norms(self) -> dict[str, tuple[int, ...]]:
        """Bucket → the deliveries whose squares count."""
        buckets = self._program.buckets
        return {
            name: sent
            for (tier, name), sent in self._norms.items()
            if buckets[name].gradient.measured_on == tier
        }

    def set_state(self, version: Version) -> None:
        """Of every trained bucket; of frozen ones, the weights that are loaded."""
        trained = {bucket.name for bucket in self._program.spec.buckets}
        for name, bucket in self._program.buckets.items():
            for ref in self._at_rest(bucket) if name in trained else (bucket.load_source,):
                self.write(ref, version)

    def state(self, name: str) -> Value:
        """Of all its fields."""
        values = {self.value(ref) for ref in self._at_rest(self._program.buckets[name])}
        assert len(values) == 1
        return values.pop()

    def _at_rest(self, bucket: BucketRefs) -> tuple[Ref, ...]:
        """Where its state is between steps."""
        return bucket.state_files or bucket.state()

    def run(self, operations: Iterable[Operation], delivery: int = -1) -> None:
        """`delivery`: the number of the gradients that autograd has left."""
        for op in operations:
            if isinstance(op, Undefined):
                self._erase(op.ref)
            elif isinstance(op, Launch):
                self._launch(op, delivery)

    def _launch(self, op: Launch, delivery: int) -> None:
        alone = self._program.spec.is_single
        match op.kind:
            case Kind.FORWARD | Kind.BACKWARD:
                for ref in op.reads:
                    self.read.setdefault(str(ref.owner), []).append(self.value(ref))
            case Kind.GATHER:
                gradient = Gradient(op.owner, op.lo, op.hi, (delivery,), alone)
                self.write(op.writes[0], gradient)
            case Kind.REDUCE_SCATTER:
                full = self._program.spec.copies == 1
                result = replace(self._gradient(op.writes[0]), summed=True, of_copies=full)
                self.write(op.writes[0], result)
            case Kind.ALL_REDUCE:
                result = self._gradient(op.writes[0])
                assert result.summed and not result.of_copies
                self.write(op.writes[0], replace(result, of_copies=True))
            case Kind.ADD | Kind.ACCUMULATE:
                self._add(op)
            case Kind.NO_GRADIENT:
                ref = op.writes[0]
                self.write(ref, Gradient(op.owner, ref.lo, ref.hi, (), True))
            case Kind.NORM:
                # Without a read: of the gradients that autograd has left.
                sent = self._whole_gradient(op.reads[0]) if op.reads else (delivery,)
                self._norms[str(op.writes[0].owner), op.owner] = sent
            case Kind.ADAM:
                self._adam(op)
            case Kind.ALL_GATHER:
                full = op.writes[0]
                count = full.hi // self._program.spec.ranks
                shard = full._replace(lo=self._rank * count, hi=(self._rank + 1) * count)
                self.write(full, self.value(shard))
            case Kind.ROUND_SUM:
                self._whole_gradient(op.writes[0])
            case Kind.ROUND | Kind.GRAD_DOWN | Kind.CAST | Kind.WEIGHTS_UP | Kind.COPY:
                self._copy(op)
            case Kind.PUBLISH | Kind.LOAD:
                self._copy(op)
            case Kind.READ_WEIGHTS | Kind.WRITE_WEIGHTS:
                self._copy(op)
            case Kind.READ_GRADIENT | Kind.WRITE_GRADIENT:
                self._copy_pieces(op.reads[0], op.writes[0])
            case Kind.READ_STATE | Kind.WRITE_STATE:
                for source, target in zip(op.reads, op.writes, strict=True):
                    self.write(target, self.value(source))

    def _copy(self, op: Launch) -> None:
        (source,), (target,) = op.reads, op.writes
        assert source.hi - source.lo == target.hi - target.lo
        value = self.value(source)
        if isinstance(value, Gradient):
            # Zeros in place of a gradient that never came are written at once, and go in pieces.
            if not value.sent and value.lo <= op.lo < op.hi <= value.hi:
                value = replace(value, lo=op.lo, hi=op.hi)
            assert (
                (value.bucket, value.lo, value.hi) == (op.owner, op.lo, op.hi)
                and value.summed
                and value.of_copies
            )
        self.write(target, value)

    def _copy_pieces(self, source: Ref, target: Ref) -> None:
        """Of one extent; the values of each piece."""
        assert (source.lo, source.hi, source.dtype) == (target.lo, target.hi, target.dtype)
        result = self._values(source)
        self._erase(target)
        self._values_at[self._bytes(target)[0]] += result

    def _add(self, op: Launch) -> None:
        arrived, target = self._gradient(op.reads[0]), op.writes[0]
        assert (arrived.lo, arrived.hi) == (op.lo, op.hi) == (target.lo, target.hi)
        if not op.first:
            before = self._gradient(target)
            arrived = replace(before, sent=before.sent + arrived.sent)
        self.write(target, arrived)
        if op.writes[1:]:
            self._norms[str(op.writes[1].owner), op.owner] = self._whole_gradient(target)

    def _adam(self, op: Launch) -> None:
        assert op.update is not None
        sent = self._whole_gradient(op.reads[0])
        after = [ref for ref in op.writes if ref.memory is Memory.STATE]
        before = {self.value(ref) for ref in (op.reads[1:] if op.update.out_of_place else after)}
        assert len(before) == 1
        version = before.pop()
        assert isinstance(version, tuple)
        for ref in op.writes:
            self.write(ref, (*version, (op.update.step, op.update.grad_scale, sent)))

    def _whole_gradient(self, ref: Ref) -> tuple[int, ...]:
        """The same deliveries in each of its pieces, which are all there and in their places."""
        shard = self._program.buckets[str(ref.owner)].spec.shard_numel
        assert (ref.lo, ref.hi) == (0, shard)
        result, size = set(), ITEMSIZE[ref.dtype]
        for lo, hi, value in self._values(ref):
            assert isinstance(value, Gradient) and value.bucket == ref.owner
            assert (value.lo * size, value.hi * size) == (lo, hi)
            result.add(value.sent)
        assert len(result) == 1
        return result.pop()

    def _gradient(self, ref: Ref) -> Gradient:
        value = self.value(ref)
        assert isinstance(value, Gradient)
        return value

    def value(self, ref: Ref) -> Value:
        """What all of it holds."""
        values = {value for _, _, value in self._values(ref)}
        assert len(values) == 1, f"{ref} holds {values}"
        return values.pop()

    def write(self, ref: Ref, value: Value) -> None:
        self._erase(ref)
        place, lo, hi = self._bytes(ref)
        self._values_at[place].append((lo, hi, value))

    def _values(self, ref: Ref) -> list[tuple[int, int, Value]]:
        place, lo, hi = self._bytes(ref)
        clipped = [(max(lo, a), min(hi, b), v) for a, b, v in self._values_at.get(place, [])]
        result = sorted((a, b, v) for a, b, v in clipped if a < b)
        assert sum(b - a for a, b, _ in result) == hi - lo, f"{ref} was never written"
        return result

    def _erase(self, ref: Ref) -> None:
        place, lo, hi = self._bytes(ref)
        left = []
        for a, b, value in self._values_at.get(place, []):
            left += [(x, y, value) for x, y in ((a, min(b, lo)), (max(a, hi), b)) if x < y]
        self._values_at[place] = left

    def _bytes(self, ref: Ref) -> tuple[_Place, int, int]:
        size = ITEMSIZE[ref.dtype]
        key, offset = self._program.table.place(ref.key)
        return key, offset + ref.lo * size, offset + ref.hi * size
