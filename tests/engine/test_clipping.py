"""`clip_grad_norm_` beside and without `clip_norm`, and clipping by others, which finds nothing."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import offloadtrain as ot
from offloadtrain.engine import EngineError
from offloadtrain.runtime.lanes import on_lanes
from offloadtrain.runtime.lanes.seeded import SeededLanes
from offloadtrain.runtime.lanes.sequential import SequentialLanes
from tests.numerics.models import Chain, batches, loss_of

LOGGER = "offloadtrain.engine.foreign_readers"


def offloaded(**options: Any) -> tuple[ot.OffloadOptimizer, Chain]:
    torch.manual_seed(0)
    net = Chain()
    return ot.offload(net, ot.AdamW(lr=1e-2), device="cpu", **options), net


def backward(optimizer: ot.OffloadOptimizer, net: nn.Module) -> None:
    optimizer.backward(loss_of(net, batches(1)[0]))


def test_it_returns_what_a_torch_loop_expects() -> None:
    optimizer, net = offloaded()
    backward(optimizer, net)
    norm = optimizer.clip_grad_norm_(0.25)
    assert norm.shape == () and norm.dtype is torch.float64 and norm.device.type == "cpu"
    assert norm.item() > 0.25
    assert optimizer.clip_grad_norm_(float("inf")).item() == pytest.approx(0.25, rel=1e-5)
    optimizer.step()
    assert optimizer.last_step is not None
    assert optimizer.last_step.grad_norm == norm.item()
    assert optimizer.last_step.clip_coef == 0.25 / (norm.item() + 1e-6)


def test_misuse_is_told() -> None:
    optimizer, net = offloaded()
    with pytest.raises(EngineError, match=r"clip_grad_norm_\(\) without a backward"):
        optimizer.clip_grad_norm_(1.0)
    with pytest.raises(ValueError, match="max_norm = nan"):
        optimizer.clip_grad_norm_(float("nan"))
    backward(optimizer, net)
    with pytest.raises(ValueError, match="max_norm = -1"):
        optimizer.clip_grad_norm_(-1)
    optimizer.close()
    with pytest.raises(EngineError, match="after close"):
        optimizer.clip_grad_norm_(1.0)


def test_where_adam_runs_inside_backward_it_raises_from_the_first_step_on() -> None:
    optimizer, net = offloaded(skip_nonfinite=False)
    backward(optimizer, net)
    with pytest.raises(EngineError, match="Adam runs inside backward"):
        optimizer.clip_grad_norm_(1.0)


def test_no_backward_between_clipping_and_the_step() -> None:
    optimizer, net = offloaded(grad_accum_steps=2)
    backward(optimizer, net)
    optimizer.clip_grad_norm_(1.0)
    with pytest.raises(EngineError, match="Clip after the last backward"):
        backward(optimizer, net)
    backward(optimizer, net)  # the failed one has dropped the step, and its clipping
    optimizer.step()
    assert optimizer.last_step is not None and optimizer.last_step.clip_coef == 1.0


def test_clipping_is_dropped_with_its_gradients() -> None:
    optimizer, net = offloaded()
    backward(optimizer, net)
    first = optimizer.clip_grad_norm_(0.1)
    optimizer.zero_grad()
    backward(optimizer, net)
    assert optimizer.clip_grad_norm_(float("inf")).item() == first.item()
    optimizer.step()
    assert optimizer.last_step is not None and optimizer.last_step.clip_coef == 1.0


# ---- others ------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("options", [{}, {"working": "host"}])
def test_clipping_that_finds_nothing_is_told_once(
    options: dict[str, Any],
    explicit: bool,
    clip_norm: float | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer, net = offloaded(clip_norm=clip_norm, **options)
    for tokens in batches(3):
        loss = loss_of(net, tokens)
        optimizer.backward(loss) if explicit else loss.backward()
        assert torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).item() == 0.0
        optimizer.step()
        optimizer.zero_grad()
        net.zero_grad()
    (record,) = [item for item in caplog.records if item.name == LOGGER]
    assert record.levelno == logging.WARNING and "clips nothing" in record.message
    remedy = "optimizer.clip_grad_norm_(max_norm)" if clip_norm is None else "clip_norm = 0.5"
    assert remedy in record.message


def by_part(net: Chain) -> None:
    assert torch.nn.utils.clip_grad_norm_(net.head.parameters(), 0.1).item() == 0.0
    assert torch.nn.utils.clip_grad_norm_(net.layers[1].parameters(), 0.1).item() == 0.0


def by_value(net: Chain) -> None:
    with contextlib.suppress(RuntimeError):  # torch's, of an empty list
        torch.nn.utils.clip_grad_value_(net.layers.parameters(), 1e-3)


def by_total_norm(net: Chain) -> None:
    result = [param.grad for param in net.parameters() if param.grad is not None]
    assert torch.nn.utils.get_total_norm(result).item() == 0.0


def by_hand(net: Chain) -> None:
    if net.head.weight.grad is not None:
        net.head.weight.grad[0] = 0


@pytest.mark.cover(1, 2)
@pytest.mark.parametrize("options", [{}, {"working": "host"}, {"update": "speculative"}])
@pytest.mark.parametrize(
    ("clip", "remedy"),
    [
        (by_part, "optimizer.clip_grad_norm_"),
        (by_value, "optimizer.clip_grad_norm_"),
        (by_total_norm, "param.register_hook"),
        (by_hand, "param.register_hook"),
    ],
)
def test_reading_gradients_of_a_part_is_told_once(
    clip: Any, remedy: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, net = offloaded(**options)
    for tokens in batches(4):
        optimizer.backward(loss_of(net, tokens))
        clip(net)
        optimizer.step()
    (record,) = [item for item in caplog.records if item.name == LOGGER]
    assert record.levelno == logging.WARNING and remedy in record.message
    if clip in (by_total_norm, by_hand):
        assert f"{__file__}:" in record.message and ".weight" in record.message


def test_reads_that_miss_nothing_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """Before a backward nothing has left; a hook inside of one finds the gradient; torch looks."""
    optimizer, net = offloaded()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    results: list[object] = []
    net.embed.weight.register_hook(lambda grad: results.append(net.head.weight.grad))
    backward(optimizer, net)
    torch.optim.SGD(net.parameters()).zero_grad()
    optimizer.step()
    assert net.head.weight.grad is None and len(results) == 1
    assert not caplog.records


@pytest.mark.cover(1, 2)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"working": "host", "activation": "recompute"}, {"update": "speculative"}],
)
def test_zero_grad_of_the_model_drops_the_step(
    options: dict[str, Any], explicit: bool, late: bool
) -> None:
    """A microbatch that is given up leaves no trace, as in a loop of torch."""

    def run(zero_grad: str) -> dict[str, torch.Tensor]:
        with on_lanes(SeededLanes(0, late=True) if late else SequentialLanes()):
            optimizer, net = offloaded(grad_accum_steps=2, **options)
        outer = nn.ModuleList([net])
        dropped = {"optimizer": optimizer, "model": net, "around": outer}.get(zero_grad)
        for number, tokens in enumerate(batches(6)):
            if dropped is not None and number % 2 == 0:  # given up
                loss = 50 * loss_of(net, batches(1, seed=number)[0])
                optimizer.backward(loss) if explicit else loss.backward()
                dropped.zero_grad()
            loss = loss_of(net, tokens)
            optimizer.backward(loss) if explicit else loss.backward()
            if number % 2 == 1:
                optimizer.step()
                net.zero_grad()  # after a step there are none
        return dict(net.state_dict())

    expected = run("nothing to drop")
    for zero_grad in ("optimizer", "model", "around"):
        for name, value in run(zero_grad).items():
            assert torch.equal(value, expected[name]), (zero_grad, name)


def test_zero_grad_of_a_part_is_told(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, net = offloaded()
    backward(optimizer, net)
    net.head.zero_grad()
    net.layers.zero_grad()
    optimizer.step()
    (record,) = caplog.records
    assert "zero_grad() of a part" in record.message and "optimizer.zero_grad()" in record.message


def test_copies_and_closed_models_are_ordinary() -> None:
    optimizer, net = offloaded()
    plain_model = copy.deepcopy(net)
    again = pickle.loads(pickle.dumps(net))
    optimizer.close()
    for model in (plain_model, again, net):
        assert all(type(param) is nn.Parameter for param in model.parameters())
    for param in plain_model.parameters():
        param.grad = torch.ones_like(param)
    assert torch.nn.utils.clip_grad_norm_(plain_model.parameters(), 1.0).item() > 1
