"""Runs the microbatches of pipeline stages in the order of a schedule, and sends activations.

Both come from `torch.distributed.pipelining`, which only this module imports. Each backward of a
microbatch runs inside a context of the engine: torch runs several in a row without a forward in
between, and would add their gradients in the weights' dtype. Shapes are passed, not inferred:
torch's inference keeps a graph alive that never runs backward, and with it the weights that it has
saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import P2POp, batch_isend_irecv
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.runtime.process_group import Group

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}
"""gpipe: all forwards, then all backwards. 1f1b: PipeDream-Flush, at most as many microbatches in
flight as stages. interleaved: 1f1b over several stages in each process."""

LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage of this process.

    Attributes:
        inputs, outputs: inputs and outputs of its forward, on the meta device; of the last stage's
            outputs only the number is used.
        micro_step: context for a microbatch's backward.
    """

    module: nn.Module
    index: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    micro_step: Callable[[], AbstractContextManager[None]]


class _Stage(PipelineStage):
    """A stage of torch whose backwards are micro-steps of the engine."""

    def __init__(
        self, spec: StageSpec, count: int, device: torch.device, group: Group | None
    ) -> None:
        super().__init__(
            spec.module,
            spec.index,
            count,
            device,
            # The first stage gets only tokens; the inputs of other stages have gradients to send
            # back.
            input_args=spec.inputs if spec.index == 0 else _with_gradients(spec.inputs),
            output_args=_with_gradients(spec.outputs),
            group=group,
        )
        self._micro_step = spec.micro_step
        self._sent = _described(spec.outputs)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with HEARTBEAT.computing():
            output = super().forward_one_chunk(*args, **kwargs)
        outputs = output if isinstance(output, tuple) else (output,)
        # torch detaches each output after its backward.
        if kinds := [type(value).__name__ for value in outputs if not isinstance(value, Tensor)]:
            raise ValueError(f"the model returns a {kinds[0]}: return a tensor, or a tuple of them")
        if self.is_last:
            return output
        made = _described(outputs)
        # The next stage has receive buffers of these sizes; torch would abort its process.
        if made != self._sent:
            raise ValueError(
                f"stage {self.stage_index} returns {', '.join(made)}, and {', '.join(self._sent)} "
                "for the example: a stage returns the same shapes and dtypes for every microbatch, "
                "contiguous (x.contiguous()), also where run() is inside torch.autocast"
            )
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        # torch also calls this for the last stage, which may return more tensors than described.
        return [] if self.is_last else super().get_fwd_send_ops(fwd_chunk_id)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        if not self.has_backward:
            return None
        with HEARTBEAT.computing(), self._micro_step():
            return super().backward_one_chunk(*args, **kwargs)


def _described(tensors: Sequence[Tensor]) -> list[str]:
    return [
        f"{tuple(tensor.shape)} {tensor.dtype}"
        + ("" if tensor.is_contiguous() else f" of strides {tensor.stride()}")
        for tensor in tensors
    ]


def _with_gradients(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return leaves on the same memory; those of a floating-point dtype require gradients."""
    return tuple(x.detach().requires_grad_(x.is_floating_point()) for x in tensors)


class Schedule:
    """Runs the microbatches of a step through the stages of this process."""

    def __init__(
        self,
        kind: str,
        stages: Sequence[StageSpec],
        count: int,
        microbatches: int,
        *,
        device: torch.device,
        group: Group | None,
        loss_fn: LossFn,
    ) -> None:
        """
        Args:
            count: number of stages in all processes.
            loss_fn: (output of the last stage, target) → the loss to differentiate.

        Raises:
            ValueError: torch's error for numbers that the schedule cannot divide; or torch is too
                old.
        """
        _check_torch()
        made = [_Stage(spec, count, device, group) for spec in stages]
        self._microbatches = microbatches
        self._takes_input = stages[0].index == 0
        self._has_loss = stages[-1].index == count - 1
        self._loss_fn, self._has_target = loss_fn, False
        # torch would divide gradients by the number of microbatches, after they have been
        # offloaded.
        self._schedule = SCHEDULES[kind](
            made if kind == "interleaved" else made[0],
            microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def run(self, inputs: tuple[Tensor, ...], target: Tensor | None, more: dict[str, Any]) -> None:
        """Run forward and backward of all microbatches, or only forward if gradients are disabled.

        Raises:
            Whatever a stage's forward or backward raises.
        """
        run = self._schedule.step if torch.is_grad_enabled() else self._schedule.eval
        stage_inputs = inputs if self._takes_input else ()
        self._has_target = target is not None
        # torch requires a target even if the model computes the loss itself.
        labels = torch.zeros(self._microbatches) if target is None else target
        with _among_stages():
            run(
                *stage_inputs,
                target=labels if self._has_loss else None,
                return_outputs=False,
                **more,
            )

    def _loss(self, output: Any, target: Any) -> Tensor:
        return self._loss_fn(output, target if self._has_target else None)


def _check_torch() -> None:
    if "return_outputs" not in signature(ScheduleGPipe.step).parameters:
        raise ValueError(
            f"torch {torch.__version__} would put the outputs of all microbatches together, "
            "which losses are not: install a later one (2.13 is tested)"
        )


@contextmanager
def _among_stages() -> Iterator[None]:
    """Context for microbatches; raises the original exception of a stage's forward or backward."""
    try:
        # Between its forwards and backwards a stage waits for other stages.
        with HEARTBEAT.collective():
            yield
    except RuntimeError as error:
        # torch wraps an exception of a forward in a description of its inputs.
        if isinstance(error.__cause__, Exception):
            raise error.__cause__ from None
        raise


class Forward:
    """Runs one microbatch forward through the stages of this process, without gradients."""

    def __init__(
        self,
        stages: Sequence[StageSpec],
        count: int,
        *,
        device: torch.device,
        group: Group | None,
        loss_fn: LossFn,
    ) -> None:
        """See `Schedule` for the arguments."""
        self._stages = [_Stage(spec, count, device, group) for spec in stages]
        # Never run; it allocates the receive buffers of each stage.
        slots: Any
        if len(stages) == 1:
            slots = ScheduleGPipe(self._stages[0], 1, loss_fn=loss_fn, scale_grads=False)
        else:
            slots = ScheduleInterleaved1F1B([*self._stages], 1, loss_fn=loss_fn, scale_grads=False)
        slots._has_backward = False
        self._initialize = slots._initialize_stages if len(stages) > 1 else slots._initialize_stage
        self._loss_fn = loss_fn
        self._begun = False

    def run(self, inputs: tuple[Tensor, ...], target: Tensor | None, more: dict[str, Any]) -> None:
        """Run the stages in the order of the model, each after the previous one.

        Raises:
            Whatever a stage's forward raises.
        """
        stage_inputs = inputs if self._stages[0].is_first else ()
        with _among_stages():
            if not self._begun:
                self._initialize(stage_inputs, more)
            for stage in self._stages:
                stage.clear_runtime_states()
                # Waits for the previous stage.
                _post(stage.get_fwd_recv_ops(0))
                output = stage.forward_one_chunk(0, stage_inputs, more, save_forward_output=False)
                if stage.is_last:
                    self._loss_fn(output, target)
                _post(stage.get_fwd_send_ops(0))
        self._begun = True


def _post(operations: Sequence[P2POp]) -> None:
    if operations:
        for work in batch_isend_irecv([*operations]):
            # The received tensors are read next. On a GPU only the stream waits, not this thread.
            work.wait()


class Moments(Protocol):
    """Hooks between the microbatches of a schedule without flushes."""

    def before_forward(self, number: int) -> None:
        """Called before a forward. `number`: index of the microbatch in its step."""

    def after_backward(self, number: int) -> None:
        """Called after a backward. `number`: index of the microbatch in its step."""


class Unflushed:
    """Runs the microbatches of this process's only stage as 1F1B without flushes between steps:
    PipeDream-2BW.

    A run ends after the forward of the step's last microbatch; as many microbatches as there are
    stages after this one are then between forward and backward. Their backwards belong to the next
    run. Sends and receives that meet in two stages are posted together, as in torch's 1F1B: in any
    other order each could wait for the other.
    """

    def __init__(
        self,
        stage: StageSpec,
        count: int,
        microbatches: int,
        *,
        device: torch.device,
        group: Group | None,
        loss_fn: LossFn,
        moments: Moments,
    ) -> None:
        """See `Schedule` for the arguments."""
        _check_torch()
        self._stage, self._count = _Stage(stage, count, device, group), microbatches
        self._stage.has_backward = True
        self._most = count - stage.index
        """Largest number of microbatches in flight; each has its own slot."""
        self._loss_fn, self._moments = loss_fn, moments
        # Never run; it allocates the receive buffers of each slot.
        self._slots = ScheduleGPipe(self._stage, self._most, loss_fn=loss_fn, scale_grads=False)
        self._forwards = self._backwards = 0
        self._losses: dict[int, Tensor] = {}
        self._grads: list[P2POp] = []
        """Sends of the last backward, posted with the next receive."""

    def run(self, inputs: tuple[Tensor, ...], target: Tensor | None, more: dict[str, Any]) -> None:
        """Run all forwards of a step, and the same number of backwards.

        Raises:
            Whatever a stage's forward or backward raises.
        """
        stage_inputs = inputs if self._stage.is_first else ()
        args: list[tuple[Any, ...]] = [()] * self._count
        kwargs: list[dict[str, Any]] = [{}] * self._count
        if stage_inputs or more:
            args, kwargs = split_args_kwargs_into_chunks(stage_inputs, more, self._count)
        targets: Sequence[Tensor | None] = [None] * self._count
        if target is not None:
            targets = target.tensor_split(self._count)
        if self._forwards == 0:
            self._slots._initialize_stage(args[0], kwargs[0])
        with _among_stages():
            for number in range(self._count):
                self._forward(number, args[number], kwargs[number], targets[number])

    def drain(self) -> None:
        """Run the remaining backwards."""
        with _among_stages():
            while self._backwards < self._forwards:
                self._backward(self._grads)
            _post(self._grads)
        self._grads = []

    def _forward(
        self, number: int, args: tuple[Any, ...], more: dict[str, Any], target: Tensor | None
    ) -> None:
        stage, slot = self._stage, self._forwards % self._most
        # Waits for the previous stage, which posts this send together with its next receive.
        _post(self._grads + stage.get_fwd_recv_ops(slot))
        self._grads = []
        self._moments.before_forward(number)
        output = stage.forward_one_chunk(slot, args, more, save_forward_output=False)
        if stage.is_last:
            self._losses[slot] = self._loss_fn(output, target)
        self._forwards += 1
        sends = stage.get_fwd_send_ops(slot)
        if self._forwards - self._backwards == self._most:
            self._backward(sends)
        else:
            _post(sends)

    def _backward(self, sends: Sequence[P2POp]) -> None:
        """Run the oldest backward; post `sends` together with its receives."""
        stage, slot = self._stage, self._backwards % self._most
        self._grads = []
        # Waits for the next stage, which runs this microbatch's backward before its next forward.
        _post([*sends, *stage.get_bwd_recv_ops(slot)])
        stage.backward_one_chunk(slot, loss=self._losses.pop(slot, None))
        self._grads = stage.get_bwd_send_ops(slot)
        # Detach the gradient: the pending send reads it, and the slot's next input would add to it.
        for received in stage.args_recv_info[slot]:
            if received.buffer is not None:
                received.buffer.grad = None
        number, self._backwards = self._backwards % self._count, self._backwards + 1
        self._moments.after_backward(number)
