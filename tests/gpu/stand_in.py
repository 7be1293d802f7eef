"""Runs tests marked `gpu` where there is no GPU: on the CPU, with the CUDA lanes over the stand-in
of `tests/runtime/fake_cuda.py`.

A test that needs more is marked `gpu(until="torch.cuda.NAME")`: its first call that only a device
can answer. Its body runs up to this call; mypy alone sees the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest
import torch

from offloadtrain.runtime import cuda_driver, kernels, lanes
from tests.runtime.fake_cuda import LoggedLanes, installed

NEED_A_DEVICE = (
    *("_lazy_init", "_sleep", "get_device_name", "get_device_properties", "max_memory_allocated"),
    *("mem_get_info", "set_sync_debug_mode"),
)
"""Of torch.cuda: what the stand-in has no answer to. `_lazy_init` is called by whatever makes a
tensor there."""


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
