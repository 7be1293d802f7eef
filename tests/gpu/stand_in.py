"""Runs tests marked `gpu` where there is no GPU: on the CPU, with the CUDA lanes over the stand-in
of `tests/runtime/fake_cuda.py`.

What the engine has allocated on its device says that it is a GPU's, so that the kernels for GPU
memory (`runtime/kernels/on_device.py`) update and measure it.

A test that needs more is marked `gpu(until="torch.cuda.NAME")`: its first call that only a device
can answer. Its body runs up to this call; mypy alone sees the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from offloadtrain.runtime import cuda_driver, kernels, lanes
from offloadtrain.runtime.kernels import on_device
from tests.runtime.fake_cuda import Gpu, LoggedLanes, installed

NEED_A_DEVICE = (
    *("_lazy_init", "_sleep", "get_device_name", "get_device_properties", "max_memory_allocated"),
    *("mem_get_info", "set_sync_debug_mode"),
)
"""Of torch.cuda: what the stand-in has no answer to. `_lazy_init` is called by whatever makes a
tensor there."""


class _DeviceMemory:
    """Tells memory of the device from the host's, both of which are the CPU's."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}
        """Address of the storage's object → that object, whose address is not given out again."""

    def add(self, memory: Tensor) -> None:
        storage = memory.untyped_storage()
        self._storages[storage._cdata] = StorageWeakRef(storage)

    def has(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided or isinstance(tensor, FakeTensor):
            return False
        ref = self._storages.get(tensor.untyped_storage()._cdata)
        return ref is not None and not ref.expired()

    def install(self, gpu: Gpu, patch: pytest.MonkeyPatch) -> None:
        """Until the patch is undone."""
        logged = gpu.allocated

        def allocated(memory: Tensor) -> None:
            self.add(memory)
            logged(memory)

        patch.setattr(gpu, "allocated", allocated)
        patch.setattr(Tensor, "is_cuda", property(self.has))
        patch.setattr(Tensor, "is_cpu", property(lambda tensor: not self.has(tensor)))
        patch.setattr(kernels, "set_master", partial(self._set_master, kernels.set_master))
        # The code generator is tested in tests/runtime/kernels.
        patch.setattr(on_device, "_has_compiler", lambda: True)
        patch.setattr(on_device, "_compiled", lambda *_: on_device.narrow_adam)

    def _set_master(self, set_master: Callable[..., None], state: Any, master: Tensor) -> None:
        """Masters come in memory of the state's device, which the stand-in takes for the host's."""
        if self.has(state[0]):
            kernels.set_master_by_codec(state.format, state, master)
        else:
            set_master(state, master)


class NeedsDeviceError(Exception):
    """A call was made that only a GPU can answer."""


@contextmanager
def stand_in(until: str | None) -> Iterator[None]:
    """Run the body of a test on the CPU, to its end or up to the call `until`."""
    host = "queue" if kernels.native_lane() is not None else "thread"
    with installed(host) as gpu, pytest.MonkeyPatch.context() as patch:
        made: list[LoggedLanes] = []

        def make_lanes() -> LoggedLanes:
            made.append(LoggedLanes(gpu))
            return made[-1]

        patch.setattr(lanes, "SequentialLanes", make_lanes)
        _DeviceMemory().install(gpu, patch)
        for name in ("synchronize", "reset_peak_memory_stats"):
            patch.setattr(torch.cuda, name, lambda device=None: None)
        patch.setattr(cuda_driver, "register", _refuse("cuda_driver.register"))
        for name in NEED_A_DEVICE:
            patch.setattr(torch.cuda, name, _refuse(f"torch.cuda.{name}"))
        if until is None:
            yield
            # Of two optimizers the log would take their streams for the same ones.
            faults = gpu.log.faults() if len(made) == 1 else []
            assert not faults, faults
            return
        with pytest.raises(NeedsDeviceError, match=f"^{re.escape(until)}$"):
            yield
        for left_open in made:  # the body did not come to its end
            left_open.close()


def _refuse(name: str) -> Callable[..., NoReturn]:
    def call(*args: object, **kwargs: object) -> NoReturn:
        raise NeedsDeviceError(name)

    return call
