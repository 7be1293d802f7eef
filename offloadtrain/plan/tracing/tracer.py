"""Traces of one model for all the jobs that a plan tries."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import TypeVar

from torch import Tensor, nn

from offloadtrain.config.job import Config
from offloadtrain.plan.costs.microbatch import Activations, BlockCost, TracedStep, Work
from offloadtrain.plan.placement import PlanError
from offloadtrain.plan.tracing.step import TraceError, trace_step

JobLoss = Callable[[nn.Module, Config], Tensor]
"""The loss of a fake model over a microbatch of this job."""

Kind = TypeVar("Kind", bound=Hashable)

_FEW = 2
"""Samples of the smallest microbatch that sizes are interpolated from: some models (batch norm)
take no single one."""


class Tracer:
    """A `plan.costs.microbatch.Trace` that traces each combination of options once.

    A trace takes seconds, and a search tries many sizes of microbatches. Only the size that was
    asked for and the smallest ones are traced; between them bytes and FLOPs are interpolated. Each
    moment of a step needs a constant and a part per sample, and the peak is the largest of them:
    it is convex, so an interpolated peak is never too small.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: JobLoss,
        micro_batch: int,
        *,
        on_cpu: bool,
        packed: bool = False,
    ) -> None:
        """`micro_batch`: the planned size, in samples. Other arguments: see `trace_step`."""
        self._on_cpu, self._packed = on_cpu, packed
        self._model = model
        self._loss_of = loss_of
        self._micro_batch = micro_batch
        self._traces: dict[tuple[object, ...], TracedStep] = {}

    def __call__(self, config: Config) -> TracedStep:
        """Return the trace of a microbatch of this job; raises as `trace_step`."""
        size = config.train.micro_batch
        if (
            config.offload.activations.mode == "offload_saved"
        ):  # which tensors move depends on the size
            return self._traced(config, size)
        if not _FEW < size < self._micro_batch:
            return self._traced(config, size)
        small, large = self._traced(config, _FEW), self._traced(config, self._micro_batch)
        return between(small, large, (size - _FEW) / (self._micro_batch - _FEW))

    def _traced(self, config: Config, size: int) -> TracedStep:
        train, offload = config.train, config.offload
        key = (
            *(size, config.data.seq_len, train.chunked_loss),
            *(
                offload.activations.mode,
                offload.activations.recompute_blocks,
                offload.activations.offload_saved_above,
                offload.precision,
                offload.weights.keep_fp32,
                offload.activations.cast_inputs,
            ),
        )
        if key not in self._traces:
            self._traces[key] = self._new(
                replace(config, train=replace(config.train, micro_batch=size))
            )
        return self._traces[key]

    def _new(self, config: Config) -> TracedStep:
        """Raises PlanError for a smaller microbatch than was asked for, which the model refuses;
        TraceError for an operation that torch cannot do without values."""
        try:
            return trace_step(
                self._model,
                lambda model: self._loss_of(model, config),
                config.offload,
                on_cpu=self._on_cpu,
                packed=self._packed,
            )
        except (ValueError, RuntimeError) as error:
            if (size := config.train.micro_batch) < self._micro_batch:
                raise PlanError(f"a microbatch of {size} cannot be traced: {error}") from error
            if not isinstance(error, RuntimeError):
                raise  # the model's own
            raise TraceError(
                f"{type(self._model).__name__} cannot be traced in {config.offload.precision}; "
                f"torch says: {str(error).rstrip('.')}. If its forward runs with data, use another "
                "offload.precision, or another implementation of that part"
            ) from error


def between(small: TracedStep, large: TracedStep, share: float) -> TracedStep:
    """Interpolate: `share` 0 is the small one, 1 the large one."""

    def mixed(a: float, b: float) -> float:
        return a + share * (b - a)

    def rounded_up(a: int, b: int) -> int:
        return -int(-mixed(a, b) // 1)

    of_small, of_large = small.activations, large.activations
    sizes = {
        key: rounded_up(getattr(of_small, key), getattr(of_large, key))
        for key in ("saved", "layer", "logits", "gradients")
    }
    return TracedStep(
        {name: _mixed_cost(small.blocks[name], cost, mixed) for name, cost in large.blocks.items()},
        Activations(**sizes, moment=of_large.moment),
        tuple(map(rounded_up, small.block_inputs, large.block_inputs)),
    )


def _mixed_cost(
    small: BlockCost, large: BlockCost, mixed: Callable[[float, float], float]
) -> BlockCost:
    def each(a: Mapping[Kind, float], b: Mapping[Kind, float]) -> dict[Kind, float]:
        return {key: mixed(a.get(key, 0.0), b.get(key, 0.0)) for key in {**a, **b}}

    def work(a: Work, b: Work) -> Work:
        return Work(
            each(a.products, b.products),
            each(a.attention, b.attention),
            mixed(a.nbytes, b.nbytes),
            mixed(a.launches, b.launches),
            mixed(a.recomputed, b.recomputed),
        )

    return BlockCost(work(small.forward, large.forward), work(small.backward, large.backward))
