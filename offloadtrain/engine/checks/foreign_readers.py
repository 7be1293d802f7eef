"""Detects readers that find no gradients, or old weights; see `engine.offloaded_parameter`.

torch's `clip_grad_norm_`, and with it Accelerate's, Lightning's and the Trainer's, reads `.grad` of
every parameter after backward. By then gradients have left for the host: it clips nothing, returns
0.0 and says nothing. torch's pipeline schedules divide `.grad` by the number of microbatches, and
the zero-bubble ones put it together from two halves of a backward: with them gradients would be too
large, or not there. Copies of a model, and pickles, are made of the newest weights.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.nn.utils import clip_grad

from offloadtrain.engine.engine import Engine
from offloadtrain.engine.offloaded_parameter import observe, release
from offloadtrain.engine.pipeline.stage_modules import PipelineError
from offloadtrain.engine.state.state_dict_hooks import WeightsOwner
from offloadtrain.engine.step_report import Phase

_log = logging.getLogger(__name__)

_PIPELINING = Path(torch.__file__).parent / "distributed" / "pipelining"

CLIPPING, SCALING, SPLITTING = "clipping", "scaling", "splitting"
_READERS = {
    clip_grad.__file__: CLIPPING,
    str(_PIPELINING / "stage.py"): SCALING,
    str(_PIPELINING / "_backward.py"): SPLITTING,
}
"""Files of torch → what they read a parameter's gradient for."""


class ParameterReaders:
    """Observes the parameters of one engine."""

    def __init__(self, owner: WeightsOwner, params: Iterable[nn.Parameter], engine: Engine) -> None:
        self._owner = weakref.ref(owner)
        self._params, self._engine = list(params), engine
        self._told = False
        observe(self._params, self)

    def remove(self) -> None:
        """Make them ordinary parameters again."""
        release(self._params)

    def before_copy(self) -> None:
        """Make parameters hold the newest weights.

        Raises:
            ModelError: weights are in shards.
        """
        owner = self._owner()
        if owner is not None:
            owner.require_whole_weights()
            owner.synchronize()

    def gradient_is_read(self, param: nn.Parameter, frame: FrameType) -> None:
        """torch's clipping or pipelining looks for gradients: warn once if some have left.

        Raises:
            PipelineError: the schedule would train with wrong gradients.
        """
        reader = _READERS.get(frame.f_code.co_filename)
        if reader is None:
            return
        if reader != CLIPPING:
            _refuse_pipelining(reader)
        left = self._engine.guard.phase in (Phase.BACKWARD, Phase.ACCUMULATED)
        if left and not self._told:
            self._told = True
            _warn_of_clipping(self._engine.program.spec.config.clip_norm)


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
