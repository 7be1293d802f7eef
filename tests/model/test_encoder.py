"""The transformer as an encoder: a plain statement of it, both sides, documents, its loss."""

from __future__ import annotations

import dataclasses
import math
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.sections import IGNORED
from offloadtrain.integrations.own_model import NoClassError, class_name
from offloadtrain.model.language_model import OwnModel, Sampling
from offloadtrain.model.layers import rotate
from offloadtrain.model.transformer import LossTerms, Transformer, TransformerBlock
from tests.model.test_transformer import GPT2, LENGTHS, LLAMA, POSITIONS_T, tokens_of

SHAPES = [dataclasses.replace(shape, objective="mlm") for shape in (LLAMA, GPT2)]
BOTH = pytest.mark.parametrize("shape", SHAPES, ids=["llama", "gpt2"])


def attended(block: TransformerBlock, x_TD: Tensor, shape: ModelShape, rotary: object) -> Tensor:
    """Attention of one document, scores and softmax written out: every token sees every other."""
    layer, width = block.attention, shape.head_dim
    heads = layer.qkv(x_TD).view(len(x_TD), -1, width).transpose(0, 1)
    q, k, v = heads.split((shape.num_heads, shape.kv_heads, shape.kv_heads))
    if rotary is not None:
        q, k = (rotate(part[None], *cast(tuple[Tensor, Tensor], rotary))[0] for part in (q, k))
    k, v = (part.repeat_interleave(shape.num_heads // shape.kv_heads, 0) for part in (k, v))
    mixed = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(width), 2) @ v
    return cast(Tensor, layer.out(mixed.transpose(0, 1).flatten(1)))


def plain_logits(model: Transformer, tokens_T: Tensor) -> Tensor:
    """One document, in full: (T, V)."""
    shape, count = model.shape, len(tokens_T)
    x, rotary = model.embedding(tokens_T), None
    if shape.positions == "learned":
        x = x + model.positions(torch.arange(count))
    else:
        rotary = model.positions(count, None)
    for module in model.blocks:
        block = cast(TransformerBlock, module)
        x = x + attended(block, block.attention_norm(x), shape, rotary)
        x = x + block.mlp(block.mlp_norm(x))
    return cast(Tensor, model.head(model.norm(x)))


@BOTH
def test_logits_and_loss_are_those_of_a_plain_encoder(shape: ModelShape) -> None:
    model, tokens_BT = Transformer(shape), tokens_of(shape)
    targets_BT = tokens_of(shape, seed=2)
    drawn_BT = torch.rand(targets_BT.shape, generator=torch.Generator().manual_seed(3))
    targets_BT[drawn_BT > 0.15] = IGNORED
    targets_BT[0, 0] = 5
    documents = [part for row in tokens_BT for part in row.split(LENGTHS)]
    expected_BTV = torch.cat([plain_logits(model, document) for document in documents]).view(
        2, 24, -1
    )
    positions_BT = POSITIONS_T.expand_as(tokens_BT)
    found_BTV = model(tokens_BT, positions_BT=positions_BT)
    torch.testing.assert_close(found_BTV, expected_BTV, rtol=1e-5, atol=1e-6)
    count = int((targets_BT != IGNORED).sum())
    expected = F.cross_entropy(expected_BTV.flatten(0, 1), targets_BT.flatten())
    for terms in (None, LossTerms()):
        model.chunked_loss = terms
        loss = model(tokens_BT, targets_BT, positions_BT=positions_BT, divisor=count)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@BOTH
def test_a_token_sees_both_sides_of_its_document_and_no_other(shape: ModelShape) -> None:
    model, tokens_BT = Transformer(shape).eval(), tokens_of(shape, batch=1)
    other_BT = tokens_BT.clone()
    last_of_third = sum(LENGTHS[:3]) - 1
    other_BT[0, last_of_third] = (tokens_BT[0, last_of_third] + 1) % shape.vocab_size
    positions_BT = POSITIONS_T.expand_as(tokens_BT)
    packed = [model(item, positions_BT=positions_BT)[0] for item in (tokens_BT, other_BT)]
    moved_T = (packed[0] != packed[1]).any(1)
    document_T = (torch.arange(24) >= sum(LENGTHS[:2])) & (torch.arange(24) <= last_of_third)
    assert torch.equal(moved_T, document_T)
    assert (model(tokens_BT)[0] != model(other_BT)[0]).any(1).all()


def test_it_has_no_class_and_writes_no_text() -> None:
    with pytest.raises(NoClassError, match=r"is an encoder as model.objective = .mlm. trains"):
        class_name(SHAPES[0])
    with pytest.raises(ConfigError, match="continues no text: offloadtrain eval measures it"):
        OwnModel(Transformer(SHAPES[0])).generate(tokens_of(SHAPES[0]), 3, Sampling())
