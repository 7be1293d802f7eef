"""Layers that keep something between calls run again in backward as if they had run once."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.engine.autograd import recompute
from tests.numerics.models import WIDTH, Layer

BATCH, LAYERS = 6, 3


class Normed(Layer):
    """Running statistics: kernels of torch change them unseen by version counters."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.statistics(x))


class Starting(Normed):
    """In its first forward the running mean stays zero, and the variance does not stay."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x if self.calls > 1 else x * 0)


class Iterating(Layer):
    """A power iteration: the output depends on a buffer that it changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("direction", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.direction.mul_(0.5).add_(x.float().mean(0))
        return super().forward(x + self.direction.to(x.dtype))


class Following(Layer):
    """A recurrence: the output depends on an attribute that it replaces."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = 0 if self.last is None else self.last
        output = super().forward(x + before)
        self.last = output.detach()
        return output


class Remembering(nn.Module):
    last: Tensor | int = 0

    def forward(self, x: Tensor) -> Tensor:
        output = x + self.last
        self.last = x.detach()
        return output


class Growing(Layer):
    """Gets a module with a recurrence after its first call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.memory = Remembering()
        return super().forward(x if self.calls < 2 else self.memory(x))


class Drawing(Layer):
    """Noise from every generator that torch's checkpoint does not restore."""

    def __init__(self) -> None:
        super().__init__()
        self.torchs = torch.Generator().manual_seed(1)
        self.pythons = random.Random(2)
        self.numpys = np.random.default_rng(3)
        self.legacy = np.random.RandomState(4)

    def forward(self, x: Tensor) -> Tensor:
        scales = [
            random.random(),
            np.random.randn(),  # every second one was computed with the one before
            self.pythons.gauss(0, 1),
            self.numpys.standard_normal(),
            self.legacy.randn(),
        ]
        mask = torch.rand(x.shape, generator=self.torchs) > 0.3
        return x + super().forward(x * mask * sum(scales))


class Paired(Layer):
    """Draws a normal number: every second one was computed with the one before."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * random.gauss(0, 1))


class Dropped(Layer):
    """Stochastic depth that begins late, in one layer, from Python's generator and NumPy's."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls < 3:
            return super().forward(x)
        return super().forward(x * (random.random() + np.random.rand() + np.random.randn()))


class Stack(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        output: Tensor = self.head(x)
        return output


def layer_state(model: nn.Module) -> dict[str, Tensor]:
    """What the layers keep after the last call."""
    attributes = {n: m.last for n, m in model.named_modules() if isinstance(m, Following)}
    states = {n: m.torchs.get_state() for n, m in model.named_modules() if isinstance(m, Drawing)}
    attributes |= states
    result = {**dict(model.named_buffers()), **attributes}
    return {name: value.clone() for name, value in result.items() if value is not None}


def train(
    layer: Callable[[], nn.Module], activation: str, *, frozen: int = 0, ahead: bool = False
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Three steps of two microbatches; the first `frozen` ones in eval mode.

    `ahead`: both forwards of a step run before both backwards.
    """
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Stack(layer)
    optimizer = ot.offload(
        model, ot.AdamW(lr=1e-2), device="cpu", grad_accum_steps=2, activation=activation
    )
    source = torch.Generator().manual_seed(1)
    losses: list[float] = []
    for step in range(3):
        model.train(step >= frozen)
        waiting: list[Tensor] = []
        for _ in range(2):
            loss = model(torch.randn(BATCH, WIDTH, generator=source)).float().square().mean()
            losses.append(loss.item())
            waiting.append(loss)
            while waiting and (not ahead or len(waiting) == 2):
                optimizer.backward(waiting.pop(0))
                if ahead and waiting:
                    optimizer.backward(waiting.pop())
        optimizer.step()
    masters = {name: state["master"].clone() for name, state in optimizer.named_state()}
    left = layer_state(model) | {"drawn next": torch.tensor([random.random(), np.random.randn()])}
    optimizer.close()
    return losses, masters, left


LAYER_KINDS = [Normed, Starting, Iterating, Following, Growing, Drawing, Paired, Dropped]


@pytest.mark.parametrize("activation", ["recompute", "offload"])
@pytest.mark.parametrize("layer", LAYER_KINDS)
@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_bits_are_those_of_kept_activations(
    layer: Callable[[], nn.Module], activation: str, ahead: bool
) -> None:
    losses, masters, left = train(layer, activation, ahead=ahead)
    expected, expected_masters, expected_left = train(layer, "keep", ahead=ahead)
    assert losses == expected
    for actual, resident in ((masters, expected_masters), (left, expected_left)):
        assert actual.keys() == resident.keys()
        assert all(torch.equal(value, resident[name]) for name, value in actual.items())
    assert left


@pytest.mark.parametrize("layer", [Paired, Dropped])
def test_so_they_are_where_the_generator_s_memory_is_not_known(
    layer: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "_HAS_KNOWN_LAYOUT", False)
    losses, masters, _ = train(layer, "recompute")
    expected, expected_masters, _ = train(layer, "keep")
    assert losses == expected
    assert all(torch.equal(value, expected_masters[name]) for name, value in masters.items())


def test_statistics_that_begin_to_run_later_are_found() -> None:
    """In eval mode they do not change, so the first forward shows nothing."""
    _, masters, left = train(Normed, "recompute", frozen=1)
    _, expected_masters, expected_left = train(Normed, "keep", frozen=1)
    assert all(torch.equal(value, expected_masters[name]) for name, value in masters.items())
    assert all(torch.equal(value, expected_left[name]) for name, value in left.items())
    assert left["layers.0.statistics.num_batches_tracked"] == 4
