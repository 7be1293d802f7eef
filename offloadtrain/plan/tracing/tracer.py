"""Traces for all candidates of a search; each combination of options is traced once."""

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
"""Returns the loss of a fake model for a microbatch of this job."""

_MOST_TOKENS = 2**17
"""Largest traced microbatch, in tokens. Larger ones are extrapolated from this size and half of
it: the time of a trace grows with the pieces of the loss."""

_FEW = 2
"""Samples of the smallest traced microbatch, from which others are interpolated. Some models (batch
norm) refuse a single sample."""


class Tracer:
    """A `plan.costs.microbatch.Trace` that traces each combination of options once.

    A trace takes seconds, and a search tries many microbatch sizes. Only the planned
    size and the smallest ones are traced; bytes and FLOPs in between are interpolated. Each
    moment of a step needs a constant and a part per sample, and the peak is the largest moment:
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
        """`micro_batch`: planned size in samples. For other arguments see `trace_step`."""
        self._on_cpu, self._packed = on_cpu, packed
        self._model = model
        self._loss_of = loss_of
        self._micro_batch = micro_batch
        self._traces: dict[tuple[object, ...], TracedStep] = {}
        self._refused: dict[tuple[object, ...], str] = {}
        """Message for each microbatch that cannot be traced; a search asks for it many times."""
        self._shares: dict[tuple[object, ...], float] = {}

    def __call__(self, config: Config) -> TracedStep:
        """Return the trace of a microbatch of this job; raises what `trace_step` raises."""
        if _are_partitioned(config):
            return _of_partitioned(self, config, partial(self._saved_share, config))
        size = config.train.micro_batch
        # Which saved tensors move depends on the size, so nothing is interpolated.
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
                # Store only the text: the traceback would keep the tensors of the trace alive.
                self._refused[key] = str(error)
                raise
        return self._traces[key]

    def _new(self, config: Config) -> TracedStep:
        """Raise PlanError if the model refuses a smaller microbatch than planned, TraceError for an
        operation that torch cannot run without values."""
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
                raise  # raised by the model itself
            raise TraceError(
                f"{type(self._model).__name__} cannot be traced in {config.offload.precision}; "
                f"torch says: {str(error).rstrip('.')}. If its forward runs with data, use another "
                "offload.precision, or another implementation of that part"
            ) from error


def _are_partitioned(config: Config) -> bool:
    """Return True if the compiler decides what layers save."""
    asks_compiler = config.offload.activations.mode in ("selective", "keep")
    return config.offload.compute.compile_blocks and asks_compiler


def _budget(offload: OffloadConfig) -> float:
    budget = offload.activations.compiled_budget
    return 1.0 if budget is None else budget


def _options_of_layers(offload: OffloadConfig) -> OffloadConfig:
    """Return a config with the options that decide what compiled layers save."""
    return OffloadConfig(
        precision=offload.precision,
        activation="selective",
        activation_budget=_budget(offload),
        compile_blocks=True,
        fp8=offload.compute.fp8,
        cast_inputs=offload.activations.cast_inputs,
    )


def _of_partitioned(trace: Trace, config: Config, share_of: Callable[[], float]) -> TracedStep:
    """Return a trace between those of recompute and of keeping all activations: its work scales
    with the budget, its memory with the share that compiled layers save."""
    budget = _budget(config.offload)
    offload = config.offload.replace(
        activation="recompute", activation_budget=None, compile_blocks=False
    )
    again = trace(replace(config, offload=offload))
    keep = trace(replace(config, offload=offload.replace(activation="keep", recompute_blocks=None)))
    memory: TracedStep = between(again, keep, share_of())
    return replace(memory, blocks=between(again.blocks, keep.blocks, budget))


def between(small: Any, large: Any, share: float) -> Any:
    """Interpolate every number of two traces: `share` 0 gives `small`, 1 gives `large`, and more
    extrapolates. Integers (bytes) are rounded up. A rate or kind of kernel that only one trace has
    counts as zero in the other."""
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
    """The inputs that a trace of a transformer shape depends on; a cache key.

    Attributes:
        shape: shape of the rank's part of the layers of its stage.
        samples, seq_len: sizes of the tokens.
        terms: terms of a chunked loss; None for full logits.
        isolated: attention does not cross the ends of documents.
        options: as returned by `traced_options`.
        on_cpu: the plan is for a CPU.
        varlen: variable-length attention. Document lengths are not known, so each
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
        """Return the transformer on the meta device, with `shape`, which may have fewer layers."""
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
        """Return the loss of a fake model; for a stage without the head the sum of its hidden
        states, whose gradients stand for those that the next stage sends."""
        size, device = (self.samples, self.seq_len), next(model.parameters()).device
        # Separate tensors, since tensors that share memory would be saved once.
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
        on_cpu: the plan is for a CPU.
        divided_inputs: tensor parallel ranks partition the inputs of layers.
    """

    on_cpu: bool
    divided_inputs: bool = False

    def __call__(self, config: Config) -> TracedStep:
        """Return the cost of a microbatch of this job.

        Raises:
            PlanError: the transformer does not support this shape.
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
        if self.divided_inputs:  # the engine stores them, not autograd
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
    """Return the shape, with fewer heads if those of a foreign model do not divide its width."""
    candidates = (
        replace(shape, num_heads=heads, num_kv_heads=gcd(heads, shape.kv_heads))
        for heads in range(shape.num_heads - 1, 0, -1)
    )
    if not shape.problems():
        return shape
    return next((fewer for fewer in candidates if not fewer.problems()), shape)


class _MeanLoad(Experts):
    """Experts of one rank that get as many rows as this rank's tokens send to all experts."""

    def forward(self, rows_MD: Tensor, ends_E: Tensor) -> Tensor:
        return self._computed(rows_MD, self.up, self.down, ends_E[: len(self.up)])


@lru_cache(maxsize=512)
def _share_of_shape(batch: Microbatch, options: OffloadConfig) -> float:
    model = batch.model(replace(batch.shape, num_layers=2))  # alike; a list has two or more
    return saved_share(model, batch.loss, options, on_cpu=batch.on_cpu)


@lru_cache(maxsize=512)
def traced_microbatch(batch: Microbatch) -> TracedStep:
    # Experts read tensor values, or test for the meta device, so they need fake tensors.
    if not (batch.on_cpu or batch.shape.num_experts):
        options, layers = batch.options, batch.shape.num_layers
        again = len(options.activations.recomputed_of(range(layers)))
        few = layers - sum(len(run.skipped) for run in uniform_runs("blocks", layers, again))
        model = batch.model(replace(batch.shape, num_layers=few))
        if traced := trace_on_meta(model, batch.loss, options, "blocks", layers):
            return traced
    return trace_step(batch.model(batch.shape), batch.loss, batch.options, on_cpu=batch.on_cpu)


def activations(placed: Placement, *, on_cpu: bool) -> Activations:
    """Return the peak bytes of a micro-step, from the trace of the placement's model or else from
    the shipped transformer in its shape."""
    traced = placed.traced
    if traced is None:
        divided = placed.spec.input_parts > 1
        traced = ShapeTrace(on_cpu, divided_inputs=divided)(placed.config)
    saved = traced.activations.saved * placed.in_flight
    return replace(traced.activations, saved=saved)


def together(stages: Sequence[Activations]) -> Activations:
    """Combine several stages on one device: all keep their saved activations, and one computes."""
    at_work = max(stages, key=lambda stage: stage.total - stage.saved)
    return replace(at_work, saved=sum(stage.saved for stage in stages))
