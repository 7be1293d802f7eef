"""Under Accelerate: nothing moves to the device, steps come when they are due, skips are seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import offloadtrain as ot
from offloadtrain.engine import EngineError
from tests.numerics.models import Chain, batches, loss_of

accelerate = pytest.importorskip("accelerate")
state_module = pytest.importorskip("accelerate.state")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Accelerate's objects share their state in the process, which a Trainer may have used."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    state_module.AcceleratorState._reset_state(reset_partial_state=True)
    state_module.GradientState._reset_state()


class Copied(TorchDispatchMode):
    """Bytes of all that is copied to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.device != args[0].device:
            self.bytes += args[0].nbytes
        return result


def model() -> Chain:
    torch.manual_seed(0)
    return Chain()


def offloaded(net: nn.Module, **options: Any) -> ot.OffloadOptimizer:
    chosen = {"device": "cpu", "precision": "fp32", **options}
    return ot.offload(net, ot.AdamW(lr=1e-2, weight_decay=0.1), **chosen)


def on_another_device() -> Any:
    """An accelerator whose device is not the host's: meta stands in for a GPU."""
    accelerator = accelerate.Accelerator(cpu=True)
    state_module.PartialState().device = torch.device("meta")
    return accelerator


def test_prepare_moves_nothing() -> None:
    plain = torch.optim.AdamW(model().parameters())
    for param in plain.param_groups[0]["params"]:
        param.grad = torch.zeros_like(param)
    plain.step()
    net = model()
    optimizer = offloaded(net)
    accelerator = on_another_device()
    with Copied() as copied, pytest.raises(NotImplementedError, match="meta tensor"):
        accelerator.prepare_optimizer(plain)  # torch takes its state back from there
    assert copied.bytes >= 8 * sum(param.numel() for param in net.parameters())  # it is seen
    with Copied() as copied:
        result, prepared = accelerator.prepare(net, optimizer, device_placement=[False, True])
    assert copied.bytes == 0
    assert result is net and prepared is optimizer
    assert accelerator.prepare(optimizer) is optimizer


def test_a_skipped_step_holds_the_schedule() -> None:
    net = model()
    optimizer = offloaded(net)
    accelerator = accelerate.Accelerator(cpu=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    net, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    assert not optimizer.step_was_skipped
    rates = []
    for factor in (1.0, float("nan"), 1.0):
        accelerator.backward(loss_of(net, batches(1)[0]) * factor)
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
        assert accelerator.optimizer_step_was_skipped is (factor != 1.0)
    assert rates == [5e-3, 5e-3, 2.5e-3]


def test_a_loop_of_ones_own_is_not_held_back() -> None:
    """Another model of the process is accumulating under Accelerate; this one was not prepared."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = model()
    optimizer = offloaded(net)
    with accelerator.accumulate(nn.Linear(1, 1)):
        assert not accelerator.sync_gradients
        optimizer.backward(loss_of(net, batches(1)[0]))
        optimizer.step()
    assert optimizer.last_step is not None and optimizer.last_step.step == 1


def test_a_grad_scaler_is_refused() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state._mixed_precision = "fp16"  # a CPU is not given it
    with pytest.raises(EngineError, match=r"optimizer\.backward"):
        accelerator.prepare(offloaded(model()))


def test_state_replaced_by_a_wrapper_is_not_what_is_saved() -> None:
    """Some wrappers put copies on the device into `optimizer.state` before training."""
    net = model()
    optimizer = offloaded(net)
    for entry in optimizer.state.values():
        entry.update({key: value.clone() for key, value in entry.items()})
    optimizer.backward(loss_of(net, batches(1)[0]))
    optimizer.step()
    saved = optimizer.state_dict()["state"][0]
    assert saved["step"] == 1.0 and saved["exp_avg"].abs().sum() > 0
