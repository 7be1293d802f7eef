"""fp32 inputs of models with 16-bit weights, and the losses that such models compute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import offloadtrain as ot
from offloadtrain.engine import ModelError, ParameterWriteError
from tests.numerics.models import WIDTH, Chain, Layer, batches, loss_of

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
each_half = pytest.mark.parametrize("precision", HALVES)


class Denoiser(nn.Module):
    """Pixels, a timestep, labels and a mask, as diffusion and vision models get them."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.time = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.received: dict[str, Tensor] = {}

    def forward(self, pixels: Tensor, timestep: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        self.received = {"timestep": timestep, "labels": labels, "mask": mask}
        waves = torch.sin(timestep[:, None] * torch.linspace(0, 1, WIDTH))
        x = self.patch(pixels).flatten(2).mT + self.time(waves)[:, None]
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(x).mean((1, 2)), labels)


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    lowest = torch.finfo(torch.float32).min
    return {
        "pixels": torch.randn(2, 3, 4, 4, generator=generator),
        "timestep": torch.tensor([999.0, 0.0123]),
        "labels": torch.tensor([1234.5, -0.1]),
        "mask": torch.full((4, 4), lowest).triu(1),
    }


def make(cls: type[nn.Module] = Denoiser) -> nn.Module:
    torch.manual_seed(0)
    return cls()


@each_half
@pytest.mark.parametrize("options", [{}, {"working": "host"}, {"activation": "recompute"}])
def test_inputs_arrive_as_they_are_and_the_bits_are_those_of_a_model_fed_by_hand(
    precision: str, options: dict[str, Any]
) -> None:
    dtype, values = HALVES[precision], inputs()
    resident = make().to(dtype)
    by_hand = values | {"pixels": values["pixels"].to(dtype)}
    finite = torch.finfo(dtype)
    by_hand["mask"] = values["mask"].clamp(finite.min).to(dtype)
    waves = torch.sin(values["timestep"][:, None] * torch.linspace(0, 1, WIDTH))
    resident.time.register_forward_pre_hook(lambda *_: (waves.to(dtype),))
    original = F.mse_loss

    def full(output: Tensor, target: Tensor) -> Tensor:
        return original(output.float(), target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "mse_loss", full)
        expected = resident(**by_hand)
    model = make()
    optimizer = ot.offload(model, device="cpu", precision=precision, **options)
    loss = model(**values)
    assert loss.dtype is torch.float32 and loss.item() == expected.item()
    for name, value in model.received.items():
        assert value.dtype is torch.float32 and torch.equal(value, values[name]), name
    optimizer.backward(loss)
    optimizer.step()
    assert optimizer.last_step is not None


def test_true_casts_every_input_and_false_none() -> None:
    model = make()
    optimizer = ot.offload(model, device="cpu", cast_inputs=True)
    model(**inputs())
    assert model.received["timestep"].tolist() == [1000.0, 0.0123291015625]
    optimizer.close()
    optimizer = ot.offload(model, device="cpu", cast_inputs=False)
    with pytest.raises(RuntimeError, match="should be the same"):
        model(**inputs())
    optimizer.close()


class Embedded(nn.Module):
    """Gets hidden states, and hands them to its layers and to a module with its own matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[torch.dtype] = []
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.matrix = Own()
        for module in (*self.layers, self.matrix):
            module.register_forward_hook(lambda *call: self.inside.append(call[2].dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.matrix(self.layers[1](self.layers[0](hidden)) + self.matrix(hidden)).sum()


class Own(nn.Module):
    """A matrix of its own, and a router that computes in fp32 on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.router = Router()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) * self.router(x.float()).to(x.dtype)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is torch.float32
        return F.linear(x, self.weight.float()).softmax(-1)


@pytest.mark.parametrize("working", ["device", "host"])
def test_hidden_states_are_cast_where_a_layer_or_a_matrix_gets_them(working: str) -> None:
    torch.manual_seed(0)
    model = Embedded()
    optimizer = ot.offload(model, device="cpu", working=working)
    model(torch.randn(2, 5, WIDTH)).backward()
    optimizer.step()
    assert set(model.inside) == {torch.bfloat16} and len(model.inside) == 4


class Scored(Chain):
    """Computes its own loss: where, and under which function modes, is noted."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__(depth)
        self.modes: dict[str, int] = {}
        self.explodes = False
        self.layers[0].up.register_forward_pre_hook(lambda *_: self.note("layer"))

    def note(self, where: str) -> None:
        self.modes[where] = len(_get_current_function_mode_stack())

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(tokens[:, :-1]).flatten(0, 1)
        self.note("model")
        if self.explodes:
            raise KeyError
        return F.cross_entropy(logits, tokens[:, 1:].flatten()), logits


@pytest.mark.parametrize("options", [{}, {"working": "host", "activation": "recompute"}])
def test_losses_are_computed_in_fp32(options: dict[str, Any]) -> None:
    model, tokens = make(Scored), batches(1)[0]
    optimizer = ot.offload(model, device="cpu", **options)
    loss, logits = model(tokens)
    assert logits.dtype is torch.bfloat16 and loss.dtype is torch.float32
    assert loss.item() == F.cross_entropy(logits.float(), tokens[:, 1:].flatten()).item()
    optimizer.backward(loss)
    optimizer.step()
    assert model.modes == {"layer": 0, "model": 1}
    assert not _get_current_function_mode_stack()


def test_the_mode_is_off_after_the_forward_and_after_what_it_raises() -> None:
    model, tokens = make(Scored), batches(1)[0]
    optimizer = ot.offload(model, device="cpu")
    model.explodes = True
    for _ in range(2):
        with pytest.raises(KeyError):
            model(tokens)
        assert not _get_current_function_mode_stack()
    model.layers[0](torch.randn(1, 2, WIDTH))  # a layer alone
    assert not _get_current_function_mode_stack()
    model.explodes = False
    checkpoint(model, tokens, use_reentrant=False)[0].backward()
    assert not _get_current_function_mode_stack()
    copied = copy.deepcopy(model)
    loss, _ = copied(tokens)
    assert loss.dtype is torch.bfloat16 and copied.modes["model"] == 0
    optimizer.close()


def test_norms_kept_in_fp32_follow_their_masters() -> None:
    model = make(Chain)
    optimizer = ot.offload(model, ot.AdamW(lr=1e-4), device="cpu", keep_fp32=["*norm.*"])
    for tokens in batches(3):
        optimizer.backward(loss_of(model, tokens))
        optimizer.step()
    optimizer.synchronize()
    fp32_names = {n for n, p in model.named_parameters() if p.dtype is torch.float32}
    assert fp32_names == {n for n, _ in model.named_parameters() if "norm" in n}
    for name, state in optimizer.named_state():
        if name in fp32_names:
            assert torch.equal(dict(model.named_parameters())[name], state["master"])
            assert not torch.equal(state["master"], state["master"].bfloat16().float())


def test_a_pattern_that_names_nothing_or_half_of_a_module_is_told() -> None:
    with pytest.raises(ModelError, match=r"no parameter is called 'nrom'; there are embed\.weight"):
        ot.offload(make(Chain), device="cpu", keep_fp32=["nrom"])
    with pytest.raises(ModelError, match=r"name all of them, 'layers\.0\.norm\.\*'"):
        ot.offload(make(Chain), device="cpu", keep_fp32=["*norm.weight"])


class ScoredInPieces(Chain):
    """Head and loss run again in backward, so that never all logits are there."""

    def score(self, x: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        pieces = zip(self.norm(x), tokens, strict=True)
        scores = [checkpoint(self.score, *piece, use_reentrant=False) for piece in pieces]
        return torch.stack(scores).mean()


@pytest.mark.parametrize("options", [{}, {"working": "host", "activation": "recompute"}])
def test_losses_that_run_again_are_those_of_a_resident_model(options: dict[str, Any]) -> None:
    model, tokens = make(ScoredInPieces), batches(1)[0]
    resident = copy.deepcopy(model).bfloat16()
    expected = resident(tokens)
    expected.backward()
    optimizer = ot.offload(model, device="cpu", **options)
    loss = model(tokens)
    assert torch.equal(loss, expected)
    optimizer.backward(loss)
    optimizer.step()
    gradients = torch.cat([param.grad.flatten().double() for param in resident.parameters()])
    assert optimizer.grad_norm == pytest.approx(gradients.norm().item(), rel=1e-9)


class Routed(nn.Module):
    """Casts a layer of its own in forward, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(torch.float32)
        output: Tensor = self.router(self.up(x).float())
        return output


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_a_forward_casts_are_told_and_may_be_kept(frozen: bool) -> None:
    model, x = Routed(), torch.ones(3, WIDTH)
    model.router.requires_grad_(not frozen)
    optimizer = ot.offload(model, device="cpu")
    error, name = (
        (ModelError, "'router' from") if frozen else (ParameterWriteError, "'router.weight'")
    )
    with pytest.raises(error, match=rf"{name}.* torch.bfloat16.* keep_fp32=\["):
        model(x)
    model = Routed()
    optimizer = ot.offload(model, device="cpu", keep_fp32=["router.*"])
    optimizer.backward(model(x).square().mean())
    optimizer.step()
    assert optimizer.last_step is not None and not optimizer.last_step.skipped
    optimizer.close()
