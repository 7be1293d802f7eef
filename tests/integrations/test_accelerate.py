"""Accelerate's loop over an offloaded model: the same losses and norms, in 4 decimals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadtrain as ot
from benchmarks.frameworks import accelerated, data
from offloadtrain.integrations.accelerate import check, drive, offload
from tests.integrations.conftest import forget

accelerate = pytest.importorskip("accelerate")


def accelerator(**options: Any) -> Any:
    return accelerate.Accelerator(cpu=True, **options)


def train(offload: dict[str, Any] | None, **options: Any) -> Any:
    forget()
    torch.manual_seed(0)
    return accelerated.train(offload, **options)


@pytest.mark.parametrize("accum", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_a_loop_logs_the_same_losses_and_norms(accum: int) -> None:
    """With 5 microbatches per step, the last step of the epoch has two."""
    logged = train({"working": "host"}, accum=accum)
    assert logged == train(None, accum=accum)
    assert len(logged) == {1: 6, 5: 3}[accum]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"state": "split16"}, {"update": "speculative"}], ids=str)
def test_what_is_saved_is_loaded_and_goes_on(tmp_path: Path, options: dict[str, Any]) -> None:
    mixed = "bf16" if options else "no"
    run = dict(accum=2, steps=5, mixed_precision=mixed, save=(4, tmp_path))
    once = train(options, **run)
    assert train(options, **run, resume=tmp_path)[:3] == once[2:] and len(once) == 5
    assert not list(tmp_path.glob("optimizer*"))


def prepared(**options: Any) -> tuple[Any, nn.Module, ot.OffloadOptimizer]:
    owner = accelerator(**options)
    net = data.model()
    optimizer = offload(owner, net, ot.AdamW(lr=1e-3))
    net, optimizer = owner.prepare(net, optimizer)
    return owner, net, optimizer


def loss_of(net: nn.Module) -> torch.Tensor:
    inputs = data.Texts()[0]
    loss: torch.Tensor = net(**{name: value[None] for name, value in inputs.items()}).loss
    return loss


def test_load_state_between_microbatches_drops_their_gradients(tmp_path: Path) -> None:
    owner, net, optimizer = prepared(gradient_accumulation_steps=2)
    owner.save_state(str(tmp_path))
    with owner.accumulate(net):
        owner.backward(loss_of(net))
    assert optimizer.phase.name != "FORWARD"
    owner.load_state(str(tmp_path))
    assert optimizer.phase.name == "FORWARD"
    assert owner._optimizers == [optimizer]


def test_losses_are_scaled_by_the_engine() -> None:
    """A CPU gets no fp16 from Accelerate: the state says that it is on, as on a GPU."""
    owner = accelerator(gradient_accumulation_steps=2)
    owner.state._mixed_precision = "fp16"
    owner.scaler = torch.amp.GradScaler("cpu")
    net = data.model()
    plain = data.model()
    optimizer = offload(owner, net, ot.AdamW(lr=1e-3))
    assert optimizer.loss_scale > 1.0
    net, optimizer = owner.prepare(net, optimizer)
    for _ in range(2):
        with owner.accumulate(net):
            owner.backward(loss_of(net))
            (loss_of(plain) / 2).backward()
            if owner.sync_gradients:
                norm = owner.clip_grad_norm_(net.parameters(), 1e9)
            optimizer.step()
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    assert norm.item() == pytest.approx(expected.item(), rel=2e-3)
    assert not owner.optimizer_step_was_skipped and owner.scaler is None


def test_prepare_wraps_nothing_among_ranks() -> None:
    owner = accelerator()
    owner.state.distributed_type = accelerate.DistributedType.MULTI_CPU
    net = data.model()
    drive(owner, net, ot.offload(net, device="cpu"))
    assert owner.prepare(net) is net


class TestClipping:
    """With a second model in the process, which is not offloaded."""

    def test_other_models_are_clipped_as_ever(self) -> None:
        owner, _, _ = prepared()
        other = nn.Linear(4, 4)
        other(torch.ones(1, 4)).sum().backward()
        norm = owner.clip_grad_norm_(other.parameters(), 0.1)
        assert norm > 0.1
        grads = [param.grad for param in other.parameters() if param.grad is not None]
        assert nn.utils.get_total_norm(grads) == pytest.approx(0.1, rel=1e-3)
        owner.clip_grad_value_(other.parameters(), 0.01)
        assert max(float(grad.abs().max()) for grad in grads) <= 0.01

    def test_parts_other_norms_and_values_are_clipped_too(self) -> None:
        owner, net, _ = prepared()
        owner.backward(loss_of(net))
        params = list(net.parameters())
        assert owner.clip_grad_norm_(params[1:], 0.1) > 0.1
        assert nn.utils.get_total_norm([param.grad for param in params[1:]]) < 0.101
        owner.clip_grad_norm_(params, 1e-3, norm_type=float("inf"))
        largest = max(float(param.grad.abs().max()) for param in params)
        assert largest == pytest.approx(1e-3, rel=0.02)
        owner.clip_grad_value_(params, 1e-4)
        assert max(float(param.grad.abs().max()) for param in params) <= 1e-4


def test_what_the_accelerator_determines() -> None:
    owner = accelerator(mixed_precision="bf16", gradient_accumulation_steps=3)
    with pytest.raises(ValueError, match=r"precision = 'fp32' .* 'bf16' by the accelerator"):
        offload(owner, data.model(), config=ot.OffloadConfig(precision="fp32"))
    optimizer = offload(owner, data.model(), config=ot.OffloadConfig(working="host"))
    config = optimizer.config
    assert (config.precision, config.grad_accum_steps, config.weights.tier) == ("bf16", 3, "host")


def test_what_an_accelerator_cannot_do() -> None:
    owner = accelerator(dynamo_backend="eager")
    with pytest.raises(ValueError, match="torch_compile"):
        check(owner)
    forget()
    owner = accelerator()
    owner.state.distributed_type = accelerate.DistributedType.FSDP
    with pytest.raises(ValueError, match="distributed_type FSDP"):
        offload(owner, data.model())
