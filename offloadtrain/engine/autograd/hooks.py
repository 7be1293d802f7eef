"""Module hooks that reference the engine weakly and become inert in a copy of the model.

[Note: Interrupted forwards]
torch calls the hooks after a forward also if it raises an `Exception`, but not after Ctrl-C.
Pins, spans and saved-tensor hooks of that forward would stay, and these hooks would take what
the next model of the process saves: in a notebook, silently. So each forward stores the frame that
called its hooks. The next hook that sees such a frame after its end ends the forward.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from offloadtrain.engine.parameters import past_the_class

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Watcher(Protocol):
    """The object that the hooks call."""

    def enter(self, module: nn.Module, *, frame: FrameType | None = None) -> None: ...
    def enter_again(
        self, module: nn.Module, begin: Callable[[Any], Any]
    ) -> Callable[[], object]: ...
    def must_enter_inside(self, module: nn.Module) -> bool: ...
    def leave(self, module: nn.Module) -> None: ...


class Removable(Protocol):
    """Something attached to a model that can be removed."""

    def remove(self) -> None: ...


class Inert:
    """Replaces a hook in a deep copy or a pickle of the model: the copy is not offloaded."""

    def __call__(self, *_: Any) -> None:
        return None


class OfOneModel:
    """A hook that deep copies and pickles of its model replace by `Inert`."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Inert:
        return Inert()

    def __reduce__(self) -> tuple[type[Inert], tuple[()]]:
        return (Inert, ())


class _Hook(OfOneModel):
    __slots__ = ("_watcher",)

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = weakref.ref(watcher)


class _Enter(_Hook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any) -> None:
        watcher = self._watcher()
        if watcher is None:
            return
        if torch.compiler.is_dynamo_compiling():
            _uncompiled(watcher.enter, module)
        else:
            watcher.enter(module, frame=sys._getframe(1))


class _EnterInside(_Hook):
    """Hook of a module inside a hooked module, whose hooks have usually run. Invisible to the
    compiler."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any) -> None:
        watcher = None if torch.compiler.is_dynamo_compiling() else self._watcher()
        if watcher is not None and watcher.must_enter_inside(module):
            watcher.enter(module, frame=sys._getframe(1))
            leave = _Leave(watcher)
            leave.handle = module.register_forward_hook(leave, always_call=True)


class _Leave(_Hook):
    """Post-forward hook. `handle`: set if the hook is for a single forward, after which it removes
    itself."""

    __slots__ = ("handle",)

    def __init__(self, watcher: Watcher) -> None:
        super().__init__(watcher)
        self.handle: RemovableHandle | None = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.handle is not None:
            self.handle.remove()
        watcher = self._watcher()
        if watcher is None:
            return
        if torch.compiler.is_dynamo_compiling():
            _uncompiled(watcher.leave, module)
        else:
            watcher.leave(module)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _uncompiled(method: Callable[[nn.Module], None], module: nn.Module) -> None:
    """Call the method outside of compiled code: a module was compiled together with its hooks."""
    method(module)


def outside_transforms(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a method that moves weights: a running `torch.func` transform must not see it, or
    parameters would become tensors that are invalid after the transform."""

    @wraps(method)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch._C._functorch.peek_interpreter_stack() is None:
            return method(*args, **kwargs)
        with temporarily_clear_interpreter_stack():
            return method(*args, **kwargs)

    return wrapper


def has_ended(frame: FrameType | None) -> bool:
    """Return True if a frame has ended, on any thread; False for None."""
    if frame is None:
        return False
    try:
        frame.clear()
    except RuntimeError:  # a running frame cannot be cleared
        return False
    return True


def watch(module: nn.Module, watcher: Watcher, *, inside: bool = False) -> list[RemovableHandle]:
    """Call the watcher around each forward of the module, also if forward raises.

    Args:
        inside: the module is inside a watched module: call `enter` and `leave` only if
            `must_enter_inside` returns True.
    """
    if inside:
        return [module.register_forward_pre_hook(_EnterInside(watcher), prepend=True)]
    return [
        module.register_forward_pre_hook(_Enter(watcher), prepend=True),
        module.register_forward_hook(_Leave(watcher), always_call=True),
    ]


def is_reached(param: nn.Parameter) -> bool:
    """Return True if the running backward will accumulate into a parameter."""
    try:
        with past_the_class():
            node = torch.autograd.graph.get_gradient_edge(param).node
        return bool(torch._C._will_engine_execute_node(node))
    # torch.autograd.grad() of the parameter returns its gradient and accumulates nothing.
    except RuntimeError:
        return False


class Passthrough(TorchDispatchMode):
    """Replaces a user's dispatch mode when a forward that ran under it is recomputed without it:
    under any mode torch computes some functions (`ctc_loss`) by other operations, which save other
    tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not wrap this mode, which would import the compiler: see
        `eager` in `engine.evaluations`. No compiled forward runs under this mode."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


class ReplacedForward:
    """Replaces `module.forward`; a copy of the module has the forward of its class."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # Set if the user assigned a forward to the module, such as a compiled function.
        self._attribute: Callable[..., Any] | None = module.__dict__.get("forward")

    @property
    def _original(self) -> Callable[..., Any]:
        # Looked up at each call: other code may patch the class's forward after `offload()`.
        return self._attribute or _forward_of(self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _forward_of(memo[id(self._module)])

    def __reduce__(self) -> Any:
        return _forward_of, (self._module,)

    def put(self) -> None:
        """Replace the module's forward."""
        self._module.forward = self

    def remove(self) -> None:
        """Restore the module's forward."""
        if self._attribute is not None:
            self._module.forward = self._attribute
        else:
            del self._module.forward


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of the module's class. Defined at module level, because pickle refers to
    it by name and calls it with a module that has no attributes yet."""
    return types.MethodType(type(module).forward, module)
