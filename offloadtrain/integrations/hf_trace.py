"""Traces a microbatch of `model.hf` as one rank computes it: of the complete model, of its tensor
parallel part, or of a pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from offloadtrain.config.job import Config
from offloadtrain.config.ranks_options import Stage
from offloadtrain.engine import ModelError
from offloadtrain.integrations.causal_lm import CausalLm, attend_within_documents
from offloadtrain.integrations.chunked_loss import chunk_loss
from offloadtrain.integrations.hf_job import described_model
from offloadtrain.model.loss import cross_entropy
from offloadtrain.model.transformer import LossTerms
from offloadtrain.parallel.pipeline.decoder_stages import cut_stage
from offloadtrain.parallel.pipeline.stage_modules import divide
from offloadtrain.parallel.tensor import transformers_plan
from offloadtrain.plan.costs.microbatch import TracedStep
from offloadtrain.plan.tracing.tracer import Tracer
from offloadtrain.runtime.dtypes import PRECISIONS


@dataclass(slots=True)
class HfTrace:
    """A `plan.costs.microbatch.Trace` of the job's model, with one tracer per pipeline
    stage.

    Attributes:
        job: the rank's part of the job; `micro_batch` is the planned size.
    """

    job: Config
    on_cpu: bool
    _of_stage: dict[Stage | None, Tracer] = field(default_factory=dict)

    def __call__(self, config: Config) -> TracedStep:
        """Return the cost of a microbatch of this job; raises what `trace_step` raises."""
        stage = config.stage  # includes its number of layers
        if stage not in self._of_stage:
            self._of_stage[stage] = self._tracer(stage, config.ranks.given_layers)
        return self._of_stage[stage](config)

    def _tracer(self, stage: Stage | None, layers_per_stage: Sequence[int]) -> Tracer:
        assert self.job.hf is not None
        model = described_model(self.job.hf).train()
        transformers_plan.narrowed(model, self.job.ranks.tensor)
        if self.job.data.varlen_attention:
            attend_within_documents(model)
        loss: Callable[[Any, Config], Tensor] = _loss
        if stage is not None:
            cut_stage(model, divide(model, stage.count, layers_per_stage), stage.index)
            loss = _loss_of_stage
        packed, size = self.job.data.packing == "isolated", self.job.train.micro_batch
        return Tracer(model, loss, size, on_cpu=self.on_cpu, packed=packed)


def _inputs(config: Config) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return tokens, targets and positions without values. Separate tensors, since tensors that
    share memory would be saved once."""
    size = (config.train.micro_batch, config.data.seq_len)
    tokens, targets, places = (torch.empty(size, dtype=torch.long, device="cpu") for _ in range(3))
    return tokens, targets, places if config.data.packing == "isolated" else None


def _chunk(model: Any, config: Config) -> None:
    chunk_loss(model, **asdict(LossTerms(config.train.label_smoothing, config.train.z_loss)))


def _loss(model: Any, config: Config) -> Tensor:
    """Return the loss with which the job will train."""
    chunked = not config.makes_logits
    if chunked:
        try:
            _chunk(model, config)
        except ModelError:
            if config.train.chunked_loss:
                raise
            chunked = False  # Liger's loss; its memory is planned as the model's own loss
    tokens, targets, places = _inputs(config)
    return CausalLm.of(model, chunked=chunked).loss(tokens, targets, positions_BT=places)


def _loss_of_stage(model: Any, config: Config) -> Tensor:
    """Return the loss of a stage, as `parallel.pipeline.language_model` computes it. Without the
    head, return the sum of its hidden states, whose gradients stand for those that the next stage
    sends and take no memory."""
    tokens, targets, places = _inputs(config)
    stage, train, inputs = config.stage, config.train, tokens
    assert stage is not None
    if not stage.is_first:
        dtype, width = PRECISIONS[config.offload.precision], config.model.d_model
        sizes = (*tokens.shape, width)
        inputs = torch.empty(sizes, dtype=dtype, device="cpu", requires_grad=True)
    more: dict[str, Any] = {} if places is None else {"position_ids": places}
    if not stage.is_last:
        hidden: Tensor = model(inputs, **more)
        return hidden.sum()
    if train.chunked_loss:
        _chunk(model, config)
        count = targets.numel()
        more |= {"labels": targets, "shift_labels": targets, "num_items_in_batch": count}
        loss: Tensor = model(inputs, **more)
        return loss
    return cross_entropy(model(inputs, **more).flatten(0, 1), targets.flatten(), None)
