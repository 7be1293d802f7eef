"""Causal language models: mixtures of experts."""

from __future__ import annotations

from typing import Any

from benchmarks.architectures.architecture import (
    ENDS,
    GROUPED,
    LAYERS,
    Architecture,
    decoder,
    of_transformers,
)
from benchmarks.architectures.batches import VOCAB, WIDTH

ROUTED: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2)
LATENT: dict[str, Any] = dict(
    intermediate_size=64,
    moe_intermediate_size=32,
    num_key_value_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
)
"""DeepSeek's attention over a latent, and its experts."""
EXPERTS: dict[str, Architecture] = {
    "qwen2_moe": decoder(
        "Qwen2MoeForCausalLM",
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        **ROUTED,
        **GROUPED,
    ),
    "qwen3_moe": decoder(
        "Qwen3MoeForCausalLM", head_dim=8, moe_intermediate_size=32, **ROUTED, **GROUPED
    ),
    "qwen3_next": decoder(
        "Qwen3NextForCausalLM",
        head_dim=8,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        **ROUTED,
        **GROUPED,
    ),
    "mixtral": decoder("MixtralForCausalLM", num_local_experts=4, **GROUPED),
    "phimoe": decoder("PhimoeForCausalLM", num_local_experts=4, **GROUPED),
    "granitemoe": decoder("GraniteMoeForCausalLM", num_local_experts=4, **GROUPED),
    "jetmoe": of_transformers(
        "JetMoeForCausalLM",
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_key_value_heads=2,
        kv_channels=8,
        intermediate_size=64,
        num_local_experts=4,
        max_position_embeddings=64,
        **ENDS,
    ),
    "olmoe": decoder("OlmoeForCausalLM", **ROUTED, **GROUPED),
    "ernie4_5_moe": decoder(
        "Ernie4_5_MoeForCausalLM",
        config="Ernie4_5_MoeConfig",
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=32,
        **GROUPED,
    ),
    "dbrx": of_transformers(
        "DbrxForCausalLM",
        vocab_size=VOCAB,
        d_model=WIDTH,
        n_heads=4,
        n_layers=LAYERS,
        max_seq_len=64,
        attn_config=dict(kv_n_heads=2, clip_qkv=8, rope_theta=10000.0),
        ffn_config=dict(ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2),
        **ENDS,
    ),
    "gpt_oss": decoder(
        "GptOssForCausalLM",
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        **GROUPED,
    ),
    "llama4": decoder(
        "Llama4ForCausalLM",
        config="Llama4TextConfig",
        head_dim=8,
        num_local_experts=4,
        intermediate_size_mlp=64,
        attention_chunk_size=8,
        **GROUPED,
    ),
    "glm4_moe": decoder(
        "Glm4MoeForCausalLM",
        head_dim=8,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        **GROUPED,
    ),
    "deepseek_v2": decoder("DeepseekV2ForCausalLM", topk_method="group_limited_greedy", **LATENT),
    "deepseek_v3": decoder("DeepseekV3ForCausalLM", **LATENT),
}
