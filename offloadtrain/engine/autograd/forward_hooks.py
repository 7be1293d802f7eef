"""What happens around each module's forward: waits, spans, handles; what the first one teaches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offloadtrain.engine.autograd.access_tracker import AccessTracker
from offloadtrain.engine.autograd.activation_offload import Parking
from offloadtrain.engine.autograd.hooks import watch, watch_inside
from offloadtrain.engine.autograd.recompute import Recomputed, Written
from offloadtrain.engine.autograd.saved_tensor_hooks import SavedTensors
from offloadtrain.engine.block import Block
from offloadtrain.engine.residency import Residency
from offloadtrain.runtime.lanes import Lanes, Span


class _Running(NamedTuple):
    """One forward in progress."""

    span: Span
    pushed: bool
    blocks: tuple[Block, ...]
    outside: tuple[Block, ...]
    """Streamed blocks whose forward it is inside of."""


@dataclass(slots=True)
class _HookedModule:
    """What the hooks of one module do, and what one running forward of it holds."""

    name: str
    waits: list[Block]
    handles: bool = False
    """Its own hooks made handles of the weights that its last forward outside of a backward saved:
    when that forward runs again they must do the same."""
    running: list[_Running] = field(default_factory=list)
    held: list[_Running] = field(default_factory=list)
    """Forwards inside of it that are over, whose blocks it reads afterwards."""


class ForwardHooks:
    """The watcher of every module whose forward reads weights."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        entries: Mapping[nn.Module, list[Block]],
        lanes: Lanes,
        *,
        residency: Residency,
        recomputed: Sequence[nn.Module],
        parking: Parking | None,
    ) -> None:
        """`entries`: module → the blocks whose weights its forward reads. `recomputed`: modules
        whose forward runs again in backward; `parking`: where their inputs wait."""
        self.on_root: Callable[[], None] = lambda: None
        """Called when a forward of the model begins that is not part of a backward."""
        self._model = model
        self._lanes = lanes
        self._residency = residency
        self._parking = parking
        self._blocks = blocks
        self._order: dict[Block, None] = {}
        self._hooked: dict[nn.Module, _HookedModule] = {}
        self._late_readers: dict[Block, set[nn.Module]] = {}
        self._handles: list[RemovableHandle] = []
        self._tracker: AccessTracker | None = None
        self._tracked = _has_compiled(model)
        self._saved = _saved_tensors(blocks, residency)
        written = Written()
        self._recomputed = {m: Recomputed(m, weakref.ref(self), written) for m in recomputed}
        self._attach(entries)

    @property
    def forward_order(self) -> list[Block]:
        """As the first forward entered them; blocks that it never entered come last."""
        return [*self._order, *(block for block in self._blocks if block not in self._order)]

    def enter(self, module: nn.Module, *, again: bool = False) -> None:
        """Pre-forward: wait for the weights, open the span, make saved weights handles.

        `again`: from inside its forward, where that is recomputed ([Note: Recompute]).
        """
        if module is self._model and not _in_backward():
            self._enter_root()
        hooked = self._hooked[module]
        blocks = tuple(hooked.waits)
        if not _in_backward():
            hooked.handles = True
        self._use(blocks)
        if not hooked.handles and not again:
            for block in blocks:
                block.runs_again()
        reads = [weights for block in blocks for weights in block.weights]
        span = self._lanes.open_span(f"forward {hooked.name}", reads)
        parking = self._parking if not again and module in self._recomputed else None
        outside = self._saved.enter(blocks, again=again or _in_backward())
        pushed = hooked.handles and self._saved.push(parking)
        hooked.running.append(_Running(span, pushed, blocks, outside))

    def enter_inside(self, module: nn.Module) -> bool:
        """Pre-forward of a module inside of a streamed block, which matters where the block's hooks
        have not fired: in a forward that somebody calls past them, or runs again ([Note: Recompute
        without hooks]). Returns whether `leave` is to follow."""
        hooked = self._hooked[module]
        for block in hooked.waits:
            if not block.forwards:
                self.enter(module)
                return True
        hooked.handles = hooked.handles and _in_backward()
        return False

    def leave(self, module: nn.Module) -> None:
        """Post-forward, also after an exception."""
        hooked = self._hooked[module]
        if not hooked.running:
            return
        running = hooked.running.pop()
        self._saved.within = running.outside
        if running.pushed:
            self._saved.pop()
        while hooked.held and not hooked.running:
            self._end(hooked.held.pop())
        reader = self._reader_after(module, running)
        if reader is not None:
            reader.held.append(running)
        else:
            self._end(running)
        if module is self._model and self._tracker is not None and not hooked.running:
            self._tracker.__exit__(None, None, None)
            self._tracker = None

    def reset(self) -> None:
        """No forward is running: those that an interruption ended have not said so, since torch
        calls hooks behind an `Exception` only."""
        for module, hooked in self._hooked.items():
            while hooked.running:
                self.leave(module)

    def close(self) -> None:
        """Take everything off the modules."""
        for handle in self._handles:
            handle.remove()
        for recomputed in self._recomputed.values():
            recomputed.remove()

    def _attach(self, entries: Mapping[nn.Module, list[Block]]) -> None:
        without: dict[nn.Module, list[Block]] = {m: [] for m in (self._model, *self._recomputed)}
        for module, waits in {**without, **entries}.items():
            self._hooked_of(module).waits += waits
        for module, waits in _inside_streamed(self._blocks).items():
            if module not in self._hooked:
                self._hooked_of(module, inner=True).waits += waits
        for recomputed in self._recomputed.values():
            recomputed.put()

    def _enter_root(self) -> None:
        self.on_root()
        self._residency.restart()
        if self._parking is not None:
            self._parking.restart()
        if not self._tracked:
            self._tracked = True
            if _has_compiled(self._model):
                return
            self._tracker = AccessTracker(self._model, self._saved.owner, self._missed, self._late)
            self._tracker.__enter__()

    def _use(self, blocks: Sequence[Block]) -> None:
        """All of them stay while the forward runs: pinned first, so that none evicts another."""
        for block in blocks:
            block.forwards += 1
        try:
            for block in blocks:
                self._use_one(block)
        except BaseException:
            for block in blocks:
                block.forwards -= 1
            raise

    def _use_one(self, block: Block) -> None:
        self._order.setdefault(block)
        if self._tracker is None:
            block.use()
            return
        with self._tracker.ignored():
            block.use()
        self._tracker.entered(block)

    def _end(self, running: _Running) -> None:
        for block in running.blocks:
            block.forwards -= 1
        self._lanes.close_span(running.span)

    def _reader_after(self, module: nn.Module, running: _Running) -> _HookedModule | None:
        """Whose forward, still going on, reads these blocks after their own."""
        readers = [m for block in running.blocks for m in self._late_readers.get(block, ())]
        passages = [self._hooked[m] for m in readers if m is not module]
        return next((hooked for hooked in passages if hooked.running), None)

    def _missed(self, module: nn.Module, block: Block) -> None:
        self._order.setdefault(block)
        self._hooked_of(module).waits.append(block)

    def _late(self, module: nn.Module, block: Block) -> None:
        self._hooked_of(module)
        self._late_readers.setdefault(block, set()).add(module)

    def _hooked_of(self, module: nn.Module, *, inner: bool = False) -> _HookedModule:
        if module not in self._hooked:
            name = next(name for name, m in self._model.named_modules() if m is module)
            self._hooked[module] = _HookedModule(name or "root", [])
            self._handles += (watch_inside if inner else watch)(module, self)
        return self._hooked[module]


def _inside_streamed(blocks: Sequence[Block]) -> dict[nn.Module, list[Block]]:
    """Modules with parameters of their own in streamed blocks, and whose these are. Not in compiled
    blocks: the compiler would make code for each block anew, as it takes hooks for a difference."""
    streamed = [b for b in blocks if b.streamed and not _has_compiled(b.module)]
    owner = {slot.param: block for block in streamed for b in block.held for slot in b.slots}
    inside = dict.fromkeys(module for block in streamed for module in block.module.modules())
    found = {m: [owner[p] for p in m.parameters(recurse=False) if p in owner] for m in inside}
    return {module: list(dict.fromkeys(owners)) for module, owners in found.items() if owners}


def _saved_tensors(blocks: Sequence[Block], residency: Residency) -> SavedTensors:
    saved = SavedTensors()
    for block in blocks:
        if not block.streamed:
            saved.register(block)
    if residency.streamed:
        saved.register_streamed(residency)
    return saved


def _has_compiled(model: nn.Module) -> bool:
    """Whether a forward in it was given to torch.compile, which gives up for good where its first
    run is under a dispatch mode."""
    return any(
        hasattr(module, "_orig_mod")
        or module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
