"""Where there is no GPU, a test marked `gpu` runs up to the call that its mark names, no less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import on_device
from offloadtrain.runtime.lanes import CudaLanes
from tests.gpu.precision import DEVICE, HAS_GPU, offload
from tests.gpu.stand_in import NeedsDeviceError, stand_in
from tests.numerics.models import Chain, batches, loss_of

pytestmark = pytest.mark.skipif(HAS_GPU, reason="there is a GPU")


def test_every_file_of_these_tests_is_marked() -> None:
    """`python -m benchmarks.gpu` runs what is marked, on a GPU."""
    files = sorted(Path(__file__).parent.glob("test_*_cuda.py"))
    assert len(files) > 3
    assert [file.name for file in files if "mark.gpu" not in file.read_text("utf-8")] == []


def train(**options: Any) -> None:
    optimizer = offload(model := Chain(2), **options)
    optimizer.backward(loss_of(model, batches(1)[0].to(DEVICE)))
    torch.cuda.mem_get_info()
    optimizer.close()


def test_a_body_stops_at_the_call_that_its_mark_names() -> None:
    with stand_in(until="torch.cuda.mem_get_info"):
        train()


def test_a_body_that_ends_elsewhere_fails() -> None:
    """Before the call, after it, at another one, or without having named any."""
    with pytest.raises(TypeError, match="renamed"), stand_in(until="torch.cuda.mem_get_info"):
        train(renamed=1)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"), stand_in("torch.cuda._sleep"):
        pass
    with pytest.raises(AssertionError, match="mem_get_info"), stand_in(until="torch.cuda._sleep"):
        train()
    with pytest.raises(NeedsDeviceError, match="mem_get_info"), stand_in(until=None):
        torch.cuda.mem_get_info()


def test_a_body_whose_operations_race_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are right: the stand-in does everything at once."""
    monkeypatch.setattr(CudaLanes, "_stream_wait", lambda lanes, lane, event: event.issued.wait())
    with pytest.raises(AssertionError, match="race"), stand_in(until=None):
        optimizer = offload(model := Chain(2), working="host")
        optimizer.backward(loss_of(model, batches(1)[0].to(DEVICE)))
        optimizer.step()
        optimizer.close()


def test_memory_of_the_device_is_updated_by_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """And memory of the host by the host's, which refuse the device's."""
    updated: list[bool] = []
    update = on_device.update

    def spy(state: Any, *args: Any) -> None:
        updated.append(state.master.is_cuda)
        update(state, *args)

    monkeypatch.setattr(on_device, "update", spy)
    with stand_in(until=None):
        optimizer = offload(model := Chain(4), state_on={"device": 0.5})
        optimizer.backward(loss_of(model, batches(1)[0].to(DEVICE)))
        optimizer.step()
        optimizer.synchronize()
        buckets = [bucket for block in optimizer._blocks for bucket in block.buckets]
        masters = [bucket.state[0].flat for bucket in buckets]
        on_host, *_, there = sorted(masters, key=lambda master: master.is_cuda)
        assert there.is_cuda and on_host.is_cpu and not on_host.is_cuda
        with pytest.raises(ValueError, match="on the CPU"):
            kernels.copy(on_host, there[: on_host.numel()])
        optimizer.close()
    assert updated and all(updated) and not torch.zeros(1).is_cuda
