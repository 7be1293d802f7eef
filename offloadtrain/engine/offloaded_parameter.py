"""The class of the parameters that an engine moves, which notice copies and reads of `.grad`.

Values and gradients of an offloaded parameter are not always where torch expects them: new weights
may be on their way up, and gradients have left for the host. A module has hooks for its forward and
its state dict, but none for `copy.deepcopy`, pickles, or a function that takes parameters. So, like
torch's own lazy parameters, offloaded ones have a class of their own. Computing with them costs
nothing more.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

_GRAD: Any = Tensor.grad
"""torch's own descriptor of the attribute."""


class Observer(Protocol):
    """The object that offloaded parameters report to."""

    def before_copy(self) -> None:
        """Parameters are about to be copied: make them hold the newest weights."""

    def gradient_is_read(self, param: nn.Parameter, frame: FrameType) -> None:
        """The code in `frame` is about to read `param.grad`."""


_observers = WeakIdKeyDictionary()
"""Parameter → a weak reference to its observer."""


class OffloadedParameter(nn.Parameter):
    """A parameter that an engine moves. Its copies are ordinary parameters."""

    @property
    def grad(self) -> Tensor | None:
        observer: Observer | None = _observers.get(self, _nobody)()
        if observer is not None:
            observer.gradient_is_read(self, sys._getframe(1))
        return gradient_of(self)

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        _GRAD.__set__(self, grad)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = self._copied()
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # On the host, as in a state dict: a pickle keeps all that it has met alive.
        return self._copied(torch.device("cpu")).__reduce_ex__(protocol)

    def _copied(self, device: torch.device | None = None) -> nn.Parameter:
        """Return a copy: a view of a flat buffer would be saved with all of the buffer."""
        observer: Observer | None = _observers.get(self, _nobody)()
        if observer is not None:
            observer.before_copy()
        values = self.data.to(device or self.device, copy=True)
        return nn.Parameter(values, self.requires_grad)


def _nobody() -> None:
    """Stands for a weak reference to an object that is gone."""


def gradient_of(param: nn.Parameter) -> Tensor | None:
    """Return `param.grad` for the engine itself: no observer is called."""
    grad: Tensor | None = _GRAD.__get__(param)
    return grad


def observe(params: Iterable[nn.Parameter], observer: Observer) -> None:
    """Make parameters report to `observer`, which they do not keep alive. A parameter of another
    class than torch's is left as it is, and does not report."""
    for param in params:
        if type(param) is nn.Parameter:
            param.__class__ = OffloadedParameter
        if isinstance(param, OffloadedParameter):
            _observers[param] = weakref.ref(observer)


def release(params: Iterable[nn.Parameter]) -> None:
    """Make them ordinary parameters again."""
    for param in params:
        if isinstance(param, OffloadedParameter):
            param.__class__ = nn.Parameter  # type: ignore[assignment]
            _observers.pop(param, None)
