"""An encoder and a decoder of text."""

from __future__ import annotations

from typing import Any

from benchmarks.architectures.architecture import (
    LAYERS,
    PAIR,
    T5_TEXT,
    TEXT,
    Architecture,
    of_transformers,
)
from benchmarks.architectures.batches import END, START, draw_pair_of_texts


def pair(model: str, **options: Any) -> Architecture:
    """In the words of BART."""
    configured = {**PAIR, "max_position_embeddings": 64, **options}
    return of_transformers(model, draw_pair_of_texts, **configured)


PAIRS_OF_TEXT: dict[str, Architecture] = {
    "t5": of_transformers("T5ForConditionalGeneration", draw_pair_of_texts, **T5_TEXT),
    "mt5": of_transformers("MT5ForConditionalGeneration", draw_pair_of_texts, **T5_TEXT),
    "umt5": of_transformers("UMT5ForConditionalGeneration", draw_pair_of_texts, **T5_TEXT),
    "longt5": of_transformers(
        "LongT5ForConditionalGeneration", draw_pair_of_texts, local_radius=4, **T5_TEXT
    ),
    "switch_transformers": of_transformers(
        "SwitchTransformersForConditionalGeneration",
        draw_pair_of_texts,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        keep_fp32=("*router*",),  # whose weights its forward casts
        **T5_TEXT,
    ),
    "bart": pair("BartForConditionalGeneration", forced_eos_token_id=END),
    "mbart": pair("MBartForConditionalGeneration"),
    "pegasus": pair("PegasusForConditionalGeneration"),
    "blenderbot": pair("BlenderbotForConditionalGeneration"),
    "m2m100": pair("M2M100ForConditionalGeneration"),
    "marian": pair("MarianMTModel", config="MarianConfig"),
    "led": pair(
        "LEDForConditionalGeneration",
        attention_window=8,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    "prophetnet": of_transformers(
        "ProphetNetForConditionalGeneration",
        draw_pair_of_texts,
        num_encoder_layers=LAYERS,
        num_decoder_layers=LAYERS,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        decoder_start_token_id=START,
        **{k: v for k, v in TEXT.items() if k not in ("num_hidden_layers", "num_attention_heads")},
    ),
}
