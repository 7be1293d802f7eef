"""One block: the residence of its working weights, and the graphs that still read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor, nn

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.engine.checks import WriteCounts
from offloadtrain.engine.parameters import (
    OffloadedParameter,
    past_the_class,
    set_data,
    set_ready,
    set_unready,
)
from offloadtrain.runtime.lanes import Buffer, Lanes, Range, Span
from offloadtrain.runtime.tensor_parts import LocalPart


class StaleGraphError(OffloadTrainError):
    """A backward over a graph whose weights have been updated since."""


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Leave a user's inference mode: views made inside it could not be trained afterwards."""
    with torch.inference_mode(False), torch.no_grad():
        yield


_Views = list[tuple[Callable[[Tensor], None], Tensor]]
"""What makes each parameter a view, and the view."""


class Source(Protocol):
    """Brings a block's weights to where compute reads them."""

    def use(self, block: Block, *, expected: bool = True) -> None: ...
    def unpacked(self, block: Block, clock: int) -> None: ...
    def is_at(self, block: Block, clock: int) -> bool: ...
    def pinned(self, block: Block) -> bool: ...


class _Closed:
    """The source of a block whose engine is closed: its parameters hold their weights."""

    def use(self, block: Block, *, expected: bool = True) -> None: ...

    def unpacked(self, block: Block, clock: int) -> None:
        raise StaleGraphError(
            f"backward reached block '{block.name}' through a graph that was built before close(), "
            "or before what is trained was changed: run forward again"
        )

    def is_at(self, block: Block, clock: int) -> bool:
        return False

    def pinned(self, block: Block) -> bool:
        return False


CLOSED = _Closed()


class ParameterViews:
    """What a block's parameters are views of: its slot of the device, the host's copy, or NaN.

    Only the views change. Autograd does not notice: saved weights are handles for this reason.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        """`buckets`: all that a forward of the block reads."""
        self.buckets = buckets
        self._ranges: dict[Buffer | None, tuple[Range, ...]] = {}
        """Device memory of the first bucket → that of all."""
        self._made: dict[tuple[Buffer, ...], _Views] = {}
        """Memory → views of it. Made once: blocks change slots at every use."""
        self._absent: _Views = []
        self._placeholders: dict[Bucket, Tensor] = {}
        self.params = [slot.param for bucket in buckets for slot in bucket.slots]
        self.ready = True
        """Compute may read the parameters."""

    @property
    def asks(self) -> bool:
        """True if a read of any parameter asks for its weights."""
        return all(isinstance(param, OffloadedParameter) for param in self.params)

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The memory of the device that holds the weights now."""
        # All buckets of a block change their slot together: the first one stands for all.
        memory = self.buckets[0].working if self.buckets else None
        if memory not in self._ranges:
            self._ranges[memory] = tuple(bucket.working.whole for bucket in self.buckets)
        return self._ranges[memory]

    def show_slot(self) -> None:
        """Show the slot that the block has."""
        # Before the load is done: no kernel reads through these views until `Block.use` has waited.
        memory = (self.buckets[0].working,)
        self._show_memory(memory, lambda bucket, slot: slot.view(bucket.working.flat))

    def show_host(self) -> None:
        """Show the host's copy; the lanes are empty, so that no update writes it meanwhile."""
        # An update of one bucket may have made another of its copies the newest.
        memory = tuple(bucket.load_source for bucket in self.buckets)
        self._show_memory(memory, lambda bucket, slot: slot.view(bucket.load_source.flat))

    def show_nothing(self) -> None:
        """Make the parameters NaN."""
        if not self._absent:
            self._absent = self._make(
                lambda bucket, slot: self.placeholder(bucket).expand(slot.shape)
            )
        self._show(self._absent)

    def set_ready(self, *, ready: bool) -> None:
        """Switch the parameters' class; see [Note: Parameters] in `engine.parameters`."""
        if ready is not self.ready:
            self.ready = ready
            (set_ready if ready else set_unready)(self.params)

    def placeholder(self, bucket: Bucket) -> Tensor:
        """Return the 0-dim NaN, on the device, that stands for weights that are not there."""
        if bucket not in self._placeholders:
            flat = bucket.working.flat
            nan = torch.full((), float("nan"), dtype=flat.dtype, device=flat.device)
            self._placeholders[bucket] = nan
        return self._placeholders[bucket]

    def _show_memory(
        self, memory: tuple[Buffer, ...], view: Callable[[Bucket, Slot], Tensor]
    ) -> None:
        if memory not in self._made:
            self._made[memory] = self._make(view)
        self._show(self._made[memory])

    def _show(self, views: _Views) -> None:
        with past_the_class():
            for show, view in views:
                show(view)

    def _make(self, view: Callable[[Bucket, Slot], Tensor]) -> _Views:
        with _ordinary_tensors():
            slots = [(bucket, slot) for bucket in self.buckets for slot in bucket.slots]
            setters = [
                partial(setattr, s.local, "data")
                if isinstance(s.local, LocalPart)
                else partial(set_data, s.local)
                for _, s in slots
            ]
            return list(zip(setters, (view(*each) for each in slots), strict=True))


class GraphReads:
    """The autograd graphs that hold saved weights of a block, and the backwards that read them.

    [Note: Backward spans]
    Autograd reads a block's weights from the first unpacking of a saved handle until the last
    handle is freed with its graph node, or, of a compiled block, until its first gradient comes.
    That interval is the block's backward span.

    Attributes:
        generation: the number of times the weights were replaced. A saved handle with another
            generation belongs to an older graph.
        versions: the number of generations whose weights are on the device.
        spans: generation → the span of the backward that reads it.
    """

    def __init__(self, name: str, lanes: Lanes, *, ends_at_gradient: bool) -> None:
        """`ends_at_gradient`: the span of a backward ends when its first gradient comes. A compiled
        backward frees what its forward saved before it runs."""
        self.generation = 0
        self.versions = 1
        self._name = name
        self._lanes = lanes
        self._ends_at_gradient = ends_at_gradient
        self._handles: dict[int, int] = {}
        """Generation → the number of handles that graphs hold."""
        self._ranges: dict[int, tuple[Range, ...]] = {}
        """Generation → its weights, where several versions are on the device."""
        self.spans: dict[int, Span] = {}

    @property
    def hold_weights(self) -> bool:
        """True if a graph holds a handle."""
        return bool(self._handles)

    def packed(self, weights: tuple[Range, ...]) -> None:
        """A graph saves a handle of the newest weights."""
        self._handles[self.generation] = self._handles.get(self.generation, 0) + 1
        if self.versions > 1:
            self._ranges[self.generation] = weights

    def check(self, generation: int) -> None:
        """Raises StaleGraphError if the weights of a generation are gone."""
        if abs(self.generation - generation) >= self.versions:
            raise StaleGraphError(
                f"backward reached block '{self._name}' through a graph that was built before the "
                f"last optimizer step ({self.generation - generation} update(s) ago): its weights "
                "are gone. Run forward again after step()."
            )

    def begin(self, generation: int, weights: tuple[Range, ...]) -> None:
        """Backward reads a generation's weights from here on."""
        if generation not in self.spans:
            # A streamed block's weights are where its slot is now, a version's where they were.
            ranges = self._ranges.get(generation, weights)
            self.spans[generation] = self._lanes.open_span(f"backward {self._name}", ranges)

    def released(self, generation: int) -> None:
        """A handle is freed. With the last one, the span of its reads ends on compute."""
        self._handles[generation] -= 1
        if self._handles[generation] == 0:
            del self._handles[generation]
            self._ranges.pop(generation, None)
            if not self._ends_at_gradient:
                self._end(generation)

    def end(self) -> None:
        """No backward reads the weights any more."""
        for generation in tuple(self.spans):
            self._end(generation)

    def _end(self, generation: int) -> None:
        if (span := self.spans.pop(generation, None)) is not None:
            self._lanes.close_span(span)


@dataclass(slots=True)
class ReadClock:
    """When a block was read, in forwards of modules; see `InFlight`.

    Attributes:
        first: the first forward since the last micro-step whose graph backward may run; 0: none.
        last: the last forward outside of a backward.
        in_order: each backward is that of the oldest forward without one.
    """

    first: int = 0
    last: int = 0
    in_order: bool = False


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
        source: brings its weights to where compute reads them.
        forwards: the number of its forwards that are running.
        clock: when it was read.
        graphs: the autograd graphs that still read its weights.
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
        self.clock = ReadClock()
        self.graphs = GraphReads(self.name, lanes, ends_at_gradient=compiled and bool(buckets))
        self._runs_again = False

    @property
    def is_unread(self) -> bool:
        """No graph holds a saved view of the weights."""
        if self.graphs.hold_weights:
            return False
        # A recompute past the hooks leaves plain views in its graph, which no handle counts: they
        # are alive until backward has passed the block.
        return not (self._runs_again and self.source.pinned(self))

    @property
    def all_buckets(self) -> tuple[Bucket, ...]:
        """All that a forward of the block reads."""
        return self.buckets + self.frozen

    @cached_property
    def views(self) -> ParameterViews:
        """Its memory on the device, and what its parameters are views of where it is streamed."""
        return ParameterViews(self.all_buckets)

    @cached_property
    def writes(self) -> WriteCounts:
        """Counts the writes into its trained parameters."""
        return WriteCounts([slot.param for bucket in self.buckets for slot in bucket.slots])

    @property
    def weights(self) -> tuple[Range, ...]:
        """The ranges that a forward or a backward of it reads, where they are now."""
        return self.views.ranges

    @property
    def resident_option(self) -> str:
        """The option that leaves it on the device."""
        return "more resident_blocks" if self.repeated else f'keep_whole = ["{self.name}"]'

    def use(self) -> None:
        """Compute is about to read the weights."""
        self.source.use(self)

    def leave_device(self) -> None:
        """Make the parameters NaN until the next use: the slot goes to another block."""
        # The span ends before the slot changes hands: a load into it would race with its reads.
        self.graphs.end()
        self.views.show_nothing()
        self.views.set_ready(ready=False)

    def packed(self) -> None:
        """A graph saves a handle of the weights."""
        self.graphs.packed(self.weights)

    def unpacked(self, generation: int, clock: int) -> None:
        """A node of the graph is about to read the weights.

        Args:
            generation: that of the weights when the graph was built.
            clock: the time of that, in forwards of modules.

        Raises:
            StaleGraphError: if they were replaced since the graph was built.
        """
        self.graphs.check(generation)
        # Where the block is streamed, compute waits for the load, and the block is pinned: no
        # prefetch evicts it while this backward reads it.
        self.source.unpacked(self, clock)
        self.graphs.begin(generation, self.weights)

    def runs_again(self) -> None:
        """Its forward runs as a part of a backward that has not unpacked any of its handles."""
        self._runs_again = True
        self.unpacked(self.graphs.generation, self.clock.last)
