"""The only door to the CPU kernels: native (C++, by instruction set), Numba, or plain torch.

Every backend gives the same bits, whatever the instruction set and the number of threads. All
tensors are 1-D, contiguous and on the CPU; anything else is refused before a byte is written.

[Note: The norm]
A gradient's global norm has one definition on device, host and ranks: the sum of squares of a
parameter is taken in fp64 (squares of fp32 and narrower are exact there) over segments of 2,048
elements counted from the parameter's start, the last padded with zeros. Within a segment, element i
is added to element i + 1024 for i < 1024, then i + 512, down to 1; segments are added in order.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offloadtrain.adam_scalars import AdamScalars
from offloadtrain.errors import OffloadTrainError

__all__ = [
    "AdamScalars",
    "Backend",
    "accumulate",
    "adam",
    "available",
    "backend",
    "cast",
    "first_touch",
    "set_threads",
    "sum_squares",
    "sum_squares_many",
    "use",
]

_log = logging.getLogger(__name__)
_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class KernelError(OffloadTrainError):
    """A kernel backend was asked for that is not there."""


@dataclass(frozen=True, slots=True)
class Backend:
    """Which kernels run.

    Attributes:
        name: "native", "numba" or "torch".
        isa: of the native kernels: "avx512", "avx2", "neon" or "baseline"; "-" otherwise.
        threads: that one call uses.
        why: how it was chosen.
    """

    name: str
    isa: str
    threads: int
    why: str


class _Native:
    """Raw addresses: ten times cheaper per call than passing tensors through DLPack."""

    def __init__(self) -> None:
        self._module: Any = importlib.import_module("offloadtrain._native")
        self.isas: list[str] = self._module.isas()

    def use_isa(self, isa: str) -> None:
        self._module.use_isa(isa)

    def set_threads(self, count: int) -> None:
        self._module.set_threads(count)

    def adam(
        self,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        working: Tensor | None,
        s: AdamScalars,
    ) -> None:
        target = (0, 0) if working is None else (working.data_ptr(), _CODES[working.dtype])
        self._module.adam(
            master.data_ptr(),
            exp_avg.data_ptr(),
            exp_avg_sq.data_ptr(),
            grad.data_ptr(),
            _CODES[grad.dtype],
            *target,
            master.numel(),
            s.lr,
            s.beta1,
            s.beta2,
            s.eps,
            s.weight_decay,
            s.step,
            s.decoupled,
            s.grad_scale,
        )

    def accumulate(self, total: Tensor, grad: Tensor, first: bool) -> None:
        numel = total.numel()
        self._module.accumulate(total.data_ptr(), grad.data_ptr(), _CODES[grad.dtype], numel, first)

    def cast(self, source: Tensor, target: Tensor) -> None:
        code = _CODES[target.dtype]
        self._module.cast(source.data_ptr(), target.data_ptr(), code, source.numel())

    def sum_squares(
        self, flat: Tensor, offsets: Sequence[int], numels: Sequence[int]
    ) -> list[float]:
        sums: list[float] = self._module.sum_squares(
            flat.data_ptr(), _CODES[flat.dtype], list(offsets), list(numels)
        )
        return sums

    def first_touch(self, memory: Tensor) -> None:
        self._module.first_touch(memory.data_ptr(), memory.numel())


class _Selection:
    """The backend in force; chosen on first use."""

    def __init__(self) -> None:
        self.threads = default_threads()
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
        self.chosen = Backend(name, isa, self.threads, why)
        self.apply_threads(self.threads)

    def apply_threads(self, count: int) -> None:
        self.threads = count
        if self.chosen is None:
            return
        if self.chosen.name == "native":
            self.kernels.set_threads(count)
        elif self.chosen.name == "numba":
            self.kernels.threads.count = count
        else:
            self.threads = torch.get_num_threads()
        self.chosen = Backend(self.chosen.name, self.chosen.isa, self.threads, self.chosen.why)


def default_threads() -> int:
    """Cores that this process may use: its affinity, capped by the cgroup's quota.

    One core is left to the thread that launches, where there are more than two.
    """
    cores = len(os.sched_getaffinity(0))
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return cores if cores <= 2 else cores - 1


def _load(name: str) -> Any:
    if name == "native":
        return _native()
    return importlib.import_module(f"offloadtrain.{name}_kernels")


_loaded: list[_Native] = []


def _native() -> _Native:
    if not _loaded:
        _loaded.append(_Native())
    return _loaded[0]


def _missing(name: str) -> str | None:
    """Why a backend cannot be used here; None if it can."""
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
    raise KernelError("no CPU kernels can be loaded")  # pragma: no cover - torch is always there


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
        return isas[0], "the fastest that this CPU has"
    if forced not in isas:
        raise KernelError(f"OFFLOADTRAIN_ISA = '{forced}' is not one of {', '.join(isas)}")
    return forced, "forced by OFFLOADTRAIN_ISA"


_selection = _Selection()


def backend() -> Backend:
    """The backend in force."""
    _selection.get()
    assert _selection.chosen is not None
    return _selection.chosen


def available() -> list[Backend]:
    """Every backend and instruction set that runs here, the preferred first."""
    found = []
    if _missing("native") is None:
        found = [Backend("native", isa, 0, "available") for isa in _native().isas]
    others = [name for name in ("numba", "torch") if _missing(name) is None]
    return found + [Backend(name, "-", 0, "available") for name in others]


@contextmanager
def use(chosen: Backend) -> Iterator[None]:
    """Force a backend of `available()` for a while; `threads` > 0 forces their number too."""
    before, threads = backend(), _selection.threads
    _selection.choose(chosen.name, chosen.isa, "forced by use()")
    _selection.apply_threads(chosen.threads or threads)
    try:
        yield
    finally:
        _selection.choose(before.name, before.isa, before.why)
        _selection.apply_threads(threads)


def set_threads(count: int) -> None:
    """How many threads one call uses, at least 1."""
    if count < 1:
        raise ValueError(f"threads = {count}: at least 1 is needed")
    _selection.apply_threads(count)


def adam(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    working: Tensor | None,
    scalars: AdamScalars,
) -> None:
    """One Adam step over a bucket in one pass.

    Order: scale the gradient, decay, moments, bias correction, update, round to the working dtype.
    The arithmetic is that of torch.optim.AdamW (or Adam) with fused=True on the CPU, to the bit.

    Args:
        master, exp_avg, exp_avg_sq: (n,) fp32, updated in place.
        grad: (n,) fp32, bf16 or fp16.
        working: (n,) fp32, bf16 or fp16: receives the new master rounded to nearest even, NaN
            kept. May be the memory of `grad` itself if their elements have the same size.

    Raises:
        TypeError, ValueError: and nothing is written.
    """
    operands = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad}
    if working is not None:
        operands["working"] = working
    _check(operands, full=("master", "exp_avg", "exp_avg_sq"))
    if scalars.step < 1:
        raise ValueError(f"step = {scalars.step}: optimizer steps count from 1")
    _check_disjoint(operands)
    _selection.get().adam(master, exp_avg, exp_avg_sq, grad, working, scalars)


def accumulate(total: Tensor, grad: Tensor, first: bool) -> None:
    """total = grad (first) or total + grad, in fp32.

    Args:
        total: (n,) fp32.
        grad: (n,) fp32, bf16 or fp16.
    """
    operands = {"total": total, "grad": grad}
    _check(operands, full=("total",))
    _check_disjoint(operands)
    _selection.get().accumulate(total, grad, first)


def cast(source: Tensor, target: Tensor) -> None:
    """target = source rounded to nearest even, NaN kept.

    Args:
        source: (n,) fp32.
        target: (n,) fp32, bf16 or fp16.
    """
    operands = {"source": source, "target": target}
    _check(operands, full=("source",))
    _check_disjoint(operands)
    _selection.get().cast(source, target)


def sum_squares(values: Tensor) -> float:
    """Of one parameter, fp64; see [Note: The norm]. Not finite if a value is not."""
    return sum_squares_many(values, [0], [values.numel()])[0]


def sum_squares_many(flat: Tensor, offsets: Sequence[int], numels: Sequence[int]) -> list[float]:
    """`sum_squares` of each parameter in a flat buffer.

    Args:
        flat: (n,) fp32, bf16 or fp16.
        offsets, numels: elements; where each parameter starts and how long it is.
    """
    _check({"flat": flat}, full=())
    for offset, numel in zip(offsets, numels, strict=True):
        if offset < 0 or numel < 0 or offset + numel > flat.numel():
            raise ValueError(
                f"elements [{offset}, {offset + numel}) are not in a buffer of {flat.numel()}"
            )
    sums: list[float] = _selection.get().sum_squares(flat, offsets, numels)
    return sums


def first_touch(memory: Tensor) -> None:
    """Zero fresh memory, each part by the thread that will work on it, which places its pages.

    Args:
        memory: (bytes,) uint8.
    """
    on_cpu = memory.device.type == "cpu" and memory.dim() == 1 and memory.is_contiguous()
    if memory.dtype is not torch.uint8 or not on_cpu:
        raise TypeError(f"memory must be 1-D contiguous uint8 on the CPU, not {_describe(memory)}")
    _check_alive("memory", memory)
    _selection.get().first_touch(memory)


def _check(operands: dict[str, Tensor], *, full: tuple[str, ...]) -> None:
    numel: int | None = None
    for name, tensor in operands.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
        if tensor.dtype not in _CODES or (name in full and tensor.dtype is not torch.float32):
            wanted = "float32" if name in full else "float32, bfloat16 or float16"
            raise TypeError(f"{name} must be {wanted}, not {tensor.dtype}")
        if tensor.device.type != "cpu" or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be 1-D, contiguous and on the CPU: {_describe(tensor)}")
        _check_alive(name, tensor)
        numel = tensor.numel() if numel is None else numel
        if tensor.numel() != numel:
            raise ValueError(f"{name} has {tensor.numel()} elements, the others {numel}")


def _check_alive(name: str, tensor: Tensor) -> None:
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if end > tensor.untyped_storage().nbytes():
        raise ValueError(f"{name} has been freed: its storage is smaller than it is")


def _check_disjoint(operands: dict[str, Tensor]) -> None:
    extents = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
        for name, tensor in operands.items()
    )
    for i in range(len(extents) - 1):
        lo, end, name = extents[i]
        start, stop, other = extents[i + 1]
        in_place = {name, other} == {"grad", "working"} and (lo, end) == (start, stop)
        if start < end and not in_place:
            raise ValueError(f"{name} and {other} overlap in memory")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} stride {tensor.stride()} on {tensor.device}"
