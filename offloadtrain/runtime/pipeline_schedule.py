"""The order in which the stages of a pipeline run their microbatches, and what they send on.

Both are torch's (`torch.distributed.pipelining`), whose only importer this is. Each backward of a
microbatch runs inside a context of the engine: torch calls several in a row without a forward in
between, and would add their gradients in the weights' dtype. Shapes are given and not inferred:
torch's inference keeps a graph alive that never runs backward, and with it the weights that it has
saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

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
        inputs, outputs: of its forward, on the meta device; of the last stage's outputs only the
            number counts.
        micro_step: the context of a microbatch's backward.
    """

    module: nn.Module
    index: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    micro_step: Callable[[], AbstractContextManager[None]]


class _Stage(PipelineStage):
    """torch's stage, whose backwards are micro-steps."""

    def __init__(
        self, spec: StageSpec, count: int, device: torch.device, group: Group | None
    ) -> None:
        super().__init__(
            spec.module,
            spec.index,
            count,
            device,
            # Only tokens enter the first stage: what others receive has a gradient to send back.
            input_args=spec.inputs if spec.index == 0 else _with_gradients(spec.inputs),
            output_args=_with_gradients(spec.outputs),
            group=group,
        )
        self._micro_step = spec.micro_step

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with HEARTBEAT.computing():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        if not self.has_backward:
            return None
        with HEARTBEAT.computing(), self._micro_step():
            return super().backward_one_chunk(*args, **kwargs)


def _with_gradients(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
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
            ValueError: torch's, for numbers that the schedule cannot divide; or torch is too old.
        """
        if "return_outputs" not in signature(ScheduleGPipe.step).parameters:
            raise ValueError(
                f"torch {torch.__version__} would put the outputs of all microbatches together, "
                "which losses are not: install a later one (2.13 is tested)"
            )
        made = [_Stage(spec, count, device, group) for spec in stages]
        self._microbatches = microbatches
        self._takes_input = stages[0].index == 0
        self._has_loss = stages[-1].index == count - 1
        # torch would divide gradients by the number of microbatches, where they have left already.
        self._schedule = SCHEDULES[kind](
            made if kind == "interleaved" else made[0],
            microbatches,
            loss_fn=loss_fn,
            scale_grads=False,
        )

    def run(self, inputs: tuple[Tensor, ...], target: Tensor | None, more: dict[str, Any]) -> None:
        """Forward and backward of all microbatches, or only forward where no gradient is asked for.

        Raises:
            Whatever a stage's forward or backward raises.
        """
        run = self._schedule.step if torch.is_grad_enabled() else self._schedule.eval
        given = inputs if self._takes_input else ()
        # torch asks for a target even where the model makes the loss itself.
        if self._has_loss and target is None:
            target = torch.zeros(self._microbatches)
        labels = target if self._has_loss else None
        try:
            # Outside of its own forwards and backwards a stage waits for the others.
            with HEARTBEAT.collective():
                run(*given, target=labels, return_outputs=False, **more)
        except RuntimeError as error:
            # torch wraps what a forward raises in a description of its inputs.
            if isinstance(error.__cause__, Exception):
                raise error.__cause__ from None
            raise
