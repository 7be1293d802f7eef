"""A language model as training, evaluation and sampling see it, whatever made it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from offloadtrain.config.errors import ConfigError
from offloadtrain.model.generate import generate
from offloadtrain.model.transformer import Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The choice of the next token; see `generate`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class LanguageModel(Protocol):
    """Attributes:
    module: what is trained.
    vocab_size: above every token.
    max_seq_len: longest sequence that it was made for.
    """

    @property
    def module(self) -> nn.Module: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        divisor: float | None = None,
    ) -> Tensor:
        """Return the loss, fp32; in training with the model's own auxiliary losses.

        Args:
            targets_BT, positions_BT, divisor: see `Transformer.forward`.
        """
        ...

    def generate(self, tokens_BT: Tensor, num_tokens: int, sampling: Sampling) -> Tensor:
        """Return the prompt followed by at most `num_tokens` tokens; torch's global generators and
        the model's mode are left as they were."""
        ...


@dataclass(frozen=True, slots=True)
class OwnModel:
    """Our transformer as a `LanguageModel`."""

    module: Transformer

    @property
    def vocab_size(self) -> int:
        return self.module.shape.vocab_size

    @property
    def max_seq_len(self) -> int:
        return self.module.shape.max_seq_len

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        divisor: float | None = None,
    ) -> Tensor:
        """See `LanguageModel.loss`."""
        out = self.module(tokens_BT, targets_BT, positions_BT=positions_BT, divisor=divisor)
        return cast(Tensor, out)

    def generate(self, tokens_BT: Tensor, num_tokens: int, sampling: Sampling) -> Tensor:
        """See `LanguageModel.generate`.

        Raises:
            ConfigError: it is an encoder.
        """
        if not self.module.shape.is_causal:
            raise ConfigError(
                'a model with model.objective = "mlm" predicts hidden tokens from both sides, and '
                "continues no text: offloadtrain eval measures it"
            )
        return generate(
            self.module,
            tokens_BT,
            num_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            generator=torch.Generator().manual_seed(sampling.seed),
        )
