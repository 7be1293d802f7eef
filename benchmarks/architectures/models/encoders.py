"""Masked language models and other encoders of text."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architectures.architecture import (
    ENDS,
    LAYERS,
    TEXT,
    Architecture,
    of_transformers,
    own_loss,
)
from benchmarks.architectures.batches import (
    END,
    PAD,
    START,
    VOCAB,
    WIDTH,
    Batch,
    draw_masked_text,
    draw_series,
)
from benchmarks.architectures.models.recurrent import next_loss


class Encoder(nn.Module):
    """torch's own transformer, dropout 0.1 as it has it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, series: Tensor) -> Tensor:
        found: Tensor = self.head(self.encoder(series))
        return found


def autocast_loss(model: nn.Module, batch: Batch) -> Tensor:
    """For forwards with operations that torch has for fp32 only, which autocast gives them."""
    half = next(model.parameters()).dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
        return own_loss(model, batch)


def masked(family: str, **options: Any) -> Architecture:
    """A masked language model in the words of BERT."""
    configured = {**TEXT, "intermediate_size": 64, **options}
    return of_transformers(f"{family}ForMaskedLM", draw_masked_text, **configured)


ENCODERS: dict[str, Architecture] = {
    "bert_mlm": masked("Bert"),
    "roberta": masked("Roberta"),
    "xlm_roberta": masked("XLMRoberta"),
    "electra": masked("Electra", embedding_size=16),
    "albert": masked("Albert", embedding_size=16),
    "mpnet": masked("MPNet"),
    "convbert": masked("ConvBert", embedding_size=16),
    "layoutlm": masked("LayoutLM"),
    "deberta": masked("Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "deberta_v2": masked("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "modernbert": masked("ModernBert", local_attention=8, cls_token_id=START, sep_token_id=END),
    "longformer": masked("Longformer", attention_window=8, sep_token_id=END),
    "big_bird": masked("BigBird", attention_type="original_full", sep_token_id=END),
    "fnet": replace(masked("FNet"), loss_of=autocast_loss),  # Fourier transforms
    "distilbert": of_transformers(
        "DistilBertForMaskedLM",
        draw_masked_text,
        vocab_size=VOCAB,
        dim=WIDTH,
        hidden_dim=64,
        n_layers=LAYERS,
        n_heads=4,
        max_position_embeddings=64,
        **ENDS,
    ),
    "funnel": of_transformers(
        "FunnelForMaskedLM",
        draw_masked_text,
        vocab_size=VOCAB,
        block_sizes=[1, 1, 1],
        num_decoder_layers=2,
        d_model=WIDTH,
        n_head=4,
        d_head=8,
        d_inner=64,
        pad_token_id=PAD,
    ),
    "xlnet": of_transformers(
        "XLNetLMHeadModel",
        draw_masked_text,
        config="XLNetConfig",
        vocab_size=VOCAB,
        d_model=WIDTH,
        n_layer=LAYERS,
        n_head=4,
        d_inner=64,
        **ENDS,
    ),
    "encoder": Architecture(build=Encoder, batch=draw_series, loss_of=next_loss),
}
