"""CPU Adam against the traffic limit, torch and DeepSpeed, interleaved in one process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from offloadtrain.cli.bench.peers import DEEPSPEED_STEP, TORCH_STEP, deepspeed_cases, torch_cases
from offloadtrain.cli.bench.report import LIMIT, ONE_PASS, Label, Row, rows_of
from offloadtrain.cli.bench.rounds import Case, measure
from offloadtrain.runtime import kernels
from offloadtrain.runtime.arena import Arena, Ledger
from offloadtrain.runtime.kernels import AdamScalars, Backend, Fp32State, Layout, State
from offloadtrain.step.formats import FORMATS
from offloadtrain.step.memory import MemoryRequest

SCALARS = AdamScalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step=10, grad_scale=0.5)
MOMENTS = ("exp_avg", "exp_avg_sq")
_TYPES: dict[str, type[State]] = {
    "fp32": Fp32State,
    "split16": kernels.Split16State,
    "int8": kernels.Int8State,
}
DISPATCH_CALLS = 5000


@dataclass(frozen=True, slots=True)
class Buffers:
    """One bucket of one parameter, in every form that a case needs.

    Attributes:
        grad, working: (n,) bf16.
        wide: (n,) fp32: gradients for those that want them so, and the sum of microbatches.
        out: fp32 state that the double-buffered form writes.
    """

    states: dict[str, State]
    out: Fp32State
    grad: Tensor
    working: Tensor
    wide: Tensor
    layout: Layout
    squares: Tensor

    @property
    def fp32(self) -> Fp32State:
        state = self.states["fp32"]
        assert isinstance(state, Fp32State)
        return state


def allocate(numel: int, states: Sequence[str]) -> Buffers:
    """Staggered in one arena, on huge pages, touched first by the threads that use them.

    Raises:
        HostMemoryError: if the host has not that much.
    """
    fields = {
        name: FORMATS[name].fields(MOMENTS) for name in {"fp32": None, **dict.fromkeys(states)}
    }
    requests = [
        MemoryRequest(f"{name} {field.name}", field.numel(numel), field.dtype or "bfloat16")
        for name, kept in fields.items()
        for field in kept
    ]
    requests += [MemoryRequest("out", numel, "float32")] * 3
    requests += [
        MemoryRequest("grad", numel, "bfloat16"),
        MemoryRequest("working", numel, "bfloat16"),
    ]
    requests.append(MemoryRequest("wide", numel, "float32"))
    tensors = iter(Arena(Ledger(), pin=False).map(requests))
    made = {name: _TYPES[name](*(next(tensors) for _ in kept)) for name, kept in fields.items()}
    out = Fp32State(*(next(tensors) for _ in range(3)))
    squares, layout = torch.zeros(1, dtype=torch.float64), Layout.of_one(numel)
    buffers = Buffers(made, out, next(tensors), next(tensors), next(tensors), layout, squares)
    _fill(buffers)
    return buffers


def _fill(buffers: Buffers) -> None:
    buffers.grad.normal_()
    buffers.wide.copy_(buffers.grad)
    for state in buffers.states.values():
        kernels.set_master(state, buffers.wide)
        kernels.adam(state, buffers.grad, SCALARS, layout=buffers.layout)


def our_cases(buffers: Buffers, backends: Sequence[Backend]) -> dict[Label, Case]:
    """Every format in every backend, then what only the preferred one is measured in."""
    b, found = buffers, dict[Label, Case]()
    for backend in backends:
        name = f"{backend.name} {backend.isa}".removesuffix(" -")
        for format, state in b.states.items():
            if format == "int8" and backend.name != "native":
                continue
            traffic = float(FORMATS[format].traffic_per_param(MOMENTS, 2, 2))
            working = b.working if format == "fp32" else None
            step = partial(kernels.adam, state, b.grad, SCALARS, working=working, layout=b.layout)
            found[Label(ONE_PASS, name, format, traffic)] = _under(backend, step)
    return found | _other_cases(buffers, backends[0])


def _other_cases(b: Buffers, backend: Backend) -> dict[Label, Case]:
    name = f"{backend.name} {backend.isa}".removesuffix(" -")
    adam = partial(kernels.adam, b.fp32, scalars=SCALARS, working=b.working)
    cases: dict[tuple[str, str, float], Case] = {
        ("one pass, double-buffered", "fp32", 28.0): partial(adam, b.grad, out=b.out),
        ("one pass, over the gradient", "fp32", 28.0): partial(
            kernels.adam, b.fp32, b.working, SCALARS, working=b.working
        ),
        ("one pass, fp32 gradients", "fp32", 30.0): partial(adam, b.wide),
        ("sum of squares", "-", 2.0): partial(kernels.sum_squares, b.grad),
        ("accumulate", "-", 10.0): partial(kernels.accumulate, b.wide, b.grad, False),
        ("accumulate and square", "-", 10.0): partial(
            kernels.accumulate_squares, b.wide, b.grad, False, b.layout, b.squares
        ),
    }
    return {
        Label(case, name, s, size): _under(backend, run) for (case, s, size), run in cases.items()
    }


def _under(backend: Backend, run: Callable[[], object]) -> Case:
    def case() -> None:
        with kernels.use(backend):
            run()

    return case


def peer_cases(b: Buffers) -> dict[Label, Case]:
    """torch and DeepSpeed: 28 bytes for the step, 48 for the path."""
    arguments = (b.fp32, b.grad, b.working, b.wide, SCALARS)
    found: dict[Label, Case] = {}
    for backend, cases in (("torch", torch_cases), ("deepspeed", deepspeed_cases)):
        for name, run in cases(*arguments).items():
            size = 28.0 if name in (TORCH_STEP, DEEPSPEED_STEP) else 48.0
            found[Label(name, backend, "fp32", size)] = run
    return found


def limit_case(b: Buffers, backends: Sequence[Backend]) -> dict[Label, Case]:
    """The native traffic loop; nothing where the extension is not installed."""
    if backends[0].name != "native":
        return {}
    run = partial(kernels.traffic, b.fp32, b.grad, b.working)
    return {Label(LIMIT, f"native {backends[0].isa}", "-", 28.0): _under(backends[0], run)}


def backends_measured() -> list[Backend]:
    """All but plain torch, which is the oracle, and a baseline where there is better."""
    found = [backend for backend in kernels.available() if backend.name != "torch"]
    native = [backend for backend in found if backend.name == "native"]
    return [b for b in found if b.isa != "baseline" or len(native) == 1]


def run(
    numel: int,
    threads: Sequence[int],
    rounds: int,
    states: Sequence[str],
    on_round: Callable[[int, int], None],
) -> list[Row]:
    """Measure; `on_round(threads, round)` tells the progress."""
    buffers = allocate(numel, states)
    peers = peer_cases(buffers)
    rows: list[Row] = []
    for count in threads:
        backends = [replace(backend, threads=count) for backend in backends_measured()]
        ours = our_cases(buffers, backends)
        asked = {label: case for label, case in ours.items() if label.state in {"-", *states}}
        cases = limit_case(buffers, backends) | asked | peers
        by_key = {label.key: case for label, case in cases.items()}
        with _torch_threads(count):
            seconds = measure(by_key, rounds, partial(on_round, count))
        rows += rows_of(list(cases), seconds, numel, count)
    return rows


@contextlib.contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def dispatch_us() -> float:
    """A call on a bucket of 16 elements: checks, dispatch and little else."""
    small = allocate(16, ["fp32"])
    step = partial(kernels.adam, small.fp32, small.grad, SCALARS, working=small.working)
    with kernels.use(backends_measured()[0]):
        start = time.perf_counter()
        for _ in range(DISPATCH_CALLS):
            step()
        return (time.perf_counter() - start) / DISPATCH_CALLS * 1e6
