"""The choice of kernels (native by instruction set, or Numba), of their threads, and of when they
run: at once, or captured for a native queue.

[Note: Without the interpreter]
A thread that runs Python between two kernels waits for the GIL each time, after a training thread
that launches a forward. The measured loss is a tenth of the time of Adam over a bucket of 7M
parameters. An operation that only calls kernels is therefore marked (`KernelCalls`) and *captured*
at launch: the kernels check their operands, and the native module records the calls. A native queue
makes them later. Other backends have no queue; there such an operation is an ordinary function.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

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
        name: "native" or "numba".
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

    def choose(self, name: str, isa: str, why: str) -> None:
        self.kernels = LOADERS[name]()
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
        where = "as asked for" if self.asked_threads else self.plan.why
        self.chosen = replace(self.chosen, threads=count, where=where)


@cache
def _native() -> Native:
    return Native()


LOADERS: dict[str, Callable[[], Any]] = {
    "native": _native,
    "numba": lambda: importlib.import_module("offloadtrain.runtime.kernels.numba_backend"),
}
"""Backend → what loads its kernels, the preferred first. Tests add a reference."""


def _missing(name: str) -> str | None:
    """Return why a backend cannot be used here; None if it can."""
    try:
        LOADERS[name]()
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
    if (numba_reason := _missing("numba")) is not None:
        raise KernelError(f"no CPU kernels can be loaded: {reason}; {numba_reason}")
    why = f"the native extension is not installed ({reason})"
    _log.warning("CPU kernels: numba; %s. Reinstall with a C++17 compiler.", why)
    return ("numba", "-", why)


def _forced(name: str) -> tuple[str, str, str]:
    if name not in LOADERS:
        raise KernelError(f"OFFLOADTRAIN_KERNELS = '{name}' is not {' or '.join(LOADERS)}")
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
    """Return the module or object whose functions run; chosen on first use."""
    if _selection.kernels is None:
        _selection.choose(*_choice())
    return _selection.kernels


def backend() -> Backend:
    """Return the active backend."""
    active_backend()
    assert _selection.chosen is not None
    return _selection.chosen


def available() -> list[Backend]:
    """Return every backend and instruction set that runs here, the preferred first."""
    isas = [("native", isa) for isa in _native().isas] if _missing("native") is None else []
    fallback = [("numba", "-")] if _missing("numba") is None else []
    return [Backend(name, isa, 0, "available") for name, isa in isas + fallback]


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


class KernelCalls:
    """An operation that only calls kernels, and reads no value that they write."""

    __slots__ = ("_call", "_captured", "_keeps")

    def __init__(self, call: Callable[..., object], *, keeps: bool = False) -> None:
        """`keeps`: it is launched again and again over a few sets of operands, and never stands for
        other calls: they are captured once, and the operands stay alive as long as it does."""
        self._call = call
        self._keeps = keeps
        self._captured: dict[tuple[int, ...], tuple[Native, Sequence[Tensor], Any]] = {}
        """Ids of operands → the kernels, the operands, which keep the ids theirs, and the calls."""

    def __call__(self, *operands: Tensor) -> None:
        self._call(*operands)

    def captured(self, kernels: Native, operands: Sequence[Tensor]) -> Any:
        """Return its calls over these operands."""
        if not self._keeps:
            return kernels.capture(lambda: self._call(*operands))
        key = tuple(map(id, operands))
        entry = self._captured.get(key)
        if entry is None or entry[0] is not kernels:
            calls = kernels.capture(lambda: self._call(*operands))
            entry = self._captured[key] = (kernels, operands, calls)
        return entry[2]


def capture(operation: Callable[..., object], operands: Sequence[Tensor]) -> Any | None:
    """Return the operation as checked native calls, not executed yet; None if it does more than
    call kernels, or the active kernels are not native."""
    kernels = active_backend()
    if not (isinstance(operation, KernelCalls) and isinstance(kernels, Native)):
        return None
    return operation.captured(kernels, operands)


def native_lane() -> Native | None:
    """Return the factory of queues and flags; None if the active kernels are not native."""
    kernels = active_backend()
    return kernels if isinstance(kernels, Native) else None


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
