"""The work around each module's forward: waits, spans and handles.

[Note: Reads without a call]
A forward may read parameters without calling the module that owns them: `F.linear(h,
self.wte.weight)`, `nn.MultiheadAttention.out_proj`, a parent that calls `block.attn(x)` and never
`block(x)`. No hook of the owner fires then, and compute would not wait for an upload of its
weights. So in the first forward, when nothing is in flight yet, every operation's arguments are
looked up. If a block is read before any hook has entered it, the running module waits for it in
later forwards. If a block is read after its own forward, it is kept in use until the running module
ends. A model with compiled blocks is not tracked: the compiler does not work under a dispatch mode.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from offloadtrain.engine.autograd.hooks import (
    CompiledForward,
    Passthrough,
    has_ended,
    watch,
    watch_inside,
)
from offloadtrain.engine.autograd.offload import Offloader, SavedOffloader
from offloadtrain.engine.autograd.recompute import Recomputed, Written
from offloadtrain.engine.autograd.saved_tensors import Chain, SavedTensors
from offloadtrain.engine.block import Block
from offloadtrain.engine.checks import has_compiled
from offloadtrain.engine.residency import Residency
from offloadtrain.runtime.lanes import Lanes, Span


class AccessTracker(Passthrough):
    """Active during one forward; calls `missed(module, block)` or `late(module, block)` for such
    reads, once for each pair: late if the module was running when the block was entered."""

    def __init__(
        self,
        root: nn.Module,
        owner: Callable[[Tensor], Block | None],
        missed: Callable[[nn.Module, Block], None],
        late: Callable[[nn.Module, Block], None],
        frame: FrameType | None,
    ) -> None:
        """`frame`: that of the forward; see [Note: Interrupted forwards] in `hooks.py`."""
        super().__init__()
        self._frame = frame
        self._owner = owner
        self._missed = missed
        self._late = late
        self._running: list[nn.Module] = [root]
        self._entered: dict[Block, set[nn.Module]] = {}
        """Block → modules that were running when a hook entered it."""
        self._reported: set[tuple[nn.Module, Block]] = set()
        self._handles: list[RemovableHandle] = []
        self._ignoring = False

    def __enter__(self) -> AccessTracker:
        self._handles = [
            register_module_forward_pre_hook(lambda module, _: self._running.append(module)),
            register_module_forward_hook(lambda *_: self._left(), always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        """Idempotent."""
        handles, self._handles = self._handles, []
        if handles:
            super().__exit__(*exc)
        for handle in handles:
            handle.remove()

    @staticmethod
    def end_interrupted() -> None:
        """End those of forwards that an interruption has cut, of any model."""
        while isinstance(mode := _get_current_dispatch_mode(), AccessTracker):
            if not has_ended(mode._frame):
                return
            mode.__exit__(None, None, None)

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Look nothing up while the engine's own operations run."""
        self._ignoring = True
        try:
            yield
        finally:
            self._ignoring = False

    def entered(self, block: Block) -> None:
        """A hook has waited for this block in this forward."""
        self._entered[block] = set(self._running)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # "prim" asks a fake tensor for its device, which reads nothing.
        if not self._ignoring and func.namespace != "prim":
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self._look_up(leaf)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _look_up(self, tensor: Tensor) -> None:
        block = self._owner(tensor)
        reader = self._running[-1]
        if block is None or block.forwards or (reader, block) in self._reported:
            return
        self._reported.add((reader, block))
        if reader in self._entered.get(block, ()):
            self._late(reader, block)
        else:
            self._missed(reader, block)

    def _left(self) -> None:
        if len(self._running) > 1:
            self._running.pop()


class _Running(NamedTuple):
    """One forward in progress; `frame`: see [Note: Interrupted forwards] in `hooks.py`."""

    module: nn.Module
    frame: FrameType | None
    span: Span
    pushed: Chain | None
    blocks: tuple[Block, ...]
    outside: tuple[Block, ...]
    """Streamed blocks whose forward surrounds it."""


@dataclass(slots=True)
class _HookedModule:
    """A hooked module: the blocks that its forward waits for, and its running forwards."""

    name: str
    waits: list[Block]
    handles: bool = False
    """Its own hooks made handles of the weights that its last forward outside of a backward saved:
    when that forward runs again they must do the same."""
    running: list[_Running] = field(default_factory=list)
    ended_inside: list[_Running] = field(default_factory=list)
    """Forwards inside it that are over, whose blocks it reads afterwards."""


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
        compiled: Sequence[nn.Module],
        offloader: Offloader | None,
    ) -> None:
        """`entries`: module → the blocks whose weights its forward reads. `recomputed`: modules
        whose forward runs again in backward. `compiled`: those that torch compiles. `offloader`:
        takes the inputs of the recomputed ones, or all that is saved for backward."""
        self.on_root: Callable[[], None] = lambda: None
        """Called when a forward of the model begins that is not part of a backward."""
        self.on_blocks: Callable[[Sequence[Block]], None] = lambda blocks: None
        """Called when such a forward of any module begins, with the blocks that it reads."""
        self._model = model
        self._lanes = lanes
        self._residency = residency
        self._offloader = offloader
        self._blocks = blocks
        self._order: dict[Block, None] = {}
        self._hooked: dict[nn.Module, _HookedModule] = {}
        self._running: list[_Running] = []
        """All forwards in progress, the innermost last."""
        self._late_readers: dict[Block, set[nn.Module]] = {}
        self._handles: list[RemovableHandle] = []
        self._tracker: AccessTracker | None = None
        self._compiled = [CompiledForward(module) for module in compiled]
        for forward in self._compiled:
            forward.put()
        self._tracked = _has_compiled(model)
        self._saved = _saved_tensors(blocks, residency)
        written = Written()
        self._recomputed = {m: Recomputed(m, weakref.ref(self), written) for m in recomputed}
        self._attach(entries)

    @property
    def forward_order(self) -> list[Block]:
        """The order in which forward first entered the blocks; blocks never entered come last."""
        return [*self._order, *(block for block in self._blocks if block not in self._order)]

    def enter(
        self, module: nn.Module, *, again: bool = False, frame: FrameType | None = None
    ) -> None:
        """Pre-forward: wait for the weights, open the span, make saved weights handles.

        Args:
            again: the call comes from inside a forward that is recomputed ([Note: Recompute]).
            frame: that of the forward, if it may end without `leave`.
        """
        self.end_interrupted()
        hooked, again_now = self._hooked[module], in_backward()
        if not again_now:
            hooked.handles = True
            if module is self._model:
                self._enter_root(frame)
            self.on_blocks(hooked.waits)
        blocks = tuple(hooked.waits)
        # Compute waits for these blocks only; uploads and loads of later ones run during forward.
        self._use(blocks)
        # A recompute past the hooks leaves plain views in its graph: the block counts as read until
        # backward has passed it, or "delayed" would upload over them.
        if not hooked.handles and not again:
            for block in blocks:
                block.runs_again()
        reads = [weights for block in blocks for weights in block.weights]
        # After the waits: from here on user code reads the weights where they are now.
        span = self._lanes.open_span(f"forward {hooked.name}", reads)
        offloader = None if again else self._offloader_of(module)
        # The backward of an embedding reads its indices: it needs no weights, and no slot.
        saved = () if _looks_up(module) else blocks
        outside = self._saved.enter(blocks, saved, again=again or again_now)
        pushed = self._saved.push(offloader, frame) if hooked.handles else None
        running = _Running(module, frame, span, pushed, blocks, outside)
        hooked.running.append(running)
        self._running.append(running)

    def enter_inside(self, module: nn.Module, frame: FrameType) -> bool:
        """Pre-forward of a module inside a streamed block. It enters where the block's hooks have
        not fired: in a forward that is called past them, or runs again ([Note: Recompute without
        hooks]). Returns True if `leave` must follow."""
        hooked = self._hooked[module]
        for block in hooked.waits:
            if not block.forwards:
                self.enter(module, frame=frame)
                return True
        hooked.handles = hooked.handles and in_backward()
        return False

    def leave(self, module: nn.Module) -> None:
        """Post-forward, also after an exception."""
        hooked = self._hooked[module]
        if not hooked.running:
            return
        running = hooked.running.pop()
        # Nearly always the last one.
        at = next(i for i in range(len(self._running) - 1, -1, -1) if self._running[i] is running)
        del self._running[at]
        self._saved.leave(running.outside)
        if running.pushed is not None:
            self._saved.pop(running.pushed)
        while hooked.ended_inside and not hooked.running:
            self._end(hooked.ended_inside.pop())
        # A module around this one reads the blocks later: it holds their pins and spans until its
        # own forward ends.
        reader = self._reader_after(module, running)
        if reader is not None:
            reader.ended_inside.append(running)
        else:
            self._end(running)
        if module is self._model and self._tracker is not None and not hooked.running:
            self._tracker.__exit__(None, None, None)
            self._tracker = None

    def end_interrupted(self) -> None:
        """End the forwards that an interruption has cut: [Note: Interrupted forwards]."""
        while self._running and has_ended(self._running[-1].frame):
            self.leave(self._running[-1].module)

    def reset(self) -> None:
        """The step was given up: end all forwards, and forget what they have moved."""
        self._end_all()
        if self._offloader is not None:
            self._offloader.reset()

    def _end_all(self) -> None:
        while self._running:
            self.leave(self._running[-1].module)

    def close(self) -> None:
        """Take everything off the modules."""
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
        for module, waits in _inside_streamed(self._blocks).items():
            if module not in self._hooked:
                self._hooked_of(module, inner=True).waits += waits
        for recomputed in self._recomputed.values():
            recomputed.put()

    def _enter_root(self, frame: FrameType | None) -> None:
        # A plain backward before this forward has left its micro-step open: its last blocks are
        # sent before compute gets more work.
        self.on_root()
        if isinstance(self._offloader, SavedOffloader):
            self._offloader.begin()
        for block in self._residency.streamed:
            block.views.check()
        # The first loads are launched before any module asks for its block.
        self._residency.restart()
        if not self._tracked:
            self._tracked = True
            if _has_compiled(self._model):
                return
            AccessTracker.end_interrupted()
            owner = self._saved.owner
            self._tracker = AccessTracker(self._model, owner, self._missed, self._late, frame)
            self._tracker.__enter__()

    def _offloader_of(self, module: nn.Module) -> Offloader | None:
        if isinstance(self._offloader, SavedOffloader):
            # What a user's recompute saves inside backward is needed at once.
            return None if in_backward() else self._offloader
        return self._offloader if module in self._recomputed else None

    def _use(self, blocks: Sequence[Block]) -> None:
        """Pin all blocks, then use them: none may evict another, and all stay while forward
        runs."""
        for block in blocks:
            block.forwards += 1
        try:
            for block in blocks:
                self._order.setdefault(block)
                if self._tracker is None:
                    block.use()
                else:
                    with self._tracker.ignored():
                        block.use()
                    self._tracker.entered(block)
        except BaseException:
            for block in blocks:
                block.forwards -= 1
            raise

    def _end(self, running: _Running) -> None:
        # Without a pin the slot may go to another block, whose load waits for compute up to then.
        for block in running.blocks:
            block.forwards -= 1
        self._lanes.close_span(running.span)

    def _reader_after(self, module: nn.Module, running: _Running) -> _HookedModule | None:
        """Return the running module that reads these blocks after their own forward, if any."""
        if not self._late_readers:
            return None
        readers = [m for block in running.blocks for m in self._late_readers.get(block, ())]
        readers_after = [self._hooked[m] for m in readers if m is not module]
        return next((hooked for hooked in readers_after if hooked.running), None)

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
    """Return modules in streamed blocks that own parameters → the blocks of these. Not in compiled
    blocks: the compiler would compile each block anew, as their hooks differ."""
    streamed = [b for b in blocks if b.streamed and not _has_compiled(b.module)]
    owner = {slot.param: block for block in streamed for b in block.all_buckets for slot in b.slots}
    inside = dict.fromkeys(module for block in streamed for module in block.module.modules())
    blocks_of = {m: [owner[p] for p in m.parameters(recurse=False) if p in owner] for m in inside}
    return {module: list(dict.fromkeys(owners)) for module, owners in blocks_of.items() if owners}


def _saved_tensors(blocks: Sequence[Block], residency: Residency) -> SavedTensors:
    saved = SavedTensors()
    for block in blocks:
        if not block.streamed:
            saved.register(block)
    if residency.streamed:
        saved.register_streamed(residency)
    return saved


def _has_compiled(model: nn.Module) -> bool:
    """Tell whether a forward in it is compiled: torch.compile gives up for good if its first run is
    under a dispatch mode."""
    return any(map(has_compiled, model.modules()))


def _looks_up(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward


def in_backward() -> bool:
    """Tell whether autograd runs a backward on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
