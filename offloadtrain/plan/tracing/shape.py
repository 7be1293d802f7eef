"""The trace of a microbatch of the shipped transformer, or of a stage or a part of it.

A search asks for few distinct microbatches in many placements: each is traced once per process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.offload import OffloadConfig
from offloadtrain.config.ranks_options import Stage
from offloadtrain.model.experts import Experts
from offloadtrain.model.transformer import LossTerms
from offloadtrain.plan.costs.microbatch import TracedStep
from offloadtrain.plan.layout import empty_transformer
from offloadtrain.plan.placement import PlanError
from offloadtrain.plan.tracing.step import trace_step, traced_options
from offloadtrain.runtime.dtypes import PRECISIONS


@dataclass(frozen=True, slots=True)
class _Microbatch:
    """What a trace of a shape depends on.

    Attributes:
        shape: of what one rank holds of the layers of the stage.
        samples, seq_len: sizes of the tokens.
        terms: those of a loss in parts; None: whole logits.
        isolated: attention does not cross the ends of documents.
        options: those of `traced_options`.
        on_cpu: a CPU is planned for.
    """

    shape: ModelShape
    stage: Stage | None
    samples: int
    seq_len: int
    terms: LossTerms | None
    isolated: bool
    options: OffloadConfig
    on_cpu: bool

    def loss(self, model: nn.Module) -> Tensor:
        """Return the loss of a fake model; of a stage without the head the sum of its hidden
        states, whose gradients are those that the next stage sends."""
        size = (self.samples, self.seq_len)
        # Each its own: what is saved of one memory is saved once.
        tokens_BT, targets_BT, positions_BT = (
            torch.empty(size, dtype=torch.long, device="cpu") for _ in range(3)
        )
        inputs, targets = tokens_BT, targets_BT
        if self.stage is not None and not self.stage.is_first:
            dtype, width = PRECISIONS[self.options.precision], self.shape.d_model
            inputs = torch.empty((*size, width), dtype=dtype, device="cpu", requires_grad=True)
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
        train, shape = config.train, config.rank_shape
        shape = replace(shape, max_seq_len=max(shape.max_seq_len, config.data.seq_len))
        if config.stage is not None:
            shape = replace(shape, router_aux_loss_coef=0.0)
        options = traced_options(config.offload)
        if self.divided_inputs:  # they leave autograd for memory of the engine
            options = options.replace(activation="offload")
        return traced_microbatch(
            _Microbatch(
                shape,
                config.stage,
                train.micro_batch,
                config.data.seq_len,
                LossTerms(train.label_smoothing, train.z_loss) if train.chunked_loss else None,
                config.data.packing == "isolated",
                options,
                self.on_cpu,
            )
        )


class _MeanLoad(Experts):
    """Experts of one rank that get as many rows as its tokens send to all experts."""

    def forward(self, rows_MD: Tensor, ends_E: Tensor) -> Tensor:
        return self._computed(rows_MD, self.up, self.down, ends_E[: len(self.up)])


@lru_cache(maxsize=512)
def traced_microbatch(batch: _Microbatch) -> TracedStep:
    try:
        model = empty_transformer(batch.shape, batch.stage).train()
    except ValueError as error:
        raise PlanError(f"activations are traced for our transformer: {error}") from None
    model.chunked_loss = batch.terms
    for module in model.modules():
        if isinstance(module, Experts) and batch.shape.held_experts < batch.shape.num_experts:
            module.__class__ = _MeanLoad
    return trace_step(model, batch.loss, batch.options, on_cpu=batch.on_cpu)
