"""A rank's pipeline stages as a `LanguageModel`: the trainer runs a complete step at once, and
every rank gets the losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.config.batch_split import held_stages
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.ranks_options import Stage, names_of
from offloadtrain.data.batches import Batch
from offloadtrain.model.language_model import Sampling
from offloadtrain.model.loss import cross_entropy
from offloadtrain.model.transformer import LossTerms
from offloadtrain.optim.update_rules import decay_groups, update_rule
from offloadtrain.parallel.mesh import Mesh
from offloadtrain.parallel.pipeline.api import pipeline
from offloadtrain.parallel.pipeline.steps import Pipeline
from offloadtrain.parallel.tensor.own_model import divided, initializer


@dataclass(frozen=True, slots=True)
class PipelinedModel:
    """This rank's pipeline stages as a `LanguageModel`."""

    pipeline: Pipeline
    stages: Sequence[Stage]
    max_seq_len: int
    vocab_size: int

    @property
    def module(self) -> nn.Module:
        return self.pipeline.module

    def run(self, batches: Sequence[Batch], divisor: float | None) -> Tensor:
        """Run forward and backward of a step; return (microbatches,) fp32 losses on the host.

        Args:
            batches: microbatches of the step, equal on every stage.
            divisor: see `losses.loss_divisor`.
        """
        columns = zip(*batches, strict=True)
        tokens_BT, targets_BT, positions_BT = (_joined(column) for column in columns)
        assert tokens_BT is not None and targets_BT is not None
        more = self._more(targets_BT, positions_BT, divisor, len(batches))
        return self.pipeline.run(tokens_BT, divide=divisor is None, **more)

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        divisor: float | None = None,
    ) -> Tensor:
        """Return the loss without gradients, equal on every stage; see `LanguageModel.loss`."""
        with torch.no_grad():
            more = self._more(targets_BT, positions_BT, divisor, 1)
            return self.pipeline.evaluate(tokens_BT, **more)

    def _more(
        self,
        targets_BT: Tensor,
        positions_BT: Tensor | None,
        divisor: float | None,
        microbatches: int,
    ) -> dict[str, Any]:
        """Return the keyword arguments of the forwards of this rank's stages. They include targets
        only on the rank that holds the last stage, with the head."""
        more: dict[str, Any] = {"positions_BT": positions_BT}
        if self.stages[-1].is_last:
            more |= {"targets_BT": targets_BT, "divisor": divisor}
        return {name: value for name, value in more.items() if value is not None}

    def generate(self, tokens_BT: Tensor, num_tokens: int, sampling: Sampling) -> Tensor:
        """Raise ConfigError: no process holds the complete model."""
        raise ConfigError(
            f"{names_of(self.stages)} cannot generate text: use offloadtrain generate RUN, which "
            "loads the whole model from a checkpoint"
        )


@dataclass(slots=True)
class CausalLoss:
    """Loss of the last stage of a transformers model, equal to `CausalLm.loss`.

    Attributes:
        divisor: divisor for the current batch, see `losses.loss_divisor`.
    """

    divisor: float | None = None

    def __call__(self, output: Tensor, targets_BT: Tensor) -> Tensor:
        if output.ndim == 0:  # the model computed the loss, in chunks
            return output
        return cross_entropy(output.flatten(0, 1), targets_BT.flatten(), self.divisor)


@dataclass(frozen=True, slots=True)
class PipelinedCausalLm(PipelinedModel):
    """A rank's stages of a transformers model as a `LanguageModel`.

    Attributes:
        chunked: in training the model computes its loss itself, in chunks.
    """

    of_logits: CausalLoss
    chunked: bool

    def _more(
        self,
        targets_BT: Tensor,
        positions_BT: Tensor | None,
        divisor: float | None,
        microbatches: int,
    ) -> dict[str, Any]:
        more: dict[str, Any] = {} if positions_BT is None else {"position_ids": positions_BT}
        if not self.stages[-1].is_last:
            return more
        if self.chunked and torch.is_grad_enabled():
            count = targets_BT.numel() // microbatches if divisor is None else divisor
            more |= {"labels": targets_BT, "shift_labels": targets_BT}
            return more | {"num_items_in_batch": count}
        self.of_logits.divisor = divisor
        return more | {"target": targets_BT}


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def offload_own_stages(
    config: Config, shape: ModelShape, terms: LossTerms | None, mesh: Mesh, device: torch.device
) -> PipelinedModel:
    """Build the shipped transformer without allocating it, and offload this rank's stages.

    Args:
        config: the rank's part of the job; its `stage` is the rank's first stage.
        shape: shape of the complete model.
        terms: terms of a chunked loss; None: full logits.
    """
    model = divided(shape, mesh)
    model.chunked_loss = terms
    init = initializer(model, config.train.seed, mesh)
    made = job_pipeline(model, config, mesh, device, param_init_fn=init)
    return PipelinedModel(
        made, stages_of(config, shape.num_layers), shape.max_seq_len, shape.vocab_size
    )


def stages_of(config: Config, num_layers: int) -> Sequence[Stage]:
    """Return the stages of this rank. `num_layers` counts the layers of the complete model."""
    assert config.stage is not None
    return held_stages(config.ranks, config.stage.index, num_layers)


def job_pipeline(
    model: nn.Module, config: Config, mesh: Mesh, device: torch.device, **more: Any
) -> Pipeline:
    """Divide a model with the options of its job. `more`: further arguments of `pipeline`."""
    shape = (config.train.micro_batch, config.data.seq_len)
    return pipeline(
        model,
        mesh,
        update_rule(config.optim),
        example=torch.empty(shape, dtype=torch.int64, device="meta"),
        microbatches=config.train.grad_accum_steps,
        schedule=config.ranks.schedule,
        stages_per_rank=config.ranks.stages_per_rank,
        layers_per_stage=config.ranks.given_layers,
        params=decay_groups(model, config),
        device=device,
        config=config.offload,
        **more,
    )
