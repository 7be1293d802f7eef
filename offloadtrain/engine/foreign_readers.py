"""Observes who copies an engine's parameters, and who reads their `.grad`.

Copies and pickles of a model are made of the newest weights. torch's clipping, and with it
Accelerate's, Lightning's and the Trainer's, reads `.grad` after backward. By then gradients have
left for the host: it clips nothing, returns 0.0 and says nothing; the same holds for code that
clips, edits or measures gradients itself. `zero_grad()` of a model finds none to drop. torch's
pipeline schedules divide `.grad` by the number of microbatches, and the zero-bubble ones put it
together from two halves of a backward: with them gradients would be too large, or not there.
See `engine.bucket`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from offloadtrain.config.errors import PipelineError
from offloadtrain.engine.autograd.forward_hooks import in_backward
from offloadtrain.engine.engine import Engine
from offloadtrain.engine.parameters import (
    ParameterWriteError,
    gradient_of,
    observe,
    past_the_class,
    release,
    set_unready,
)
from offloadtrain.engine.step_report import Phase
from offloadtrain.engine.weights import WeightsOwner
from offloadtrain.runtime.user_code import OURS, TORCHS, line_of

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

    def __init__(
        self, owner: WeightsOwner, named: Iterable[tuple[str, nn.Parameter]], engine: Engine
    ) -> None:
        self._owner = weakref.ref(owner)
        self._named, self._engine = list(named), engine
        self._blocks = {
            slot.param: (block, slot)
            for block in engine.residency.blocks.values()
            for bucket in block.all_buckets
            for slot in bucket.slots
        }
        self._warned: set[str] = set()
        observe((param for _, param in self._named), self)
        # The first read of each block reports it: weights go up in the order of the first reads.
        for block in engine.residency.blocks.values():
            set_unready(block.views.params)
            block.views.ready = False

    def remove(self) -> None:
        """Make them ordinary parameters again."""
        release(param for _, param in self._named)

    def before_copy(self) -> None:
        """Make parameters hold the newest weights.

        Raises:
            ModelError: weights are in shards.
        """
        owner = self._owner()
        if owner is not None:
            owner.require_whole_weights()
            owner.synchronize()

    def before_data_is_set(self, param: nn.Parameter, values: Tensor) -> None:
        """See `Observer`. Memory of the same kind is accepted: where the parameter still views it
        in the next step, the masters take over what it holds."""
        block, slot = self._blocks[param]
        with past_the_class():
            kinds = [f"{tuple(x.shape)}, {x.dtype}, on {x.device}" for x in (values, param)]
        # The engine changes the memory of streamed blocks, and in pipelines without flushes.
        if kinds[0] != kinds[1] or block.streamed or block.graphs.versions > 1:
            raise ParameterWriteError(
                f"'{slot.name}'.data is set to another tensor (.to(), .data = …), of {kinds[0]}: "
                f"offload() has fixed {kinds[1]}, and moves streamed parameters itself. Copy the "
                "values, param.data.copy_(…), or change the model before offload() (dtype: "
                f'keep_fp32=["{slot.name}"])'
            )

    def version_of(self, param: nn.Parameter, *, for_write: bool = False) -> object:
        """See `Observer`."""
        block, _ = self._blocks[param]
        # A backward in progress may have the block in a slot.
        if for_write and not in_backward() and (owner := self._owner()) is not None:
            owner.synchronize()
        if for_write and not self._engine.residency.shows_host(block):
            return None
        with past_the_class():
            return block.graphs.generation, param._version

    def layout_of(self, param: nn.Parameter) -> Tensor:
        """See `Observer`."""
        _, slot = self._blocks[param]
        return torch.empty_strided(slot.shape, slot.stride, device="meta")

    def values_of(self, param: nn.Parameter, *, in_graph: bool) -> Tensor | None:
        """See `Observer`."""
        block, slot = self._blocks[param]
        return self._engine.read_without_a_call(block, slot, in_graph=in_graph)

    def gradient_is_read(self, param: nn.Parameter, frame: FrameType) -> None:
        """Drop the step's gradients for `zero_grad()` of the model; warn once of other readers that
        miss gradients which have left.

        Raises:
            PipelineError: the schedule would train with wrong gradients.
            EngineError: gradients that are dropped belong to microbatches in flight.
        """
        file = frame.f_code.co_filename
        reader = _READERS.get(file)
        zeroes = frame.f_code is nn.Module.zero_grad.__code__
        # torch's optimizers and compiler look whether there are gradients.
        if reader is None and not zeroes and file.startswith((OURS, TORCHS)):
            return
        if reader in (SCALING, SPLITTING):
            _refuse_pipelining(reader)
        left = self._engine.guard.phase in (Phase.BACKWARD, Phase.ACCUMULATED)
        if not left or in_backward():
            return
        if zeroes:
            self._zero_grad(frame.f_locals["self"])
        elif param.requires_grad and gradient_of(param) is None:
            if reader == CLIPPING:
                self._warn_once(
                    CLIPPING, _clipping_warning(self._engine.program.spec.config.clip_norm)
                )
            else:
                name = next(name for name, other in self._named if other is param)
                self._warn_once("reading", _reading_warning(name, frame))

    def _zero_grad(self, module: nn.Module) -> None:
        zeroed = set(map(id, module.parameters()))
        if all(id(param) in zeroed for _, param in self._named if param.requires_grad):
            self._engine.drop_gradients()
        else:
            self._warn_once("zeroing", _zero_grad_warning(module))

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s", message)


def _clipping_warning(clip_norm: float | None) -> str:
    """Describe that torch's clipping was called after backward; `clip_norm`: the engine's own."""
    message = (
        "torch's clip_grad_norm_ or clip_grad_value_ (or what calls it: Accelerate's, Lightning's "
        "gradient_clip_val, the Trainer's max_grad_norm) found no gradients, which have left for "
        "the host: it clips nothing, and a norm is 0.0. "
    )
    if clip_norm is not None:
        return f"{message}What clips is clip_norm = {clip_norm:g}; the norm is optimizer.grad_norm."
    return (
        f"{message}Call optimizer.clip_grad_norm_(max_norm) in its place, or offload with "
        "clip_norm: both clip by the norm of all parameters together; a part cannot be clipped by "
        "itself"
    )


def _reading_warning(name: str, frame: FrameType) -> str:
    """Return the warning for code other than torch's that has read a gradient."""
    return (
        f"'{name}'.grad was read at {line_of(frame)}: it is None between backward and step(), as "
        "gradients leave for the host during backward. What changes or measures single gradients "
        "goes into param.register_hook(…), which sees each of them; the norm of all is "
        "optimizer.clip_grad_norm_(inf), and optimizer.grad_norm after step()"
    )


def _zero_grad_warning(module: nn.Module) -> str:
    """Return the warning for `zero_grad()` of a module without some of the trained parameters."""
    return (
        f"zero_grad() of a part of the offloaded model ({type(module).__name__}) drops nothing: "
        "its gradients have left for the host. optimizer.zero_grad(), or that of the model, drops "
        "those of all parameters"
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
