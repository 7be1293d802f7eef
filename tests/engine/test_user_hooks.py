"""Hooks, modes and replaced parameters of the user's around and inside of streamed and recomputed
layers: losses and weights are those of a plain torch loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.func import functional_call, grad, jvp
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import offloadtrain as ot
from offloadtrain.engine import ModelError
from offloadtrain.runtime.lanes import on_lanes
from tests import levels
from tests.engine.test_parameter_reads import Model, trained
from tests.seeded_lanes import SeededLanes

PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident": {},
    "one slot": {"working": "host", "device_slots": 1},
    "recomputed": {"working": "host", "activation": "recompute"},
    "inputs offloaded": {"activation": "offload"},
}


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


RESPECT = "respect_saved_tensors_hooks"


def selects_what_is_saved(model: Any, x: Tensor, **options: bool) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, saves_some)
    model.call = partial(checkpoint, use_reentrant=False, context_fn=contexts, **options)
    loss: Tensor = model(x).square().mean()
    return loss


def trains_fast_weights(model: Any, x: Tensor) -> Tensor:
    """A step of meta-learning: the loss is that of weights which a gradient has changed."""
    params = dict(model.named_parameters())
    inner = functional_call(model, params, (x,)).square().mean()
    used = {name: param for name, param in params.items() if not name.startswith("spare")}
    grads = torch.autograd.grad(inner, list(used.values()), create_graph=True)
    fast = params | {name: p - 0.1 * g for (name, p), g in zip(used.items(), grads, strict=True)}
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


class _Reversible(torch.autograd.Function):
    """Runs a layer again in backward, whose parameters get their gradients there and None here;
    `unused` gets none at all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, unused: Tensor, *params: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(x), grads)
        return x.grad, *[None] * (len(ctx.needs_input_grad) - 1)


def delivers_no_gradients(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    for layer in model.layers:
        x = _Reversible.apply(x, layer, model.spare.weight, *layer.parameters())  # type: ignore[no-untyped-call]
    loss: Tensor = model.head(x).square().mean()
    return loss


def differentiates_forwards(model: Any, x: Tensor) -> Tensor:
    """By transforms of torch.func around the model, and around a read of weights."""
    weights = {name: param.detach() for name, param in model.named_parameters()}
    along = {name: torch.ones_like(weight) for name, weight in weights.items()}
    slope = jvp(partial(functional_call, model, args=(x,)), (weights,), (along,))[1]
    read = grad(lambda y: F.linear(y, model.layers[1].inner.weight).square().sum())(x)
    return model(x + 0.01 * slope.sum() + 0.01 * read.sum()).square().mean()  # type: ignore[no-any-return]


SITUATIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "hooks that keep": partial(packs_inside, keeps),
    "hooks that detach": partial(packs_inside, detaches),
    "hooks that copy": partial(packs_inside, copies),
    "hooks around": packs_around,
    "selective checkpoint": selects_what_is_saved,
    **(
        {"selective checkpoint with hooks": partial(selects_what_is_saved, **{RESPECT: True})}
        if RESPECT in signature(checkpoint).parameters
        else {}
    ),
    "fast weights": trains_fast_weights,
    "gradient hooks": scales_gradients,
    "transforms": differentiates_forwards,
    "functions without a gradient": delivers_no_gradients,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's, in jvp
@pytest.mark.parametrize(
    ("situation", "placement", "late"),
    levels.array([*SITUATIONS], [*PLACEMENTS], [False, True], quick=2),
)
def test_as_in_a_plain_loop(situation: str, placement: str, late: bool) -> None:
    loss_of = SITUATIONS[situation]
    with on_lanes(SeededLanes(0, late=late)):
        ours = trained(loss_of, PLACEMENTS[placement], reads=False)
    torch.testing.assert_close(ours, trained(loss_of, None, reads=False), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_gradient_by_torch_func_is_refused_before_anything_moves(placement: str) -> None:
    model = Model()
    optimizer = ot.offload(model, device="cpu", precision="fp32", **PLACEMENTS[placement])
    x, weights = torch.ones(2, 8), dict(model.named_parameters())

    def loss(values: dict[str, Tensor]) -> Tensor:
        return functional_call(model, values, (x,)).square().mean()

    with pytest.raises(ModelError, match=r"torch\.autograd\.grad\(…, create_graph=True\)"):
        grad(loss)(weights)
    optimizer.backward(model(x).square().mean())
    optimizer.step()
    optimizer.close()
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_hooks_of_nodes_that_accumulate_gradients_are_called(placement: str) -> None:
    """torch's hook of many tensors, and libraries that reach the node by a view of the parameter,
    after `offload()` and between steps."""

    def gradients(options: dict[str, Any] | None) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        params = [*model.parameters()]
        if options is None:
            run: Any = torch.optim.SGD(params, lr=0.1)
        else:
            run = ot.offload(model, ot.SGD(lr=0.1), device="cpu", precision="fp32", **options)
        norms: list[Any] = []
        nodes = []
        for step in range(3):
            if step < 2:
                register_multi_grad_hook(
                    params, lambda grads: norms.append([float(g.norm()) for g in grads])
                )
                nodes += [x.expand_as(x).grad_fn.next_functions[0][0] for x in params]
                for node in nodes[-len(params) :]:
                    node.register_hook(lambda *_: norms.append(None))
            model(torch.linspace(-1, 1, 8).view(2, 4)).square().mean().backward()
            run.step()
            run.zero_grad()
        return [norms.count(None), *filter(None, norms)]

    torch.testing.assert_close(gradients(PLACEMENTS[placement]), gradients(None))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_forward_that_is_set_on_the_class_later_is_used(placement: str) -> None:
    """As libraries replace the forwards of a family of models by their own."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    def losses(options: dict[str, Any] | None) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(8, 8) for _ in range(3)))
        if options is None:
            run: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            run = ot.offload(model, ot.SGD(lr=0.1), device="cpu", precision="fp32", **options)
        results = []
        with pytest.MonkeyPatch.context() as patch:
            for step in range(3):
                if step == 1:
                    patch.setattr(Block, "forward", nn.Linear.forward)
                loss = model(torch.linspace(-1, 1, 16).view(2, 8)).square().mean()
                loss.backward()
                run.step()
                run.zero_grad()
                results.append(loss.item())
        return results

    assert losses(PLACEMENTS[placement]) == pytest.approx(losses(None), rel=1e-6)
