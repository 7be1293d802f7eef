"""Tells of weights that are read where they are not on the device.

[Note: Absent weights]
Parameters of a streamed block are NaN outside of its use. A loss that reads `model.head.weight`, a
penalty on all parameters, or a moving average of them, would compute with that NaN and say nothing:
no hook of a module fires there. So parameters without their weights get a class whose operations
look at what they return. One that computed from the values is told, once, with the parameter, the
line of the user's code and the key. Views and `data` are of such a class, too; questions for sizes,
types and gradients are none. torch asks such a class about every operation, so parameters have it
in the first steps, where a loop shows what it reads, and after gradients that are not finite.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from offloadtrain.engine.bucket import OffloadedParameter
from offloadtrain.runtime.user_code import line_of

_log = logging.getLogger(__name__)

WATCHED_STEPS = 2
"""At the start: the first step, and what a loop reads after it."""
WATCHED_AFTER_NONFINITE = 100
_NUMBERS = frozenset({"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__"})
"""Functions that return values which are not tensors."""
_MADE = ("new_", "zeros_like", "ones_like", "empty_like", "full_like", "rand", "requires_grad")
"""Beginnings of functions that make tensors and read no values."""

_ALONE = "them behind optimizer.synchronize()", "working = 'device'"
_AMONG_RANKS = "dict(optimizer.full_weights()), on all ranks", "zero_stage = 2"
"""Where the values are between two steps, and the option that leaves all of them on the device."""

_told_by = WeakIdKeyDictionary()
"""Absent tensor → what tells of it."""


class AbsentReads:
    """Watches the parameters of one engine, and tells of the first read."""

    def __init__(self, *, is_single: bool) -> None:
        self._is_single = is_single
        self._steps = WATCHED_STEPS
        self._has_warned = False

    @property
    def on(self) -> bool:
        return self._steps > 0 and not self._has_warned

    def end_step(self, *, finite: bool) -> None:
        """Watch longer if the gradients of a step were not finite."""
        self._steps = self._steps - 1 if finite else WATCHED_AFTER_NONFINITE

    def hide(self, named: Iterable[tuple[str, nn.Parameter]], keep: str) -> list[nn.Parameter]:
        """Watch these parameters, whose weights have left; returns those that are, for `reveal`.
        `keep`: the option that leaves them on the device."""
        # Parameters of a class of their own keep it.
        plain = (nn.Parameter, OffloadedParameter)
        watched = [(name, param) for name, param in named if type(param) in plain]
        for name, param in watched:
            _told_by[param] = (self, name, keep)
            param.__class__ = AbsentParameter
        return [param for _, param in watched]

    def tell(self, name: str, keep: str, what: str) -> None:
        """Warn once that an operation `what` has read an absent parameter."""
        if self._has_warned:
            return
        self._has_warned = True
        between, alternative = _ALONE if self._is_single else _AMONG_RANKS
        _log.warning(
            "'%s' was read by %s() at %s, outside of its module's forward, where its weights are "
            "not on the device: the result is NaN. Between steps take %s; for a loss that reads it "
            "set %s, or %s",
            name,
            what,
            line_of(sys._getframe()),
            between,
            keep,
            alternative,
        )


def reveal(params: Iterable[nn.Parameter]) -> None:
    """The weights of watched parameters are about to come back."""
    for param in params:
        if type(param) is AbsentParameter:
            param.__class__ = OffloadedParameter  # type: ignore[assignment]
        _told_by.pop(param, None)


class AbsentParameter(OffloadedParameter):
    """A parameter without its weights."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _AbsentView(Tensor):
    """A view of such a parameter, or its `data`."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function of torch that was given absent tensors, and tell if it has read one."""
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _ABSENT)]
        told_by = next((_told_by[tensor] for tensor in tensors if tensor in _told_by), None)
        if told_by is None:
            return result
        if isinstance(result, Tensor) and _views(result, tensors):
            return _as_absent(result, told_by)
        if _reads(func, result):
            reads, name, keep = told_by
            reads.tell(name, keep, func.__name__)
    return result


_ABSENT = (AbsentParameter, _AbsentView)


def _views(result: Tensor, tensors: Iterable[Tensor]) -> bool:
    return any(
        result.untyped_storage()._cdata == tensor.untyped_storage()._cdata for tensor in tensors
    )


def _as_absent(view: Tensor, told_by: Any) -> Tensor:
    if isinstance(view, _ABSENT):
        return view
    absent = view.as_subclass(_AbsentView)
    _told_by[absent] = told_by
    return absent


def _reads(func: Any, result: Any) -> bool:
    """Tell whether the function has computed from values."""
    name = getattr(func, "__name__", "")
    # Attributes (`grad`), and functions that only mention the tensors.
    if name in ("__get__", "__set__") or (getattr(func, "__module__", "") or "").startswith(
        "torch.autograd"
    ):
        return False
    if name in _NUMBERS:
        return True
    return not name.startswith(_MADE) and any(isinstance(x, Tensor) for x in tree_leaves(result))
