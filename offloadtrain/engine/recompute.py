"""Activations that are not kept: a block's forward runs again in backward, from its inputs.

[Note: Recompute]
The forward of a repeated module is replaced by one that runs the user's under torch's non-reentrant
checkpoint, which keeps the inputs only and restores the random state, so that dropout draws the
same. What runs again is no module call: no hook fires. So the replacement itself tells the engine
that the module's forward begins and ends; in the first forward it says so a second time, inside the
hooks. Saved weights stay handles: the engine's hooks are innermost in both runs.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offloadtrain.engine.hooks import Watcher


class Recomputed:
    """Stands in for `module.forward`; a copy of the module has the forward of its class again."""

    def __init__(self, module: nn.Module, watcher: Callable[[], Watcher | None]) -> None:
        self._module = module
        self._watcher = watcher
        self._original: Callable[..., Any] = module.forward
        self._own = "forward" in module.__dict__  # e.g. a compiled forward that the user assigned

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._original(*args, **kwargs)
        return checkpoint(self._run, *args, use_reentrant=False, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._module)]
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self) -> Any:
        return types.MethodType, (type(self._module).forward, self._module)

    def put(self) -> None:
        """Replace the module's forward."""
        self._module.forward = self

    def remove(self) -> None:
        """Give the module its forward back."""
        if self._own:
            self._module.forward = self._original
        else:
            del self._module.forward

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        watcher = self._watcher()
        if watcher is None:
            return self._original(*args, **kwargs)
        watcher.enter(self._module, again=True)
        try:
            return self._original(*args, **kwargs)
        finally:
            watcher.leave(self._module)
