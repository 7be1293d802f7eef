"""Traces for all the jobs that a plan tries, each combination of options traced once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from math import ceil, gcd
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.offload import OffloadConfig
from offloadtrain.config.ranks_options import Stage
from offloadtrain.model.experts import Experts
from offloadtrain.model.transformer import LossTerms, Transformer
from offloadtrain.plan.costs.microbatch import Activations, Trace, TracedStep
from offloadtrain.plan.layout import empty_transformer
from offloadtrain.plan.placement import Placement, PlanError
from offloadtrain.plan.tracing.alike import uniform_runs
from offloadtrain.plan.tracing.compiled import saved_share
from offloadtrain.plan.tracing.step import (
    TraceError,
    trace_on_meta,
    trace_step,
    traced_options,
)
from offloadtrain.runtime.dtypes import PRECISIONS

JobLoss = Callable[[nn.Module, Config], Tensor]
"""The loss of a fake model over a microbatch of this job."""

_MOST_TOKENS = 2**17
"""The largest microbatch that is traced, in tokens. Sizes of a larger one are extrapolated from
this one and half of it: a trace takes time for each piece of the loss."""

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
        self._refused: dict[tuple[object, ...], str] = {}
        """Message of each microbatch that cannot be traced: a search asks for it many times."""
        self._shares: dict[tuple[object, ...], float] = {}

    def __call__(self, config: Config) -> TracedStep:
        """Return the trace of a microbatch of this job; raises as `trace_step`."""
        if _are_partitioned(config):
            return _of_partitioned(self, config, partial(self._saved_share, config))
        size = config.train.micro_batch
        # Which saved tensors move depends on the size.
        of_any_size = config.offload.activations.mode == "offload_saved"
        if of_any_size or not _FEW < size < self._micro_batch:
            return self._traced(config, size)
        small, large = self._traced(config, _FEW), self._traced(config, self._micro_batch)
        traced: TracedStep = between(small, large, (size - _FEW) / (self._micro_batch - _FEW))
        return traced

    def _saved_share(self, config: Config) -> float:
        options = _options_of_layers(config.offload)
        key = config.data.seq_len, options
        if key not in self._shares:
            self._shares[key] = saved_share(
                self._model,
                lambda model: self._loss_of(model, config),
                options,
                on_cpu=self._on_cpu,
                packed=self._packed,
            )
        return self._shares[key]

    def _traced(self, config: Config, size: int) -> TracedStep:
        key = size, config.data.seq_len, config.makes_logits, traced_options(config.offload)
        if key in self._refused:
            raise PlanError(self._refused[key])
        if key not in self._traces:
            sized = replace(config, train=replace(config.train, micro_batch=size))
            try:
                self._traces[key] = self._new(sized)
            except PlanError as error:
                # The text alone: the traceback holds the tensors of the trace.
                self._refused[key] = str(error)
                raise
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


def _are_partitioned(config: Config) -> bool:
    """The compiler decides what layers save."""
    asks_compiler = config.offload.activations.mode in ("selective", "keep")
    return config.offload.compute.compile_blocks and asks_compiler


def _budget(offload: OffloadConfig) -> float:
    budget = offload.activations.compiled_budget
    return 1.0 if budget is None else budget


def _options_of_layers(offload: OffloadConfig) -> OffloadConfig:
    """Return the options that decide what compiled layers save, the others at their defaults."""
    return OffloadConfig(
        precision=offload.precision,
        activation="selective",
        activation_budget=_budget(offload),
        compile_blocks=True,
        fp8=offload.compute.fp8,
        cast_inputs=offload.activations.cast_inputs,
    )


def _of_partitioned(trace: Trace, config: Config, share_of: Callable[[], float]) -> TracedStep:
    """Return the trace between those of recompute and of keeping all: its work in proportion to the
    budget, its memory to what compiled layers save."""
    budget = _budget(config.offload)
    offload = config.offload.replace(
        activation="recompute", activation_budget=None, compile_blocks=False
    )
    again = trace(replace(config, offload=offload))
    keep = trace(replace(config, offload=offload.replace(activation="keep", recompute_blocks=None)))
    memory: TracedStep = between(again, keep, share_of())
    return replace(memory, blocks=between(again.blocks, keep.blocks, budget))


def between(small: Any, large: Any, share: float) -> Any:
    """Interpolate every number of two traces: `share` 0 is the small one, 1 the large one, and more
    a still larger one. Bytes, which are whole numbers, are rounded up; a rate or a kind of kernel
    that only one of them has counts as zero in the other."""
    if isinstance(large, float):
        return small + share * (large - small)
    if isinstance(large, int):
        return ceil(small + share * (large - small))
    if isinstance(large, tuple):
        return tuple(between(a, b, share) for a, b in zip(small, large, strict=True))
    if isinstance(large, Mapping):
        keys = {**small, **large}
        return {key: between(small.get(key, 0.0), large.get(key, 0.0), share) for key in keys}
    values = (between(getattr(small, x.name), getattr(large, x.name), share) for x in fields(large))
    return type(large)(*values)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What a trace of a shape depends on.

    Attributes:
        shape: of what one rank holds of the layers of the stage.
        samples, seq_len: sizes of the tokens.
        terms: those of a loss in parts; None: whole logits.
        isolated: attention does not cross the ends of documents.
        options: those of `traced_options`.
        on_cpu: a CPU is planned for.
        varlen: by variable-length attention. The lengths of documents are not known, so each
            sequence counts as one document: an upper bound of the FLOPs.
    """

    shape: ModelShape
    stage: Stage | None
    samples: int
    seq_len: int
    terms: LossTerms | None
    isolated: bool
    options: OffloadConfig
    on_cpu: bool
    varlen: bool = False

    def model(self, shape: ModelShape) -> Transformer:
        """Return the transformer on the meta device; `shape`: perhaps of fewer layers."""
        try:
            model = empty_transformer(shape, self.stage).train()
        except ValueError as error:
            raise PlanError(f"activations are traced for our transformer: {error}") from None
        model.chunked_loss, model.varlen_attention = self.terms, self.varlen
        for module in model.modules():
            if isinstance(module, Experts) and shape.held_experts < shape.num_experts:
                module.__class__ = _MeanLoad
        return model

    def loss(self, model: nn.Module) -> Tensor:
        """Return the loss of a fake model; of a stage without the head the sum of its hidden
        states, whose gradients are those that the next stage sends."""
        size, device = (self.samples, self.seq_len), next(model.parameters()).device
        # Each its own: what is saved of one memory is saved once.
        tokens_BT, targets_BT, positions_BT = (
            torch.empty(size, dtype=torch.long, device=device) for _ in range(3)
        )
        inputs, targets = tokens_BT, targets_BT
        if self.stage is not None and not self.stage.is_first:
            dtype, width = PRECISIONS[self.options.precision], self.shape.d_model
            inputs = torch.empty((*size, width), dtype=dtype, device=device, requires_grad=True)
        places = positions_BT if self.isolated else None
        if self.stage is not None and not self.stage.is_last:
            hidden_BTD: Tensor = model(inputs, positions_BT=places)
            return hidden_BTD.sum()
        loss: Tensor = model(inputs, targets, positions_BT=places)
        return loss


@dataclass(frozen=True, slots=True)
class ShapeTrace:
    """A `plan.costs.microbatch.Trace` of the shipped transformer.

    Attributes:
        on_cpu: a CPU is planned for.
        divided_inputs: the ranks that hold the parts of matrices divide the inputs of layers.
    """

    on_cpu: bool
    divided_inputs: bool = False

    def __call__(self, config: Config) -> TracedStep:
        """Return what a microbatch of this job takes.

        Raises:
            PlanError: the model has no such shape as the transformer.
        """
        batch = self._microbatch(config)
        if _are_partitioned(config):
            few = replace(batch, samples=min(batch.samples, _FEW))
            of_layers = _options_of_layers(config.offload)
            return _of_partitioned(self, config, partial(_share_of_shape, few, of_layers))
        most = max(_MOST_TOKENS // batch.seq_len, _FEW)
        if batch.samples <= most:
            return traced_microbatch(batch)
        small = traced_microbatch(replace(batch, samples=most // 2))
        large = traced_microbatch(replace(batch, samples=most))
        traced: TracedStep = between(small, large, (batch.samples - most // 2) / (most - most // 2))
        return traced

    def _microbatch(self, config: Config) -> Microbatch:
        train, shape = config.train, config.rank_shape
        shape = replace(shape, max_seq_len=max(shape.max_seq_len, config.data.seq_len))
        options = traced_options(config.offload)
        if config.hf is not None:
            shape = _with_possible_heads(shape)
        if config.stage is not None:
            shape = replace(shape, router_aux_loss_coef=0.0)
        if config.hf is not None or config.stage is not None:  # patterns may name other parameters
            options = options.replace(keep_fp32=())
        if self.divided_inputs:  # they leave autograd for memory of the engine
            options = options.replace(activation="offload")
        return Microbatch(
            shape,
            config.stage,
            train.micro_batch,
            config.data.seq_len,
            None if config.makes_logits else LossTerms(train.label_smoothing, train.z_loss),
            config.data.packing == "isolated",
            options,
            self.on_cpu,
            config.data.varlen_attention,
        )


def _with_possible_heads(shape: ModelShape) -> ModelShape:
    """Return the shape, with fewer heads if those of another model do not divide its width."""
    candidates = (
        replace(shape, num_heads=heads, num_kv_heads=gcd(heads, shape.kv_heads))
        for heads in range(shape.num_heads - 1, 0, -1)
    )
    if not shape.problems():
        return shape
    return next((fewer for fewer in candidates if not fewer.problems()), shape)


class _MeanLoad(Experts):
    """Experts of one rank that get as many rows as its tokens send to all experts."""

    def forward(self, rows_MD: Tensor, ends_E: Tensor) -> Tensor:
        return self._computed(rows_MD, self.up, self.down, ends_E[: len(self.up)])


@lru_cache(maxsize=512)
def _share_of_shape(batch: Microbatch, options: OffloadConfig) -> float:
    model = batch.model(replace(batch.shape, num_layers=2))  # alike; a list has two or more
    return saved_share(model, batch.loss, options, on_cpu=batch.on_cpu)


@lru_cache(maxsize=512)
def traced_microbatch(batch: Microbatch) -> TracedStep:
    # Experts ask for the values of tensors, or whether they are on the meta device.
    if not (batch.on_cpu or batch.shape.num_experts):
        options, layers = batch.options, batch.shape.num_layers
        again = len(options.activations.recomputed_of(range(layers)))
        few = layers - sum(len(run.skipped) for run in uniform_runs("blocks", layers, again))
        model = batch.model(replace(batch.shape, num_layers=few))
        if traced := trace_on_meta(model, batch.loss, options, "blocks", layers):
            return traced
    return trace_step(batch.model(batch.shape), batch.loss, batch.options, on_cpu=batch.on_cpu)


def activations(placed: Placement, *, on_cpu: bool) -> Activations:
    """Return the bytes at the peak of a micro-step: of the model that was traced for the placement,
    else of our transformer of its shape."""
    traced = placed.traced
    if traced is None:
        divided = placed.spec.input_parts > 1
        traced = ShapeTrace(on_cpu, divided_inputs=divided)(placed.config)
    saved = traced.activations.saved * placed.in_flight
    return replace(traced.activations, saved=saved)


def together(stages: Sequence[Activations]) -> Activations:
    """Return those of several stages on one device: all keep what they have saved, and one of them
    computes."""
    at_work = max(stages, key=lambda stage: stage.total - stage.saved)
    return replace(at_work, saved=sum(stage.saved for stage in stages))
