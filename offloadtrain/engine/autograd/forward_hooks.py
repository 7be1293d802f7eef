"""The work around each module's forward: waits, spans and handles.

[Note: Reads without a call]
A forward may read parameters without calling the module that owns them: `F.linear(h,
self.wte.weight)`, `nn.MultiheadAttention.out_proj`, a parent that calls `block.attn(x)` and never
`block(x)`. No hook of the owner runs then; the parameters themselves request their weights: see
[Note: Parameters] in `engine.parameters`. Parameters of a custom class cannot. So the
model itself waits for blocks whose modules its first forward has not called.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offloadtrain.config.errors import ModelError
from offloadtrain.engine.autograd.compiled import CompiledForward
from offloadtrain.engine.autograd.hooks import has_ended, outside_transforms, watch
from offloadtrain.engine.autograd.offload import Offloader, SavedOffloader
from offloadtrain.engine.autograd.recompute import Recomputed, Written
from offloadtrain.engine.autograd.saved_tensors import (
    Chain,
    Hooks,
    PassOn,
    SavedTensors,
    are_covered,
    in_checkpoint,
)
from offloadtrain.engine.autograd.selective import Policy, engine_code
from offloadtrain.engine.block import Block, Residency
from offloadtrain.engine.checks import has_compiled
from offloadtrain.runtime.lanes import Lanes, Span

_hooks_are_disabled: Callable[[], str | None] = (
    torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
)
"""Returns torch's message if saved-tensor hooks cannot be pushed on this thread."""

_DTYPES = (
    "offloadtrain: weights are in 16 bits here, buffers are not, and only inputs of torch's own "
    "modules are cast. "
    'Keep those of this part in fp32, offload(keep_fp32=["name.*"]), compute it inside '
    'torch.autocast, or set precision = "fp32"'
)
_HOOKS = (
    "offloadtrain: a forward saves its weights through such hooks. Call "
    "torch.autograd.grad(…, create_graph=True) in the place of torch.func"
)
_NOTES = {
    "BFloat16": _DTYPES,
    "Half": _DTYPES,
    "don't yet support saved tensor hooks": _HOOKS,
}
"""Substring of torch's error message → the note that is added to the error."""


class _Running(NamedTuple):
    """A forward in progress; `frame`: see [Note: Interrupted forwards] in `hooks.py`."""

    module: nn.Module
    frame: FrameType | None
    span: Span
    pushed: Chain | None
    blocks: tuple[Block, ...]
    outside: Sequence[Block]
    """Streamed blocks of the enclosing forward."""
    writes: list[tuple[Block, list[int]]]
    """Streamed blocks of this forward → write counts of trained parameters when it began."""


@dataclass(slots=True)
class _HookedModule:
    """A hooked module: the blocks that its forward waits for, and its running forwards."""

    name: str
    waits: list[Block]
    handles: bool = False
    """True if this module's hooks made handles of the weights saved by its last forward outside of
    backward: when that forward is recomputed they must do the same."""
    running: list[_Running] = field(default_factory=list)


class _HookedModules(dict[nn.Module, _HookedModule]):
    def __missing__(self, module: nn.Module) -> _HookedModule:
        raise ModelError(
            f"this {type(module).__name__} is a shallow copy (copy.copy) of a module that is "
            "offloaded: call that module itself, or a copy.deepcopy of it"
        )


class ForwardHooks:
    """The hooks of every module whose forward reads weights."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        entries: Mapping[nn.Module, list[Block]],
        lanes: Lanes,
        *,
        residency: Residency,
        recomputed: Sequence[nn.Module],
        compiled: Mapping[nn.Module, float | None],
        offloader: Offloader | None,
        policy: Policy | None = None,
    ) -> None:
        """`entries`: module → the blocks whose weights its forward reads. `recomputed`: modules
        whose forward is recomputed in backward. `compiled`: module that torch compiles → budget of
        `CompiledForward`. `offloader`: takes the inputs of recomputed modules, or all tensors
        saved for backward. `policy`: see `Recomputed`."""
        self.on_root: Callable[[], ForwardHooks | None] = lambda: None
        """Called when a forward of the model begins outside of backward. Returns the hooks that
        replace these during the call, or None."""
        self.on_blocks: Callable[[Sequence[Block]], None] = lambda blocks: None
        """Called when a forward of any module begins outside of backward, with the blocks it
        reads."""
        self._model = model
        self._lanes = lanes
        self._residency = residency
        self._offloader = offloader
        self._blocks = blocks
        self._is_first = True
        """True until the first forward of the model has ended."""
        self._hooked = _HookedModules()
        self._running: list[_Running] = []
        """All forwards in progress, innermost last."""
        self._handles: list[RemovableHandle] = []
        self._compiled = [CompiledForward(module, budget) for module, budget in compiled.items()]
        for forward in self._compiled:
            forward.put()
        self._saved = SavedTensors(residency)
        written = Written()
        watcher = weakref.ref(self)
        self._recomputed = {
            module: Recomputed(name, module, watcher, written, policy)
            for name, module in model.named_modules()
            if module in recomputed
        }
        self._attach(entries)

    @property
    def is_running(self) -> bool:
        """True if a forward is in progress."""
        return bool(self._running)

    @engine_code
    @outside_transforms
    def enter(
        self,
        module: nn.Module,
        *,
        again: bool = False,
        frame: FrameType | None = None,
        begin: Callable[[Hooks], PassOn] | None = None,
    ) -> None:
        """Pre-forward: wait for the weights, open the span, make saved weights handles.

        Args:
            again: the call comes from a forward that is being recomputed ([Note: Recompute]).
            frame: frame of the forward, if it may end without `leave`.
            begin: see `SavedTensors.push`.

        Raises:
            ModelError: saved-tensor hooks are forbidden here, as in `torch.func.grad`.
        """
        self.end_interrupted()
        # Checked before anything is loaded or pinned.
        if torch.is_grad_enabled() and (reason := _hooks_are_disabled()) is not None:
            raise ModelError(f"{reason} {_HOOKS}")
        hooked, again_now = self._hooked[module], in_backward()
        if not again_now:
            hooked.handles = True
            if module is self._model and (successor := self._enter_root()) is not None:
                # torch has already collected this module's pre-forward hooks, so the successor's
                # are called from here; it collects the post-forward hooks later.
                successor.enter(module, frame=frame)
                return
            self.on_blocks(hooked.waits)
        blocks = tuple(hooked.waits)
        # Compute waits for these blocks only; uploads and loads of later ones run during forward.
        self._use(blocks)
        # A recompute that bypasses the hooks leaves plain views in its graph: the block counts as
        # read until backward has passed it, or "delayed" would upload over them.
        if not hooked.handles and not again:
            for block in blocks:
                block.runs_again()
        reads = [weights for block in blocks for weights in block.views.ranges]
        # After the waits: user code reads the weights from here on.
        span = self._lanes.open_span(f"forward {hooked.name}", reads)
        offloader = None if again else self._offloader_of(module)
        streamed = self._residency.loaded(blocks)
        # The backward of an embedding reads only its indices: it needs neither weights nor a slot.
        looks_up = isinstance(module, nn.Embedding) and (
            type(module).forward is nn.Embedding.forward
        )
        saved = [] if looks_up else streamed
        outside = self._saved.enter(blocks, saved, again=again or again_now)
        pushed = self._saved.push(offloader, frame, begin) if hooked.handles else None
        writes = [(block, block.writes.read()) for block in streamed]
        running = _Running(module, frame, span, pushed, blocks, outside, writes)
        hooked.running.append(running)
        self._running.append(running)

    def enter_again(
        self, module: nn.Module, begin: Callable[[Hooks], PassOn]
    ) -> Callable[[], object]:
        """Begin a run of a recomputed forward ([Note: Recompute]); return the function that ends
        it. `begin`: see `SavedTensors.push`."""
        self.end_interrupted()
        if in_backward() or not self._running or self._running[-1].module is not module:
            self.enter(module, again=True, begin=begin)
            return partial(self.leave, module)
        # First run: the module's hooks have waited for the weights. Since then only torch's
        # checkpoint has pushed saved-tensor hooks.
        pushed = self._saved.push(begin=begin)
        return partial(self._saved.pop, pushed)

    def must_enter_inside(self, module: nn.Module) -> bool:
        """Return True if a module inside a streamed block must call `enter`: if the block's hooks
        have not run, because its forward was called directly or is recomputed ([Note: Recompute
        without hooks]), or if its saved-tensor hooks are no longer innermost."""
        hooked = self._hooked[module]
        for block in hooked.waits:
            if not block.forwards:
                return True
        hooked.handles = hooked.handles and in_backward()
        return are_covered()

    @engine_code
    def leave(self, module: nn.Module) -> None:
        """Post-forward; also called after an exception."""
        hooked = self._hooked.get(module)
        if hooked is None or not hooked.running:
            return
        running = hooked.running.pop()
        # If forward has raised.
        error = sys.exc_info()[1]
        if isinstance(error, RuntimeError) and not hasattr(error, "__notes__"):
            for text, note in _NOTES.items():
                if text in str(error):
                    error.add_note(note)
        # Nearly always the last entry.
        at = next(i for i in range(len(self._running) - 1, -1, -1) if self._running[i] is running)
        del self._running[at]
        self._saved.set_within(running.outside)
        self._saved.pop(running.pushed)
        names = (block.written_since(counts) for block, counts in running.writes)
        written = next(filter(None, names), None)
        # Without a pin the slot may be reused: the load of the next block waits for compute up to
        # here.
        self._release(running.blocks)
        self._lanes.close_span(running.span)
        if written is not None:
            raise ModelError(
                f"parameter '{written}' was written in the forward of '{hooked.name}', whose "
                "weights are on the device only meanwhile: the write is lost. Write after step(), "
                "or leave the block on the device (resident_blocks, keep_whole)"
            )
        if self._is_first and module is self._model:
            self._is_first = False
            called = self._residency.forward_order
            uncalled = (block for block in self._blocks if block not in called)
            hooked.waits += [block for block in uncalled if block.source.waits_with_model(block)]

    def end_interrupted(self) -> None:
        """End the forwards that an interrupt has cut: [Note: Interrupted forwards]."""
        while self._running and has_ended(self._running[-1].frame):
            self.leave(self._running[-1].module)

    def reset(self) -> None:
        """The step was abandoned: end all forwards, and drop the tensors that they have
        offloaded."""
        self._end_all()
        if self._offloader is not None:
            self._offloader.reset()

    def _end_all(self) -> None:
        while self._running:
            self.leave(self._running[-1].module)

    def close(self) -> None:
        """Remove all hooks and replaced forwards from the modules."""
        self._end_all()
        for handle in self._handles:
            handle.remove()
        for recomputed in self._recomputed.values():
            recomputed.remove()
        for compiled in self._compiled:
            compiled.remove()

    def _attach(self, entries: Mapping[nn.Module, list[Block]]) -> None:
        without: dict[nn.Module, list[Block]] = {m: [] for m in (self._model, *self._recomputed)}
        for module, waits in {**without, **entries}.items():
            self._hooked_of(module).waits += waits
        for module, waits in _inside_streamed(self._residency.streamed).items():
            if module not in self._hooked:
                self._hooked_of(module, inner=True).waits += waits
        for recomputed in self._recomputed.values():
            recomputed.put()

    def _enter_root(self) -> ForwardHooks | None:
        # A plain backward before this forward has left its micro-step open: its last blocks are
        # sent before compute gets more work.
        if (successor := self.on_root()) is not None:
            return successor
        if isinstance(self._offloader, SavedOffloader):
            self._offloader.begin()
        # The first loads are launched before any module asks for its block.
        self._residency.restart()
        return None

    def _offloader_of(self, module: nn.Module) -> Offloader | None:
        if isinstance(self._offloader, SavedOffloader):
            # A user's recompute drops the tensors of its first run, and needs those of its second
            # run, inside backward, at once.
            return None if in_backward() or in_checkpoint() else self._offloader
        return self._offloader if module in self._recomputed else None

    def _use(self, blocks: Sequence[Block]) -> None:
        """Pin all blocks before the first use: none may evict another; all stay during forward."""
        for block in blocks:
            block.forwards += 1
        try:
            for block in blocks:
                self._residency.forward_order.setdefault(block)
                block.source.use(block)
                block.views.set_ready(ready=True)
        except BaseException:
            self._release(blocks)
            raise

    def _release(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.forwards -= 1
        for block in self._residency.loaded(blocks):
            if not block.forwards:
                block.views.set_ready(ready=False)

    def _hooked_of(self, module: nn.Module, *, inner: bool = False) -> _HookedModule:
        if module not in self._hooked:
            name = next(name for name, m in self._model.named_modules() if m is module)
            self._hooked[module] = _HookedModule(name or "root", [])
            self._handles += watch(module, self, inside=inner)
        return self._hooked[module]


def _inside_streamed(streamed: Sequence[Block]) -> dict[nn.Module, list[Block]]:
    """Return the modules in streamed blocks that own parameters → their blocks. Compiled blocks are
    left out: their hooks differ, so the compiler would compile each block separately."""
    eager = [block for block in streamed if not any(map(has_compiled, block.module.modules()))]
    owner = {slot.param: block for block in eager for b in block.all_buckets for slot in b.slots}
    inside = dict.fromkeys(module for block in eager for module in block.module.modules())
    blocks_of = {m: [owner[p] for p in m.parameters(recurse=False) if p in owner] for m in inside}
    return {module: list(dict.fromkeys(owners)) for module, owners in blocks_of.items() if owners}


def in_backward() -> bool:
    """Return True if autograd runs a backward on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
