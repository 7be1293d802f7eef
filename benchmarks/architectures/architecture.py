"""What an architecture of the table is, and the words in which the rows are written.

Widths, depths, vocabularies and windows are shrunk to the data's size; token ids that a package
takes from a vocabulary of its own are moved into this one. Dropout, caches, attention, experts and
losses are the package's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import transformers
from torch import Generator, Tensor, nn

from benchmarks.architectures.batches import (
    END,
    IMAGE,
    PAD,
    PATCH,
    START,
    VOCAB,
    WIDTH,
    Batch,
    draw_text,
)

LAYERS = 3  # one more than a streamed run has slots for


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One line of the table.

    Attributes:
        build: the model, its weights drawn from torch's default generator.
        batch: what one microbatch is made of, drawn from the generator given.
        loss_of: the model's loss on it, as its users compute it.
        impossible: cell → why the library refuses it.
        options: of `offload` in every cell.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[Generator], Batch]
    loss_of: Callable[[nn.Module, Batch], Tensor]
    impossible: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that Hugging Face's models return."""
    loss: Tensor = model(**batch).loss
    return loss


def of_transformers(
    model: str,
    draw: Callable[[Generator], Batch] = draw_text,
    loss_of: Callable[[nn.Module, Batch], Tensor] = own_loss,
    *,
    config: str = "",
    impossible: Mapping[str, str] | None = None,
    keep_fp32: Sequence[str] = (),
    **configured: Any,
) -> Architecture:
    """A class of `transformers` by name; its configuration's name follows from it if not given."""
    family, _, _ = model.partition("For")

    def build() -> nn.Module:
        made = getattr(transformers, config or f"{family}Config")(**configured)
        built: nn.Module = getattr(transformers, model)(made)
        return built

    return Architecture(
        build=build,
        batch=draw,
        loss_of=loss_of,
        impossible=impossible or {},
        options={"keep_fp32": keep_fp32} if keep_fp32 else {},
    )


def decoder(model: str, *, config: str = "", **options: Any) -> Architecture:
    """A causal language model in the words that most decoders' configurations share."""
    return of_transformers(model, config=config, **{**TEXT, **options})


ENDS: dict[str, Any] = dict(pad_token_id=PAD, bos_token_id=START, eos_token_id=END)
TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    max_position_embeddings=64,
    **ENDS,
)
GROUPED: dict[str, Any] = dict(num_key_value_heads=2, intermediate_size=64)
GPT2_TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB, n_positions=64, n_embd=WIDTH, n_layer=LAYERS, n_head=4, **ENDS
)
"""The words of GPT-2 and of what grew from it."""
T5_TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB,
    d_model=WIDTH,
    d_kv=8,
    d_ff=64,
    num_layers=LAYERS,
    num_heads=4,
    pad_token_id=PAD,
    eos_token_id=END,
    decoder_start_token_id=START,
)
PAIR: dict[str, Any] = dict(
    vocab_size=VOCAB,
    d_model=WIDTH,
    encoder_layers=LAYERS,
    decoder_layers=LAYERS,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    decoder_start_token_id=START,
    **ENDS,
)
"""An encoder beside a decoder, in the words of BART."""
VISION: dict[str, Any] = dict(
    hidden_size=WIDTH,
    intermediate_size=64,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    image_size=IMAGE,
    patch_size=PATCH,
)
