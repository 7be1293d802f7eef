"""Blocks: the place of their working weights, the graphs that still read them, and the pins that
keep streamed blocks on the device."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.engine.buffers import MemoryMap
from offloadtrain.engine.interpreter import Interpreter
from offloadtrain.engine.parameters import (
    OffloadedParameter,
    WriteCounts,
    past_the_class,
    set_data,
    set_ready,
    set_unready,
)
from offloadtrain.runtime.arena import with_own_storage
from offloadtrain.runtime.lanes import Buffer, Lanes, Range, Span
from offloadtrain.runtime.process_group import ALONE, lost
from offloadtrain.runtime.tensor_parts import LocalPart
from offloadtrain.step.layout.block_spec import BlockSpec
from offloadtrain.step.program.operations import Enter, Flip, Leave, Operation, Renew, Swap
from offloadtrain.step.program.program import Program
from offloadtrain.step.program.streaming import StreamError

_log = logging.getLogger(__name__)


class StaleGraphError(OffloadTrainError):
    """A backward through a graph whose weights have been updated since."""


_Views = list[tuple[Callable[[Tensor], None], Tensor]]
"""For each parameter: the function that sets its data, and the view to set."""


class Source:
    """Makes a block's weights available to compute. Each block gets its source when memory is laid
    out, so that callers need not know where its weights are. This class serves weights that are
    always on the device.

    Attributes:
        gathers: a use is a collective of the ranks that have shards of the weights.
    """

    gathers = False

    def use(self, block: Block, *, expected: bool = True) -> None:
        """Compute is about to read the weights; `expected`: see `Streaming.use`."""

    def read(self, block: Block, slot: Slot, *, in_graph: bool, in_forward: bool) -> Tensor | None:
        """Let compute read a parameter that no hook of its module has waited for.

        Args:
            in_graph: autograd may save the parameter for a backward.
            in_forward: a forward is in progress.

        Returns:
            A copy of the weights; None: the parameter's memory can be read directly.

        Raises:
            StreamError: the weights are in shards, and no forward is in progress, in which all
                ranks would read them.
        """
        return None

    def waits_with_model(self, block: Block) -> bool:
        """Return True if the model's forward must wait for a block whose module no forward has
        called."""
        return False

    def unpacked(self, block: Block, clock: int) -> None:
        """A node of the graph is about to read the weights; see `Block.unpacked`."""

    def is_at(self, block: Block, clock: int) -> bool:
        """Return True if `unpacked` would do nothing."""
        return True

    def pinned(self, block: Block) -> bool:
        """Return True if a running forward or backward needs the weights in their present place."""
        return block.forwards > 0


class _Closed(Source):
    """The source of a block after `close()`: its parameters hold their weights."""

    def unpacked(self, block: Block, clock: int) -> None:
        raise StaleGraphError(
            f"backward reached block '{block.name}' through a graph that was built before close(), "
            "or before what is trained was changed: run forward again"
        )

    def is_at(self, block: Block, clock: int) -> bool:
        return False


class ParameterViews:
    """The memory that a block's parameters view: its slot on the device, the host copy, or NaN.

    Only the views change. Autograd does not notice this: saved weights are handles for this reason.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        """`buckets`: all buckets that a forward of the block reads."""
        self.buckets = buckets
        self._ranges: dict[Buffer | None, tuple[Range, ...]] = {}
        """Device memory of the first bucket → ranges of all buckets."""
        self._made: dict[tuple[Buffer, ...], _Views] = {}
        """Memory → views of it. Cached, as blocks change slots at every use."""
        self._absent: _Views = []
        self._placeholders: dict[Bucket, Tensor] = {}
        self.params = [slot.param for bucket in buckets for slot in bucket.slots]
        self.ready = True
        """True if compute may read the parameters."""

    @property
    def asks(self) -> bool:
        """True if a read of any parameter requests its weights."""
        return all(isinstance(param, OffloadedParameter) for param in self.params)

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The device memory that holds the weights now."""
        # All buckets of a block change their slot together, so the first identifies the slot.
        memory = self.buckets[0].working if self.buckets else None
        if memory not in self._ranges:
            self._ranges[memory] = tuple(bucket.working.whole for bucket in self.buckets)
        return self._ranges[memory]

    def show_slot(self) -> None:
        """Make the parameters views of the block's slot."""
        # Before the load is complete: no kernel reads through these views until `use` has waited.
        memory = (self.buckets[0].working,)
        self._show_memory(memory, lambda bucket, slot: slot.view(bucket.working.flat))

    def show_host(self) -> None:
        """Make the parameters views of the host copy; the lanes are idle, so no update writes
        it."""
        # An update may have switched one bucket to its other copy.
        memory = tuple(bucket.home for bucket in self.buckets)
        self._show_memory(memory, lambda bucket, slot: slot.view(bucket.home.flat))

    def show_nothing(self) -> None:
        """Make the parameters views of NaN."""
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
        """Return the 0-dim NaN on the device that replaces weights which are not on the device."""
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
        # Views made in a user's inference mode could not be trained afterwards.
        with torch.inference_mode(False), torch.no_grad():
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
    handle is freed with its graph node, or, for a compiled block, until its first gradient is
    ready. That interval is the block's backward span.

    Attributes:
        generation: number of times the weights were replaced. A saved handle with another
            generation belongs to an older graph.
        versions: number of generations whose weights are on the device.
        handles: generation → number of handles that graphs hold.
        spans: generation → span of the backward that reads it.
    """

    def __init__(self, name: str, lanes: Lanes, *, ends_at_gradient: bool) -> None:
        """`ends_at_gradient`: the span of a backward ends at its first gradient, for compiled
        blocks: their backward frees what the forward saved before it runs."""
        self.generation = 0
        self.versions = 1
        self._name = name
        self._lanes = lanes
        self._ends_at_gradient = ends_at_gradient
        self.handles: dict[int, int] = {}
        self._ranges: dict[int, tuple[Range, ...]] = {}
        """Generation → its weights, if several versions are on the device."""
        self.spans: dict[int, Span] = {}

    def packed(self, weights: tuple[Range, ...]) -> None:
        """A graph saves a handle of the newest weights."""
        self.handles[self.generation] = self.handles.get(self.generation, 0) + 1
        if self.versions > 1:
            self._ranges[self.generation] = weights

    def check(self, generation: int) -> None:
        """Raises StaleGraphError if no version has the weights of a generation any more."""
        if abs(self.generation - generation) >= self.versions:
            raise StaleGraphError(
                f"backward reached block '{self._name}' through a graph that was built before the "
                f"last optimizer step ({self.generation - generation} update(s) ago): its weights "
                "are gone. Run forward again after step()."
            )

    def begin(self, generation: int, weights: tuple[Range, ...]) -> None:
        """Backward reads a generation's weights from here on."""
        if generation not in self.spans:
            # With a single version: the block's present slot. With several: the version's own
            # memory.
            ranges = self._ranges.get(generation, weights)
            self.spans[generation] = self._lanes.open_span(f"backward {self._name}", ranges)

    def released(self, generation: int) -> None:
        """A handle is freed. With the last handle, the span of its reads ends on compute."""
        self.handles[generation] -= 1
        if self.handles[generation] == 0:
            del self.handles[generation]
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
    """When a block was read, counted in forwards of modules; see `InFlight`.

    Attributes:
        first: the first forward since the last micro-step whose graph may still run backward; 0:
            none.
        last: the last forward outside of a backward.
        in_order: backwards run in the order of their forwards, oldest first.
    """

    first: int = 0
    last: int = 0
    in_order: bool = False


class Block:
    """The unit of residence: the parameters that one module's forward uses together.

    Attributes:
        spec: kind of the block, and sizes and formats of its buckets.
        buckets: trained buckets.
        frozen: frozen buckets, if the block may be streamed: they are loaded with the trained ones.
        compiled: torch compiles its forward.
        streamed: its weights are loaded into a device slot before each use.
        source: makes its weights available to compute.
        forwards: number of its forwards in progress.
        clock: when it was read.
        graphs: the autograd graphs that still read its weights.
    """

    def __init__(
        self,
        spec: BlockSpec,
        module: nn.Module,
        buckets: tuple[Bucket, ...],
        frozen: tuple[Bucket, ...],
        lanes: Lanes,
        *,
        compiled: bool,
    ) -> None:
        self.spec, self.name = spec, spec.name
        self.module = module
        self.buckets, self.frozen = buckets, frozen
        self.compiled = compiled
        self.streamed = False
        self.source: Source
        self.forwards = 0
        self.clock = ReadClock()
        self.graphs = GraphReads(self.name, lanes, ends_at_gradient=compiled and bool(buckets))
        self._runs_again = False

    @property
    def is_unread(self) -> bool:
        """True if no graph holds a saved view of the weights."""
        if self.graphs.handles:
            return False
        # A recompute that bypasses the hooks leaves plain views in its graph, which no handle
        # counts: they are alive until backward has passed the block.
        return not (self._runs_again and self.source.pinned(self))

    @property
    def all_buckets(self) -> tuple[Bucket, ...]:
        """All buckets that a forward of the block reads."""
        return self.buckets + self.frozen

    @cached_property
    def views(self) -> ParameterViews:
        """Its device memory, and the views that its parameters can be set to."""
        return ParameterViews(self.all_buckets)

    @cached_property
    def writes(self) -> WriteCounts:
        """Counts writes into its trained parameters."""
        return WriteCounts([slot.param for bucket in self.buckets for slot in bucket.slots])

    def written_since(self, counts: Sequence[int]) -> str | None:
        """Return the name of a trained parameter that was written since `writes` had these counts,
        or None."""
        for param in self.writes.since(counts):
            return next(s.name for b in self.buckets for s in b.slots if s.param is param)
        return None

    def leave_device(self) -> None:
        """Make the parameters NaN until the next use: another block gets the slot."""
        # The span ends before the slot is reused: a load into it would race with the span's reads.
        self.graphs.end()
        self.views.show_nothing()
        self.views.set_ready(ready=False)

    def unpacked(self, generation: int, clock: int) -> None:
        """A node of the graph is about to read the weights.

        Args:
            generation: generation of the weights when the graph was built.
            clock: time when the graph was built, in forwards of modules.

        Raises:
            StaleGraphError: the weights were replaced since the graph was built.
        """
        self.graphs.check(generation)
        # If the block is streamed, compute waits for its load, and it is pinned: no prefetch evicts
        # it while this backward reads it.
        self.source.unpacked(self, clock)
        self.graphs.begin(generation, self.views.ranges)

    def runs_again(self) -> None:
        """Its forward runs inside a backward that has not unpacked any of its handles."""
        self._runs_again = True
        self.unpacked(self.graphs.generation, self.clock.last)


class Resident(Source):
    """The source of blocks that stay on the device: compute waits for uploads, never for loads."""

    def __init__(self, residency: Residency, program: Program) -> None:
        self._residency, self._program = residency, program

    def use(self, block: Block, *, expected: bool = True) -> None:
        # Compute waits for this block's upload; later blocks' uploads run during its forward.
        self._residency.interpreter.run(self._program.use, block.name)
        block.views.set_ready(ready=True)

    def read(self, block: Block, slot: Slot, *, in_graph: bool, in_forward: bool) -> None:
        self._residency.forward_order.setdefault(block)
        self.use(block, expected=False)

    def waits_with_model(self, block: Block) -> bool:
        return not block.views.asks


class Residency(Source):
    """Reports uses to the program and carries out its slot changes. The source of streamed blocks.

    Pins: see [Note: Streaming] in `step.program.streaming`.

    Attributes:
        blocks: name → block.
        streamed: blocks without permanent memory on the device.
        forward_order: blocks in the order of their first use in forward, as keys.
        gathers: weights of some blocks are in shards, which forwards gather (ZeRO stage 3).
        exposed: streamed blocks whose parameters are views of the host copy.
        unpacking: above 0 while inputs of a recompute are unpacked: all pins stay, as the inputs
            were saved before the node that backward has reached.
    """

    interpreter: Interpreter

    def __init__(self, blocks: Sequence[Block], program: Program, memory: MemoryMap) -> None:
        sources: dict[bool, Source] = {True: self, False: Resident(self, program)}
        for block in blocks:
            block.source = sources[block.streamed]
        self.streamed = streamed = self.loaded(blocks)
        self.forward_order: dict[Block, None] = {}
        self.gathers = bool(streamed) and not program.spec.is_single
        self._program = program
        self.memory = memory
        self.blocks = {block.name: block for block in blocks}
        self._buckets = {bucket.name: bucket for block in blocks for bucket in block.all_buckets}
        self.exposed: set[Block] = set()
        self._owners: dict[tuple[int, str], list[tuple[int, int, tuple[Block, Bucket]]]] = {}
        """(slot, block name) → byte range of each of its buckets in the slot."""
        self._running: dict[int, dict[Block, int]] = {}
        """Graph task → block in its backward → clock of the oldest saved tensor of the block that
        was unpacked."""
        self.unpacking = 0
        self._latest: Block | None = None
        """The block used last: it is in its slot, compute has waited for it, and the next blocks
        are being loaded."""
        self._at: tuple[int, int] | None = None
        """Graph task and clock of the last read of `_latest` in a backward; its pins are set."""
        self._has_warned = False
        self.on_backward: Callable[[int, Block | None], None] | None = None
        """Called before a use in backward, with the clock that backward has reached, and the block
        whose forward is recomputed there, or None."""
        for block in blocks:
            for bucket in block.all_buckets:
                bucket.memory = memory
        for bucket in (bucket for block in self.streamed for bucket in block.all_buckets):
            bucket.place = program.spec.first_slot(bucket.spec)

    def loaded(self, blocks: Iterable[Block]) -> list[Block]:
        """Return the blocks whose weights this source loads."""
        return [block for block in blocks if block.source is self]

    def owner(self, slot: int, tensor: Tensor) -> tuple[Block, Bucket] | None:
        """Return the block and bucket whose weights a tensor in this slot views; None: empty
        slot."""
        name = self._program.streaming.slots[slot]
        if name is None:
            return None
        if (owners := self._owners.get((slot, name))) is None:
            block = self.blocks[name]
            flats = [(bucket, bucket.working.flat) for bucket in block.all_buckets]
            starts = [int(flat.storage_offset()) * flat.element_size() for _, flat in flats]
            owners = self._owners[slot, name] = [
                (start, start + flat.nbytes, (block, bucket))
                for start, (bucket, flat) in zip(starts, flats, strict=True)
            ]
        at = tensor.storage_offset() * tensor.element_size()
        for start, end, owner in owners:
            if start <= at < end:
                return owner
        raise StreamError(f"a tensor lies in the slot of '{name}' and in none of its buckets")

    # Called by the engine.

    def describe_lost_rank(self, exchange: str) -> str:
        """Return the message for a failed collective. The usual cause is a module that only some
        ranks use; Gloo may report it by ending the other process."""
        message = lost(f"rank {ALONE.world_rank}, in '{exchange}',")
        if not (unused := self._program.streaming.unused):
            return message
        weights = (
            slot.name for name in unused for b in self.blocks[name].all_buckets for slot in b.slots
        )
        return (
            f"{message}. This pass of this rank has not used {', '.join(map(repr, weights))} so "
            "far. In ZeRO stage 3 all ranks use the same modules in the same order; for modules "
            f"outside of layers that only some use set keep_whole = {json.dumps(unused)}"
        )

    def use(self, block: Block, *, expected: bool = True) -> None:
        # Release the pins of finished backwards: backwards nested in the current one have larger
        # numbers, and outside of any backward all are finished.
        now, self._at = torch._C._current_graph_task_id(), None
        for task in [task for task in self._running if task > now]:
            del self._running[task]
        # Before the loads: the other ranks run their all-gathers after the same reduce-scatters.
        if self.on_backward is not None and now >= 0:
            self.on_backward(block.clock.last, block)
        # A forward that is recomputed in the backward that has just used its block.
        if expected and block is self._latest:
            return
        # Compute waits for the block's load; the next blocks are loaded into slots without a pin.
        self.interpreter.run(self._program.use, block.name, self._pinned(), expected=expected)
        # A read without a call prefetches nothing.
        if expected:
            self._latest = block

    def read(self, block: Block, slot: Slot, *, in_graph: bool, in_forward: bool) -> Tensor | None:
        # A graph saves the parameter itself, whose memory will change: it needs a copy.
        if block in self.exposed and not in_graph:
            return None
        self.forward_order.setdefault(block)
        if self.gathers and not in_forward:
            raise StreamError(
                f"weights of block '{block.name}' are read outside of a forward, and each rank has "
                "a shard of them (zero_stage = 3): take dict(optimizer.full_weights()), on all "
                "ranks, or set zero_stage = 2"
            )
        self.use(block, expected=False)
        # Compute has waited for the load; the slot's next load waits for this copy.
        return slot.local.data.clone()

    def waits_with_model(self, block: Block) -> bool:
        # Loading all layers at once would need as many slots.
        return not (block.views.asks or block.spec.repeated)

    def passed(self, clock: int) -> dict[Block, int]:
        """Backward has reached a node that saved a tensor at `clock`: release the pins of blocks
        saved later. Returns the blocks that this backward still pins."""
        task = torch._C._current_graph_task_id()
        if self._at == (task, clock):
            return self._running[task]
        self._at, pinned = None, self._running.setdefault(task, {})
        # A pin ends here, not with the block's last handle: a retained graph keeps handles alive
        # and would keep its blocks in the slots.
        if not self.unpacking:
            for other in [other for other, saved in pinned.items() if saved > clock]:
                del pinned[other]
        return pinned

    def is_at(self, block: Block, clock: int) -> bool:
        """Return True if the previous read in the same backward was of the same forward of the
        block: it is pinned, and compute has waited for it."""
        return block is self._latest and self._at == (torch._C._current_graph_task_id(), clock)

    def unpacked(self, block: Block, clock: int) -> None:
        """A node of the graph is about to read a tensor saved in a forward of the streamed block,
        and that forward may be about to run again."""
        # The pin comes before the use, whose prefetches must not take the block's slot.
        pinned = self.passed(clock)
        known = block in pinned and self.gathers
        pinned.setdefault(block, clock)
        # If a layer reads two blocks alternately, the number of such reads may differ among ranks:
        # prefetches follow the first reads, which all ranks make. The pin has kept the slot.
        if known and block.name in self._program.streaming.slots:
            return
        if block is not self._latest:
            if self.on_backward is not None and not self.unpacking:
                self.on_backward(clock, None)
            self.use(block)
        # Unpacking the inputs of a recompute keeps later pins; they are released after it.
        self._at = None if self.unpacking else (torch._C._current_graph_task_id(), clock)

    def end_backward(self) -> None:
        """No backward runs: the next backward needs the slots, even if no forward comes first."""
        self._running.clear()
        self._at = None

    def restart(self) -> None:
        """A micro-step is over and its weights may have changed: prefetch for the next one."""
        self._running.clear()
        self._latest = self._at = None
        # The next update may write the host copy: parameters must not view it then.
        for block in self.exposed:
            block.leave_device()
        self.exposed.clear()
        streaming = self._program.streaming
        if streaming.slots and streaming.access_order.differs and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "blocks were used in another order than in the step before: %d loads could not "
                "begin ahead of their use. The result is the same, the step is slower.",
                streaming.access_order.missed,
            )
        # Launches loads into slots without a pin, while compute and the host still run.
        self.interpreter.run(self._program.begin_pass, self._pinned())

    def reset(self) -> None:
        """The lanes are idle, and no streamed block has a slot any more."""
        self._running.clear()
        self._latest = self._at = None
        self.exposed.clear()
        for block in self.streamed:
            block.leave_device()

    def pinned(self, block: Block) -> bool:
        """Return True if a running forward or backward needs the streamed block's slot."""
        return block.forwards > 0 or any(block in pinned for pinned in self._running.values())

    def show_host_weights(self) -> None:
        """The lanes are idle: make parameters views of the host copy until their next use. If the
        host copy is a shard, they stay unchanged."""
        for block in self.blocks.values():
            if block.source is not self:
                block.views.set_ready(ready=True)
            # A block whose forward is running keeps its slot: the call comes from inside the
            # forward.
            elif not (self.gathers or block.forwards):
                self.interpreter.run(self._program.drop_slot, block.name)
                block.views.show_host()
                self.exposed.add(block)

    def close(self, *, has_successor: bool = False) -> None:
        """Hand the host memory of streamed weights over to their parameters: the host may have no
        room for a copy. If the host has only a shard of them, parameters become empty, so that a
        read raises an error; with a successor they become NaN of their shape."""
        self.show_host_weights()
        # Tensors of a user's inference mode could not be trained again.
        with torch.inference_mode(False):
            for bucket in (bucket for block in self.streamed for bucket in block.all_buckets):
                # A mapped file lives as long as its views.
                on_disk = self._program.buckets[bucket.name].loads_from_file
                for slot in bucket.slots:
                    if self.gathers:
                        no_weights = slot.local.data.new_empty(0)
                        if has_successor:
                            no_weights = slot.local.data.new_full((), math.nan).expand(slot.shape)
                        slot.local.data = no_weights
                    elif not on_disk:
                        weights = bucket.weights_of(slot)
                        on_host = weights.device.type == "cpu"
                        weights = with_own_storage(weights) if on_host else weights.clone()
                        slot.local.data = slot.shaped(weights)
        # Ends the engine's reference cycles: its host memory is freed at once, not by a later
        # garbage collection.
        for block in self.blocks.values():
            block.source = _Closed()
        del self.interpreter

    def change(self, op: Operation) -> None:
        """Carry out an operation of the program that changes where weights and state are."""
        match op:
            case Enter(name, slot):
                block = self.blocks[name]
                self.exposed.discard(block)
                for bucket in block.all_buckets:
                    bucket.place = slot
                block.views.show_slot()
            case Leave(name):
                # Its next use must request a slot and a load from the program.
                if self.blocks[name] is self._latest:
                    self._latest = None
                self.blocks[name].leave_device()
            case Renew(name, by):
                self.blocks[name].graphs.generation += by
                # The next read, by a module's forward or by a torch function, waits for the upload.
                self.blocks[name].views.set_ready(ready=False)
            case Swap(name):
                # Views of `state` that a user holds show the old copy from here on.
                self._buckets[name].copy ^= 1
            case Flip(name):
                # Launched loads read the previous version; later loads read the other.
                self._buckets[name].version ^= 1

    def _pinned(self) -> list[str]:
        slots, blocks = self._program.streaming.slots, self.blocks
        return [name for name in slots if name is not None and self.pinned(blocks[name])]
