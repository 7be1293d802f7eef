"""One block: the residence of its working weights, and the graphs that still read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine.autograd.absent_reads import AbsentReads, reveal
from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.engine.checks import MOVED, ModelError, changed
from offloadtrain.engine.local_part import LocalPart
from offloadtrain.runtime.lanes import Buffer, Lanes, Range, Span


class StaleGraphError(OffloadTrainError):
    """A backward over a graph whose weights have been updated since."""


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Leave a user's inference mode: views made inside it could not be trained afterwards."""
    with torch.inference_mode(False), torch.no_grad():
        yield


_Views = list[tuple[nn.Parameter | LocalPart, Tensor]]
"""Each parameter with its view. Made once per memory: blocks change slots at every use."""


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor is, also a fake one."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


class Source(Protocol):
    """Brings a block's weights to where compute reads them."""

    def use(self, block: Block) -> None: ...
    def unpacked(self, block: Block, clock: int) -> None: ...
    def pinned(self, block: Block) -> bool: ...


class _Closed:
    """The source of a block whose engine is closed: its parameters hold their weights."""

    def use(self, block: Block) -> None: ...

    def unpacked(self, block: Block, clock: int) -> None:
        raise StaleGraphError(f"backward reached block '{block.name}' after close()")

    def pinned(self, block: Block) -> bool:
        return False


CLOSED = _Closed()


class Block:
    """The unit of residence: the parameters that one module's forward uses as one.

    Attributes:
        buckets: the trained ones.
        frozen: the frozen ones, where the block may be streamed: they are loaded with the others.
        repeated: one of several alike that are used one after the other: it can be streamed.
        leaf: see `Part`; in ZeRO stage 3 it can be streamed.
        recomputed: its forward runs again in backward.
        compiled: torch compiles its forward.
        then: see `BlockSpec`.
        streamed: its weights are loaded into a device slot for their use.
        reads: told of reads of its parameters while they have no weights.
        source: brings its weights to where compute reads them.
        forwards: the number of its forwards that are running.
        generation: the number of times its weights were replaced. A saved handle with another
            generation belongs to an older graph.
        versions: the number of generations whose weights are on the device.
        clock: the time, in forwards of modules, at which its last forward outside of a backward
            began.
        first_clock: that of the first one since the last micro-step whose graph backward may run; 0
            if there was none.
        in_order: see `InFlight`.
        expected: number of trainable parameters, each of which delivers a gradient per backward.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        buckets: tuple[Bucket, ...],
        lanes: Lanes,
        *,
        frozen: tuple[Bucket, ...] = (),
        repeated: bool = False,
        leaf: bool = False,
        recomputed: bool = False,
        compiled: bool = False,
    ) -> None:
        self.name = name or "root"
        self.module = module
        self.buckets = buckets
        self.frozen = frozen
        self.repeated = repeated
        self.recomputed = recomputed
        self.compiled = compiled
        self.leaf = leaf
        self.then: tuple[str, ...] = ()
        self.streamed = False
        self.source: Source
        self.forwards = 0
        self.expected = sum(len(bucket.slots) for bucket in buckets)
        self.generation = 0
        self.versions = 1
        self.clock = self.first_clock = 0
        self.in_order = False
        self._lanes = lanes
        self._readings: dict[int, int] = {}
        """Generation → the graphs that hold saved views of its weights."""
        self._read: dict[int, tuple[Range, ...]] = {}
        """Generation → its weights, where several are kept."""
        self._runs_again = False
        self._backward: dict[int, Span] = {}
        """Generation → the span of the backward that reads it."""
        self._placeholders: dict[Bucket, Tensor] = {}
        self._weights: dict[Buffer | None, tuple[Range, ...]] = {}
        self._views: dict[Buffer, _Views] = {}
        """For a streamed block: memory of its first bucket in a slot → its parameters' views."""
        self._host_views: dict[tuple[Buffer, ...], _Views] = {}
        """The same of the host's copy, by the memory of each of its buckets."""
        self._absent: _Views = []
        """Its parameters' views without a slot."""
        self._shown: _Views = []
        """Its parameters' views as they were set last."""
        self.reads: AbsentReads | None = None
        self._hidden: list[nn.Parameter] = []
        """Parameters whose reads are told while they have no weights."""

    @property
    def quiet(self) -> bool:
        """No graph holds a saved view of the weights."""
        if self._readings:
            return False
        # A recompute past the hooks leaves plain views in its graph, which no handle counts: they
        # are alive until backward has passed the block.
        return not (self._runs_again and self.source.pinned(self))

    @property
    def all_buckets(self) -> tuple[Bucket, ...]:
        """All that a forward of the block reads."""
        return self.buckets + self.frozen

    @property
    def weights(self) -> tuple[Range, ...]:
        """The ranges that a forward or a backward of it reads, where they are now."""
        memory = self.all_buckets[0].working if self.all_buckets else None
        if memory not in self._weights:
            self._weights[memory] = tuple(bucket.working.whole for bucket in self.all_buckets)
        return self._weights[memory]

    @property
    def kept_by(self) -> str:
        """The option that leaves it on the device."""
        return "more resident_blocks" if self.repeated else f'keep_whole = ["{self.name}"]'

    def use(self) -> None:
        """Compute is about to read the weights."""
        self.source.use(self)

    def enter_device(self) -> None:
        """Make the parameters views of the slot; compute waits for the weights in `use`."""
        # All buckets of a block change their slot together: the first one stands for all.
        memory = self.all_buckets[0].working
        if memory not in self._views:
            self._views[memory] = self._views_of(
                lambda bucket, slot: slot.view(bucket.working.flat)
            )
        # Before the load is done: no kernel reads through these views until `use` has waited.
        self._show(self._views[memory])

    def leave_device(self) -> None:
        """Make the parameters NaN until the next use: the slot goes to another block."""
        # The span ends before the slot changes hands: a load into it would race with its reads.
        self.end_backward()
        if not self._absent:
            self._absent = self._views_of(
                lambda bucket, slot: self.placeholder(bucket).expand(slot.shape)
            )
        self._show(self._absent)
        if self.reads is not None and self.reads.on:
            self.hide(self.reads)

    def hide(self, reads: AbsentReads) -> None:
        """Tell of reads of its parameters, which have no weights: [Note: Absent weights]."""
        slots = [slot for bucket in self.all_buckets for slot in bucket.slots]
        self._hidden += reads.hide([(slot.name, slot.param) for slot in slots], self.kept_by)

    def expose_host_weights(self) -> None:
        """Make the parameters of a streamed block without a slot views of the host's copy."""
        # An update of one bucket may have made another of its copies the newest.
        memory = tuple(bucket.load_source for bucket in self.all_buckets)
        if memory not in self._host_views:
            made = self._views_of(lambda bucket, slot: slot.view(bucket.load_source.flat))
            self._host_views[memory] = made
        # The lanes are empty: no update writes this memory while the user looks at it.
        self._show(self._host_views[memory])

    def reveal(self) -> None:
        """Tell of no reads any more."""
        reveal(self._hidden)
        self._hidden.clear()

    def _show(self, views: _Views) -> None:
        if self._hidden:
            self.reveal()
        # Only the view changes; autograd does not notice. Saved weights are handles for this
        # reason.
        for param, view in views:
            param.data = view
        self._shown = views

    def check(self) -> None:
        """Raises ModelError if somebody else has set `data` of a parameter of a streamed block: the
        next load would silently undo it."""
        for number, (param, view) in enumerate(self._shown):
            current = param.data if isinstance(param, LocalPart) else param
            if _place(current) != _place(view):
                slots = [slot for bucket in self.all_buckets for slot in bucket.slots]
                raise ModelError(changed(slots[number].name, MOVED))

    def _views_of(self, view: Callable[[Bucket, Slot], Tensor]) -> _Views:
        with _ordinary_tensors():
            return [(slot.local, view(b, slot)) for b in self.all_buckets for slot in b.slots]

    def placeholder(self, bucket: Bucket) -> Tensor:
        """Return the 0-dim NaN, on the device, that stands for weights that are not there."""
        if bucket not in self._placeholders:
            flat = bucket.working.flat
            nan = torch.full((), float("nan"), dtype=flat.dtype, device=flat.device)
            self._placeholders[bucket] = nan
        return self._placeholders[bucket]

    # [Note: Backward spans]
    # Autograd reads a block's weights from the first unpacking of a saved handle until the last
    # handle is freed with its graph node, or, of a compiled block, until its first gradient comes.
    # That interval is the block's backward span.

    def packed(self) -> None:
        self._readings[self.generation] = self._readings.get(self.generation, 0) + 1
        if self.versions > 1:
            self._read[self.generation] = self.weights

    def unpacked(self, generation: int, clock: int) -> None:
        """A node of the graph is about to read the weights.

        Args:
            generation: that of the weights when the graph was built.
            clock: the time of that, in forwards of modules.

        Raises:
            StaleGraphError: if they were replaced since the graph was built.
        """
        if abs(self.generation - generation) >= self.versions:
            raise StaleGraphError(
                f"backward reached block '{self.name}' through a graph that was built before the "
                f"last optimizer step ({self.generation - generation} update(s) ago): its weights "
                "are gone. Run forward again after step()."
            )
        # Compute waits for the load, and the block is pinned: no prefetch evicts it while this
        # backward reads it.
        if self.streamed:
            self.source.unpacked(self, clock)
        if generation not in self._backward:
            # A streamed block's weights are where its slot is now, a version's where they were.
            read = self._read.get(generation, self.weights)
            self._backward[generation] = self._lanes.open_span(f"backward {self.name}", read)

    def runs_again(self) -> None:
        """Its forward runs as a part of a backward that has not unpacked any of its handles."""
        self._runs_again = True
        self.unpacked(self.generation, self.clock)

    def released(self, generation: int) -> None:
        self._readings[generation] -= 1
        # The last reader of the weights is gone: the span of its reads ends on compute here.
        if self._readings[generation] == 0:
            del self._readings[generation]
            self._read.pop(generation, None)
            # A compiled backward frees what its forward saved before it runs: its span ends when
            # its first gradient comes.
            if not (self.compiled and self.expected):
                self._end_span(generation)

    def end_backward(self) -> None:
        for generation in tuple(self._backward):
            self._end_span(generation)

    def _end_span(self, generation: int) -> None:
        if (span := self._backward.pop(generation, None)) is not None:
            self._lanes.close_span(span)
