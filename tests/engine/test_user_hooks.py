"""Hooks, modes and replaced parameters of the user's around and inside of streamed and recomputed
layers: losses and weights are those of a plain torch loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import offloadtrain as ot
from offloadtrain.runtime.lanes import on_lanes
from offloadtrain.runtime.lanes.seeded import SeededLanes
from tests import levels

PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident": {},
    "one slot": {"working": "host", "device_slots": 1},
    "recomputed": {"working": "host", "activation": "recompute"},
    "inputs offloaded": {"activation": "offload"},
}


class Layer(nn.Module):
    """`pack`: of hooks that the layer pushes itself, as those who compress activations do."""

    pack: Callable[[Tensor], Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def inside(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.outer(torch.tanh(self.inner(x)))
        return result

    def forward(self, x: Tensor) -> Tensor:
        if self.pack is None:
            return self.inside(x)
        with saved_tensors_hooks(self.pack, lambda packed: packed):
            return self.inside(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.call: Callable[[nn.Module, Tensor], Any] = lambda layer, x: layer(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = self.call(layer, x)
        result: Tensor = self.head(x)
        return result


def keeps(tensor: Tensor) -> Tensor:
    return tensor


def detaches(tensor: Tensor) -> Tensor:
    return tensor.detach()


def copies(tensor: Tensor) -> Tensor:
    return tensor.clone()


def packs_inside(pack: Callable[[Tensor], Tensor], model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        layer.pack = pack
    loss: Tensor = model(x).square().mean()
    return loss


def packs_around(model: Any, x: Tensor) -> Tensor:
    with saved_tensors_hooks(keeps, keeps):
        loss: Tensor = model(x).square().mean()
    return loss


def saves_some(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def selects_what_is_saved(model: Any, x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, saves_some)
    model.call = partial(checkpoint, use_reentrant=False, context_fn=contexts)
    loss: Tensor = model(x).square().mean()
    return loss


def trains_fast_weights(model: Any, x: Tensor) -> Tensor:
    """A step of meta-learning: the loss is that of weights which a gradient has changed."""
    params = dict(model.named_parameters())
    inner = functional_call(model, params, (x,)).square().mean()
    grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads, strict=True)}
    loss: Tensor = functional_call(model, fast, (x.flip(0),)).square().mean()
    return loss


def scales_gradients(model: Any, x: Tensor) -> Tensor:
    """By hooks that are registered after offload(), and see the whole gradient."""

    def scale(param: Any) -> None:
        param.grad.mul_(0.5).add_(0.01)

    params = [*model.layers.parameters()] * 2
    model.handles = [param.register_post_accumulate_grad_hook(scale) for param in params]
    loss: Tensor = model(x).square().mean()
    return loss


SITUATIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "hooks that keep": partial(packs_inside, keeps),
    "hooks that detach": partial(packs_inside, detaches),
    "hooks that copy": partial(packs_inside, copies),
    "hooks around": packs_around,
    "selective checkpoint": selects_what_is_saved,
    "fast weights": trains_fast_weights,
    "gradient hooks": scales_gradients,
}


def trained(
    loss_of: Callable[[Any, Tensor], Tensor], options: dict[str, Any] | None
) -> list[Tensor]:
    torch.manual_seed(0)
    model: Any = Model()
    optimizer: Any
    if options is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    else:
        rule = ot.AdamW(lr=1e-2, weight_decay=0.0)
        optimizer = ot.offload(model, rule, device="cpu", precision="fp32", **options)
    results: list[Tensor] = []
    for step in range(4):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for handle in model.__dict__.pop("handles", ()):
            handle.remove()
        results.append(loss.detach())
    results += [param.detach().clone() for param in model.parameters()]
    if options is not None:
        optimizer.close()
    return results


@pytest.mark.parametrize(
    ("situation", "placement", "late"),
    levels.array([*SITUATIONS], [*PLACEMENTS], [False, True], quick=2),
)
def test_as_in_a_plain_loop(situation: str, placement: str, late: bool) -> None:
    loss_of = SITUATIONS[situation]
    with on_lanes(SeededLanes(0, late=late)):
        ours = trained(loss_of, PLACEMENTS[placement])
    torch.testing.assert_close(ours, trained(loss_of, None), rtol=1e-5, atol=2e-6)
