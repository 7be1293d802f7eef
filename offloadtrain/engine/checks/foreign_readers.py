"""Detects readers that find no gradients, by one parameter that sees who reads its `.grad`.

torch's `clip_grad_norm_`, and with it Accelerate's, Lightning's and the Trainer's, reads `.grad` of
every parameter after backward. By then gradients have left for the host: it clips nothing, returns
0.0 and says nothing. torch's pipeline schedules divide `.grad` by the number of microbatches, and
the zero-bubble ones put it together from two halves of a backward: with them gradients would be too
large, or not there. So one parameter gets a class, as torch's own lazy parameters have one, whose
`grad` looks at the calling code. It costs nothing where `.grad` is not read.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakIdKeyDictionary

from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.engine.engine import Engine
from offloadtrain.engine.pipeline.stage_modules import PipelineError
from offloadtrain.engine.step_report import Phase

_log = logging.getLogger(__name__)

_GRAD: Any = Tensor.grad
"""torch's own descriptor of the attribute."""

_PIPELINING = Path(torch.__file__).parent / "distributed" / "pipelining"

CLIPPING, SCALING, SPLITTING = "clipping", "scaling", "splitting"
_READERS = {
    clip_grad.__file__: CLIPPING,
    str(_PIPELINING / "stage.py"): SCALING,
    str(_PIPELINING / "_backward.py"): SPLITTING,
}
"""Files of torch → what they read a parameter's gradient for."""

_on_reading = WeakIdKeyDictionary()
"""Parameter → a weak reference to the function to call."""


class WatchedParameter(nn.Parameter):
    """A parameter that reports when torch reads its gradient; its copies do not."""

    @property
    def grad(self) -> Tensor | None:
        reader = _READERS.get(sys._getframe(1).f_code.co_filename)
        if reader is not None:
            noticed = _on_reading.get(self, _nobody)()
            if noticed is not None:
                noticed(reader)
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


class GradReaders:
    """Watches one parameter, while the gradients of its step have left for the host."""

    def __init__(
        self, slots: Iterable[tuple[Bucket, Slot]], clip_norm: float | None, engine: Engine
    ) -> None:
        """A parameter of another class than torch's is not watched. `clip_norm`: the engine's."""
        # One that stays on the device, if any does: others are watched for reads of their weights.
        param = min(slots, key=lambda held: held[0].streamed)[1].param
        self._param, self._clip_norm, self._engine = param, clip_norm, engine
        self._told = False
        if type(param) is nn.Parameter:
            param.__class__ = WatchedParameter
            _on_reading[param] = weakref.WeakMethod(self._is_read)

    def remove(self) -> None:
        """Make it an ordinary parameter again."""
        if type(self._param) is WatchedParameter:
            self._param.__class__ = nn.Parameter  # type: ignore[assignment]
            _on_reading.pop(self._param, None)

    def _is_read(self, reader: str) -> None:
        """torch's clipping or pipelining looks for gradients: warn once if some have left.

        Raises:
            PipelineError: the schedule would train with wrong gradients.
        """
        if reader != CLIPPING:
            _refuse_pipelining(reader)
        left = self._engine.guard.phase in (Phase.BACKWARD, Phase.ACCUMULATED)
        if left and not self._told:
            self._told = True
            _warn_of_clipping(self._clip_norm)


def _warn_of_clipping(clip_norm: float | None) -> None:
    """Warn that torch's clipping was called after backward; `clip_norm`: the engine's own."""
    _log.warning(
        "torch's clip_grad_norm_ (or what calls it: Accelerate's, Lightning's gradient_clip_val, "
        "the Trainer's max_grad_norm) found no gradients, which have left for the host: it returns "
        "0.0 and clips nothing. %s",
        "Call optimizer.clip_grad_norm_(max_norm) in its place, or offload with clip_norm."
        if clip_norm is None
        else f"What clips is clip_norm = {clip_norm:g}; the norm is optimizer.grad_norm.",
    )


def _refuse_pipelining(reader: str) -> None:
    """Raises PipelineError for what torch's pipeline schedule is about to do with gradients."""
    if reader == SCALING:
        raise PipelineError(
            "the pipeline schedule divides .grad by the number of microbatches (scale_grads=True), "
            "and gradients have left for the host: make it with scale_grads=False and divide the "
            "loss, or let ot.pipeline() make it"
        )
    raise PipelineError(
        "a zero-bubble schedule divides the backward in two and delivers no gradients to the "
        "engine: use GPipe, 1F1B or interleaved 1F1B, which ot.pipeline() makes"
    )
