"""Every wrong use gets an error that says what and which parameter, before anything is trained."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import offloadtrain as ot
from offloadtrain.engine import EngineError, GradientError, ModelError, StaleGraphError
from offloadtrain.engine.parameters import past_the_class, set_data
from offloadtrain.runtime.arena import Arena
from offloadtrain.runtime.lanes import on_lanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from tests.numerics.models import Chain, batches, loss_of


def model() -> Chain:
    torch.manual_seed(0)
    return Chain()


def offloaded(**options: Any) -> tuple[ot.OffloadOptimizer, Chain]:
    net = model()
    return ot.offload(net, options.pop("rule", None), device="cpu", **options), net


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1).expand(4))


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(4))
        self.second = nn.Parameter(self.first.data[2:])


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.complex64))


def with_gradient() -> nn.Module:
    net = nn.Linear(2, 2)
    net(torch.ones(1, 2)).sum().backward()
    return net


def made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(2, 2)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "nothing to train": (lambda: nn.Linear(2, 2).requires_grad_(False), "nothing to train"),
    "no parameters": (nn.Identity, "nothing to train"),
    "double": (lambda: nn.Linear(2, 2).double(), r"'weight' is torch\.float64"),
    "complex": (Complex, "'weight' is complex"),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)),
        "'0' makes sparse",
    ),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "'weight' is on the meta device"),
    "lazy": (lambda: nn.LazyLinear(2), "'weight' is not initialised"),
    "inference": (made_in_inference_mode, "'weight' was made in inference mode"),
    "gradient left": (with_gradient, "'weight' has a gradient already"),
    "expanded": (Expanded, "'weight' is an expanded view"),
    "overlapping": (Overlapping, "'first' and 'second' share memory"),
    "scripted": (lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))), "'0' is a TorchScript"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_be_trained_are_refused(case: str) -> None:
    build, message = REFUSED[case]
    net = build()
    before = {name: param.data_ptr() for name, param in net.named_parameters() if case != "lazy"}
    with pytest.raises(ModelError, match=message):
        ot.offload(net, device="cpu")
    assert before == {n: p.data_ptr() for n, p in net.named_parameters() if case != "lazy"}


@pytest.mark.parametrize(
    ("kind", "activation", "problem"),
    [
        (nn.RReLU, "recompute", "an RReLU"),
        (nn.RReLU, "offload_saved", "an RReLU"),
        (partial(nn.Embedding, 4, 2, max_norm=1.0), "recompute", "an Embedding with max_norm"),
    ],
)
def test_layers_that_would_train_with_other_gradients_are_refused(
    kind: Callable[[], nn.Module], activation: Any, problem: str
) -> None:
    """torch's own checkpoint and hooks of saved tensors say nothing."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), kind()) for _ in range(3)))
    with pytest.raises(ModelError, match=rf"'{activation}' and '0\.1' is {problem}"):
        ot.offload(net, device="cpu", activation=activation)
    ot.offload(net, device="cpu", activation="recompute", recompute_blocks=0).close()


def test_parameters_of_another_offloaded_model_are_refused() -> None:
    shared = nn.Linear(2, 2)
    optimizer = ot.offload(nn.Sequential(nn.Linear(2, 2), shared), device="cpu")
    with pytest.raises(ModelError, match=r"'0.weight' is a parameter of another offloaded model"):
        ot.offload(nn.Sequential(shared), device="cpu")
    optimizer.close()
    ot.offload(nn.Sequential(shared), device="cpu").close()


class ByFunction(nn.Module):
    """Differentiates a function of its input inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return torch.func.vjp(self.inner, x)[1](torch.ones(2, 4))[0]


@pytest.mark.parametrize(
    ("make", "note"),
    [
        (ByFunction, r"torch\.autograd\.grad\(…, create_graph=True\)"),
        (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), r"keep_fp32=\["),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), r"torch\.autocast"),
    ],
)
def test_errors_of_torch_in_a_forward_say_what_to_do(
    make: Callable[[], nn.Module], note: str
) -> None:
    net = nn.Sequential(make(), nn.Linear(4, 4))
    optimizer = ot.offload(net, device="cpu")
    with pytest.raises(RuntimeError) as caught:
        net(torch.ones(2, 4))
    assert re.search(note, "".join(caught.value.__notes__))
    optimizer.close()


def test_a_loss_of_another_model_passes_through_an_fp16_model_that_is_frozen_meanwhile() -> None:
    generator, critic = nn.Linear(2, 4), nn.Linear(4, 1)
    options: dict[str, Any] = {"device": "cpu", "precision": "fp16"}
    of_generator, of_critic = ot.offload(generator, **options), ot.offload(critic, **options)
    x = torch.ones(2, 2)
    with pytest.raises(EngineError, match=r"another model.*requires_grad_\(False\)"):
        of_generator.backward(critic(generator(x)).float().mean())
    of_generator.zero_grad()
    of_critic.zero_grad()
    for _ in range(2):
        of_critic.backward(critic(generator(x).detach()).float().mean())
        of_critic.step()
        critic.requires_grad_(False)
        of_generator.backward(critic(generator(x)).float().mean())
        of_generator.step()
        critic.requires_grad_(True)
    for optimizer in (of_generator, of_critic):
        assert optimizer.last_step is not None
        optimizer.close()


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": float("nan")}])
def test_hyperparameters_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ot.AdamW(**wrong)


WRONG_FIRST: dict[str, tuple[Callable[[Chain], object], str]] = {
    "a torch optimizer": (
        lambda net: ot.offload(net, torch.optim.AdamW(net.parameters(), lr=3e-4), device="cpu"),
        r"rule is a torch\.optim\.AdamW.*ot\.AdamW\(lr=0\.0003, betas=\(0\.9, 0\.999\), eps=1e-08, "
        r"weight_decay=0\.01\)",
    ),
    "another torch optimizer": (
        lambda net: ot.offload(net, torch.optim.SGD(net.parameters()), device="cpu"),
        r"rule is a torch\.optim\.SGD.*ot\.SGD\(lr=0\.001, momentum=0, .*ot\.AdamW, ot\.Adam, ",
    ),
    "a torch optimizer without a rule": (
        lambda net: ot.offload(net, torch.optim.NAdam(net.parameters()), device="cpu"),
        r"rule is a torch\.optim\.NAdam.*ot\.AdamW\(lr=…\).*ot\.Lion, ",
    ),
    "a torch class": (
        lambda net: ot.offload(net, torch.optim.AdamW, device="cpu"),  # type: ignore[arg-type]
        r"rule is the class AdamW of torch\.optim.*ot\.AdamW\(",
    ),
    "a class": (
        lambda net: ot.offload(net, ot.AdamW, device="cpu"),  # type: ignore[arg-type]
        r"rule is the class AdamW, not one of it.*ot\.AdamW\(",
    ),
    "a name": (
        lambda net: ot.offload(net, "adamw", device="cpu"),  # type: ignore[arg-type]
        r"rule is 'adamw'.*ot\.AdamW\(lr=…\).*ot\.Lion, ",
    ),
    "parameters first": (
        lambda net: ot.offload(net.parameters(), ot.AdamW(), device="cpu"),  # type: ignore[arg-type]
        r"model is a generator.*ot\.offload\(model, .*params=",
    ),
    "a rule as torch's optimizers are made": (
        lambda net: ot.AdamW(net.parameters(), lr=1e-3),  # type: ignore[misc]
        r"AdamW is an update rule.*by name.*ot\.offload\(model, ot\.AdamW\(lr=",
    ),
    "a rule as Trainers call optimizers": (
        lambda net: ot.AdamW()(net, lr=1e-3),  # type: ignore[operator]
        r"AdamW is an update rule.*ot\.offload\(model, ot\.AdamW\(lr=",
    ),
}


@pytest.mark.parametrize("case", WRONG_FIRST)
def test_first_mistakes_are_answered_with_what_to_write(case: str) -> None:
    call, message = WRONG_FIRST[case]
    with pytest.raises(TypeError, match=message) as raised:
        call(model())
    assert "\n" not in str(raised.value)


def test_a_resized_parameter_is_named() -> None:
    optimizer, net = offloaded()
    with past_the_class():
        set_data(net.embed.weight, torch.zeros(40, 24, dtype=torch.bfloat16))
    with pytest.raises(GradientError, match=r"'embed.weight' has the shape \(40, 24\) now and had"):
        optimizer.backward(loss_of(net, batches(1)[0]))


def test_groups_must_hold_each_trainable_parameter_once() -> None:
    net = model()
    params = list(net.parameters())
    with pytest.raises(ModelError, match=r"'head.weight' is in no group"):
        ot.offload(net, params=params[:-1], device="cpu")
    with pytest.raises(ModelError, match=r"'embed.weight' is in 2 groups"):
        ot.offload(net, params=[{"params": params}, {"params": params[:1]}], device="cpu")
    with pytest.raises(ModelError, match="not in the model"):
        ot.offload(net, params=[*params, nn.Parameter(torch.zeros(3))], device="cpu")
    with pytest.raises(ValueError, match=r"learning_rate.*AdamW has \['betas', 'eps', 'lr', "):
        ot.offload(net, params=[{"params": params, "learning_rate": 1.0}], device="cpu")


def test_groups_take_names_and_keys_of_the_users_own() -> None:
    """As torch's optimizers do; a forward in inference mode may have made the optimizer."""
    net = model()
    named = [*net.named_parameters()]
    groups = [{"params": iter(named[:1]), "lr": 1e-3}, {"params": named[1:]}]
    with torch.inference_mode():
        optimizer = ot.offload(net, params=groups, device="cpu", precision="fp32")
    optimizer.param_groups[0]["lr_scale"] = 0.5
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, len(named) - 1]
    for tokens in batches(2):
        optimizer.backward(loss_of(net, tokens))
        optimizer.step()
        net.head.requires_grad_(False)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.param_groups[0]["lr_scale"] == 0.5
    optimizer.close()
    ot.offload(net, params=net.named_parameters(), device="cpu").close()


def test_fp16_cannot_hold_large_weights() -> None:
    net = model()
    with torch.no_grad():
        net.head.weight[0, 0] = 1e6
    with pytest.raises(ModelError, match=r"'head.weight' has values beyond the range of fp16"):
        ot.offload(net, device="cpu", precision="fp16")


def test_a_model_is_offloaded_once() -> None:
    optimizer, net = offloaded()
    with pytest.raises(ModelError, match="offloaded already"):
        ot.offload(net, device="cpu")
    optimizer.close()
    ot.offload(net, device="cpu").close()


@pytest.mark.parametrize("options", [{}, {"working": "host"}, {"update": "delayed"}], ids=str)
def test_step_without_backward_changes_nothing(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """As in torch: moments and decay stand still, and hooks of the step run."""
    results = []
    for idle in (False, True):
        optimizer, net = offloaded(**options)
        calls: list[object] = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        for tokens in batches(3):
            if idle:
                assert optimizer.step() is None
                if "update" not in options:  # a backward ends the delay of the weights before it
                    optimizer.backward(loss_of(net, tokens))
                    optimizer.zero_grad()
                assert optimizer.step(lambda: 5.0) == 5.0
            optimizer.backward(loss_of(net, tokens))
            optimizer.step()
        assert optimizer.last_step is not None and optimizer.last_step.step == 3
        assert len(calls) == (9 if idle else 3)
        results.append(list(optimizer.master_weights()))
        optimizer.close()
        with pytest.raises(EngineError, match="after close"):
            optimizer.step()
    for (name, expected), (_, value) in zip(*results, strict=True):
        assert torch.equal(value, expected), name
    assert caplog.text.count("step() without a backward") == 1


def test_a_hook_that_takes_a_gradient_away_is_named() -> None:
    """As loops that step inside backward do."""
    optimizer, net = offloaded()
    net.head.weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    with pytest.raises(GradientError, match=r"'head.weight' .* a hook has set it to None"):
        optimizer.backward(loss_of(net, batches(1)[0]))
    optimizer.close()


def test_one_backward_too_many() -> None:
    optimizer, net = offloaded(grad_accum_steps=2)
    for tokens in batches(2):
        optimizer.backward(loss_of(net, tokens))
    with pytest.raises(GradientError, match="3 backward passes before step"):
        optimizer.backward(loss_of(net, batches(1)[0]))


def test_a_graph_older_than_the_weights_raises() -> None:
    optimizer, net = offloaded()
    tokens = batches(1)[0]
    loss = loss_of(net, tokens)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(StaleGraphError, match="built before the last optimizer step"):
        loss.backward()
    optimizer.zero_grad()
    optimizer.backward(loss_of(net, tokens))
    optimizer.step()


def test_plain_backward_under_loss_scaling_raises() -> None:
    optimizer, net = offloaded(precision="fp16")
    with pytest.raises(EngineError, match=r"call optimizer.backward\(loss\)"):
        loss_of(net, batches(1)[0]).backward()
    optimizer.zero_grad()


def test_after_an_exception_in_backward_the_next_step_is_right() -> None:
    plain, expected = offloaded()
    optimizer, net = offloaded()
    bad, good = batches(2)

    def explode(grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("planned")

    loss = loss_of(net, bad)
    handle = net.layers[1].register_full_backward_hook(lambda *_: explode(_[1][0]))
    loss = loss_of(net, bad)
    with pytest.raises(RuntimeError, match="planned"):
        optimizer.backward(loss)
    handle.remove()
    del loss
    for opt, target in ((plain, expected), (optimizer, net)):
        opt.backward(loss_of(target, good))
        opt.step()
        opt.synchronize()
    for a, b in zip(expected.parameters(), net.parameters(), strict=True):
        assert torch.equal(a, b)


CHANGES: dict[str, tuple[Callable[[Chain], object], str]] = {
    "frozen": (lambda net: net.head.requires_grad_(False), r"'head.weight' was frozen"),
    "replaced": (
        lambda net: setattr(net.head, "weight", nn.Parameter(net.head.weight.detach().clone())),
        r"'head.weight' was replaced",
    ),
    "grown": (lambda net: net.layers.append(nn.Linear(2, 2)), "the model has 21 parameters, 19"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_model_changed_after_offload(case: str) -> None:
    optimizer, net = offloaded()
    optimizer.backward(loss_of(net, batches(1)[0]))
    change, message = CHANGES[case]
    change(net)
    with pytest.raises(ModelError, match=message):
        optimizer.step()


def test_after_close() -> None:
    optimizer, net = offloaded()
    optimizer.close()
    loss_of(net, batches(1)[0]).backward()  # an ordinary model again
    with pytest.raises(EngineError, match="after close"):
        optimizer.step()


def test_state_dicts_that_do_not_fit() -> None:
    optimizer, _ = offloaded()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["master"] = torch.zeros(3)
    with pytest.raises(EngineError, match=r"'embed.weight' needs master of shape"):
        optimizer.load_state_dict(saved)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["params"].pop()
    with pytest.raises(EngineError, match="parameter groups of sizes"):
        optimizer.load_state_dict(saved)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing its compiler
def test_a_model_compiled_as_a_whole_is_refused() -> None:
    with pytest.raises(ModelError, match="compile each block"):
        ot.offload(torch.compile(model()), device="cpu")


def test_an_offload_that_fails_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, while the error is still held: a second try may need every byte."""
    closed: list[Arena] = []
    close = Arena.close
    monkeypatch.setattr(Arena, "close", lambda arena: (close(arena), closed.append(arena)))

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("planned")

    monkeypatch.setattr("offloadtrain.engine.buffers._on_device", full)
    before = threading.active_count()
    with on_lanes(ThreadLanes()), pytest.raises(torch.OutOfMemoryError, match="planned"):
        offloaded()
    assert closed and all(not arena._slabs and not arena._booked for arena in closed)
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.5, "grad_accum_steps": 2},
        {"update": "speculative", "state": "split16", "working": "host", "activation": "offload"},
        {"precision": "fp16", "state": "int8"},
    ],
)
def test_another_default_device_changes_nothing(options: dict[str, Any]) -> None:
    """What is made on the host is made there, also under `torch.device("cuda")`: meta stands in."""

    def train(default: str) -> list[float]:
        net, inputs = model(), batches(4)
        with torch.device(default), on_lanes(ThreadLanes()):
            optimizer = ot.offload(net, device="cpu", **options)
        losses = []
        for number, tokens in enumerate(inputs):
            loss = loss_of(net, tokens)
            with torch.device(default):
                optimizer.backward(loss)
                if number % 2 or "grad_accum_steps" not in options:
                    optimizer.step()
            losses.append(loss.item())
        with torch.device(default):
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.close()
        return losses

    assert train("meta") == train("cpu")


def test_views_of_weights_that_modules_keep_are_named(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Linear(4, 4), torch.nn.utils.spectral_norm(nn.Linear(4, 4)))
    net[0].turned = net[0].weight.detach().t()  # type: ignore[assignment]
    net[0].register_buffer("first", net[0].bias.detach()[:1])
    net[0].other = torch.ones(4)  # type: ignore[assignment]
    ot.offload(net, device="cpu", precision="fp32").close()
    named = [record.message for record in caplog.records if "make it in forward" in record.message]
    assert [message.split(" and keeps")[0] for message in named] == [
        "'0.turned' is a view of the parameter '0.weight'",
        "'0.first' is a view of the parameter '0.bias'",
    ]
