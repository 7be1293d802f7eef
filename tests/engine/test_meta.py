"""A model on the meta device: made module by module, with the bits of one made at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.config.model_shape import SIZES, ModelShape
from offloadtrain.engine import ModelError
from offloadtrain.model.transformer import Transformer
from tests.numerics.comparison import assert_same, pair, train
from tests.numerics.models import Chain, batches, loss_of

SHAPES = {
    "rotary": SIZES["debug"],
    "tied": ModelShape(
        vocab_size=64,
        num_layers=3,
        d_model=32,
        num_heads=4,
        max_seq_len=16,
        positions="learned",
        norm="layernorm",
        mlp="gelu",
        tie_embeddings=True,
        bias=True,
    ),
}


def on_meta(shape: ModelShape) -> Transformer:
    with torch.device("meta"):
        return Transformer(shape)


@pytest.mark.parametrize("working", ["device", "host"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_weights_are_those_of_a_model_made_at_once(name: str, working: str) -> None:
    shape = SHAPES[name]
    made_at_once, parted = Transformer(shape, seed=3), on_meta(shape)
    params = {n: p for n, p in parted.named_parameters(remove_duplicate=False)}
    optimizer = ot.offload(
        parted, device="cpu", working=working, param_init_fn=parted.initializer(3)
    )
    for key, param in parted.named_parameters(remove_duplicate=False):
        assert param is params[key]
    masters = {key: state["master"] for key, state in optimizer.named_state()}
    expected = dict(made_at_once.named_parameters())
    assert masters.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(masters[key], value), key
    for (key, actual), (_, reference_value) in zip(
        parted.named_buffers(), made_at_once.named_buffers(), strict=True
    ):
        assert torch.equal(actual, reference_value), key
    tokens = torch.randint(0, 64, (2, 9))
    optimizer.backward(parted(tokens[:, :-1], tokens[:, 1:]))
    optimizer.step()
    assert optimizer.last_step is not None and not optimizer.last_step.skipped


def test_never_more_than_one_module_beside_the_state() -> None:
    """fp32 memory that has values and is not the engine's, while the model is being made."""
    shape = ModelShape(vocab_size=64, num_layers=12, d_model=64, num_heads=4, max_seq_len=16)
    model = on_meta(shape)
    init, most = model.initializer(0), 0

    def counting(module: nn.Module) -> None:
        nonlocal most
        init(module)
        filled = [p for p in model.parameters() if not p.is_meta and p.dtype == torch.float32]
        most = max(most, sum(p.numel() for p in filled))

    ot.offload(model, device="cpu", param_init_fn=counting).close()
    block = sum(p.numel() for p in model.blocks[0].parameters())
    assert block <= most < 1.1 * block


class WithBuffers(Chain):
    """A buffer beside parameters, one without any, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Module()
        self.shift.register_buffer("by", torch.ones(24))
        self.norm.register_buffer("scale", torch.ones(24))
        self.layers[1].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.shift.by.bfloat16()
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x) * self.norm.scale.bfloat16())


def fill(module: nn.Module) -> None:
    """Values that depend on the shape alone."""
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        tensor.copy_(torch.linspace(-0.3, 0.4, tensor.numel()).view(tensor.shape))


@pytest.mark.parametrize("options", [{}, {"working": "host", "activation": "recompute"}])
def test_any_model(options: dict[str, Any]) -> None:
    real = WithBuffers()
    with torch.no_grad():
        for module in real.modules():
            fill(module)
    with torch.device("meta"):
        parted = WithBuffers()
    resident, other, _ = pair(copy.deepcopy(real))
    other.close()
    optimizer = ot.offload(
        parted,
        ot.AdamW(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
        device="cpu",
        param_init_fn=torch.no_grad()(fill),
        **options,
    )
    for tokens in batches(3):
        assert train(optimizer, parted, [tokens]) == resident.step([tokens], loss_of)
    assert_same(resident, optimizer, parted)


def test_a_meta_parameter_without_a_way_to_fill_it() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="'weight' is on the meta device: say how"):
        ot.offload(model, device="cpu")
