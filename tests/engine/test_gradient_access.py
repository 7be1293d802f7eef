"""`.grad` between backward and `step()`, read and changed as in a torch loop, on any lanes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import offloadtrain as ot
from offloadtrain.engine import EngineError
from offloadtrain.engine.gradients import GradientAccessError, GradientView
from offloadtrain.runtime.lanes import on_lanes
from tests import levels
from tests.numerics.models import Chain, batches, loss_of
from tests.seeded_lanes import SeededLanes

PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident": {},
    "resident, clipped": {"clip_norm": 0.2},
    "streamed": {"working": "host", "device_slots": 1, "activation": "recompute"},
    "microbatches": {"grad_accum_steps": 2, "clip_norm": 0.2},
    "sums on the device": {"grad_accum_steps": 2, "sums_on": "device", "clip_norm": 0.2},
    "sums on both": {"grad_accum_steps": 2, "sums_on": {"device": 0.4}, "clip_norm": 0.2},
    "state on the device": {"state_on": "device", "clip_norm": 0.2},
    "state on the disk": {"state_on": "disk"},
    "speculative": {"update": "speculative"},
    "speculative, clipped": {"update": "speculative", "clip_norm": 0.2},
}
STEPS = 4
EPS = 1e-4
"""Large, so that rounding of gradients near zero is not amplified."""

Backward = Callable[[Any], None]
Losses = list[Callable[[], Tensor]]
"""A forward of each microbatch."""
Habit = Callable[[nn.Module, Losses, Backward], Any]
"""Runs the backwards of a step over its losses, and does something with the gradients. Returns
values to compare."""


def backwards(losses: Losses, backward: Backward) -> None:
    for loss in losses:
        backward(loss())


def only_reads(net: nn.Module, losses: Losses, backward: Backward) -> Any:
    read = []
    for loss in losses:
        backward(loss())
        read.append([param.grad.norm() for param in net.parameters()])
    gradients = [param.grad for param in net.parameters()]
    return read, get_total_norm(gradients), torch.cat([grad.view(-1) for grad in gradients]).sum()


def clips_all(net: nn.Module, losses: Losses, backward: Backward) -> Any:
    backwards(losses, backward)
    return clip_grad_norm_(net.parameters(), 0.3, error_if_nonfinite=True)


def clips_all_twice_and_reads(net: nn.Module, losses: Losses, backward: Backward) -> Any:
    backwards(losses, backward)
    first = clip_grad_norm_(list(net.parameters()), 0.3)
    second = clip_grad_norm_(net.parameters(), 0.1, foreach=True)
    return first, second, net.head.weight.grad.norm(), net.embed.weight.grad.norm()


def clips_by_largest(net: nn.Module, losses: Losses, backward: Backward) -> Any:
    backwards(losses, backward)
    return clip_grad_norm_(net.parameters(), 0.01, norm_type=float("inf"))


def clips_parts(net: nn.Module, losses: Losses, backward: Backward) -> Any:
    backwards(losses, backward)
    parts = net.head, net.layers[1]
    return [clip_grad_norm_(part.parameters(), 0.05) for part in parts]


def clips_values(net: nn.Module, losses: Losses, backward: Backward) -> Any:
    backwards(losses, backward)
    clip_grad_value_(net.parameters(), 1e-2)


def edits_in_place(net: nn.Module, losses: Losses, backward: Backward) -> Any:
    backwards(losses, backward)
    weights = net.head.weight
    weights.grad[:3] = 0
    weights.grad.data.clamp_(-1e-2, 1e-2)
    weights.grad += 1e-3 * weights
    net.embed.weight.grad.data[:5] *= 2
    torch._foreach_mul_([param.grad for param in net.layers[0].parameters()], 0.5)
    return weights.grad.sum()


def replaces(net: nn.Module, losses: Losses, backward: Backward) -> Any:
    backwards(losses, backward)
    for param in net.layers.parameters():
        param.grad = param.grad.sign() * 1e-2
    net.head.weight.grad = torch.zeros_like(net.head.weight)
    net.layers[0].zero_grad(set_to_none=False)


def keeps_views(net: nn.Module, losses: Losses, backward: Backward) -> Any:
    """Surgery between two losses: gradients are stored without a copy while others arrive."""
    backward(losses[0]())
    stored = [param.grad for param in net.parameters()]
    parts = [grad.view(-1)[:2] for grad in stored]
    net.zero_grad()
    backwards([*losses[1:], losses[0]], lambda loss: backward(loss.square()))
    for param, grad in zip(net.parameters(), stored, strict=True):
        param.grad = param.grad + grad * 0.5
    return [part.sum() for part in parts]


def assigns(net: nn.Module, losses: Losses, backward: Backward) -> Any:
    """No backward at all."""
    params = list(net.parameters())
    of_loss = [torch.autograd.grad(loss(), params) for loss in losses]
    for param, *grads in zip(params, *of_loss, strict=True):
        param.grad = torch.stack(grads).sum(0).sign() * 1e-2


def scales(net: nn.Module, losses: Losses, backward: Backward) -> Any:
    """What `torch.amp.GradScaler` does with gradients, and the noise of private training."""
    backwards(losses, lambda loss: backward(loss * 64))
    scaler = torch.amp.GradScaler("cpu", init_scale=64)
    scaler.scale(torch.ones(()))
    scaler.unscale_(SCALED[0])
    generator = torch.Generator().manual_seed(7)
    for param in net.parameters():
        param.grad.add_(torch.randn(param.shape, generator=generator), alpha=1e-3)


SCALED: list[torch.optim.Optimizer] = []
"""The optimizer of the step that runs."""
HABITS: list[Habit] = [
    only_reads,
    clips_all,
    clips_all_twice_and_reads,
    clips_by_largest,
    clips_parts,
    clips_values,
    edits_in_place,
    replaces,
    keeps_views,
    assigns,
    scales,
]


def loss_of_microbatch(net: nn.Module, tokens: Tensor, microbatches: int) -> Tensor:
    return loss_of(net, tokens) / microbatches


def trained(habit: Habit, options: dict[str, Any], *, resident: bool = False) -> list[Any]:
    """Train some steps; `resident`: in torch."""
    torch.manual_seed(0)
    net, results, microbatches = Chain(), [], options.get("grad_accum_steps", 1)
    if resident:
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=EPS, fused=True)
    else:
        rule = ot.AdamW(lr=1e-2, eps=EPS)
        optimizer = ot.offload(net, rule, device="cpu", precision="fp32", **options)
    SCALED[:] = [optimizer]
    for step in range(STEPS):
        tokens = batches(microbatches, seed=step)
        losses = [partial(loss_of_microbatch, net, each, microbatches) for each in tokens]
        results.append(habit(net, losses, lambda loss: loss.backward()))
        if resident and "clip_norm" in options:
            clip_grad_norm_(net.parameters(), options["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
    return [results, {name: value.clone() for name, value in net.state_dict().items()}]


@pytest.mark.parametrize(
    ("habit", "placement", "late"), levels.array(HABITS, [*PLACEMENTS], [True, False])
)
def test_gradients_are_those_of_torch(
    habit: Habit, placement: str, late: bool, tmp_path: Any
) -> None:
    options = dict(PLACEMENTS[placement])
    if options.get("state_on") == "disk":
        options["scratch_dir"] = str(tmp_path)
    with on_lanes(SeededLanes(0, late=True)) if late else nullcontext():
        result = trained(habit, options)
    torch.testing.assert_close(
        result, trained(habit, options, resident=True), rtol=2e-6, atol=2e-6, check_dtype=False
    )


@pytest.mark.parametrize("placement", ["resident", "streamed", "speculative"])
def test_reading_changes_no_bit(placement: str) -> None:
    def weights(habit: Habit) -> dict[str, Tensor]:
        return trained(habit, PLACEMENTS[placement])[1]  # type: ignore[no-any-return]

    def nothing(net: nn.Module, losses: Losses, backward: Backward) -> None:
        backwards(losses, backward)

    assert {n: v.tolist() for n, v in weights(only_reads).items()} == {
        n: v.tolist() for n, v in weights(nothing).items()
    }


def offloaded(**options: Any) -> tuple[ot.OffloadOptimizer, Chain]:
    torch.manual_seed(0)
    net = Chain()
    optimizer = ot.offload(net, ot.AdamW(lr=1e-2), device="cpu", **options)
    optimizer.backward(loss_of(net, batches(1)[0]))
    return optimizer, net


def test_a_look_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, net = offloaded()
    drains: list[None] = []
    monkeypatch.setattr(optimizer.lanes, "synchronize", lambda: drains.append(None))
    weight = net.head.weight
    assert hasattr(weight, "grad") and weight.grad is not None and weight.grad.shape == weight.shape
    torch.optim.SGD(net.parameters()).zero_grad()  # torch's own optimizers find none
    assert not drains and isinstance(weight.grad, GradientView)
    weight.grad.sum()
    weight.grad.mean()
    assert len(drains) == 1


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_step_of_another_optimizer_is_an_error(kind: Any) -> None:
    """A loop that keeps it and drops gradients by `model.zero_grad()` would train nothing."""
    optimizer, net = offloaded(working="host")
    other = kind(net.parameters(), lr=1e-2)
    with pytest.raises(GradientAccessError, match=rf"step\(\) of {kind.__name__} would change"):
        other.step()
    optimizer.step()
    other.step()  # as without gradients


def test_gradients_and_norms_by_name(tmp_path: Any) -> None:
    for options in (
        {},
        {"working": "disk", "grad_on": "disk", "state_on": "disk", "scratch_dir": str(tmp_path)},
    ):
        optimizer, net = offloaded(precision="fp32", **options)
        norms = optimizer.grad_norms()
        gradients = {name: grad.clone() for name, grad in optimizer.gradients()}
        assert list(norms) == [name for name, _ in net.named_parameters()] == [*gradients]
        for name, grad in gradients.items():
            assert norms[name] == pytest.approx(grad.double().norm().item(), rel=1e-12)
        assert optimizer.clip_grad_norm_(float("inf")).item() == pytest.approx(
            torch.stack([grad.double().norm() for grad in gradients.values()]).norm().item()
        )
        if options:
            with pytest.raises(GradientAccessError, match=r"on the disk.*optimizer.gradients\(\)"):
                print(net.head.weight.grad)
            assert not hasattr(net.head.weight, "grad")
        optimizer.close()


def test_where_adam_has_run_gradients_are_none_and_changes_raise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer, net = offloaded(skip_nonfinite=False)
    assert net.head.weight.grad is None and net.embed.weight.grad is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "Adam runs inside backward" in record.message
    assert f"{__file__}:" in record.message and "'head.weight'" in record.message
    for change in (
        lambda: clip_grad_norm_(net.parameters(), 1.0),
        lambda: clip_grad_norm_(net.head.parameters(), 1.0),
        lambda: setattr(net.head.weight, "grad", torch.zeros_like(net.head.weight)),
        optimizer.grad_norms,
        lambda: list(optimizer.gradients()),
    ):
        with pytest.raises(EngineError, match="Adam runs inside backward"):
            change()


def test_scaled_gradients_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, net = offloaded(precision="fp16")
    scale = optimizer.loss_scale
    norm = optimizer.grad_norms()["head.weight"]
    assert net.head.weight.grad.double().norm().item() == pytest.approx(norm * scale)
    net.embed.weight.grad.sum()
    (record,) = caplog.records
    assert "optimizer.loss_scale times" in record.message


def test_stored_views_outlive_the_step() -> None:
    optimizer, net = offloaded()
    stored = net.head.weight.grad
    part = stored.detach()[2:]
    values = stored.clone()
    optimizer.step()
    optimizer.synchronize()
    assert type(stored) is Tensor and torch.equal(stored, values)
    assert torch.equal(part, values[2:]) and net.head.weight.grad is None


def test_a_changed_sum_on_the_device_goes_to_the_host_again() -> None:
    placement = PLACEMENTS["sums on the device"]
    _, changed = trained(edits_in_place, placement)
    _, expected = trained(edits_in_place, {**placement, "sums_on": "host"})
    assert all(torch.equal(value, expected[name]) for name, value in changed.items())


def test_all_are_clipped_whoever_comes_first() -> None:
    """The first parameter of the list may be frozen, or without a gradient."""
    for options, prepare in (
        ({"working": "host"}, lambda net: net.layers[0].requires_grad_(False)),
        ({}, lambda net: net.add_module("unused", nn.Linear(2, 2))),
    ):
        torch.manual_seed(0)
        net = Chain()
        prepare(net)
        optimizer = ot.offload(net, ot.AdamW(lr=1e-2), device="cpu", **options)
        optimizer.backward(loss_of(net, batches(1)[0]))
        params = sorted(net.parameters(), key=lambda param: param.requires_grad)
        params.sort(key=lambda param: param.shape != (2, 2))
        norm = clip_grad_norm_(params, 0.25).item()
        optimizer.step()
        assert norm > 0.25 and optimizer.last_step is not None
        assert optimizer.last_step.clip_coef == 0.25 / (norm + 1e-6)


def test_arrays_are_copies_that_refuse_writes() -> None:
    optimizer, net = offloaded(precision="fp32")
    stored = net.head.weight.grad.numpy()
    before = stored.copy()
    with pytest.raises(ValueError, match="read-only"):
        stored[0] = 1
    optimizer.step()
    optimizer.synchronize()
    assert (stored == before).all()


def test_gradients_set_to_none_drop_the_step() -> None:
    optimizer, net = offloaded()
    for param in net.parameters():
        param.grad = None
    optimizer.backward(loss_of(net, batches(1)[0]))
    optimizer.step()
    assert optimizer.last_step is not None and optimizer.last_step.micro_steps == 1


@pytest.mark.parametrize("places", [{}, {"grad_on": "disk"}])
def test_gradients_by_name_are_clipped_like_the_step(places: dict[str, Any], tmp_path: Any) -> None:
    disk = {"working": "disk", "state_on": "disk", "scratch_dir": str(tmp_path)}
    optimizer, _ = offloaded(precision="fp32", **(places and {**disk, **places}))
    optimizer.clip_grad_norm_(0.01)
    norms = [float(grad.double().norm()) for _, grad in optimizer.gradients()]
    assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(0.01, rel=1e-4)
    optimizer.step()
    optimizer.synchronize()
    moments = [state["exp_avg"].double().norm() * 10 for state in optimizer.state.values()]
    assert float(torch.stack(moments).norm()) == pytest.approx(0.01, rel=1e-4)
    optimizer.close()
