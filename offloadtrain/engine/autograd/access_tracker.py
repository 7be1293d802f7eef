"""Tracks the first forward for weights that are read outside the forward of their own module.

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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from offloadtrain.engine.autograd.hooks import has_ended
from offloadtrain.engine.autograd.passthrough import Passthrough
from offloadtrain.engine.block import Block


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
