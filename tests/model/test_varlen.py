"""Variable-length attention against documents that are alone, and offloaded against resident."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import offloadtrain as ot
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.model import documents
from offloadtrain.model.documents import attend_documents, document_bias, document_bounds
from offloadtrain.model.transformer import Transformer
from tests.model.test_transformer import (
    GPT2,
    LENGTHS,
    LLAMA,
    POSITIONS_T,
    check_packed_documents,
    tokens_of,
)
from tests.numerics.comparison import ADAMW, assert_same
from tests.numerics.reference import SEED, ResidentRun

ENCODER = replace(LLAMA, objective="mlm")


def varlen_kernel(
    q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, *longest: int, **how: Any
) -> Tensor:
    """As the documentation of torch's `varlen_attn` describes it, for queries (S, N, H)."""
    left, right = how["window_size"]
    assert left == -1 and q.dim() == 3 and cu_seq_q.dtype == torch.int32
    assert max(cu_seq_q.diff().tolist()) <= min(longest)
    mixed = torch.zeros_like(q)
    for begin, end in zip(cu_seq_q.tolist(), cu_seq_k.tolist()[1:], strict=False):
        heads = q.shape[1] // k.shape[1] if how["enable_gqa"] else 1
        keys, values = (x[begin:end].repeat_interleave(heads, 1) for x in (k, v))
        scores = torch.einsum("inh,jnh->nij", q[begin:end], keys)
        scores = scores * (q.shape[-1] ** -0.5 if how["scale"] is None else how["scale"])
        if right == 0:
            scores += torch.full_like(scores, float("-inf")).triu(1)
        mixed[begin:end] = torch.einsum("nij,jnh->inh", scores.softmax(-1), values)
    return mixed


@pytest.fixture(params=["by document", "kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Attend as without a kernel, or by one that stands in for torch's, which needs a GPU."""
    if request.param == "kernel":
        monkeypatch.setattr(documents, "_flash_kernel", lambda q, v: varlen_kernel)
    return str(request.param)


def test_documents_begin_with_rows_and_at_position_0() -> None:
    positions_BT = torch.tensor([[0, 1, 0, 0], [2, 3, 4, 0]])
    assert document_bounds(positions_BT).tolist() == [0, 2, 3, 4, 7, 8]
    assert document_bounds(positions_BT.to("meta")).shape == (3,)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_is_that_under_a_mask(way: str, causal: bool, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    positions_BT = POSITIONS_T.expand(2, -1).clone()
    positions_BT[1] = torch.arange(24)
    sizes = [(2, heads, 24, 8) for heads in (4, kv_heads, kv_heads)]
    inputs = [torch.randn(size, generator=generator, requires_grad=True) for size in sizes]
    bias = document_bias(positions_BT, torch.float32, causal=causal)
    expected = F.scaled_dot_product_attention(
        *inputs, attn_mask=bias, scale=0.3, enable_gqa=kv_heads != 4
    )
    bounds = document_bounds(positions_BT)
    mixed = attend_documents(*inputs, bounds, causal=causal, scale=0.3)
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(expected.shape, generator=generator)
    for actual, wanted in zip(
        torch.autograd.grad((mixed * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [LLAMA, GPT2, ENCODER], ids=["llama", "gpt2", "encoder"])
def test_packed_documents_have_the_loss_and_gradients_they_have_alone(
    way: str, shape: ModelShape
) -> None:
    check_packed_documents(shape, varlen=True)


def test_only_pairs_within_documents_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    attention = F.scaled_dot_product_attention

    def counted(query: Tensor, key: Tensor, *more: Any, **how: Any) -> Tensor:
        computed.append(len(query) * query.shape[-2] * key.shape[-2])
        return attention(query, key, *more, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    model, tokens_BT = Transformer(replace(LLAMA, num_layers=1)), tokens_of(LLAMA)
    positions_BT = POSITIONS_T.expand_as(tokens_BT)
    model(tokens_BT, positions_BT=positions_BT)
    assert computed == [2 * 24**2]
    model.varlen_attention = True
    model(tokens_BT, positions_BT=positions_BT)
    assert sum(computed[1:]) == 2 * sum(length**2 for length in LENGTHS)


PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"activation": "selective"},
    {"working": "host", "activation": "recompute"},
    {"working": "host", "activation": "offload"},
    {"state_on": "device"},
]


@pytest.mark.parametrize("options", PLACEMENTS, ids=str)
def test_offloaded_has_the_bits_of_resident(options: dict[str, Any]) -> None:
    model = Transformer(LLAMA)
    model.varlen_attention = True
    positions_BT = POSITIONS_T.expand(2, -1)

    def loss_of(module: Any, tokens_BT: Tensor) -> Tensor:
        loss: Tensor = module(tokens_BT, tokens_BT.roll(-1, 1), positions_BT=positions_BT)
        return loss

    run = ResidentRun(copy.deepcopy(model), torch.bfloat16)
    optimizer = ot.offload(model, ADAMW, device="cpu", precision="bf16", seed=SEED, **options)
    for seed in range(3):
        tokens_BT = tokens_of(LLAMA, seed=seed)
        expected = run.step([tokens_BT], loss_of)
        loss = loss_of(model, tokens_BT)
        optimizer.backward(loss)
        optimizer.step()
        assert [loss.item()] == expected
    assert_same(run, optimizer, model)
    optimizer.close()
