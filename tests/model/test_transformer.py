"""The transformer: exact sizes, causality, positions, heads, ties, dtypes, initial weights."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from offloadtrain.config.model_shape import (
    SIZES,
    ModelShape,
    flops_per_token,
    num_block_params,
    num_params,
)
from offloadtrain.config.sections import IGNORED
from offloadtrain.model.layers import RotaryTables, rotary_tables
from offloadtrain.model.transformer import Transformer, TransformerBlock
from tests import levels
from tests.gpu.precision import DEVICE

LLAMA = ModelShape(
    vocab_size=97, num_layers=2, d_model=64, num_heads=8, num_kv_heads=2, max_seq_len=48
)
GPT2 = ModelShape(
    vocab_size=97,
    num_layers=2,
    d_model=64,
    num_heads=4,
    max_seq_len=48,
    positions="learned",
    norm="layernorm",
    mlp="gelu",
    tie_embeddings=True,
    bias=True,
)
BOTH = pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)],
    ids=["fp32", "bf16", "fp16"],
)


def tokens_of(shape: ModelShape, batch: int = 2, seq_len: int = 24, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocab_size, (batch, seq_len), generator=generator)


def meta(shape: ModelShape) -> Transformer:
    with torch.device("meta"):
        return Transformer(shape)


@pytest.mark.slow
def test_num_params_is_exact_for_every_named_size() -> None:
    for shape in SIZES.values():
        model = meta(shape)
        assert sum(p.numel() for p in model.parameters()) == num_params(shape)
        block_numel = sum(p.numel() for p in model.blocks[0].parameters())
        assert block_numel == num_block_params(shape)


@levels.examples(60)
@given(
    heads=st.sampled_from([(1, 1), (4, 0), (4, 2), (6, 3)]),
    head_dim=st.sampled_from([2, 6, 8]),
    d_ff=st.sampled_from([0, 10]),
    positions=st.sampled_from(["rotary", "learned"]),
    norm=st.sampled_from(["rmsnorm", "layernorm"]),
    mlp=st.sampled_from(["swiglu", "gelu"]),
    tied=st.booleans(),
    bias=st.booleans(),
)
def test_num_params_is_exact_for_any_shape(
    heads: tuple[int, int],
    head_dim: int,
    d_ff: int,
    positions: str,
    norm: str,
    mlp: str,
    tied: bool,
    bias: bool,
) -> None:
    shape = ModelShape(
        vocab_size=11,
        num_layers=2,
        d_model=heads[0] * head_dim,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        d_ff=d_ff,
        positions=positions,  # type: ignore[arg-type]
        norm=norm,  # type: ignore[arg-type]
        mlp=mlp,  # type: ignore[arg-type]
        tie_embeddings=tied,
        bias=bias,
    )
    assert sum(p.numel() for p in meta(shape).parameters()) == num_params(shape)


@BOTH
def test_flops_are_those_that_run(shape: ModelShape) -> None:
    model, tokens_BT = Transformer(shape), tokens_of(shape, batch=3, seq_len=16)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens_BT, tokens_BT).backward()
    # The counter takes the product of scores in full, and no elementwise work, as the formula.
    assert counter.get_total_flops() / tokens_BT.numel() == flops_per_token(shape, 16)


@BOTH
def test_a_future_token_changes_no_earlier_logit(shape: ModelShape) -> None:
    model, tokens_BT = Transformer(shape).eval(), tokens_of(shape)
    changed_BT = tokens_BT.clone()
    changed_BT[:, 10] = (changed_BT[:, 10] + 1) % shape.vocab_size
    before_BTV, after_BTV = model(tokens_BT), model(changed_BT)
    assert torch.equal(before_BTV[:, :10], after_BTV[:, :10])
    assert (before_BTV[:, 10:] != after_BTV[:, 10:]).any(dim=2).all()


@BOTH
@DTYPES
def test_every_dtype_runs_and_agrees_with_fp32(
    shape: ModelShape, dtype: torch.dtype, tolerance: float
) -> None:
    tokens_BT = tokens_of(shape)
    reference = Transformer(shape)(tokens_BT, tokens_BT)
    model = Transformer(shape).to(dtype)
    assert model(tokens_BT).dtype == dtype
    loss = model(tokens_BT, tokens_BT)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(reference.item(), rel=tolerance)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())


def test_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    same, again, other = Transformer(GPT2, seed=3), Transformer(GPT2, seed=3), Transformer(GPT2)
    assert torch.equal(torch.get_rng_state(), before)
    for name, weight in same.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    assert not torch.equal(same.embedding.weight, other.embedding.weight)


def test_initial_deviations_are_those_of_gpt2() -> None:
    shape = dataclasses.replace(GPT2, num_layers=8, d_model=256)
    model = Transformer(shape)
    block = model.blocks[5]
    assert isinstance(block, TransformerBlock)
    for weight in (model.embedding.weight, block.attention.qkv.weight, block.mlp.up.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (block.attention.out.weight, block.mlp.down.weight):
        assert weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert not block.mlp.up.bias.any()
    assert torch.equal(model.state_dict()["norm.weight"], torch.ones(256))


def test_dropout_acts_in_training_only() -> None:
    model, tokens_BT = Transformer(dataclasses.replace(LLAMA, dropout=0.2)), tokens_of(LLAMA)
    assert not torch.equal(model(tokens_BT), model(tokens_BT))
    model.eval()
    assert torch.equal(model(tokens_BT), model(tokens_BT))
    assert torch.equal(model(tokens_BT), Transformer(LLAMA)(tokens_BT))


def test_a_sequence_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="49 tokens does not fit max_seq_len = 48"):
        Transformer(LLAMA)(tokens_of(LLAMA, seq_len=49))


@pytest.mark.gpu
@BOTH
def test_the_gpu_agrees_and_repeats(shape: ModelShape) -> None:
    tokens_BT = tokens_of(shape)
    reference = Transformer(shape)(tokens_BT, tokens_BT)
    with DEVICE:
        model = Transformer(shape)
    assert torch.equal(model.embedding.weight.cpu(), Transformer(shape).embedding.weight)
    model = model.bfloat16()
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            model.zero_grad()
            loss = model(tokens_BT.to(DEVICE), tokens_BT.to(DEVICE))
            loss.backward()
            runs.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    finally:
        torch.use_deterministic_algorithms(False)
    assert loss.item() == pytest.approx(reference.item(), rel=2e-2)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# Rotary positions: relative, exact, and in fp32 whatever happens to the model.


COS_TP, SIN_TP = rotary_tables(16, 256, 10000.0)


def test_tables_are_filled_after_the_meta_device() -> None:
    with torch.device("meta"):
        tables = RotaryTables(16, 256, 10000.0)
    assert tables.cos_TP.is_meta
    tables = tables.to_empty(device="cpu")
    assert torch.equal(tables.cos_TP, COS_TP)
    assert torch.equal(tables.sin_TP, SIN_TP)


# Documents packed into one row against the same documents each in a row of its own.


LENGTHS = (5, 1, 11, 7)
POSITIONS_T = torch.cat([torch.arange(length) for length in LENGTHS])


@BOTH
def test_packed_documents_have_the_logits_they_have_alone(shape: ModelShape) -> None:
    model, tokens_BT = Transformer(shape).eval(), tokens_of(shape)
    packed_BTV = model(tokens_BT, positions_BT=POSITIONS_T.expand_as(tokens_BT))
    alone = [model(part_BT) for part_BT in tokens_BT.split(LENGTHS, dim=1)]
    torch.testing.assert_close(packed_BTV, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-6)
    assert (packed_BTV - model(tokens_BT)).abs().max() > 1e-3


def check_packed_documents(shape: ModelShape, *, varlen: bool) -> None:
    """Documents in one row have the loss and the gradients that they have alone; some targets do
    not count."""
    model, tokens_BT, targets_BT = Transformer(shape), tokens_of(shape), tokens_of(shape, seed=2)
    model.varlen_attention = varlen
    drawn_BT = torch.rand(targets_BT.shape, generator=torch.Generator().manual_seed(3))
    targets_BT[drawn_BT < 0.4] = IGNORED
    count = int((targets_BT != IGNORED).sum())

    def loss_and_grads(*losses: Tensor) -> list[Tensor]:
        model.zero_grad()
        total = torch.stack(losses).sum()
        total.backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        return [total.detach(), *(grad.clone() for grad in grads)]

    positions_BT = POSITIONS_T.expand_as(tokens_BT)
    packed = loss_and_grads(model(tokens_BT, targets_BT, positions_BT=positions_BT, divisor=count))
    parts = zip(tokens_BT.split(LENGTHS, 1), targets_BT.split(LENGTHS, 1), strict=True)
    alone = loss_and_grads(*(model(part, other, divisor=count) for part, other in parts))
    for actual, expected in zip(packed, alone, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@BOTH
def test_packed_documents_have_the_gradients_they_have_alone(shape: ModelShape) -> None:
    check_packed_documents(shape, varlen=False)


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
