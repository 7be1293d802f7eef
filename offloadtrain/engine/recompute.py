"""Activations that are not kept: a block's forward runs again in backward, from its inputs.

[Note: Recompute]
The forward of a repeated module is replaced by one that runs the user's under torch's non-reentrant
checkpoint, which keeps the inputs only and restores the random state, so that dropout draws the
same. What runs again is no module call: no hook fires. So the replacement itself tells the engine
that the module's forward begins and ends; in the first forward it says so a second time, inside the
hooks. Saved weights stay handles: the engine's hooks are innermost in both runs. What the first run
changed in its inputs is as before for the second one: [Note: Rewound inputs] in `rewind.py`.

A key-value cache that is made in a training forward and never read holds on to keys and values of
every layer, which recompute is there to let go of. Models that follow the convention of a
`use_cache` argument are asked for none where the caller says nothing.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from offloadtrain.engine.hooks import OfOneModel, Watcher
from offloadtrain.engine.rewind import Rewind


class _Runs:
    """One forward, and whenever it is called once more, that forward again."""

    def __init__(self, run: Callable[..., Any], inputs: Rewind) -> None:
        self._run = run
        self._inputs = inputs
        self._ran = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._ran:
            with self._inputs.again():
                return self._run(*args, **kwargs)
        self._ran = True
        return self._run(*args, **kwargs)


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
        run = _Runs(self._run, Rewind(args, kwargs))
        return checkpoint(run, *args, use_reentrant=False, **kwargs)

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


def make_no_caches(model: nn.Module, recomputed: Collection[nn.Module]) -> list[RemovableHandle]:
    """Ask every module around the recomputed ones that can make a cache for none, in forwards with
    a graph."""
    inside = {module for one in recomputed for module in one.modules()}
    handles = []
    for module in model.modules() if recomputed else ():
        names = list(inspect.signature(module.forward).parameters)
        if _USE_CACHE in names and module not in inside:
            hook = _NoCache(names.index(_USE_CACHE))
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    return handles


_USE_CACHE = "use_cache"


class _NoCache(OfOneModel):
    def __init__(self, position: int) -> None:
        self._position = position

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        said = len(args) > self._position or kwargs.get(_USE_CACHE) is not None
        if said or not torch.is_grad_enabled():
            return None
        return args, kwargs | {_USE_CACHE: False}
