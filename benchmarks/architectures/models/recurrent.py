"""State spaces, recurrences and convolutions over tokens, alone and between attention."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.architectures.architecture import (
    ENDS,
    GROUPED,
    LAYERS,
    Architecture,
    decoder,
    of_transformers,
)
from benchmarks.architectures.batches import VOCAB, WIDTH, Batch, draw_series

TOKENS: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, **ENDS)
STATE_SPACE: dict[str, Any] = dict(
    mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8
)
"""Mamba-2 inside a model that has attention too."""


def next_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["series"]).float(), batch["next"])


class Recurrent(nn.Module):
    """LSTMs one above the other, each of two layers."""

    def __init__(self) -> None:
        super().__init__()
        lstms = (nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True) for _ in range(LAYERS))
        self.lstms = nn.ModuleList(lstms)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, series: Tensor) -> Tensor:
        for lstm in self.lstms:
            series, _ = lstm(series)
        found: Tensor = self.head(series)
        return found


RECURRENT: dict[str, Architecture] = {
    "mamba": of_transformers("MambaForCausalLM", state_size=8, **TOKENS),
    "mamba2": of_transformers(
        "Mamba2ForCausalLM",
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=8,
        **TOKENS,
    ),
    "falcon_mamba": of_transformers("FalconMambaForCausalLM", state_size=8, **TOKENS),
    "rwkv": of_transformers("RwkvForCausalLM", **{**TOKENS, "context_length": 64}),
    "recurrent_gemma": of_transformers(
        "RecurrentGemmaForCausalLM",
        num_attention_heads=4,
        intermediate_size=64,
        attention_window_size=8,
        **TOKENS,
    ),
    "jamba": decoder(
        "JambaForCausalLM",
        num_experts=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        **GROUPED,
    ),
    "bamba": decoder("BambaForCausalLM", attn_layer_indices=[1], **STATE_SPACE, **GROUPED),
    "falcon_h1": decoder("FalconH1ForCausalLM", mamba_d_ssm=64, **STATE_SPACE, **GROUPED),
    "zamba2": decoder(
        "Zamba2ForCausalLM",
        intermediate_size=64,
        mamba_d_state=8,
        chunk_size=8,
        layers_block_type=["mamba", "hybrid", "mamba"],
    ),
    "lfm2": decoder(
        "Lfm2ForCausalLM",
        block_multiple_of=8,
        layer_types=["conv", "full_attention", "conv"],
        **GROUPED,
    ),
    "lstm": Architecture(build=Recurrent, batch=draw_series, loss_of=next_loss),
}
