"""Fifteen architectures, small, in which activations outweigh what torch takes beside them: 5 KB of
random state per recomputed layer, and scratch memory of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, LAYERS, VOCAB, LENGTH, SAMPLES = 64, 4, 512, 64, 4
_TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    intermediate_size=2 * WIDTH,
    max_position_embeddings=LENGTH,
    pad_token_id=0,
    use_cache=False,
)
_GROUPED = _TEXT | dict(num_key_value_heads=2)
_OLD: dict[str, Any] = dict(
    vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=4, use_cache=False
)
_PAIR: dict[str, Any] = dict(
    vocab_size=VOCAB, d_model=WIDTH, pad_token_id=0, decoder_start_token_id=1, use_cache=False
)

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _OLD),
    "gptj": ("GPTJForCausalLM", _OLD | dict(rotary_dim=8)),
    "llama": ("LlamaForCausalLM", _GROUPED),
    "mistral": ("MistralForCausalLM", _GROUPED | dict(sliding_window=16)),
    "qwen3": ("Qwen3ForCausalLM", _GROUPED | dict(head_dim=16)),
    "gemma2": ("Gemma2ForCausalLM", _GROUPED | dict(head_dim=16, sliding_window=16)),
    "phi": ("PhiForCausalLM", _TEXT),
    "gpt_neox": ("GPTNeoXForCausalLM", _TEXT),
    "opt": ("OPTForCausalLM", _TEXT | dict(ffn_dim=2 * WIDTH, word_embed_proj_dim=WIDTH)),
    "bloom": (
        "BloomForCausalLM",
        dict(vocab_size=VOCAB, hidden_size=WIDTH, n_layer=LAYERS, n_head=4),
    ),
    "falcon": ("FalconForCausalLM", _TEXT),
    "bert": ("BertForMaskedLM", _TEXT),
    "electra": ("ElectraForMaskedLM", _TEXT | dict(embedding_size=WIDTH)),
    "t5": (
        "T5ForConditionalGeneration",
        _PAIR | dict(d_kv=16, d_ff=2 * WIDTH, num_layers=LAYERS, num_heads=4),
    ),
    "bart": (
        "BartForConditionalGeneration",
        _PAIR
        | dict(
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_ffn_dim=2 * WIDTH,
            decoder_ffn_dim=2 * WIDTH,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            max_position_embeddings=LENGTH,
        ),
    ),
}
"""Name → class of transformers, and its configuration's values."""

Batch = dict[str, Tensor]


def maker(name: str) -> Callable[[], nn.Module]:
    """Return what makes the model, in train mode."""
    import transformers

    kind, values = CONFIGS[name]
    cls = getattr(transformers, kind)

    def make() -> nn.Module:
        model: nn.Module = cls(cls.config_class(**values)).train()
        return model

    return make


def batch_of(name: str, samples: int = SAMPLES) -> Batch:
    tokens = torch.randint(2, VOCAB, (samples, LENGTH))
    return {"input_ids": tokens, "labels": tokens}
