"""Module hooks that hold the engine weakly and become inert in a copy of the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class Watcher(Protocol):
    """What the hooks call."""

    def enter(self, module: nn.Module, *, again: bool = False) -> None: ...
    def leave(self, module: nn.Module) -> None: ...


class Inert:
    """What a hook becomes in a deep copy or a pickle of the model: the copy is not offloaded."""

    def __call__(self, *_: Any) -> None:
        return None


class OfOneModel:
    """A hook that a copy of its model does not have."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Inert:
        return Inert()

    def __reduce__(self) -> tuple[type[Inert], tuple[()]]:
        return (Inert, ())


class _Hook(OfOneModel):
    __slots__ = ("_traced", "_watcher")

    def __init__(self, watcher: Watcher, traced: bool) -> None:
        self._watcher = weakref.ref(watcher)
        self._traced = traced

    def _alive(self) -> Watcher | None:
        """Who is to be told; nobody while the compiler traces the module, if it is not to see."""
        return self._watcher() if self._traced or not torch.compiler.is_compiling() else None


class _Enter(_Hook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any) -> None:
        watcher = self._alive()
        if watcher is not None:
            _call(watcher.enter, module)


class _Leave(_Hook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        watcher = self._alive()
        if watcher is not None:
            _call(watcher.leave, module)


def _call(method: Callable[[nn.Module], None], module: nn.Module) -> None:
    """The compiler, where a module was compiled with its hooks, makes no code of the engine's."""
    if torch.compiler.is_compiling():
        _uncompiled(method, module)
    else:
        method(module)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _uncompiled(method: Callable[[nn.Module], None], module: nn.Module) -> None:
    method(module)


def watch(module: nn.Module, watcher: Watcher, *, traced: bool = True) -> list[RemovableHandle]:
    """Call the watcher around each forward of the module, also when forward raises.

    `traced`: also where the compiler traces that forward as a part of a larger one.
    """
    return [
        module.register_forward_pre_hook(_Enter(watcher, traced), prepend=True),
        module.register_forward_hook(_Leave(watcher, traced), always_call=True),
    ]
