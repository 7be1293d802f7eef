"""A trace of a few layers, extended, is the trace of all of them; where layers differ, it is not
believed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from offloadtrain.config.offload import OffloadConfig, Precision
from offloadtrain.plan.costs.microbatch import TracedStep
from offloadtrain.plan.tracing import step as tracing
from offloadtrain.plan.tracing.alike import TRACED, Moment, Run, runs_of
from offloadtrain.plan.tracing.alike import with_skipped_layers as extend
from tests.plan.tracing.models import CONFIGS, LENGTH

Activation = Literal["keep", "recompute", "selective", "offload"]

LAYERS = 16


class Layer(nn.Module):
    def __init__(self, index: int, width: int = 32, window: int = 0) -> None:
        super().__init__()
        self.index, self.window = index, window
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        out: Tensor = x + self.down(hidden * hidden if self.window else hidden)
        return out


class ByIndex(Layer):
    """What it computes depends on where it is, and nothing that it owns says so."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.sin(x) if self.index >= LAYERS // 2 else x)


class Counting(nn.Module):
    """Its forward asks for as many layers as it was made with."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for index in range(LAYERS):
            x = self.layers[index](x)
        return x


class Dense(Counting):
    """Each layer meets what all earlier ones made."""

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer in self.layers:
            made.append(layer(torch.cat(made).view(-1, *x.shape).sum(0)))
        return made[-1]


class Gathering(Counting):
    """Each layer leaves something for the loss: a scalar, as experts do, or all that it made."""

    def __init__(self, layers: list[nn.Module], *, scalars: bool) -> None:
        super().__init__(layers)
        self.scalars = scalars

    def forward(self, x: Tensor) -> Tensor:
        left = []
        for layer in self.layers:
            x = layer(x)
            left.append(x.mean() if self.scalars else x * 1.0)
        return x + torch.stack(left).sum()


class Listed(nn.Module):
    """The model, not the layer, knows what is special; the outputs are gathered outside."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.kinds = ["wide" if at % 3 == 2 else "narrow" for at in range(LAYERS)]

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for layer, kind in zip(self.layers, self.kinds, strict=False):
            x = layer(x.repeat(2, 1) if kind == "wide" else x)[: len(x)]
            out = out + x
        return out


def made_of(make: Callable[[int], nn.Module]) -> list[nn.Module]:
    return [make(index) for index in range(LAYERS)]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "same": lambda: nn.Sequential(*made_of(Layer)),
    "alternating": lambda: nn.Sequential(*made_of(lambda at: Layer(at, window=at % 2))),
    "first ones differ": lambda: nn.Sequential(
        *made_of(lambda at: Layer(at, width=96 if at < 3 else 32)), nn.LayerNorm(16)
    ),
    "growing": lambda: nn.Sequential(*made_of(lambda at: Layer(at, width=16 + at))),
    "by index": lambda: nn.Sequential(*made_of(ByIndex)),
    "counting": lambda: Counting(made_of(Layer)),
    "dense": lambda: Dense(made_of(Layer)),
    "listed": lambda: Listed(made_of(Layer)),
    "scalars for the loss": lambda: Gathering(made_of(Layer), scalars=True),
    "outputs for the loss": lambda: Gathering(made_of(Layer), scalars=False),
}
SKIPPED = {"same": 9, "alternating": 2, "first ones differ": 6, "growing": 0}
"""Layers that are not traced; of the others, the trace decides."""


def sum_of(model: nn.Module) -> Tensor:
    total: Tensor = model(torch.empty(4, 16)).sum()
    return total


def both(
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    activation: Activation,
    precision: Precision = "fp32",
    again: int | None = None,
) -> tuple[TracedStep, TracedStep]:
    config = OffloadConfig(precision=precision, activation=activation, recompute_blocks=again)
    short = tracing.trace_step(model, loss, config, on_cpu=True)
    monkeypatch.setattr(tracing, "runs_of", lambda model, again: ())
    return short, tracing.trace_step(model, loss, config, on_cpu=True)


@pytest.mark.parametrize("name", SKIPPED)
def test_layers_that_are_alike_are_found(name: str) -> None:
    assert sum(len(run.skipped) for run in runs_of(MODELS[name]())) == SKIPPED[name]


def test_layers_that_share_a_parameter_are_all_traced() -> None:
    model = MODELS["same"]()
    assert isinstance(model, nn.Sequential)
    first, last = model[0], model[LAYERS - 1]
    assert isinstance(first, Layer) and isinstance(last, Layer)
    last.up = first.up
    assert len(runs_of(model)[0].skipped) == LAYERS - 2 - TRACED


EXTENDED = {"same", "alternating", "first ones differ", "scalars for the loss"}
"""The others are traced a second time, whole, but for "growing", which has no run."""


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["keep", "recompute", "selective", "offload"])
@pytest.mark.parametrize("name", MODELS)
def test_the_extended_trace_is_the_whole_one(
    monkeypatch: pytest.MonkeyPatch, name: str, activation: Activation
) -> None:
    believed: list[bool] = []

    def noting(moments: Sequence[Moment], run: Run) -> list[Moment] | None:
        moments_of_all = extend(moments, run)
        believed.append(moments_of_all is not None)
        return moments_of_all

    monkeypatch.setattr(tracing, "with_skipped_layers", noting)
    short, full = both(monkeypatch, MODELS[name](), sum_of, activation)
    if name == "scalars for the loss":
        # What gathers them after the last layer reads and writes those of the traced layers.
        last = f"layers.{LAYERS - 1}"
        gathering, of_all = (trace.blocks[last].forward for trace in (short, full))
        assert of_all.nbytes - gathering.nbytes <= 16 * (LAYERS - TRACED)
        gathering.nbytes = of_all.nbytes
    assert short == full
    assert any(believed) == (name in EXTENDED)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["recompute", "offload"])
@pytest.mark.parametrize(("again", "skipped"), [(8, [1, 1]), (12, [5]), (3, [6]), (0, [9])])
def test_so_is_that_of_layers_of_which_some_run_again(
    monkeypatch: pytest.MonkeyPatch, activation: Activation, again: int, skipped: list[int]
) -> None:
    model = MODELS["same"]()
    runs = runs_of(model, set(list(model)[:again]))  # type: ignore[arg-type]
    assert [len(run.skipped) for run in runs] == skipped
    short, full = both(monkeypatch, model, sum_of, activation, again=again)
    assert short == full
    assert (short.recomputed > 0) == (again > 0)
    # The first layer's input is data, without a gradient: it stays.
    moved = max(again - 1, 0) if activation == "offload" else 0
    assert len(short.block_inputs) == moved


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LONG: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: CONFIGS[name] for name in ("llama", "gemma2", "t5")},
    "experts in every second": (
        "Qwen3MoeForCausalLM",
        CONFIGS["llama"][1] | _EXPERTS | {"decoder_sparse_step": 2, "head_dim": 16},
    ),
    "first ones dense": (
        "Glm4MoeForCausalLM",
        CONFIGS["llama"][1]
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        | {"first_k_dense_replace": 3, "head_dim": 16, "n_group": 1, "topk_group": 1},
    ),
}
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")


@pytest.mark.slow
@pytest.mark.draws(0.4)
@pytest.mark.parametrize("name", _LONG)
def test_the_extended_trace_of_transformers_is_the_whole_one(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    transformers = pytest.importorskip("transformers")
    kind, values = _LONG[name]
    values = values | {key: LAYERS for key in _COUNTS if key in values}
    of_class = getattr(transformers, kind)
    config = of_class.config_class(**values)
    if "expert" in name or "dense" in name:
        config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        model = of_class(config).train()

    def loss(fake: nn.Module) -> Tensor:
        tokens = torch.empty(2, LENGTH, dtype=torch.long)
        result: Tensor = fake(input_ids=tokens, labels=tokens).loss
        return result

    assert any(run.skipped for run in runs_of(model))
    short, full = both(monkeypatch, model, loss, "recompute", "bf16")
    assert short == full
