"""State that moves by what torch's allocator and the driver of a GPU say, and where it may be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.engine.promotion import CHECK_STEPS
from tests.gpu.precision import DEVICE, DTYPE, HAS_BF16, HAS_GPU, offload
from tests.gpu.test_engine_cuda import ResidentOnGpu
from tests.numerics.comparison import ADAMW
from tests.numerics.models import Chain, batches, loss_of
from tests.numerics.test_promotion import Device

pytestmark = pytest.mark.gpu

RULE = ot.AdamW(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


def fail_to_allocate(device: Device | None) -> None:
    if device is None:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * torch.cuda.mem_get_info()[0], dtype=torch.uint8, device=DEVICE)
    else:
        device.failures += 1


def test_state_moves_to_the_device_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of masters stay in both moves, and training goes on in between."""
    device = None
    if not HAS_GPU:
        device = Device()
        device.install(monkeypatch)
    torch.manual_seed(0)
    model = Chain(3)
    resident = ResidentOnGpu(copy.deepcopy(model).to(DEVICE), DTYPE)
    optimizer = offload(model, RULE, state_on="auto")
    shares = []
    for number, tokens in enumerate(batches(2 * CHECK_STEPS + 5)):
        loss = loss_of(model, tokens.to(DEVICE))
        if number < 2 * CHECK_STEPS:
            assert [loss.item()] == resident.step([tokens.to(DEVICE)], loss_of)
        optimizer.backward(loss)
        optimizer.step()
        assert optimizer.last_step is not None and not optimizer.last_step.skipped
        shares.append(optimizer.last_step.state_on_device)
        if number == 2 * CHECK_STEPS - 1:
            masters = dict(optimizer.master_weights())
            for name, master in masters.items():
                assert torch.equal(master, resident.master(name)), name
            if HAS_GPU:
                states = dict(optimizer.named_state()).values()
                assert {state["master"].device for state in states} == {DEVICE}
        if number == 2 * CHECK_STEPS + 2:
            before = dict(optimizer.master_weights())
            fail_to_allocate(device)
            optimizer.zero_grad()
            after = dict(optimizer.master_weights())
            assert all(torch.equal(after[name], before[name]) for name in before)
    assert shares[: 2 * CHECK_STEPS] == [0.0] * (2 * CHECK_STEPS)
    assert shares[2 * CHECK_STEPS :] == [1.0, 1.0, 1.0, 0.0, 0.0]
    optimizer.close()


HALF: dict[str, Any] = {"state_on": {"device": 0.5}}


@pytest.mark.parametrize(
    "options",
    [
        HALF,
        HALF | {"grad_accum_steps": 3, "sums_on": "device"},
        HALF | {"working": "host", "resident_blocks": 3, "activation": "recompute"},
        HALF | {"update": "speculative", "clip_norm": 1e9},
        *([HALF | {"state": "split16"}, {"state": "split16"}] if HAS_BF16 else []),
        HALF | {"state": "int8", "grad_accum_steps": 2},
        {"state": "int8", "state_on": "device"},
    ],
    ids=str,
)
def test_where_state_is_makes_no_difference(options: dict[str, Any]) -> None:
    """To losses and norms of a few steps: a GPU's update rounds elsewhere than the host's."""
    accum = options.get("grad_accum_steps", 1)
    figures = []
    for chosen in (options, {"state_on": "host", "grad_accum_steps": accum, "clip_norm": 0.5}):
        torch.manual_seed(0)
        model = Chain(4)
        optimizer = offload(model, ADAMW, **{"clip_norm": 0.5} | chosen)
        of_run = []
        for number, tokens in enumerate(batches(6 * accum)):
            loss = loss_of(model, tokens.to(DEVICE))
            of_run.append(loss.item())
            optimizer.backward(loss)
            if number % accum == accum - 1:
                optimizer.step()
                assert optimizer.grad_norm is not None
                of_run.append(optimizer.grad_norm)
        figures.append(of_run)
        optimizer.close()
    assert figures[0] == pytest.approx(figures[1], rel=0.05)
