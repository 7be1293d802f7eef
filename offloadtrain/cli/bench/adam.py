"""CPU Adam and the other rules against the traffic limit, torch and DeepSpeed, alternating in one
process.

A "whole path" of torch or DeepSpeed starts from 16-bit gradients and ends with 16-bit weights, with
clipping: cast, multiply, step, cast. DeepSpeed's ZeRO-2 casts gradients on the GPU
(`stage_1_and_2.py`): its host path starts from fp32.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from offloadtrain.cli.bench.rounds import Case, Row, measure, ratio, torch_threads
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

LIMIT = "traffic limit"
ONE_PASS = "one pass"
TORCH_STEP, TORCH_PATH = "torch fused, step alone", "torch fused, whole path"
DEEPSPEED_STEP, DEEPSPEED_PATH = "DeepSpeed, step alone", "DeepSpeed, whole path"
DEEPSPEED_ZERO2 = "DeepSpeed, ZeRO-2's path"
BYTES_PER_PARAM = {TORCH_STEP: 28, DEEPSPEED_STEP: 28, DEEPSPEED_ZERO2: 42}
"""Memory traffic in bytes per parameter; a whole path has FULL_PATH_BYTES."""

FULL_PATH_BYTES = 48


PEERS = {
    "x_deepspeed_zero2": DEEPSPEED_ZERO2,
    "x_deepspeed_path": DEEPSPEED_PATH,
    "x_deepspeed_step": DEEPSPEED_STEP,
    "x_torch_path": TORCH_PATH,
}
"""Column → case; the column shows the speedup over that case."""


@dataclass(frozen=True, slots=True)
class Label:
    """The identity of a case."""

    case: str
    backend: str
    state: str
    bytes_per_param: float | None


def rows_of(seconds: Mapping[Label, list[float]], n: int, threads: int) -> list[Row]:
    """Compare every case with the traffic limit and the peers of the same run.

    Returns:
        One row per case: fields of its label, `n`, `threads`, `ns_per_param`, `gb_per_s`,
        `x_limit` (time relative to moving the 28 bytes of fp32 Adam), and `PEERS`.
    """
    by_case = {label.case: times for label, times in seconds.items()}

    def row(label: Label, times: list[float]) -> Row:
        size = label.bytes_per_param
        ns_per_param = statistics.median(times) / n * 1e9
        return {
            **asdict(label),
            "n": n,
            "threads": threads,
            "ns_per_param": ns_per_param,
            "gb_per_s": size and size / ns_per_param,
            "x_limit": ratio(times, by_case.get(LIMIT)),
            **{column: ratio(by_case.get(peer), times) for column, peer in PEERS.items()},
        }

    return list(starmap(row, seconds.items()))


def table(rows: Sequence[Row]) -> str:
    """Return all rows as a text table."""
    head = (
        f"{'case':30} {'backend':14} {'state':8} thr ns/param B/param   GB/s  x limit"
        "  x ZeRO-2  x DS path  x DS step  x torch path"
    )
    return "\n".join([head, *map(_line, rows)])


def _line(row: Row) -> str:
    size = "-" if row["bytes_per_param"] is None else f"{row['bytes_per_param']:.2f}"
    columns = zip(("gb_per_s", "x_limit", *PEERS), (6, 8, 9, 10, 10, 13), strict=True)
    return (
        f"{row['case']:30} {row['backend']:14} {row['state']:8} {row['threads']:3} "
        f"{row['ns_per_param']:8.3f} {size:>7} "
        + " ".join(f"{_figure(row[column]):>{width}}" for column, width in columns)
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


SCALARS = AdamScalars(
    lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10, grad_scale=0.5
)
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
"""Other rules with kernels; weight decay and Nesterov's form are the costliest."""
_TYPES: dict[str, type[State]] = {
    "fp32": Fp32State,
    "split16": kernels.Split16State,
    "int8": kernels.Int8State,
}
DISPATCH_CALLS = 5000


@dataclass(frozen=True, slots=True)
class Buffers:
    """One bucket with one parameter, and the buffers of all cases.

    Attributes:
        grad, working: (n,) bf16.
        wide: (n,) fp32: gradients for cases that need fp32, and sums of microbatches.
        out: the second copy of each state, which mode `speculative` writes.
    """

    states: dict[str, State]
    out: dict[str, State]
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
        BufferSpec(f"{prefix}{name} {field.name}", field.numel(numel), field.dtype or "bfloat16")
        for prefix in ("", "out ")
        for name, state_fields in fields.items()
        for field in state_fields
    ]
    requests += [
        BufferSpec("grad", numel, "bfloat16"),
        BufferSpec("working", numel, "bfloat16"),
    ]
    requests.append(BufferSpec("wide", numel, "float32"))
    tensors = iter(Arena(Ledger(), pin=False).map(requests))
    made, out = (
        {
            name: _TYPES[name](next(tensors) for _ in state_fields)
            for name, state_fields in fields.items()
        }
        for _ in range(2)
    )
    squares, layout = torch.zeros(1, dtype=torch.float64), Layout.of_one(numel)
    buffers = Buffers(made, out, next(tensors), next(tensors), next(tensors), layout, squares)
    buffers.grad.normal_()
    buffers.wide.copy_(buffers.grad)
    for state in buffers.states.values():
        kernels.set_master(state, buffers.wide)
        kernels.update(state, buffers.grad, SCALARS, layout=buffers.layout)
    return buffers


def our_cases(buffers: Buffers, backends: Sequence[Backend]) -> dict[Label, Case]:
    """Return the cases of Adam in every format and backend, then those of the preferred backend:
    every other rule in the formats that support its moments, over Adam's memory, and partial
    kernels."""
    b, cases, preferred = buffers, dict[Label, Case](), backends[0]
    adam = [(backend, "", SCALARS) for backend in backends]
    other_rules = [(preferred, f", {rule}", scalars) for rule, scalars in RULES.items()]
    for backend, rule, scalars in (*adam, *other_rules):
        for format, state in b.states.items():
            declared = FORMATS[format]
            is_slow = format == "int8" and backend.name != "native"
            if is_slow or not declared.keeps_moments(scalars.moments):
                continue
            step = partial(
                kernels.update,
                *(_of_rule(state, scalars), b.grad, scalars),
                working=b.working if format == "fp32" else None,
                layout=b.layout,
            )
            label = Label(f"{ONE_PASS}{rule}", _named(backend), format, _traffic(format, scalars))
            cases[label] = _under(backend, step)
    return cases | _other_cases(b, preferred)


def _named(backend: Backend) -> str:
    return f"{backend.name} {backend.isa}".removesuffix(" -")


def _traffic(format: str, scalars: Scalars) -> float:
    """Return the bytes per parameter that a step with 16-bit gradients reads and writes."""
    return float(FORMATS[format].traffic_per_param(scalars.moments, 2, 2))


def _of_rule(state: State, scalars: Scalars) -> State:
    """Return Adam's state without the moments that another rule lacks."""
    # A sum of squares is positive, like Adam's second moment, in formats that store it alike.
    moments = ADAM_MOMENTS[::-1] if scalars.moments == ("sum",) else ADAM_MOMENTS
    by_name = dict(zip(state.names(), state, strict=True))
    fields = state.format.fields(moments[: len(scalars.moments)])
    return type(state)(by_name[field.name] for field in fields)


def _other_cases(b: Buffers, backend: Backend) -> dict[Label, Case]:
    adam = partial(kernels.update, b.fp32, scalars=SCALARS, working=b.working)
    cases: dict[tuple[str, str, float], Case] = {
        (f"{ONE_PASS}, into a second copy", name, _traffic(name, SCALARS)): partial(
            kernels.update,
            *(state, b.grad, SCALARS),
            working=b.working if name == "fp32" else None,
            out=b.out[name],
            layout=b.layout,
        )
        for name, state in b.states.items()
    } | {
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
        Label(case, _named(backend), s, size): _under(backend, run)
        for (case, s, size), run in cases.items()
    }


def _under(backend: Backend, run: Callable[[], object]) -> Case:
    def case() -> None:
        with kernels.use(backend):
            run()

    return case


def peer_cases(b: Buffers) -> dict[Label, Case]:
    """Return the cases of torch and DeepSpeed."""
    return {
        Label(name, backend, "fp32", float(BYTES_PER_PARAM.get(name, FULL_PATH_BYTES))): run
        for backend, cases in (("torch", _torch_cases(b)), ("deepspeed", _deepspeed_cases(b)))
        for name, run in cases.items()
    }


def _torch_cases(b: Buffers) -> dict[str, Case]:
    """torch.optim.AdamW(fused=True), called as the optimizer calls it; gradients are in `wide`."""
    state, step = b.fp32, torch.tensor(float(SCALARS.step))

    def fused() -> None:
        torch._fused_adamw_(
            [state.master],
            [b.wide],
            [state.exp_avg],
            [state.exp_avg_sq],
            [],
            [step],
            lr=SCALARS.lr,
            beta1=SCALARS.beta1,
            beta2=SCALARS.beta2,
            weight_decay=SCALARS.weight_decay,
            eps=SCALARS.eps,
            amsgrad=False,
            maximize=False,
        )

    return {TORCH_STEP: fused, TORCH_PATH: _path(fused, b)}


def _deepspeed_cases(b: Buffers) -> dict[str, Case]:
    """DeepSpeedCPUAdam; empty, with a line on stderr, if it cannot be loaded or built."""
    try:
        adam = _quietly(partial(_deepspeed_adam, b))
    except Exception as error:  # its compiler run may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == "deepspeed":
            return {}
        print(f"DeepSpeed is installed but does not work: {error}", file=sys.stderr)
        return {}
    path, zero2 = _path(adam.step, b), _from_fp32(adam.step, b)
    return {DEEPSPEED_STEP: adam.step, DEEPSPEED_PATH: path, DEEPSPEED_ZERO2: zero2}


def deepspeed_version() -> str | None:
    """Return the version of the loaded DeepSpeed; None if it was not loaded."""
    return getattr(sys.modules.get("deepspeed"), "__version__", None)


def _path(step: Callable[[], object], b: Buffers) -> Case:
    from_fp32 = _from_fp32(step, b)

    def path() -> None:
        b.wide.copy_(b.grad)
        from_fp32()

    return path


def _from_fp32(step: Callable[[], object], b: Buffers) -> Case:
    master = b.fp32.master

    def path() -> None:
        b.wide.mul_(SCALARS.grad_scale)
        step()
        b.working.copy_(master)

    return path


def _deepspeed_adam(b: Buffers) -> Any:
    param = torch.nn.Parameter(b.fp32.master)
    param.grad = b.wide
    adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(
        [param],
        lr=SCALARS.lr,
        betas=(SCALARS.beta1, SCALARS.beta2),
        eps=SCALARS.eps,
        weight_decay=SCALARS.weight_decay,
        adamw_mode=True,
    )
    adam.step()
    return adam


def _quietly(make: Callable[[], Any]) -> Any:
    """Send DeepSpeed's output to stderr: its import and compiler print to stdout, which is for
    data."""
    sys.stdout.flush()
    stdout_copy = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            return make()
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


def limit_case(b: Buffers, backends: Sequence[Backend]) -> dict[Label, Case]:
    """Return the native traffic loop; empty without the native extension."""
    if backends[0].name != "native":
        return {}
    run = partial(kernels.traffic, b.fp32, b.grad, b.working)
    return {Label(LIMIT, f"native {backends[0].isa}", "-", 28.0): _under(backends[0], run)}


def backends_measured() -> list[Backend]:
    """Return the available backends, without baseline if there is a better one."""
    backends = kernels.available()
    native = [backend for backend in backends if backend.name == "native"]
    return [b for b in backends if b.isa != "baseline" or len(native) == 1]


def run(
    numel: int,
    threads: Sequence[int],
    rounds: int,
    states: Sequence[str],
    on_round: Callable[[int, int], None],
) -> list[Row]:
    """Run all cases; `on_round(threads, round)` reports progress."""
    buffers = allocate(numel, states)
    peers = peer_cases(buffers)
    rows: list[Row] = []
    for count in threads:
        backends = [replace(backend, threads=count) for backend in backends_measured()]
        ours = our_cases(buffers, backends)
        selected = {label: case for label, case in ours.items() if label.state in {"-", *states}}
        cases = limit_case(buffers, backends) | selected | peers
        # With one thread, processor time: other work on the machine affects it less.
        clock = time.process_time if count == 1 else time.perf_counter
        with torch_threads(count):
            seconds = measure(cases, rounds, partial(on_round, count), clock)
        rows += rows_of(seconds, numel, count)
    return rows


def dispatch_us() -> float:
    """Return the microseconds of a call on a bucket of 16 elements: mainly checks and dispatch."""
    small = allocate(16, ["fp32"])
    step = partial(kernels.update, small.fp32, small.grad, SCALARS, working=small.working)
    with kernels.use(backends_measured()[0]):
        start = time.perf_counter()
        for _ in range(DISPATCH_CALLS):
            step()
        return (time.perf_counter() - start) / DISPATCH_CALLS * 1e6
