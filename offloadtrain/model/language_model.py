"""The interface of a language model for training, evaluation and sampling."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from offloadtrain.config.errors import ConfigError
from offloadtrain.model.transformer import Transformer

# Shape suffixes: B batch, T time (grows by one each round), V vocab_size.


@torch.no_grad()
def generate(
    model: Transformer,
    tokens_BT: Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator,
) -> Tensor:
    """Return the prompt followed by `num_tokens` sampled tokens, (B, T + num_tokens) int64.

    The model sees at most its last `max_seq_len` tokens. It runs in evaluation mode and returns to
    its previous mode afterwards.

    Args:
        tokens_BT: the prompt, at least one token, on the device of the model.
        temperature: divides the logits, at least 0; 0 takes the likeliest token.
        top_k: sample among the k likeliest tokens; 0: among all.
        top_p: and among the fewest of these whose probabilities reach this sum, in (0, 1].
        generator: makes the choice on its own device, which need not be the model's.

    Raises:
        ValueError: logits are not finite.
    """
    was_training = model.training
    model.eval()
    try:
        with uncompiled():
            for _ in range(num_tokens):
                logits_BV = model(tokens_BT[:, -model.shape.max_seq_len :])[:, -1]
                logits_BV = logits_BV.float().to(generator.device)
                next_B1 = _choose(logits_BV, temperature, top_k, top_p, generator)
                tokens_BT = torch.cat((tokens_BT, next_B1.to(tokens_BT.device)), dim=1)
    finally:
        model.train(was_training)
    return tokens_BT


def uncompiled() -> AbstractContextManager[object]:
    """Run compiled layers without compilation. Each token changes the length of the sequence, and
    the compiler would generate code for several lengths. If the compiler is not imported, nothing
    is compiled."""
    imported = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if imported else nullcontext()


def _choose(
    logits_BV: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> Tensor:
    if not bool(logits_BV.isfinite().all()):
        raise ValueError("the model's logits are not finite, so there is nothing to sample from")
    if temperature == 0.0:
        return logits_BV.argmax(dim=1, keepdim=True)
    if 0 < top_k < logits_BV.shape[1]:
        least_B1 = logits_BV.topk(top_k, dim=1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, float("-inf"))
    probabilities_BV = torch.softmax(logits_BV / temperature, dim=1)
    if top_p < 1.0:
        sorted_BV, order_BV = probabilities_BV.sort(dim=1, descending=True)
        # A token stays if the sum of the previous tokens is below top_p: the most likely token
        # always stays.
        beyond_BV = sorted_BV.cumsum(dim=1) - sorted_BV >= top_p
        probabilities_BV = probabilities_BV.scatter(
            1, order_BV, sorted_BV.masked_fill(beyond_BV, 0.0)
        )
    return torch.multinomial(probabilities_BV, 1, generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Options for the choice of the next token; see `generate`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class LanguageModel(Protocol):
    """The interface of a language model.

    Attributes:
        module: the trained model.
        vocab_size: larger than every token.
        max_seq_len: longest sequence that the model supports.
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
        """Return the loss in fp32, in training with the auxiliary losses of the model.

        Args:
            targets_BT, positions_BT, divisor: see `Transformer.forward`.
        """
        ...

    def generate(self, tokens_BT: Tensor, num_tokens: int, sampling: Sampling) -> Tensor:
        """Return the prompt followed by at most `num_tokens` tokens. torch's global generators and
        the model's mode do not change."""
        ...


@dataclass(frozen=True, slots=True)
class OwnModel:
    """The project's transformer as a `LanguageModel`."""

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
            ConfigError: if the model is an encoder.
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
