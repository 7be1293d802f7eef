"""Reads and writes of parameters past their modules: what a plain torch loop does, on any lanes."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import offloadtrain as ot
from offloadtrain.engine.foreign_readers import ParameterReaders
from offloadtrain.engine.interpreter import Interpreter
from offloadtrain.engine.parameters import (
    OffloadedParameter,
    UnreadyParameter,
    past_the_class,
    set_unready,
)
from offloadtrain.runtime.lanes import Lanes, on_lanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from tests import levels
from tests.seeded_lanes import SeededLanes

PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident": {},
    "streamed": {"working": "host", "device_slots": 1},
    "recomputed": {"working": "host", "activation": "recompute"},
    "state on the device": {"state_on": "device"},
    "speculative": {"update": "speculative", "clip_norm": 1e9},
}


class Layer(nn.Module):
    """`pack`: of hooks that the layer pushes itself, as those who compress activations do."""

    pack: Callable[[Tensor], Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        hooks = saved_tensors_hooks(self.pack, lambda packed: packed) if self.pack else None
        with hooks or nullcontext():
            return x + self.outer(torch.tanh(self.inner(x)))


class Model(nn.Module):
    """`scale` is the root's own; `head` and `spare` are read without a call on some paths; `call`
    calls the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.spare, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 4)
        self.call: Callable[[nn.Module, Tensor], Any] = nn.Module.__call__

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = self.call(layer, x)
        return x * self.scale.exp()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x))


class Average:
    """A moving average of parameters, one after the other."""

    def __init__(self, model: nn.Module) -> None:
        self.values = [torch.zeros_like(param) for param in model.parameters()]

    def update(self, model: nn.Module) -> None:
        for value, param in zip(self.values, model.parameters(), strict=True):
            value.lerp_(param.detach(), 0.3)


Loss = Callable[[Any, Tensor], Any]


def by_call(model: Any, x: Tensor) -> Any:
    return model(x).square().mean()


def by_forward(model: Any, x: Tensor) -> Any:
    return model.forward(x).square().mean()


def by_methods(model: Any, x: Tensor) -> Any:
    """Past the root's forward, with a matrix of a module that is not called."""
    return F.linear(model.features(x), model.head.weight, model.head.bias).square().mean()


def by_layers(model: Any, x: Tensor) -> Any:
    """A layer's weights are read outside of its forward, with and without a gradient."""
    read = F.linear(x, model.layers[1].inner.weight) @ model.layers[2].inner.weight.detach()
    return (model(x) + read[:, :4]).square().mean()


def with_penalty(model: Any, x: Tensor) -> Any:
    penalties = [param.square().sum() for param in model.layers.parameters()]
    return model(x).square().mean() + 1e-2 * torch.stack(penalties).sum()


def on_a_late_path(model: Any, x: Tensor) -> Any:
    """The first forward is an evaluation, which does not read `spare`."""
    with torch.no_grad():
        model(x)
    return (model(x) + F.linear(x, model.spare.weight)[:, :4]).square().mean()


LOSSES: list[Loss] = [by_call, by_forward, by_methods, by_layers, with_penalty, on_a_late_path]


def trained(loss_of: Loss, options: dict[str, Any] | None, *, reads: bool = True) -> list[Any]:
    """Train four steps, resident where there are no options.

    Args:
        reads: after each step, weights are read in several ways, and for two moving averages.

    Returns:
        The losses, what was read, and the weights at the end.
    """
    torch.manual_seed(0)
    model: Any = Model()
    optimizer: Any
    if options is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    else:
        optimizer = ot.offload(
            model, ot.AdamW(lr=1e-2, weight_decay=0.0), device="cpu", precision="fp32", **options
        )
    average = Average(model)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    results: list[Any] = []
    for step in range(4):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for handle in model.__dict__.pop("handles", ()):
            handle.remove()
        results.append(loss.detach())
        if not reads:
            continue
        average.update(model)
        if step > 1:  # the first read of the model comes late
            averaged.update_parameters(model)
        results.append(model.layers[1].inner.weight.detach().clone())
        results += [torch.cat([p.flatten() for p in model.layers[2].parameters()]).detach()]
        results += [model.scale.item(), model.layers[3].outer.bias.tolist()]
    results += [*average.values, *(param.detach() for param in averaged.parameters())]
    results += [param.detach().clone() for param in model.parameters()]
    if options is not None:
        optimizer.close()
        assert {type(param) for param in model.parameters()} == {nn.Parameter}
    return results


@pytest.mark.parametrize(
    ("loss_of", "placement", "late"), levels.array(LOSSES, [*PLACEMENTS], [False, True], quick=2)
)
def test_reads_give_the_weights_of_the_step(loss_of: Loss, placement: str, late: bool) -> None:
    """On late lanes an upload, or an update on the host, runs only when something waits for it.
    Weights of an earlier step would differ by a hundredth, bits of torch's fused update by one."""
    with on_lanes(SeededLanes(0, late=True)) if late else nullcontext():
        ours = trained(loss_of, PLACEMENTS[placement])
    torch.testing.assert_close(ours, trained(loss_of, None), rtol=1e-5, atol=1e-6)


def offloaded(**options: Any) -> tuple[Any, ot.OffloadOptimizer]:
    """A model on late lanes, after a step: nothing has waited for the new weights."""
    torch.manual_seed(0)
    model = Model()
    with on_lanes(SeededLanes(0, late=True)):
        optimizer = ot.offload(model, device="cpu", precision="fp32", **options)
    optimizer.backward(by_call(model, torch.ones(2, 8)))
    optimizer.step()
    return model, optimizer


def test_an_evaluation_in_inference_mode_reads_them() -> None:
    """Copies of streamed weights that it makes count writes, and serve training after it."""
    torch.manual_seed(0)
    model: Any = Model()
    x = torch.randn(5, 8)
    optimizer = ot.offload(model, device="cpu", precision="fp32", **PLACEMENTS["streamed"])
    for _ in range(2):
        optimizer.backward(by_layers(model, x))
        optimizer.step()
        with torch.inference_mode():
            evaluated = by_layers(model, x).item()
        assert by_layers(model, x).item() == evaluated
    optimizer.close()


@pytest.mark.parametrize("placement", ["resident", "streamed"])
def test_questions_without_values_wait_for_nothing(
    placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = offloaded(**PLACEMENTS[placement])
    runs: list[object] = []
    original = Interpreter.run

    def run(self: Interpreter, event: Any, *args: Any, **kwargs: Any) -> None:
        runs.append(event)
        original(self, event, *args, **kwargs)

    monkeypatch.setattr(Interpreter, "run", run)
    for param in model.parameters():
        assert type(param) is UnreadyParameter
        assert param.shape == param.size() and param.dtype is torch.float32 and param.ndim < 3
        assert param.device.type == "cpu" and param.requires_grad and param.is_leaf
        assert (
            param.numel() == param.nelement()
            and param.grad is None
            and param.stride()[-1:] in ((1,), ())
        )
        assert param.is_contiguous() and isinstance(param, nn.Parameter) and param in {param: 1}
        assert type(torch.zeros_like(param)) is Tensor and param.data_ptr() >= 0
        param.requires_grad_(True)
    assert not runs
    model.scale.item()
    assert len(runs) == 1
    optimizer.close()


def test_resident_parameters_cost_nothing_once_they_are_ready() -> None:
    model, optimizer = offloaded()
    total = sum(param.sum() for param in model.parameters())
    assert type(total) is Tensor
    assert {type(param) for param in model.parameters()} == {OffloadedParameter}
    optimizer.close()


def test_what_is_read_past_the_class_is_nan_and_never_an_old_value() -> None:
    model, optimizer = offloaded(working="host", device_slots=1)
    with past_the_class():
        values = [param.detach().clone() for param in model.layers[1].parameters()]
    assert all(value.isnan().all() for value in values)
    optimizer.close()


@pytest.mark.parametrize("view", [Tensor.view_as, Tensor.expand_as])
def test_a_view_of_a_streamed_parameter_keeps_its_values(view: Any) -> None:
    """Though it is of the parameter's own shape, and its block's slot goes to another one."""
    model: Any = Model()
    optimizer = ot.offload(model, device="cpu", precision="fp32", **PLACEMENTS["streamed"])
    params = [layer.inner.weight for layer in model.layers]
    values = [param.detach().clone() for param in params]
    views = [view(param, param) for param in params]
    views += [view(param, other=param) for param in params]
    model(torch.ones(2, 8))
    assert all(map(torch.equal, views, values * 2))
    torch.stack(views).sum().backward()
    optimizer.end_micro_step()
    assert all(param.grad.eq(2).all() for param in params)
    optimizer.close()


def test_blocks_are_loaded_ahead_where_a_weight_is_read_first() -> None:
    """By the model, right before it calls the layer."""

    class Scaled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer(x * layer.inner.weight.detach().abs().amax())
            return x

    model = Scaled(*(Layer() for _ in range(5)))
    optimizer = ot.offload(model, device="cpu", precision="fp32", working="host")
    order = optimizer._engine.program.streaming.access_order
    for step in range(3):
        loss = model(torch.ones(2, 8)).square().mean()
        assert len(order.uses) == len(optimizer._engine.residency.streamed)
        loss.backward()
        assert step == 0 or not order.missed
        optimizer.step()
    optimizer.close()


def test_a_read_in_the_midst_of_a_streamed_forward_needs_a_slot() -> None:
    model, optimizer = offloaded(working="host", device_slots=1)
    other = model.layers[3].inner.weight
    handle = model.layers[0].inner.register_forward_hook(lambda *_: other.sum())
    with pytest.raises(ot.OffloadTrainError, match="device_slots = 2"):
        model(torch.ones(2, 8))
    handle.remove()
    optimizer.zero_grad()
    assert by_call(model, torch.ones(2, 8)).isfinite()
    optimizer.close()


class Momentum(nn.Module):
    """A frozen copy follows the trained one, as in momentum contrast."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.ModuleList(Layer() for _ in range(2))
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.lerp_(query, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        target = x
        for query, key in zip(self.query, self.key, strict=True):
            x, target = query(x), key(target)
        return (x - target.detach() - 1).square().mean()


def compare(
    model: Any, after: Callable[[Any], object] = lambda model: None, **options: Any
) -> None:
    """Train a model that computes its loss, and a plain copy, for four steps; `after` each, read or
    write their weights."""
    plain = copy.deepcopy(model)
    trained = [param for param in plain.parameters() if param.requires_grad]
    resident = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    common: dict[str, Any] = {"device": "cpu", "precision": "fp32"}
    with on_lanes(SeededLanes(0, late=True)):
        optimizer = ot.offload(model, ot.AdamW(lr=1e-2, weight_decay=0.0), **common, **options)
    x = torch.randn(4, 8)
    for _ in range(4):
        losses = [model(x), plain(x)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        for loss, each in zip(losses, (optimizer, resident), strict=True):
            loss.backward()
            each.step()
            each.zero_grad()
        after(model)
        after(plain)
    optimizer.close()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_frozen_copy_may_follow_the_trained_one(placement: str) -> None:
    torch.manual_seed(0)
    compare(Momentum(), Momentum.follow, **PLACEMENTS[placement])


def test_a_parametrization_that_comes_and_goes_is_no_change() -> None:
    """It moves a parameter to the end of its module's, and counts a write of a frozen one."""

    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    optimizer = ot.offload(model, device="cpu", precision="fp32")
    for _ in range(2):
        nn.utils.parametrize.register_parametrization(model[0], "weight", Twice())
        loss = model(torch.ones(2, 8)).square().mean()
        nn.utils.parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=False)
        optimizer.backward(loss)
        optimizer.step()
    optimizer.close()


class Tagged(nn.Parameter):
    """A class of the user's, which the engine leaves as it is."""


class TaggedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = Tagged(self.head.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.first(x)), self.head.weight).square().mean()


def test_a_forward_reads_a_parameter_of_another_class_without_a_call() -> None:
    torch.manual_seed(0)
    model = TaggedHead()
    compare(model)
    assert type(model.head.weight) is Tagged


def test_a_read_passes_gradients_though_another_thread_updates_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The update comes between the question for the weights and the read of the parameter."""
    values_of = ParameterReaders.values_of

    def and_update(self: ParameterReaders, param: nn.Parameter, *, in_graph: bool) -> Tensor | None:
        values = values_of(self, param, in_graph=in_graph)
        set_unready([param])
        return values

    model = Model()
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", precision="fp32")
    by_methods(model, torch.ones(4, 8)).backward()
    optimizer.step()
    set_unready([model.scale])
    monkeypatch.setattr(ParameterReaders, "values_of", and_update)
    (grad,) = torch.autograd.grad(model.scale * 3, model.scale)
    assert grad.item() == 3.0
    optimizer.close()


def test_operations_of_two_threads_do_not_mix() -> None:
    """A thread that reads waits until all operations of another thread's event are launched."""
    optimizer = ot.offload(Model(), ot.AdamW(lr=1e-2), device="cpu", precision="fp32")
    interpreter = optimizer._engine.residency.interpreter
    order: list[str] = []
    is_inside, may_end = threading.Event(), threading.Event()

    def train() -> Iterator[Any]:
        order.append("training begins")
        is_inside.set()
        may_end.wait(10)
        order.append("training ends")
        yield from ()

    def read() -> Iterator[Any]:
        order.append("reading")
        yield from ()

    threads = [threading.Thread(target=interpreter.run, args=(event,)) for event in (train, read)]
    threads[0].start()
    is_inside.wait(10)
    threads[1].start()
    threads[1].join(0.1)
    may_end.set()
    for thread in threads:
        thread.join()
    assert order == ["training begins", "training ends", "reading"]
    optimizer.close()


@pytest.mark.parametrize("lanes", [ThreadLanes, lambda: SeededLanes(0, late=True)])
def test_another_thread_may_read_while_the_model_trains(lanes: Callable[[], Lanes]) -> None:
    """Classes switch meanwhile: every value is one that the parameter had, and no bit changes."""

    def weights(*, read: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, seen, errors = Model(), 0, []
        with on_lanes(lanes()):
            optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", precision="fp32")
        done = threading.Event()

        def reads() -> None:
            nonlocal seen
            try:
                while not done.is_set():
                    for param in model.parameters():
                        # A copy: `isfinite` compares each element with itself, which may change
                        # between its two reads.
                        assert bool(param.detach().clone().isfinite().all())
                        assert (param * 2).requires_grad
                        seen += 1
            except BaseException as error:
                errors.append(error)

        reader = threading.Thread(target=reads)
        if read:
            reader.start()
        for step in range(6):
            by_methods(model, torch.full((4, 8), 0.1 * step)).backward()
            optimizer.step()
        done.set()
        if read:
            reader.join()
            assert seen and not errors, errors
        optimizer.synchronize()
        return [param.detach().clone() for param in model.parameters()]

    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        assert all(map(torch.equal, weights(read=True), weights(read=False)))
    finally:
        sys.setswitchinterval(interval)
