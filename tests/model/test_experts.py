"""Experts: against a plain loop over tokens and against Mixtral of transformers; their balance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from offloadtrain.config.model_shape import (
    ModelShape,
    mlp_params,
    num_active_params,
    num_block_params,
    num_params,
)
from offloadtrain.model import experts
from offloadtrain.model.experts import MixtureOfExperts, grouped_linear
from offloadtrain.model.transformer import LossTerms, Transformer

SWITCH = ModelShape(
    vocab_size=37,
    num_layers=2,
    d_model=32,
    num_heads=4,
    d_ff=48,
    max_seq_len=16,
    num_experts=4,
    experts_per_token=1,
)
TOP2 = replace(SWITCH, experts_per_token=2)
GELU = replace(TOP2, mlp="gelu", norm="layernorm", positions="learned", bias=True, num_experts=3)
MIXTRAL = ModelShape(
    vocab_size=32000,
    num_layers=32,
    d_model=4096,
    num_heads=32,
    num_kv_heads=8,
    d_ff=14336,
    num_experts=8,
)
"""Mixtral 8x7B: 46.7B parameters, of which 12.9B compute a token
(mistral.ai/news/mixtral-of-experts)."""
SHAPES = {"switch": SWITCH, "top 2": TOP2, "gelu": GELU}
each_product = pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "by expert"])


def mixture(shape: ModelShape, seed: int = 0) -> MixtureOfExperts:
    """Weights large enough that experts differ and the router decides."""
    torch.manual_seed(seed)
    made = MixtureOfExperts(shape)
    for param in made.parameters():
        torch.nn.init.normal_(param, 0.0, 0.3)
    return made


def inputs(shape: ModelShape, rows: int = 14) -> Tensor:
    return torch.randn(2, rows, shape.d_model, generator=torch.Generator().manual_seed(1))


def expert(made: MixtureOfExperts, number: Tensor, x_D: Tensor) -> Tensor:
    up = made.experts.up[number] @ x_D
    if not made.experts.gated:
        return made.experts.down[number] @ F.gelu(up, approximate="tanh")
    gate, value = up.chunk(2)
    return made.experts.down[number] @ (F.silu(gate) * value)


def one_by_one(made: MixtureOfExperts, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Each token through its experts, one after the other; equations 4 to 6 of Switch."""
    outputs, tokens = [], x_BTD.flatten(0, 1)
    count = made.router.out_features
    share, mean = torch.zeros(count), torch.zeros(count)
    for x_D in tokens:
        probs = (made.router.weight @ x_D).softmax(0)
        best = probs.argsort(descending=True)[: made.chosen]
        total = probs[best].sum() if made.chosen > 1 else 1.0
        outputs.append(sum(probs[item] / total * expert(made, item, x_D) for item in best))
        share[best] += 1 / (len(tokens) * made.chosen)
        mean = mean + probs / len(tokens)
    return torch.stack(outputs).view_as(x_BTD), count * (share * mean).sum()


def near(actual: Tensor, expected: Tensor) -> bool:
    """Equal but for the order of sums in fp32."""
    return bool((actual - expected).abs().max() <= 2e-6 * expected.abs().max())


def results(
    made: MixtureOfExperts, x_BTD: Tensor, actual: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    output, balance = actual
    (output.square().sum() + balance).backward()
    grads = {name: param.grad for name, param in made.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    tensors = {"output": output, "balance": balance, "input": x_BTD.grad} | grads
    return {name: value.detach().clone() for name, value in tensors.items()}  # type: ignore[union-attr]


@each_product
def test_each_token_goes_through_its_experts(
    grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, balance, and gradients of inputs, router and experts."""
    if not grouped:
        monkeypatch.setattr(experts, "has_grouped_products", lambda weight: False)
    for shape in SHAPES.values():
        check_each_token(shape)


def check_each_token(shape: ModelShape) -> None:
    made = mixture(shape)
    x_BTD = inputs(shape).requires_grad_()
    actual = results(made, x_BTD, made(x_BTD))
    x_BTD.grad = None
    made.zero_grad()
    expected = results(made, x_BTD, one_by_one(made, x_BTD))
    for name, value in expected.items():
        assert near(actual[name], value), name
    assert actual["router.weight"].abs().max() > 1e-3


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch 2.9 has no grouped products")
def test_products_by_expert_are_taken_where_no_group_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch without them, and matrices whose sides are no multiple of 16 bytes."""
    wide, odd = torch.empty(2, 8, 8), torch.empty(2, 8, 6)
    assert experts.has_grouped_products(wide) and not experts.has_grouped_products(odd)
    assert not experts.has_grouped_products(odd.mT)
    monkeypatch.delattr(F, "grouped_mm")
    assert not experts.has_grouped_products(wide)


@pytest.mark.slow
@each_product
def test_an_expert_without_tokens_gets_zeros(
    grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not grouped:
        monkeypatch.setattr(experts, "has_grouped_products", lambda weight: False)
    rows, weight = torch.randn(6, 8), torch.randn(4, 4, 8, requires_grad=True)
    ends = torch.tensor([2, 2, 6, 6], dtype=torch.int32)
    grouped_linear(rows, weight, ends).square().sum().backward()
    assert weight.grad is not None
    assert [bool(item.any()) for item in weight.grad] == [True, False, True, False]


def test_no_token_is_dropped_when_all_choose_one_expert() -> None:
    """As unbalanced as can be, which makes the balance the number of experts; chosen alike, 1."""
    made = mixture(SWITCH)
    with torch.no_grad():
        made.router.weight.zero_()
        made.router.weight[2] = 10.0
    x_BTD = inputs(SWITCH).abs()
    output, balance = made(x_BTD)
    expected, _ = one_by_one(made, x_BTD)
    assert near(output, expected)
    assert balance.item() == pytest.approx(4.0)
    made = mixture(replace(TOP2, d_model=4, num_heads=2, experts_per_token=1))
    with torch.no_grad():
        made.router.weight.copy_(torch.eye(4))
    _, balance = made(torch.eye(4).repeat(3, 1)[None] * 5.0)
    assert balance.item() == pytest.approx(1.0)


def test_parameters_are_counted() -> None:
    for shape in SHAPES.values():
        check_count(shape)
    dense = replace(TOP2, num_experts=0)
    assert num_active_params(dense) == num_params(dense)
    assert num_params(MIXTRAL) == 46_702_792_704
    assert round(num_active_params(MIXTRAL) / 1e9, 1) == 12.9


def check_count(shape: ModelShape) -> None:
    with torch.device("meta"):
        model = Transformer(shape)
    counts = {name: param.numel() for name, param in model.named_parameters()}
    assert sum(counts.values()) == num_params(shape)
    layer = {name: n for name, n in counts.items() if name.startswith("blocks.0.")}
    assert sum(layer.values()) == num_block_params(shape)
    assert sum(n for name, n in layer.items() if ".mlp." in name) == mlp_params(shape)
    of_experts = sum(n for name, n in counts.items() if ".experts." in name)
    idle = of_experts * (shape.num_experts - shape.experts_per_token) // shape.num_experts
    assert num_active_params(shape) == num_params(shape) - idle


def test_training_adds_the_balance_of_every_layer() -> None:
    """Validation, without gradients, measures cross-entropy alone."""
    for terms in (None, LossTerms()):
        check_loss(terms)


def check_loss(terms: LossTerms | None) -> None:
    tokens_BT = torch.randint(37, (2, 16), generator=torch.Generator().manual_seed(0))
    model = Transformer(replace(TOP2, router_aux_loss_coef=0.5), seed=3)
    model.chunked_loss = terms
    balances: list[Tensor] = []
    for block in model.blocks:
        block.mlp.register_forward_hook(
            lambda module, arguments, actual: balances.append(actual[1])
        )  # type: ignore[arg-type, union-attr]
    loss = model(tokens_BT, tokens_BT)
    assert len(balances) == 2
    with torch.no_grad():
        measured = model(tokens_BT, tokens_BT)
    assert loss.item() == pytest.approx((measured + 0.5 * sum(balances[:2])).item())
    plain = F.cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten())
    assert measured.item() == pytest.approx(plain.item())


REFUSED: tuple[tuple[dict[str, float], str], ...] = (
    ({"num_experts": 1}, "num_experts = 1 must be at least 2"),
    ({"num_experts": -1}, "num_experts = -1 must be at least 2, or 0"),
    ({"experts_per_token": 5}, "experts_per_token = 5 must be from 1 to num_experts = 4"),
    ({"experts_per_token": 0}, "experts_per_token = 0 must be from 1"),
    ({"router_aux_loss_coef": -0.1}, "router_aux_loss_coef = -0.1 must be a finite number"),
)


def test_what_cannot_be_is_refused_by_its_key() -> None:
    """Shapes, and a stage of a pipeline, which would lose the load-balancing loss."""
    for changes, message in REFUSED:
        with pytest.raises(ValueError, match="impossible model shape") as caught:
            Transformer(replace(TOP2, **changes))  # type: ignore[arg-type]
        assert message in str(caught.value)
    model = Transformer(TOP2)
    model.head = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"set model\.router_aux_loss_coef = 0"):
        model(torch.zeros(1, 4, dtype=torch.long))
