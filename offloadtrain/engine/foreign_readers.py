"""Serves foreign code that reads an engine's parameters: copies, values and `.grad`.

Copies and pickles of a model are made of the newest weights. For gradients see [Note: Gradients of
the user] in `engine.gradients`. Some of torch's files read `.grad` as the user's code
does: its clipping, which Accelerate, Lightning and the Trainer call, and its gradient scaler. Its
other files only check for gradients, and get None. torch's pipeline schedules divide `.grad` by
the number of microbatches, and the zero-bubble schedules compute it in two halves of a backward:
they would train with wrong gradients, and raise an error.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import grad_scaler
from torch.nn.utils import clip_grad

from offloadtrain.config.errors import PipelineError
from offloadtrain.engine.autograd.forward_hooks import in_backward
from offloadtrain.engine.engine import Engine
from offloadtrain.engine.gradients import ClippedTogether, GradientAccessError
from offloadtrain.engine.parameters import (
    ParameterWriteError,
    gradient_of,
    observe,
    past_the_class,
    release,
    set_unready,
)
from offloadtrain.engine.step_report import Phase
from offloadtrain.engine.weights import WeightsIO
from offloadtrain.runtime.user_code import OURS, TORCHS, line_of

_log = logging.getLogger(__name__)

_PIPELINING = Path(torch.__file__).parent / "distributed" / "pipelining"
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)

CLIPPING, UNSCALING, SCALING, SPLITTING = "clipping", "unscaling", "scaling", "splitting"
_READERS = {
    clip_grad.__file__: CLIPPING,
    grad_scaler.__file__: UNSCALING,
    str(_PIPELINING / "stage.py"): SCALING,
    str(_PIPELINING / "_backward.py"): SPLITTING,
}
"""File of torch → its purpose for reading a parameter's gradient."""


class ParameterReaders:
    """Observes the parameters of an engine."""

    def __init__(
        self, owner: WeightsIO, named: Iterable[tuple[str, nn.Parameter]], engine: Engine
    ) -> None:
        self._owner = weakref.ref(owner)
        self._named, self._engine = list(named), engine
        self._places = {
            slot.param: (block, bucket, slot)
            for block in engine.residency.blocks.values()
            for bucket in block.all_buckets
            for slot in bucket.slots
        }
        self._warned = False
        self._clipped: tuple[list[nn.Parameter], bool] | None = None
        """Parameters of torch's last clipping call, and whether they include all trained
        parameters."""
        observe((param for _, param in self._named), self)
        # The first read of each block reports it: uploads follow the order of the first reads.
        for block in engine.residency.blocks.values():
            set_unready(block.views.params)
            block.views.ready = False

    def remove(self) -> None:
        """Turn them into ordinary parameters again."""
        release(param for _, param in self._named)

    def before_copy(self) -> None:
        """Parameters are about to be copied: make them hold the newest weights.

        Raises:
            ModelError: weights are in shards.
        """
        owner = self._owner()
        if owner is not None:
            owner.require_whole_weights()
            owner.synchronize()

    def before_data_is_set(self, param: nn.Parameter, values: Tensor, frame: FrameType) -> bool:
        """See `Observer`. Memory of the same kind is accepted: if the parameter still views it
        in the next step, its values are copied to the masters."""
        _, bucket, slot = self._places[param]
        owner = self._owner()
        moves = bucket.moves and frame.f_code is nn.Module._apply.__code__
        with past_the_class():
            # `.to("cuda")` of a model before its first forward: parameters view the host copy.
            if moves and owner is not None and values.device == owner.device:
                here = values.to(param.device)
                if here.dtype == param.dtype and torch.equal(here, param):
                    return False
            kinds = [f"{tuple(x.shape)}, {x.dtype}, on {x.device}" for x in (values, param)]
        # The engine itself sets the memory of streamed blocks, and of pipelines without flushes.
        if kinds[0] != kinds[1]:
            raise ParameterWriteError(
                f"'{slot.name}'.data is set to another tensor (.to(), .data = …), of {kinds[0]}: "
                f"offload() has fixed {kinds[1]}. Copy the values, param.data.copy_(…), or change "
                f'the model before offload() (dtype: keep_fp32=["{slot.name}"])'
            )
        if bucket.moves:
            raise ParameterWriteError(
                f"'{slot.name}'.data is set to another tensor (.data = …), and "
                "offload() moves the memory of streamed parameters itself: copy the values, "
                "param.data.copy_(…)"
            )
        return True

    def before_write(self, param: nn.Parameter) -> bool:
        """See `Observer`."""
        # A backward in progress may have the block in a slot.
        if not in_backward() and (owner := self._owner()) is not None:
            owner.synchronize()
        return self._places[param][0] in self._engine.residency.exposed

    def write(self, param: nn.Parameter, weights: Tensor) -> None:
        """See `Observer`."""
        _, bucket, slot = self._places[param]
        with torch.no_grad(), past_the_class():
            if (owner := self._owner()) is not None:
                owner.before_weights_are_written(bucket, slot)
            param.copy_(weights)

    def version_of(self, param: nn.Parameter) -> object:
        """See `Observer`."""
        with past_the_class():
            return self._places[param][0].graphs.generation, param._version

    def layout_of(self, param: nn.Parameter) -> Tensor:
        """See `Observer`."""
        *_, slot = self._places[param]
        return torch.empty_strided(slot.shape, slot.stride, device="meta")

    def values_of(self, param: nn.Parameter, *, in_graph: bool) -> Tensor | None:
        """See `Observer`."""
        block, bucket, slot = self._places[param]
        weights = self._engine.read_without_a_call(block, slot, in_graph=in_graph)
        # A write into the memory itself, which belongs to the masters, would bypass `write`.
        if weights is None and bucket.loads_masters and block in self._engine.residency.exposed:
            with torch.no_grad(), past_the_class():
                weights = slot.local.data.clone()
        return weights

    def gradient(self, param: nn.Parameter, frame: FrameType) -> Tensor | None:
        """See `Observer`.

        Raises:
            PipelineError: the schedule would train with wrong gradients.
            EngineError: dropped gradients belong to microbatches in flight, or the step can no
                longer be clipped.
            GradientAccessError: the gradient is in shards or on the disk; or another optimizer's
                step reads it.
        """
        file = frame.f_code.co_filename
        reader = _READERS.get(file)
        if reader == SCALING:
            raise PipelineError(
                "the pipeline schedule divides .grad by the number of microbatches "
                "(scale_grads=True), and gradients have left for the host: make it with "
                "scale_grads=False and divide the loss, or let ot.pipeline() make it"
            )
        if reader == SPLITTING:
            raise PipelineError(
                "a zero-bubble schedule divides the backward in two and delivers no gradients to "
                "the engine: use GPipe, 1F1B or interleaved 1F1B, which ot.pipeline() makes"
            )
        if reader == CLIPPING and (call := self._clipping_all(frame)) is not None:
            # All are clipped together: the first parameter represents the others, even if it has no
            # gradient.
            params = call["parameters"]
            first = next(each for each in params if each.requires_grad and each in self._places)
            if param is not first:
                return None
            norm = self._engine.step_gradients.measure("clip_grad_norm_", float(call["max_norm"]))
            total = torch.tensor([norm.clipped], dtype=torch.float64, device="cpu")
            together = total.as_subclass(ClippedTogether)
            together.on_factor = norm.multiply
            return together
        zeroes = frame.f_code is nn.Module.zero_grad.__code__
        if not self._has_left(param):
            return gradient_of(param)
        if zeroes and self._all_trained(frame.f_locals["self"].parameters()):
            self._engine.drop_gradients()
            return None
        if file.startswith(_OPTIMIZERS) and frame.f_code.co_name != "zero_grad":
            raise GradientAccessError(
                f"step() of {type(frame.f_locals.get('self')).__name__} would change nothing: "
                f"offload() trains '{self._places[param][2].name}', and has taken its gradient. "
                "Call step() of the optimizer that offload() has returned, or close() that one"
            )
        # torch's compiler checks whether there are gradients.
        if reader is None and not zeroes and file.startswith((OURS, TORCHS)):
            return None
        return self._view(param, writes=reader is not None, frame=frame)

    def gradient_is_set(self, param: nn.Parameter, grad: Tensor | None, frame: FrameType) -> bool:
        """See `Observer`; raises as `gradient`."""
        if self._has_left(param):
            with torch.no_grad():
                if (view := self._view(param, writes=True, frame=frame)) is not None:
                    view.zero_() if grad is None else view.copy_(grad)
            if grad is None:
                emptied = self._engine.step_gradients.access.emptied
                emptied.add(self._places[param][2])
                if len(emptied) == sum(trained.requires_grad for _, trained in self._named):
                    self._engine.drop_gradients()
            return True
        if grad is None and in_backward():
            self._engine.gradients.emptied.add(param)
        elif grad is not None and not in_backward() and self._engine.program.spec.is_single:
            self._engine.step_gradients.access.has_assigned = True
        return False

    def _has_left(self, param: nn.Parameter) -> bool:
        """Return True if the step has a gradient of this parameter that is not in `.grad`."""
        phase = self._engine.guard.phase
        if phase not in (Phase.BACKWARD, Phase.ACCUMULATED) or in_backward():
            return False
        _, bucket, _ = self._places[param]
        left = self._engine.step_gradients.access.has_left(bucket)
        if left and gradient_of(param) is not None:
            # A second gradient of the same backward: it is added to the first.
            self._engine.end_micro_step()
        return left

    def _all_trained(self, params: Iterable[nn.Parameter]) -> bool:
        """Return True if these include all parameters that the engine trains."""
        return {param for _, param in self._named if param.requires_grad} <= set(params)

    def _clipping_all(self, frame: FrameType) -> dict[str, Any] | None:
        """Return the local variables of torch's `clip_grad_norm_`, if it reads a gradient of the
        step and clips all parameters that the engine trains."""
        if self._engine.guard.phase not in (Phase.BACKWARD, Phase.ACCUMULATED) or in_backward():
            return None
        if (call := _clipping_call(frame)) is None or call["norm_type"] != 2:
            return None
        params = call["parameters"]
        # torch makes the list once, and reads each of its gradients several times.
        if self._clipped is None or self._clipped[0] is not params:
            self._clipped = params, self._all_trained(params)
        return call if self._clipped[1] else None

    def _view(self, param: nn.Parameter, *, writes: bool, frame: FrameType) -> Tensor | None:
        (_, bucket, slot), program = self._places[param], self._engine.program
        if not self._engine.step_gradients.access.shows(bucket):
            where = "on the disk" if program.spec.is_single else "divided among ranks"
            raise GradientAccessError(
                f"'{slot.name}'.grad is {where} between backward and step(): read it through "
                "optimizer.gradients(), or change it in a hook (param.register_hook)"
            )
        if not program.mode.waits_for_norm:
            if writes:
                self._engine.guard.require_undecided("a change of gradients")
            self._warn_once(
                "'%s'.grad was read at %s: it is None between backward and step(), as "
                "Adam runs inside backward (skip_nonfinite = False and no clip_norm). Set "
                "skip_nonfinite = True, or read gradients in a hook (param.register_hook)",
                *(slot.name, line_of(frame)),
            )
            return None
        if self._engine.counter.scaler is not None:
            self._warn_once(
                "'%s'.grad was read at %s: in fp16 it is the gradient of the scaled "
                "loss, optimizer.loss_scale times the gradient. step() divides by it",
                *(slot.name, line_of(frame)),
            )
        return self._engine.step_gradients.access.of(bucket, slot)

    def _warn_once(self, message: str, name: str, line: str) -> None:
        # All gradients of an engine are of one kind, so a single warning is enough.
        if not self._warned:
            self._warned = True
            _log.warning(message, name, line)


def _clipping_call(frame: FrameType) -> dict[str, Any] | None:
    """Return the local variables of torch's `clip_grad_norm_`, if it reads the gradient."""
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename == clip_grad.__file__:
        if caller.f_code.co_name == clip_grad.clip_grad_norm_.__name__:
            local_variables = dict(caller.f_locals)
            return local_variables if "parameters" in local_variables else None
        caller = caller.f_back
    return None
