"""A rank's stages of a pipeline as the trainer sees them: a whole step at once, and losses on every
rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.config.batch_split import held_stages
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.config.ranks_options import Stage, names_of
from offloadtrain.data.batches import Batch
from offloadtrain.engine.pipeline import pipeline
from offloadtrain.engine.pipeline_steps import Pipeline
from offloadtrain.model.language_model import Sampling
from offloadtrain.model.transformer import Transformer
from offloadtrain.optim import AnyRule
from offloadtrain.runtime.mesh import Mesh


@dataclass(frozen=True, slots=True)
class PipelinedModel:
    """This rank's stages, and the others behind them, as a `LanguageModel`."""

    pipeline: Pipeline
    stages: Sequence[Stage]
    max_seq_len: int
    vocab_size: int

    @property
    def module(self) -> nn.Module:
        return self.pipeline.module

    def run(self, batches: Sequence[Batch], divisor: float | None) -> Tensor:
        """Forward and backward of a step; returns (microbatches,) fp32 losses on the host.

        Args:
            batches: its microbatches, the same on every stage.
            divisor: see `losses.loss_divisor`.
        """
        columns = zip(*batches, strict=True)
        tokens_BT, targets_BT, positions_BT = (_joined(column) for column in columns)
        assert tokens_BT is not None
        more = self._more(targets_BT, positions_BT, divisor)
        return self.pipeline.run(tokens_BT, divide=divisor is None, **more)

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        divisor: float | None = None,
    ) -> Tensor:
        """Return the loss without gradients, on every stage; see `LanguageModel.loss`."""
        more = self._more(targets_BT, positions_BT, divisor)
        return self.pipeline.evaluate(tokens_BT, **more)

    def _more(
        self, targets_BT: Tensor | None, positions_BT: Tensor | None, divisor: float | None
    ) -> dict[str, Any]:
        """Return what the forward of every stage here gets besides its first argument; without a
        head it makes no loss of the targets."""
        more: dict[str, Any] = {"positions_BT": positions_BT}
        if self.stages[-1].is_last:
            more |= {"targets_BT": targets_BT, "divisor": divisor}
        return {name: value for name, value in more.items() if value is not None}

    def generate(self, tokens_BT: Tensor, num_tokens: int, sampling: Sampling) -> Tensor:
        """Refused: no process holds the whole model."""
        raise ConfigError(
            f"{names_of(self.stages)} cannot generate text: use offloadtrain generate RUN, which "
            "loads the whole model from a checkpoint"
        )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    whole = [part for part in parts if part is not None]
    return torch.cat(whole) if whole else None


def offload_stage(
    model: Transformer,
    rule: AnyRule,
    groups: Sequence[dict[str, Any]],
    config: Config,
    mesh: Mesh,
    device: torch.device,
) -> PipelinedModel:
    """Offload this rank's stages of a model on the meta device.

    Args:
        config: the rank's part of the job; its `stage` is the first of them.
    """
    assert config.stage is not None
    shape = (config.train.micro_batch, config.data.seq_len)
    made = pipeline(
        model,
        mesh,
        rule,
        example=torch.empty(shape, dtype=torch.int64, device="meta"),
        microbatches=config.train.grad_accum_steps,
        schedule=config.ranks.schedule,
        stages_per_rank=config.ranks.stages_per_rank,
        params=groups,
        device=device,
        config=config.offload,
        param_init_fn=model.initializer(config.train.seed),
    )
    held = held_stages(config.ranks, config.stage.index, model.shape.num_layers)
    return PipelinedModel(made, held, model.shape.max_seq_len, model.shape.vocab_size)
