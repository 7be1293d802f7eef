"""`clip_grad_norm_` with and without `clip_norm`, `zero_grad()` of the model, and its copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import offloadtrain as ot
from offloadtrain.engine import EngineError
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from tests.numerics.models import Chain, batches, loss_of
from tests.seeded_lanes import SeededLanes


def offloaded(**options: Any) -> tuple[ot.OffloadOptimizer, Chain]:
    torch.manual_seed(0)
    net = Chain()
    return ot.offload(net, ot.AdamW(lr=1e-2), device="cpu", **options), net


def backward(optimizer: ot.OffloadOptimizer, net: nn.Module) -> None:
    optimizer.backward(loss_of(net, batches(1)[0]))


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
