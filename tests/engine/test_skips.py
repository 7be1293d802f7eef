"""A step that is skipped is never silent: reports say which parameters, and a few in a row warn."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import offloadtrain as ot
from tests.numerics.models import Chain, batches, loss_of

LOGGER = "offloadtrain.engine.step_report"


def offloaded(**options: Any) -> tuple[ot.OffloadOptimizer, Chain]:
    torch.manual_seed(0)
    net = Chain()
    return ot.offload(net, ot.AdamW(), device="cpu", **options), net


def step(optimizer: ot.OffloadOptimizer, net: Chain, *, times: float = 1.0) -> ot.StepReport:
    optimizer.backward(loss_of(net, batches(1)[0]) * times)
    optimizer.step()
    assert optimizer.last_step is not None
    return optimizer.last_step


def spoil(net: Chain, name: str) -> Any:
    """Make the gradient of one parameter NaN in every backward."""
    return dict(net.named_parameters())[name].register_hook(lambda grad: grad * float("nan"))


def test_a_report_names_the_parameters_whose_gradients_are_not_finite() -> None:
    optimizer, net = offloaded()
    good = step(optimizer, net)
    assert (good.nonfinite, good.skipped_in_a_row) == ((), 0)
    hooks = [spoil(net, "layers.1.up.weight"), spoil(net, "embed.weight")]
    bad = step(optimizer, net)
    assert bad.skipped and bad.nonfinite == ("embed.weight", "layers.1.up.weight")
    assert step(optimizer, net).skipped_in_a_row == 2
    assert optimizer.grad_norm is not None and optimizer.grad_norm != optimizer.grad_norm
    for hook in hooks:
        hook.remove()
    assert step(optimizer, net).skipped_in_a_row == 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_three_skips_in_a_row_warn_once_and_name_the_parameters(
    precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, net = offloaded(precision=precision)
    hook = spoil(net, "layers.1.up.weight")
    with caplog.at_level(logging.WARNING, LOGGER):
        for _ in range(2):
            step(optimizer, net)
        assert not caplog.records
        for _ in range(5):
            step(optimizer, net)
    (record,) = caplog.records
    assert "3 steps in a row were skipped" in record.message
    assert "'layers.1.up.weight'" in record.message and "head" not in record.message
    assert ("loss scale" in record.message) is (precision == "fp16")
    hook.remove()
    step(optimizer, net)


def test_many_parameters_are_counted_and_not_listed(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, net = offloaded()
    for _ in range(3):
        step(optimizer, net, times=float("nan"))
    assert "'embed.weight'" in caplog.text
    assert f"and {len(list(net.parameters())) - 3} more" in caplog.text


def test_a_trainer_that_tells_of_skips_itself_hears_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer, net = offloaded()
    optimizer.warns_of_skips = False
    for _ in range(4):
        step(optimizer, net, times=float("nan"))
    assert not caplog.records
