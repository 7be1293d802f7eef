"""Documents packed into one row against the same documents each in a row of its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.sections import IGNORED
from offloadtrain.model.transformer import Transformer
from tests.model.test_transformer import BOTH, tokens_of

LENGTHS = (5, 1, 11, 7)
POSITIONS_T = torch.cat([torch.arange(length) for length in LENGTHS])


@BOTH
def test_packed_documents_have_the_logits_they_have_alone(shape: ModelShape) -> None:
    model, tokens_BT = Transformer(shape).eval(), tokens_of(shape)
    packed_BTV = model(tokens_BT, positions_BT=POSITIONS_T.expand_as(tokens_BT))
    alone = [model(part_BT) for part_BT in tokens_BT.split(LENGTHS, dim=1)]
    torch.testing.assert_close(packed_BTV, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-6)
    assert (packed_BTV - model(tokens_BT)).abs().max() > 1e-3


@BOTH
def test_packed_documents_have_the_gradients_they_have_alone(shape: ModelShape) -> None:
    model, tokens_BT = Transformer(shape), tokens_of(shape)
    targets_BT = tokens_of(shape, seed=2)
    targets_BT[torch.rand(targets_BT.shape, generator=torch.Generator().manual_seed(3)) < 0.4] = (
        IGNORED
    )
    count = int((targets_BT != IGNORED).sum())

    def grads(*losses: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        sum(losses).backward()  # type: ignore[union-attr]
        return [param.grad.clone() for param in model.parameters() if param.grad is not None]

    positions_BT = POSITIONS_T.expand_as(tokens_BT)
    packed = grads(model(tokens_BT, targets_BT, positions_BT=positions_BT, divisor=count))
    parts = zip(tokens_BT.split(LENGTHS, 1), targets_BT.split(LENGTHS, 1), strict=True)
    alone = grads(*(model(part, other, divisor=count) for part, other in parts))
    for part, other in zip(packed, alone, strict=True):
        torch.testing.assert_close(part, other, rtol=1e-4, atol=1e-6)


def test_llama_of_transformers_packs_the_same() -> None:
    """By its own `position_ids`, which begin anew with each document, as our positions do."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=48,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(config).eval()
    shape = ModelShape(
        vocab_size=97,
        num_layers=2,
        d_model=64,
        num_heads=4,
        num_kv_heads=2,
        d_ff=96,
        max_seq_len=48,
        norm_eps=1e-5,
        rope_theta=10000.0,
    )
    ours = Transformer(shape).eval()
    ours.load_state_dict(_weights(llama.state_dict()))
    tokens_BT = tokens_of(dataclasses.replace(shape))
    positions_BT = POSITIONS_T.expand_as(tokens_BT)
    expected_BTV = llama(tokens_BT, position_ids=positions_BT).logits
    torch.testing.assert_close(
        ours(tokens_BT, positions_BT=positions_BT), expected_BTV, rtol=1e-4, atol=1e-5
    )


def _weights(llama: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result = {
        "embedding.weight": llama["model.embed_tokens.weight"],
        "norm.weight": llama["model.norm.weight"],
        "head.weight": llama["lm_head.weight"],
    }
    for n in range(2):
        of = f"model.layers.{n}."
        qkv = [llama[f"{of}self_attn.{x}_proj.weight"] for x in "qkv"]
        up = [llama[f"{of}mlp.{x}_proj.weight"] for x in ("gate", "up")]
        result |= {
            f"blocks.{n}.attention_norm.weight": llama[f"{of}input_layernorm.weight"],
            f"blocks.{n}.attention.qkv.weight": torch.cat(qkv),
            f"blocks.{n}.attention.out.weight": llama[f"{of}self_attn.o_proj.weight"],
            f"blocks.{n}.mlp_norm.weight": llama[f"{of}post_attention_layernorm.weight"],
            f"blocks.{n}.mlp.up.weight": torch.cat(up),
            f"blocks.{n}.mlp.down.weight": llama[f"{of}mlp.down_proj.weight"],
        }
    return result
