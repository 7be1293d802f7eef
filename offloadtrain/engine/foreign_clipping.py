"""Detects clipping that finds no gradients, by one parameter that sees who reads its `.grad`.

torch's `clip_grad_norm_`, and with it Accelerate's, Lightning's and the Trainer's, reads `.grad` of
every parameter after backward. By then gradients have left for the host: it clips nothing, returns
0.0 and says nothing. So one parameter gets a class, as torch's own lazy parameters have one, whose
`grad` looks at the calling code. It costs nothing where `.grad` is not read.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakIdKeyDictionary

_log = logging.getLogger(__name__)

_GRAD: Any = Tensor.grad
"""torch's own descriptor of the attribute."""

_on_clipping = WeakIdKeyDictionary()
"""Parameter → a weak reference to the function to call."""


class WatchedParameter(nn.Parameter):
    """A parameter that reports when torch's clipping reads its gradient; its copies do not."""

    @property
    def grad(self) -> Tensor | None:
        if sys._getframe(1).f_code.co_filename == clip_grad.__file__:
            noticed = _on_clipping.get(self, _nobody)()
            if noticed is not None:
                noticed()
        grad: Tensor | None = _GRAD.__get__(self)
        return grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        _GRAD.__set__(self, grad)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            values = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(values, self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied


def _nobody() -> None:
    """Stands for a weak reference to an object that is gone."""


def watch_clipping(param: nn.Parameter, noticed: Callable[[], Callable[[], None] | None]) -> None:
    """Call the function that `noticed` (a weak reference) refers to when torch's clipping reads the
    gradient. Parameters of other classes than torch's are left as they are."""
    if type(param) is nn.Parameter:
        param.__class__ = WatchedParameter
        _on_clipping[param] = noticed


def unwatch(param: nn.Parameter) -> None:
    """Make it an ordinary parameter again."""
    if type(param) is WatchedParameter:
        param.__class__ = nn.Parameter  # type: ignore[assignment]
        _on_clipping.pop(param, None)


def warn_of_clipping(clip_norm: float | None) -> None:
    """Warn that torch's clipping was called after backward; `clip_norm`: the engine's own."""
    _log.warning(
        "torch's clip_grad_norm_ (or what calls it: Accelerate's, Lightning's gradient_clip_val, "
        "the Trainer's max_grad_norm) found no gradients, which have left for the host: it returns "
        "0.0 and clips nothing. %s",
        "Call optimizer.clip_grad_norm_(max_norm) in its place, or offload with clip_norm."
        if clip_norm is None
        else f"What clips is clip_norm = {clip_norm:g}; the norm is optimizer.grad_norm.",
    )
