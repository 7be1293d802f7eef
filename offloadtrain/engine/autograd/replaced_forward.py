"""What stands in for the forward of a module, and takes the module's own place again."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offloadtrain.runtime.heartbeat import HEARTBEAT


class ReplacedForward:
    """Stands in for `module.forward`; a copy of the module has the forward of its class again."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._original: Callable[..., Any] = module.forward
        # An attribute of the module, such as a compiled forward that the user assigned.
        self._is_instance_attribute = "forward" in module.__dict__

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
        """Give the module its forward back."""
        if self._is_instance_attribute:
            self._module.forward = self._original
        else:
            del self._module.forward


class CompiledForward(ReplacedForward):
    """The forward as `torch.compile` makes it, at its first call.

    Not the call of the module: hooks stay outside, all layers alike share one code, and a recompute
    runs the compiled forward again.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        # Under torch's own name for it, by which others tell that it is compiled.
        self._torchdynamo_orig_callable = module.forward
        self._compiled = torch.compile(module.forward)
        _tell_the_watchdog()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)


def _tell_the_watchdog() -> None:
    """To compile takes up to a minute, in which nothing is launched: that is no hang."""
    # here: the compiler takes over a second to import
    from torch._dynamo.callback import callback_handler

    if _begun not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_begun)
        callback_handler.register_end_callback(_ended)


def _begun(*_: object) -> None:
    HEARTBEAT.held_up = True


def _ended(*_: object) -> None:
    HEARTBEAT.held_up = False


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of the module's class. A pickle names this function: it is called for a
    module whose attributes are not there yet."""
    return types.MethodType(type(module).forward, module)
