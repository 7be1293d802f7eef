"""CPU Adam, and the other rules, against the traffic limit, torch and DeepSpeed, interleaved in one
process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from offloadtrain.cli.bench.peers import (
    BYTES_PER_PARAM,
    FULL_PATH_BYTES,
    deepspeed_cases,
    torch_cases,
)
from offloadtrain.cli.bench.report import LIMIT, ONE_PASS, Label, Row, rows_of
from offloadtrain.cli.bench.rounds import Case, measure
from offloadtrain.runtime import kernels
from offloadtrain.runtime.arena import Arena, Ledger
from offloadtrain.runtime.kernels import (
    AdagradScalars,
    AdamScalars,
    Backend,
    Fp32State,
    Layout,
    LionScalars,
    MomentumScalars,
    Scalars,
    SgdScalars,
    State,
)
from offloadtrain.step.layout.buffers import BufferSpec
from offloadtrain.step.layout.formats import ADAM_MOMENTS, FORMATS

SCALARS = AdamScalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step=10, grad_scale=0.5)
RULES: dict[str, Scalars] = {
    "Lion": LionScalars(lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.1, step=10, grad_scale=0.5),
    "SGD": SgdScalars(lr=1e-4, weight_decay=0.1, step=10, grad_scale=0.5),
    "SGD, momentum": MomentumScalars(
        lr=1e-4,
        momentum=0.9,
        dampening=0.0,
        nesterov=True,
        weight_decay=0.1,
        step=10,
        grad_scale=0.5,
    ),
    "Adagrad": AdagradScalars(
        lr=1e-4, lr_decay=0.0, eps=1e-10, weight_decay=0.1, step=10, grad_scale=0.5
    ),
}
"""The other rules that have kernels; decay and Nesterov's form are the costliest."""
_TYPES: dict[str, type[State]] = {
    "fp32": Fp32State,
    "split16": kernels.Split16State,
    "int8": kernels.Int8State,
}
DISPATCH_CALLS = 5000


@dataclass(frozen=True, slots=True)
class Buffers:
    """One bucket of one parameter, with the buffers of every case.

    Attributes:
        grad, working: (n,) bf16.
        wide: (n,) fp32: gradients for cases that need fp32, and the sum of microbatches.
        out: fp32 state written by the out-of-place form.
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
    """Allocate staggered buffers in one arena, on huge pages, first touched by the threads that use
    them.

    Raises:
        HostMemoryError: the host has too little memory.
    """
    fields = {
        name: FORMATS[name].fields(ADAM_MOMENTS) for name in {"fp32": None, **dict.fromkeys(states)}
    }
    requests = [
        BufferSpec(f"{name} {field.name}", field.numel(numel), field.dtype or "bfloat16")
        for name, state_fields in fields.items()
        for field in state_fields
    ]
    requests += [BufferSpec("out", numel, "float32")] * 3
    requests += [
        BufferSpec("grad", numel, "bfloat16"),
        BufferSpec("working", numel, "bfloat16"),
    ]
    requests.append(BufferSpec("wide", numel, "float32"))
    tensors = iter(Arena(Ledger(), pin=False).map(requests))
    made = {
        name: _TYPES[name](*(next(tensors) for _ in state_fields))
        for name, state_fields in fields.items()
    }
    out = Fp32State(*(next(tensors) for _ in range(3)))
    squares, layout = torch.zeros(1, dtype=torch.float64), Layout.of_one(numel)
    buffers = Buffers(made, out, next(tensors), next(tensors), next(tensors), layout, squares)
    buffers.grad.normal_()
    buffers.wide.copy_(buffers.grad)
    for state in buffers.states.values():
        kernels.set_master(state, buffers.wide)
        kernels.update(state, buffers.grad, SCALARS, layout=buffers.layout)
    return buffers


def our_cases(buffers: Buffers, backends: Sequence[Backend]) -> dict[Label, Case]:
    """Return cases: every format in every backend, then those of the preferred backend only."""
    b, cases = buffers, dict[Label, Case]()
    for backend in backends:
        name = f"{backend.name} {backend.isa}".removesuffix(" -")
        for format, state in b.states.items():
            if format == "int8" and backend.name != "native":
                continue
            traffic = float(FORMATS[format].traffic_per_param(ADAM_MOMENTS, 2, 2))
            working = b.working if format == "fp32" else None
            step = partial(kernels.update, state, b.grad, SCALARS, working=working, layout=b.layout)
            cases[Label(ONE_PASS, name, format, traffic)] = _under(backend, step)
    return cases | _rule_cases(buffers, backends[0]) | _other_cases(buffers, backends[0])


def _rule_cases(b: Buffers, backend: Backend) -> dict[Label, Case]:
    """Return every other rule in every format that keeps its moments, over Adam's memory."""
    name = f"{backend.name} {backend.isa}".removesuffix(" -")
    cases: dict[Label, Case] = {}
    for rule, scalars in RULES.items():
        for format, state in b.states.items():
            declared = FORMATS[format]
            if not declared.keeps_moments(scalars.moments):
                continue
            if format == "int8" and backend.name != "native":
                continue
            step = partial(
                kernels.update,
                _of_rule(state, scalars),
                b.grad,
                scalars,
                working=b.working if format == "fp32" else None,
                layout=b.layout,
            )
            traffic = float(declared.traffic_per_param(scalars.moments, 2, 2))
            cases[Label(f"{ONE_PASS}, {rule}", name, format, traffic)] = _under(backend, step)
    return cases


def _of_rule(state: State, scalars: Scalars) -> State:
    """Adam's state, without the moments that another rule does not have."""
    # A sum of squares is positive: Adam's second moment, in the formats that keep it alike.
    moments = ADAM_MOMENTS[::-1] if scalars.moments == ("sum",) else ADAM_MOMENTS
    by_name = dict(zip(state.names(), state, strict=True))
    fields = state.format.fields(moments[: len(scalars.moments)])
    return type(state)(*(by_name[field.name] for field in fields))


def _other_cases(b: Buffers, backend: Backend) -> dict[Label, Case]:
    name = f"{backend.name} {backend.isa}".removesuffix(" -")
    adam = partial(kernels.update, b.fp32, scalars=SCALARS, working=b.working)
    cases: dict[tuple[str, str, float], Case] = {
        ("one pass, double-buffered", "fp32", 28.0): partial(adam, b.grad, out=b.out),
        ("one pass, over the gradient", "fp32", 28.0): partial(
            kernels.update, b.fp32, b.working, SCALARS, working=b.working
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
    """Return the cases of torch and DeepSpeed."""
    arguments = (b.fp32, b.grad, b.working, b.wide, SCALARS)
    by_label: dict[Label, Case] = {}
    for backend, cases in (("torch", torch_cases), ("deepspeed", deepspeed_cases)):
        for name, run in cases(*arguments).items():
            size = BYTES_PER_PARAM.get(name, FULL_PATH_BYTES)
            by_label[Label(name, backend, "fp32", float(size))] = run
    return by_label


def limit_case(b: Buffers, backends: Sequence[Backend]) -> dict[Label, Case]:
    """Return the native traffic loop; nothing without the extension."""
    if backends[0].name != "native":
        return {}
    run = partial(kernels.traffic, b.fp32, b.grad, b.working)
    return {Label(LIMIT, f"native {backends[0].isa}", "-", 28.0): _under(backends[0], run)}


def backends_measured() -> list[Backend]:
    """Return the backends without plain torch, the oracle, and without baseline if there is a
    better one."""
    backends = [backend for backend in kernels.available() if backend.name != "torch"]
    native = [backend for backend in backends if backend.name == "native"]
    return [b for b in backends if b.isa != "baseline" or len(native) == 1]


def run(
    numel: int,
    threads: Sequence[int],
    rounds: int,
    states: Sequence[str],
    on_round: Callable[[int, int], None],
) -> list[Row]:
    """Measure; `on_round(threads, round)` reports the progress."""
    buffers = allocate(numel, states)
    peers = peer_cases(buffers)
    rows: list[Row] = []
    for count in threads:
        backends = [replace(backend, threads=count) for backend in backends_measured()]
        ours = our_cases(buffers, backends)
        selected = {label: case for label, case in ours.items() if label.state in {"-", *states}}
        cases = limit_case(buffers, backends) | selected | peers
        by_key = {label.key: case for label, case in cases.items()}
        # Of one thread the processor's time, which other work on the machine lengthens less.
        clock = time.process_time if count == 1 else time.perf_counter
        with _torch_threads(count):
            seconds = measure(by_key, rounds, partial(on_round, count), clock)
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
    """Time a call on a bucket of 16 elements: mainly checks and dispatch."""
    small = allocate(16, ["fp32"])
    step = partial(kernels.update, small.fp32, small.grad, SCALARS, working=small.working)
    with kernels.use(backends_measured()[0]):
        start = time.perf_counter()
        for _ in range(DISPATCH_CALLS):
            step()
        return (time.perf_counter() - start) / DISPATCH_CALLS * 1e6
