"""The choice of kernels (native by instruction set, or Numba), of their threads, and of the time
when they run: at once, or captured for a native queue.

[Note: Without the interpreter]
A thread that runs Python between two kernels waits for the GIL each time, while a training thread
launches a forward. The measured loss is a tenth of the time of Adam over a bucket of 7M
parameters. An operation that only calls kernels is therefore marked (`KernelCalls`) and *captured*
at launch: the kernels check their operands, and the native module records the calls. A native queue
executes them later. Other backends have no queue; there such an operation is an ordinary function.

The native extension is called with raw addresses: ten times cheaper than DLPack tensors.
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
from offloadtrain.runtime.kernels.scalars import BlendScalars, Scalars, coefficients_of
from offloadtrain.runtime.kernels.state import Fp32State, Int8State, Layout, Split16State, State
from offloadtrain.runtime.thread_pools import started_pool

_log = logging.getLogger(__name__)


_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class Native:
    """The loaded extension."""

    def __init__(self) -> None:
        self._module: Any = importlib.import_module("offloadtrain._native")
        self.isas: list[str] = self._module.isas()

    def use_isa(self, isa: str) -> None:
        self._module.use_isa(isa)

    def set_threads(self, count: int, cpus: Sequence[int]) -> None:
        self._module.set_threads(count, list(cpus))

    def update(
        self,
        state: State,
        out: State,
        grad: Tensor,
        working: Tensor | None,
        layout: Layout | None,
        s: Scalars,
    ) -> None:
        before = _addresses(state)
        after = before if out is state else _addresses(out)
        scalars, numel = (s.rule, coefficients_of(s)), grad.numel()
        if isinstance(state, Fp32State):
            target = (0, 0) if working is None else _described(working)
            self._module.update_fp32(before, after, _described(grad), *target, numel, scalars)
            return
        assert layout is not None
        where = (numel, (layout.address, layout.count), (s.seed & 0xFFFFFFFFFFFFFFFF, s.step))
        if isinstance(state, Split16State):
            self._module.update_split16(before, after, _described(grad), *where, scalars)
        elif isinstance(state, Int8State):
            code = _CODES[state.weight.dtype]
            self._module.update_int8(before, after, _described(grad), code, *where, scalars)

    def accumulate(self, total: Tensor, grad: Tensor, first: bool) -> None:
        self._module.accumulate(total.data_ptr(), _described(grad), total.numel(), first)

    def accumulate_squares(
        self, total: Tensor, grad: Tensor, layout: Layout, first: bool, squares: Tensor
    ) -> None:
        slots = (layout.address, layout.count)
        self._module.accumulate_squares(
            total.data_ptr(), _described(grad), slots, first, squares.data_ptr()
        )

    def cast(self, source: Tensor, target: Tensor) -> None:
        self._module.cast(source.data_ptr(), *_described(target), source.numel())

    def copy_flat(self, source: Tensor, target: Tensor) -> None:
        self._module.copy(source.data_ptr(), target.data_ptr(), source.nbytes)

    def zero_flat(self, memory: Tensor) -> None:
        self._module.zero(memory.data_ptr(), memory.nbytes)

    def sum_squares(self, flat: Tensor, layout: Layout, squares: Tensor) -> None:
        slots = (layout.address, layout.count)
        self._module.sum_squares(_described(flat), slots, squares.data_ptr())

    def sum_squares_each(self, tensors: Sequence[tuple[int, Tensor]], squares: Tensor) -> None:
        where = [(values.data_ptr(), values.numel(), id) for id, values in tensors]
        self._module.sum_squares_each(where, _CODES[tensors[0][1].dtype], squares.data_ptr())

    def capture(self, calls: Callable[[], object]) -> Any:
        """Return the native calls that `calls` makes, captured on this thread instead of
        executed."""
        captured = self._module.Calls()
        captured.begin()
        try:
            calls()
        finally:
            captured.end()
        return captured

    def make_queue(self) -> Any:
        return self._module.Queue()

    def make_flag(self) -> Any:
        return self._module.Flag()

    def traffic(self, state: Fp32State, grad: Tensor, working: Tensor) -> None:
        self._module.traffic(_addresses(state), grad.data_ptr(), working.data_ptr(), grad.numel())

    def set_master(self, state: State, master: Tensor) -> None:
        source, (weight, rest), numel = master.data_ptr(), state[:2], master.numel()
        if isinstance(state, Split16State):
            self._module.encode_split16(source, weight.data_ptr(), rest.data_ptr(), numel)
        elif isinstance(state, Int8State):
            self._module.encode_int8(source, _described(weight), rest.data_ptr(), numel)

    def read_master(self, state: State, master: Tensor) -> None:
        target, (weight, rest), numel = master.data_ptr(), state[:2], master.numel()
        if isinstance(state, Split16State):
            self._module.decode_split16(weight.data_ptr(), rest.data_ptr(), target, numel)
        elif isinstance(state, Int8State):
            self._module.decode_int8(_described(weight), rest.data_ptr(), target, numel)

    def blend(
        self, state: State, grad: Tensor, target: Tensor, layout: Layout, s: BlendScalars
    ) -> None:
        kind = "fp32" if isinstance(state, Fp32State) else "split16"
        c = s.coefficients()
        getattr(self._module, f"blend_{kind}")(
            state[-1].data_ptr(),
            _described(grad),
            target.data_ptr(),
            grad.numel(),
            (layout.address, layout.count),
            (s.seed & 0xFFFFFFFFFFFFFFFF, s.step),
            (list(c[:3]), *c[3:]),
        )

    def subtract(
        self,
        state: State,
        update: Tensor,
        working: Tensor | None,
        layout: Layout,
        decay: float,
        rates: Sequence[float],
    ) -> None:
        slots, decays = (layout.address, layout.count), (decay, list(rates))
        source, numel = update.data_ptr(), update.numel()
        if isinstance(state, Fp32State):
            target = (0, 0) if working is None else _described(working)
            master = state.master.data_ptr()
            self._module.subtract_fp32(master, source, target, numel, slots, decays)
        elif isinstance(state, Split16State):
            halves = (state.weight.data_ptr(), state.low.data_ptr())
            self._module.subtract_split16(*halves, source, numel, slots, decays)

    def first_touch(self, memory: Tensor) -> None:
        self._module.first_touch(memory.data_ptr(), memory.numel(), memory.element_size())


def _addresses(state: State) -> tuple[int, ...]:
    """Return addresses in the order of the native structs, which have two moments: 0 if there is
    none."""
    addresses = [tensor.data_ptr() for tensor in state]
    if isinstance(state, Int8State) and len(addresses) < 6:
        addresses[len(addresses) // 2 + 1 : len(addresses) // 2 + 1] = [0] * (
            3 - len(addresses) // 2
        )
    return (*addresses, *[0] * (6 - len(addresses)))


def _described(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), _CODES[tensor.dtype]


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
"""Backend → function that loads its kernels, preferred first. Tests add a reference."""


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
    """Return every backend and instruction set that runs here, preferred first."""
    isas = [("native", isa) for isa in _native().isas] if _missing("native") is None else []
    fallback = [("numba", "-")] if _missing("numba") is None else []
    return [Backend(name, isa, 0, "available") for name, isa in isas + fallback]


@contextmanager
def use(chosen: Backend) -> Iterator[None]:
    """Force a backend of `available()` within the context; `threads` > 0 also forces their
    number."""
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
    """An operation that only calls kernels, and reads none of the values that they write."""

    __slots__ = ("_call", "_captured", "_keeps")

    def __init__(self, call: Callable[..., object], *, keeps: bool = False) -> None:
        """`keeps`: the object is launched repeatedly over a few sets of operands and always makes
        the same calls: they are captured once, and the operands stay alive as long as the
        object."""
        self._call = call
        self._keeps = keeps
        self._captured: dict[tuple[int, ...], tuple[Native, Sequence[Tensor], Any]] = {}
        """Ids of operands → the kernels, the operands (alive, so that ids stay valid), and the
        calls."""

    def __call__(self, *operands: Tensor) -> None:
        self._call(*operands)

    def captured(self, kernels: Native, operands: Sequence[Tensor]) -> Any:
        """Return the captured calls over these operands."""
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
"""torch uses at most one thread per this number of elements of a loop."""


def start_threads() -> None:
    """Start the threads of torch's loops and of the kernels, unless they run already.

    Raises:
        HostMemoryError: a thread cannot be started.
    """
    count = max(torch.get_num_threads(), backend().threads)
    started_pool("trial", count).shutdown()  # OpenMP would end the process without a reason
    ones = torch.ones(count * _ELEMENTS_PER_THREAD, dtype=torch.float32, device="cpu")
    try:
        active_backend().cast(ones, torch.empty_like(ones, dtype=torch.bfloat16))
    except RuntimeError as error:  # raised by a thread of the native kernels
        raise HostMemoryError(refusal(error)) from error
