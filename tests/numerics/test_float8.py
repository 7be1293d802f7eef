"""`fp8`: the bits of a resident model that torchao has converted, in every placement."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import offloadtrain as ot
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.offload import OptionError
from offloadtrain.engine.autograd import float8
from offloadtrain.model.transformer import Transformer
from tests import levels
from tests.numerics.comparison import assert_same, follow
from tests.numerics.models import VOCAB, batches
from tests.numerics.reference import ResidentRun

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torchao and torch's compiler warn of torch
    pytest.mark.skipif(find_spec("torchao") is None, reason="no torchao"),
]
WIDTH = 32
RULE = ot.AdamW(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
PLACED: dict[str, dict[str, Any]] = {
    "device": {},
    "streamed": {"working": "host"},
    "recomputed": {"working": "host", "activation": "recompute"},
    "offloaded": {"activation": "offload"},
    "saved": {"working": "host", "activation": "offload_saved", "offload_saved_above": 0},
    "speculative": {"update": "speculative", "clip_norm": 1e9},
    "clipped": {"clip_norm": 0.1, "grad_accum_steps": 2, "state_on": {"device": 0.3}},
}


class Layer(nn.Module):
    """An MLP, and what stays in 16 bits: a router, an adapter and a narrow matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.router = nn.Linear(WIDTH, 16, bias=False)
        self.adapter = nn.Linear(WIDTH, 4, bias=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 16, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weight = self.router(h).softmax(-1).amax(-1, keepdim=True)
        return x + weight * self.down(F.gelu(self.up(h))) + self.low(h)

    def low(self, h: Tensor) -> Tensor:
        return (self.adapter(h).sum(-1) + self.lora_A["default"](h).mean(-1)).unsqueeze(-1)


class Model(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 48, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def converted(model: nn.Module, recipe: str, *, emulate: bool = True) -> nn.Module:
    """Return a copy of the model as torchao's own function converts it."""
    torchao = pytest.importorskip("torchao.float8")
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    config = torchao.Float8LinearConfig(
        **vars(config) | {"emulate": emulate, "pad_inner_dim": True}
    )
    ends = (".up", ".down")
    return torchao.convert_to_float8_training(
        copy.deepcopy(model), config=config, module_filter_fn=lambda _, name: name.endswith(ends)
    )


def made() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.mark.cover(1, levels.ALL)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("options", PLACED.values(), ids=PLACED.keys())
def test_the_bits_of_a_converted_model(options: dict[str, Any], recipe: str) -> None:
    model = made()
    arguments = {"clip_norm": options.get("clip_norm")}
    resident = ResidentRun(converted(model, recipe), torch.bfloat16, **arguments)
    optimizer = ot.offload(model, RULE, device="cpu", fp8=recipe, **options)
    follow(resident, optimizer, model, batches(4), options.get("grad_accum_steps", 1))
    assert_same(resident, optimizer, model)
    assert type(model.layers[0].up).__name__ == "Float8Linear"
    assert type(model.layers[0].router) is type(model.head) is nn.Linear


def test_modules_come_back_with_their_hooks() -> None:
    model = made()
    modules = list(model.modules())
    calls: list[nn.Module] = []
    removed = model.layers[0].up.register_forward_hook(lambda m, _, out: calls.append(m))
    model.layers[0].up.register_forward_hook(lambda m, _, out: calls.append(m))
    optimizer = ot.offload(model, RULE, device="cpu", fp8="tensorwise")
    removed.remove()
    model(batches(1)[0])
    assert len(calls) == 1 and calls[0] is model.layers[0].up and calls[0] is not modules[3]
    model.eval()
    optimizer.close()
    assert list(model.modules()) == modules and not any(module.training for module in modules)
    model(batches(1)[0])
    assert len(calls) == 2


def _without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)


REFUSED: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], dict[str, Any], int]] = {
    "needs torchao": (_without_torchao, {}, 3),
    "leave it out, or set precision = 'bf16'": (lambda _: None, {"precision": "fp16"}, 3),
    "no nn.Linear in a list of layers of Model": (lambda _: None, {}, 1),
    "is not one of 'off', 'tensorwise', 'rowwise'": (lambda _: None, {"fp8": "blockwise"}, 3),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, options, depth = REFUSED[message]
    prepare(monkeypatch)
    model = Model(depth)
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises((OptionError, ot.ModelError), match=message):
        ot.offload(model, RULE, device="cpu", **{"fp8": "tensorwise", **options})
    assert {name: type(module) for name, module in model.named_modules()} == before


@pytest.mark.parametrize(("capability", "compiled"), [((8, 6), True), ((8, 9), False)])
def test_what_a_gpu_can(
    capability: tuple[int, int],
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    device = torch.device("cuda")
    if capability < (8, 9):
        with pytest.raises(OptionError, match=r"GPU has no FP8 products.*8\.9"):
            float8._check_device("fp8 = 'tensorwise'", device, is_compiled=compiled)
    else:
        with caplog.at_level(logging.WARNING):
            float8._check_device("fp8 = 'tensorwise'", device, is_compiled=compiled)
        assert "without compile_blocks" in caplog.text


def test_weights_that_are_drawn_by_class() -> None:
    """Modules without values are filled after the conversion, by functions that ask for a class."""
    shape = ModelShape(vocab_size=64, num_layers=2, d_model=WIDTH, num_heads=2, max_seq_len=16)
    with torch.device("meta"):
        model = Transformer(shape)
    drawn = Transformer(shape)
    drawn.init_weights(3)
    options: dict[str, Any] = {"device": "cpu", "fp8": "rowwise", "working": "host"}
    first = ot.offload(drawn, RULE, **options)
    second = ot.offload(model, RULE, param_init_fn=model.initializer(3), **options)
    tokens = torch.randint(64, (2, 8))
    assert torch.equal(model(tokens), drawn(tokens))
    first.close()
    second.close()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"working": "host"}, {"activation": "recompute"}])
def test_compiled_layers(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in FP8 share one code, as others do."""
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward: compiled(forward, backend=counter))
    torch.manual_seed(0)
    model = Model(torch._dynamo.config.recompile_limit + 2)
    plain_model = converted(model, "tensorwise")
    for layer in plain_model.layers:
        layer.forward = torch.compile(layer.forward)
    resident = ResidentRun(plain_model, torch.bfloat16)
    options = options | {"compile_blocks": True, "fp8": "tensorwise"}
    optimizer = ot.offload(model, RULE, device="cpu", **options)
    follow(resident, optimizer, model, batches(3))
    assert counter.frame_count == 2
    assert_same(resident, optimizer, model)


def test_a_failed_offload_leaves_the_model_as_it_was() -> None:
    model = made()
    modules = list(model.modules())
    with pytest.raises(ot.HostMemoryError):
        ot.offload(model, RULE, device="cpu", fp8="tensorwise", host_memory_limit=1000)
    assert list(model.modules()) == modules


def test_a_quantized_base_stays_on_the_device() -> None:
    """Its values are in other tensors, at no address of its own; adapters beside it are trained."""
    quantization = pytest.importorskip("torchao.quantization")

    def losses(offloaded: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
        model.requires_grad_(False)
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        model.append(nn.Linear(32, 32))
        optimizer: torch.optim.Optimizer
        if offloaded:
            optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", precision="fp32")
        else:
            optimizer = torch.optim.AdamW(model[-1].parameters(), lr=1e-2, fused=True)
        result = []
        for _ in range(3):
            loss = model(torch.ones(2, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            result.append(loss.item())
        return result

    assert losses(offloaded=True) == losses(offloaded=False)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    quantization.quantize_(model.requires_grad_(False), quantization.Int8WeightOnlyConfig())
    model.append(nn.Linear(32, 32))
    with pytest.raises(ot.ModelError, match=r"'0\.weight' is a Int8Tensor, which"):
        ot.offload(model, ot.AdamW(), device="cpu", precision="fp32", working="host")
