"""The choice of kernels (native by instruction set, Numba, or plain torch) and of their threads."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from offloadtrain.config.errors import HostMemoryError, OffloadTrainError
from offloadtrain.hardware.cpus import CpuPlan, local_plan
from offloadtrain.hardware.host_memory import refusal
from offloadtrain.runtime.kernels.native import Native
from offloadtrain.runtime.thread_pools import started_pool

_log = logging.getLogger(__name__)


class KernelError(OffloadTrainError):
    """The requested kernel backend is not available."""


@dataclass(frozen=True, slots=True)
class Backend:
    """The active kernels.

    Attributes:
        name: "native", "numba" or "torch".
        isa: instruction set of the native kernels: "avx512", "avx2", "neon" or "baseline"; "-"
            otherwise.
        threads: number of threads per call.
        why: reason for the backend.
        where: reason for the number of threads.
    """

    name: str
    isa: str
    threads: int
    why: str
    where: str = ""


class _Selection:
    """The active backend, chosen on first use."""

    def __init__(self) -> None:
        self.plan = local_plan()
        self.asked_threads: int | None = None
        self.chosen: Backend | None = None
        self.kernels: Any = None

    def get(self) -> Any:
        if self.kernels is None:
            self.choose(*_choice())
        return self.kernels

    def choose(self, name: str, isa: str, why: str) -> None:
        self.kernels = _load(name)
        if name == "native":
            self.kernels.use_isa(isa)
        self.chosen = Backend(name, isa, 0, why, self.plan.why)
        self.apply_threads()

    def apply_threads(self) -> None:
        """Set the number of threads of the active backend, and their CPUs."""
        if self.chosen is None:
            return
        count = self.asked_threads or self.plan.threads
        if self.chosen.name == "native":
            self.kernels.set_threads(count, self.plan.cpus)
        elif self.chosen.name == "numba":
            self.kernels.threads.count = count
        else:
            count = torch.get_num_threads()
        where = "as asked for" if self.asked_threads else self.plan.why
        self.chosen = replace(self.chosen, threads=count, where=where)


def _load(name: str) -> Any:
    if name == "native":
        return _native()
    return importlib.import_module(f"offloadtrain.runtime.kernels.{name}_backend")


_loaded: list[Native] = []


def _native() -> Native:
    if not _loaded:
        _loaded.append(Native())
    return _loaded[0]


def _missing(name: str) -> str | None:
    """Return why a backend cannot be used here; None if it can."""
    try:
        _load(name)
    except ImportError as error:
        return str(error)
    return None


def _choice() -> tuple[str, str, str]:
    forced = os.environ.get("OFFLOADTRAIN_KERNELS", "")
    if forced:
        return _forced(forced)
    reason = _missing("native")
    if reason is None:
        return ("native", *_isa())
    for name in ("numba", "torch"):
        if _missing(name) is None:
            why = f"the native extension is not installed ({reason})"
            _log.warning("CPU kernels: %s; %s. Reinstall with a C++17 compiler.", name, why)
            return (name, "-", why)
    raise KernelError("no CPU kernels can be loaded")  # pragma: no cover - torch is there


def _forced(name: str) -> tuple[str, str, str]:
    if name not in ("native", "numba", "torch"):
        raise KernelError(f"OFFLOADTRAIN_KERNELS = '{name}' is not native, numba or torch")
    reason = _missing(name)
    if reason is not None:
        raise KernelError(f"OFFLOADTRAIN_KERNELS = '{name}', but it cannot be loaded: {reason}")
    isa, _ = _isa() if name == "native" else ("-", "")
    return (name, isa, "forced by OFFLOADTRAIN_KERNELS")


def _isa() -> tuple[str, str]:
    isas = _native().isas
    forced = os.environ.get("OFFLOADTRAIN_ISA", "")
    if not forced:
        return isas[0], "the fastest on this CPU"
    if forced not in isas:
        raise KernelError(f"OFFLOADTRAIN_ISA = '{forced}' is not one of {', '.join(isas)}")
    return forced, "forced by OFFLOADTRAIN_ISA"


_selection = _Selection()


def active_backend() -> Any:
    """Return the module or object whose functions run."""
    return _selection.get()


def backend() -> Backend:
    """Return the active backend."""
    _selection.get()
    assert _selection.chosen is not None
    return _selection.chosen


def available() -> list[Backend]:
    """Return every backend and instruction set that runs here, the preferred first."""
    backends = []
    if _missing("native") is None:
        backends = [Backend("native", isa, 0, "available") for isa in _native().isas]
    fallbacks = [name for name in ("numba", "torch") if _missing(name) is None]
    return backends + [Backend(name, "-", 0, "available") for name in fallbacks]


@contextmanager
def use(chosen: Backend) -> Iterator[None]:
    """Force a backend of `available()` for a while; `threads` > 0 forces their number too."""
    before, threads = backend(), _selection.asked_threads
    _selection.asked_threads = chosen.threads or threads
    _selection.choose(chosen.name, chosen.isa, "forced by use()")
    try:
        yield
    finally:
        _selection.asked_threads = threads
        _selection.choose(before.name, before.isa, before.why)


def set_threads(count: int | None) -> None:
    """Set the threads of a call, at least 1, overriding `place`; None: as set by `place`."""
    if count is not None and count < 1:
        raise ValueError(f"threads = {count}: at least 1 is needed")
    _selection.asked_threads = count
    _selection.apply_threads()


def place(plan: CpuPlan) -> None:
    """Apply a plan to the kernels' threads: their number, and the CPUs they are bound to.

    Memory first touched by them (`first_touch`) is local to these CPUs.
    """
    _selection.plan = plan
    _selection.apply_threads()


_ELEMENTS_PER_THREAD = 1 << 15
"""torch divides a loop over fewer elements among fewer threads."""


def start_threads() -> None:
    """Start the threads of torch's loops and of the kernels, unless they run already.

    Raises:
        HostMemoryError: one of them is refused.
    """
    count = max(torch.get_num_threads(), backend().threads)
    started_pool("trial", count).shutdown()  # OpenMP would end the process without a reason
    ones = torch.ones(count * _ELEMENTS_PER_THREAD, dtype=torch.float32, device="cpu")
    try:
        active_backend().cast(ones, torch.empty_like(ones, dtype=torch.bfloat16))
    except RuntimeError as error:  # of a thread of the native kernels
        raise HostMemoryError(refusal(error)) from error
