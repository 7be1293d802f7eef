"""Adam: the same bits from every backend, instruction set and thread count, and from torch."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import AdamScalars, Backend
from tests.runtime.kernels.kernel_cases import (
    BACKENDS,
    DTYPES,
    LENGTHS,
    SCALARS,
    SPECIALS,
    State,
    Step,
    differences,
    different_elements,
    each_backend,
    fused_adam,
    plain_adam,
    random_state,
    special_state,
    threaded,
)

FMA_IN_TORCH = platform.machine() != "x86_64" or (
    torch.backends.cpu.get_cpu_capability() != "DEFAULT"
)
needs_fma_in_torch = pytest.mark.skipif(not FMA_IN_TORCH, reason="torch's kernels use no FMA here")


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """torch cuts a tensor by its thread count, and each part may end in its inexact scalar tail."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def expected_of(state: State, scalars: AdamScalars = SCALARS) -> State:
    return state.clone().step(plain_adam, scalars)


@pytest.mark.parametrize("working", [*DTYPES, None], ids=str)
def test_backends_agree(working: torch.dtype | None) -> None:
    for grad, numel in product(DTYPES, LENGTHS):
        state = random_state(numel, grad, working)
        expected = expected_of(state)
        for backend in BACKENDS:
            with kernels.use(backend):
                assert differences(state.clone().step(), expected) == {}, (grad, numel, backend)


@each_backend
def test_thread_counts_agree(backend: Backend) -> None:
    state = random_state((1 << 20) + 3, torch.bfloat16, torch.bfloat16)
    expected = expected_of(state)
    for chosen in threaded(backend):
        with kernels.use(chosen):
            assert differences(state.clone().step(), expected) == {}, chosen


@each_backend
def test_working_may_replace_the_gradient(backend: Backend) -> None:
    for dtype in DTYPES:
        state = random_state(10_007, dtype, dtype)
        expected = expected_of(state)
        state.working = state.grad
        with kernels.use(backend):
            assert differences(state.step(), expected) == {}, dtype


@each_backend
def test_unaligned_views(backend: Backend) -> None:
    state = random_state(4099, torch.bfloat16, torch.float16)
    tail = State(
        *(x[3:] for x in (state.master, state.exp_avg, state.exp_avg_sq, state.grad)), None
    )
    tail.working = torch.zeros(4097, dtype=torch.float16)[1:]
    expected = expected_of(tail)
    before = state.clone()
    with kernels.use(backend):
        assert differences(tail.step(), expected) == {}
    assert all(
        torch.equal(x[:3], y[:3])
        for x, y in zip(state.outputs().values(), before.outputs().values(), strict=True)
    )


@each_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype: torch.dtype, backend: Backend) -> None:
    for decoupled in (True, False):
        scalars = replace(SCALARS, decoupled=decoupled)
        state = special_state(dtype, dtype)
        expected = expected_of(state, scalars)
        with kernels.use(backend):
            assert differences(state.step(scalars=scalars), expected) == {}, decoupled


@each_backend
def test_the_moment_starts_from_the_nearer_end(backend: Backend) -> None:
    for beta1 in (0.0, 0.3, 0.5, 0.51):
        scalars = replace(SCALARS, beta1=beta1)
        state = random_state(10_007, torch.float32, None)
        expected = expected_of(state, scalars)
        with kernels.use(backend):
            assert differences(state.step(scalars=scalars), expected) == {}, beta1


def float64_errors(adam: Step, scalars: AdamScalars) -> dict[str, float]:
    """Return the largest error of each output after one step, in units of its bound.

    The bounds count roundings (u = 2^-24): the moment two of its largest term; the second moment
    five of itself; the weight two of itself and sixteen of its change.
    """
    state = random_state(100_003, torch.float32, None, seed=5)
    p, m, v, g = (x.double() for x in (state.master, state.exp_avg, state.exp_avg_sq, state.grad))
    g = g * scalars.grad_scale
    if not scalars.decoupled:
        g = g + scalars.weight_decay * p
    new_m = scalars.beta1 * m + (1 - scalars.beta1) * g
    new_v = scalars.beta2 * v + (1 - scalars.beta2) * g * g
    m_hat = new_m / (1 - scalars.beta1**scalars.step)
    v_hat = new_v / (1 - scalars.beta2**scalars.step)
    change = -scalars.lr * m_hat / (v_hat.sqrt() + scalars.eps)
    decayed = p * (1 - scalars.lr * scalars.weight_decay) if scalars.decoupled else p
    unit = 2.0**-24
    term = m.abs() + g.abs() + (0 if scalars.decoupled else (scalars.weight_decay * p).abs())
    # An error of the moment is an error of the change, however small the moment itself.
    moment_error = 4 * unit * term
    change_per_moment = (
        scalars.lr / (1 - scalars.beta1**scalars.step) / (v_hat.sqrt() + scalars.eps)
    )
    l2_error = 0 if scalars.decoupled else 8 * unit * term * g.abs()
    bounds = {
        "master": 2 * unit * decayed.abs()
        + 16 * unit * change.abs()
        + moment_error * change_per_moment,
        "exp_avg": moment_error,
        "exp_avg_sq": 5 * unit * new_v + l2_error,
    }
    truth = {"master": decayed + change, "exp_avg": new_m, "exp_avg_sq": new_v}
    if not scalars.decoupled:
        # g carries an error of its own, which both moments pass on.
        bounds["master"] += change.abs() * l2_error / new_v
    result = state.step(adam, scalars).outputs()
    return {k: float(((result[k].double() - truth[k]).abs() / bounds[k]).max()) for k in truth}


@each_backend
def test_every_element_is_near_the_float64_result(backend: Backend) -> None:
    for step, decoupled in product((1, 1000), (True, False)):
        scalars = replace(SCALARS, step=step, decoupled=decoupled)
        with kernels.use(backend):
            errors = float64_errors(fused_adam, scalars)
        assert max(errors.values()) <= 1.0, (step, decoupled, errors)


def _nothing(*_: object) -> None: ...


def _with(**changed: float) -> Step:
    """Return Adam with other hyperparameters than it is given."""

    def adam(p: Tensor, m: Tensor, v: Tensor, g: Tensor, w: Tensor | None, s: AdamScalars) -> None:
        plain_adam(p, m, v, g, w, replace(s, **changed))

    return adam


def _late_bias_correction(
    p: Tensor, m: Tensor, v: Tensor, g: Tensor, w: Tensor | None, s: AdamScalars
) -> None:
    plain_adam(p, m, v, g, w, replace(s, step=s.step + 1))


# The last: 1 - beta2 taken in fp32, 16 times the error of taking it in double.
BETA2_OF_FP32 = 1.0 - float(torch.tensor(1.0) - torch.tensor(SCALARS.beta2))
WRONG = {
    "does nothing": _nothing,
    "late bias correction": _late_bias_correction,
    "forgets decay": _with(weight_decay=0.0),
    "forgets grad_scale": _with(grad_scale=1.0),
    "1 - beta2 in fp32": _with(beta2=BETA2_OF_FP32),
}
GROSS = list(WRONG)[:4]


@needs_fma_in_torch
def test_every_comparison_tells_a_wrong_kernel() -> None:
    """Each as far as it can see what is wrong."""
    state = random_state(10_007, torch.bfloat16, torch.bfloat16)
    expected = expected_of(state)
    for name, wrong in WRONG.items():
        assert differences(state.clone().step(wrong), expected) != {}, name
        assert name not in GROSS or max(float64_errors(wrong, SCALARS).values()) > 100.0, name


@each_backend
def test_casts_round_to_nearest_even(backend: Backend) -> None:
    source = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (1 << 18,), dtype=torch.int64, generator=source)
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    ties = torch.cat([halves.view(dtype).float() for dtype in DTYPES[1:]])
    between = torch.nextafter(ties, torch.tensor(float("inf")))
    values = torch.cat([bits.to(torch.int32).view(torch.float32), ties, between, SPECIALS])
    bf16_ties = ((halves.int() << 16) | 0x8000).view(torch.float32)
    values = torch.cat([values, bf16_ties])
    with kernels.use(backend):
        for dtype in DTYPES:
            target = torch.zeros(values.numel(), dtype=dtype)
            kernels.cast(values, target)
            assert different_elements(target, values.to(dtype)) == 0, dtype


@each_backend
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_accumulate_reads_every_half(dtype: torch.dtype, backend: Backend) -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    total = torch.full((1 << 16,), 7.0)
    with kernels.use(backend):
        kernels.accumulate(total, halves, True)
        assert different_elements(total, halves.float()) == 0
        kernels.accumulate(total, halves, False)
    assert different_elements(total, halves.float() + halves.float()) == 0


@pytest.mark.skipif(os.environ.get("OFFLOADTRAIN_NATIVE") == "0", reason="built without it")
def test_this_machine_has_both_backends() -> None:
    assert {backend.name for backend in kernels.available()} == {"native", "numba"}


def slowdown(state: State, plain: State) -> float:
    """Return the CPU time of a step over that of a plain one, of the shortest of many in turn: what
    else runs on the machine only ever adds."""
    times_ns: list[tuple[int, int]] = []
    for _ in range(60):
        start = time.thread_time_ns()
        state.step()
        between = time.thread_time_ns()
        plain.step()
        times_ns.append((between - start, time.thread_time_ns() - between))
    of_state, of_plain = map(min, zip(*times_ns, strict=True))
    return of_state / of_plain


@pytest.mark.parametrize("isa", ["avx512", "avx2"])
def test_loops_that_emit_16_bit_weights_are_vectorised(isa: str) -> None:
    """A compiler that gives up on the mix of 16 and 32 bits says nothing: the loop takes 5x."""
    result = [b for b in BACKENDS if b.isa == isa]
    if not result:
        pytest.skip(f"no {isa} here")
    with kernels.use(replace(result[0], threads=1)):
        plain = random_state(1 << 15, torch.float32, None)
        for dtype in (torch.bfloat16, torch.float16):
            state = random_state(1 << 15, dtype, dtype)
            state.grad.fill_(1.5)  # denormal halves take the CPU's slow path, vectorised or not
            assert slowdown(state, plain) < 4.0, dtype
