"""Narrow state against a second statement of its definition, with tests that it can fail."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import Backend, Fp32State, Int8State, Layout, State
from offloadtrain.step.layout.formats import ADAM_MOMENTS
from tests import torch_kernels
from tests.runtime.kernels import format_reference as reference
from tests.runtime.kernels.format_cases import (
    NARROW,
    SCALARS,
    clone,
    differing,
    gradient,
    ids_of,
    random_state,
    stepped,
    zero_state,
)
from tests.runtime.kernels.format_reference import (
    Case,
    bits,
    float64_errors,
    kernel_step,
    wrong_bits,
)
from tests.runtime.kernels.kernel_cases import BACKENDS, DTYPES, each_backend, threaded

LENGTHS = (0, 1, 127, 128, 129, 1021)
IDS = (0, 3, 2**31, 2**40 + 1, 2**63 - 1, 5)
each_state = pytest.mark.parametrize(("name", "dtype"), NARROW, ids=ids_of)


def gapped() -> tuple[Layout, int]:
    """Every length in one bucket, up to two unowned blocks and a ragged end between."""
    offsets, end = [], 128
    for i, length in enumerate(LENGTHS):
        offsets.append(end)
        end += (kernels.blocks(length) + i % 3) * 128
    return Layout(offsets, LENGTHS, IDS), end + 200


def case_of(name: str, dtype: torch.dtype, grad: torch.dtype, seed: int = 0) -> Case:
    layout, numel = gapped()
    return Case(random_state(name, numel, dtype, seed), gradient(numel, grad), layout, SCALARS)


def one_case(name: str, dtype: torch.dtype, numel: int = 5000, seed: int = 0) -> Case:
    grad = gradient(numel, torch.float32)
    return Case(random_state(name, numel, dtype, seed), grad, Layout.of_one(numel, 9), SCALARS)


def raw(tensor: Tensor) -> Tensor:
    """(n, bytes per element) uint8."""
    if not tensor.numel():
        return torch.empty(0, 1, dtype=torch.uint8)
    return tensor.contiguous().view(torch.uint8).view(tensor.numel(), -1)


def changed_elements(actual: State, before: State, layout: Layout) -> int:
    """Elements and scales outside of the layout that are not as they were."""
    inside = reference.inside(layout, before[0].numel())
    padded = torch.nn.functional.pad(inside, (0, -inside.numel() % 128))
    count = 0
    for x, y in zip(actual, before, strict=True):
        owned = inside if x.numel() == inside.numel() else padded.view(-1, 128).any(1)
        count += int((raw(x) != raw(y)).any(1)[~owned].sum())
    return count


# ---- bits and values ---------------------------------------------------------------------------


@each_backend
@each_state
def test_bits_and_values(name: str, dtype: torch.dtype, backend: Backend) -> None:
    for grad in DTYPES:
        case = case_of(name, dtype, grad)
        after = kernel_step(backend)(case)
        assert wrong_bits(after, case) == {}, grad
        assert max(float64_errors(after, case).values()) <= 1.0, float64_errors(after, case)
        assert differing(after, kernel_step(reference.PLAIN)(case)) == {}, grad
        assert changed_elements(after, case.state, case.layout) == 0, grad


@each_backend
@each_state
def test_lengths_alone(name: str, dtype: torch.dtype, backend: Backend) -> None:
    for length in LENGTHS:
        case = one_case(name, dtype, length)
        stepped_state = kernel_step(backend)(case)
        assert wrong_bits(stepped_state, case) == {}, length
        assert differing(stepped_state, kernel_step(reference.PLAIN)(case)) == {}, length


@each_backend
@each_state
def test_hyperparameters(name: str, dtype: torch.dtype, backend: Backend) -> None:
    for beta1, decoupled in product((0.0, 0.9), (True, False)):
        scalars = replace(SCALARS, beta1=beta1, decoupled=decoupled, step=10**6, seed=-1)
        case = replace(case_of(name, dtype, torch.bfloat16), scalars=scalars)
        actual = kernel_step(backend)(case)
        assert wrong_bits(actual, case) == {}, (beta1, decoupled)
        assert differing(actual, kernel_step(reference.PLAIN)(case)) == {}, (beta1, decoupled)


@each_backend
@each_state
def test_zero_memory_is_a_state(name: str, dtype: torch.dtype, backend: Backend) -> None:
    wide = torch_kernels.to_fp32(zero_state(name, 1000, dtype))
    assert all(bool((x == 0).all()) for x in wide)
    case = replace(one_case(name, dtype, 1000), state=zero_state(name, 1000, dtype))
    case = replace(case, scalars=replace(SCALARS, step=1))
    result = kernel_step(backend)(case)
    assert wrong_bits(result, case) == {}
    assert max(float64_errors(result, case).values()) <= 1.0
    assert differing(result, kernel_step(reference.PLAIN)(case)) == {}


@each_backend
@each_state
def test_views_at_odd_addresses(name: str, dtype: torch.dtype, backend: Backend) -> None:
    case = one_case(name, dtype, 4099)
    wide = type(case.state)(torch.cat([x[:1], x, x[:1]]) for x in case.state)
    before = clone(wide)
    view = type(wide)(x[1:-1] for x in wide)
    grad = torch.cat([case.grad[:3], case.grad])[3:]
    with kernels.use(backend):
        kernels.update(view, grad, SCALARS, layout=case.layout)
    assert differing(view, kernel_step(reference.PLAIN)(case)) == {}
    for x, y in zip(wide, before, strict=True):
        assert bool((raw(x) == raw(y))[[0, -1]].all())


@each_state
def test_threads_do_not_change_bits(name: str, dtype: torch.dtype) -> None:
    case = one_case(name, dtype, 100_003)
    expected = kernel_step(reference.PLAIN)(case)
    for chosen in (b for backend in BACKENDS for b in threaded(backend)):
        assert differing(kernel_step(chosen)(case), expected) == {}, chosen


@each_state
def test_a_longer_parameter_starts_with_the_same_bits(name: str, dtype: torch.dtype) -> None:
    case, step = one_case(name, dtype, 2048), kernel_step(BACKENDS[0])
    layout = Layout.of_one(1024, 9)
    shorter = type(case.state)(x[: x.numel() // 2].clone() for x in case.state)
    result = step(replace(case, state=shorter, grad=case.grad[:1024], layout=layout))
    longer = step(case)
    assert differing(result, type(longer)(x[: x.numel() // 2] for x in longer)) == {}


def test_seeds_are_taken_modulo_2_to_the_64() -> None:
    case, step = one_case("split16", torch.bfloat16), kernel_step(BACKENDS[0])
    for seed, same in ((2**64 + 11, 11), (-1, 2**64 - 1)):
        a = step(replace(case, scalars=replace(SCALARS, seed=seed)))
        assert differing(a, step(replace(case, scalars=replace(SCALARS, seed=same)))) == {}


# ---- the double-buffered form ------------------------------------------------------------------


def garbage(state: State) -> State:
    return type(state)(torch.full_like(raw(x), 0xA5).view(x.dtype).view(-1) for x in state)


@each_backend
@each_state
def test_out_of_place(name: str, dtype: torch.dtype, backend: Backend) -> None:
    for grad in DTYPES:
        check_out_of_place(case_of(name, dtype, grad), backend)


@each_backend
def test_fp32_state_out_of_place(backend: Backend) -> None:
    check_out_of_place(one_case("fp32", torch.float32), backend)


def check_out_of_place(straight: Case, backend: Backend) -> None:
    source, target = clone(straight.state), garbage(straight.state)
    for step in range(1, 6):
        straight = replace(straight, scalars=replace(SCALARS, step=step))
        straight = replace(straight, state=kernel_step(backend)(straight))
        untouched, outside = clone(source), clone(target)
        with kernels.use(backend):
            kernels.update(
                source, straight.grad, straight.scalars, layout=straight.layout, out=target
            )
        assert differing(source, untouched) == {}
        assert changed_elements(target, outside, straight.layout) == 0
        inner = clone(straight.state)
        assert changed_elements(inner, straight.state, straight.layout) == 0
        assert differing_inside(target, straight.state, straight.layout) == 0, step
        source, target = target, source


def differing_inside(actual: State, expected: State, layout: Layout) -> int:
    """Elements and scales of the layout's parameters that differ in a bit."""
    inside = reference.inside(layout, expected[0].numel())
    padded = torch.nn.functional.pad(inside, (0, -inside.numel() % 128)).view(-1, 128).any(1)
    count = 0
    for x, y in zip(actual, expected, strict=True):
        owned = inside if x.numel() == inside.numel() else padded
        count += int((raw(x) != raw(y)).any(1)[owned].sum())
    return count


# ---- what is held ------------------------------------------------------------------------------


def patterns(random_bits: int) -> Tensor:
    """2^n fp32 patterns, and those around every boundary of 16, 8 and 5 dropped bits."""
    source = torch.Generator().manual_seed(9)
    random = torch.randint(0, 1 << 32, (1 << random_bits,), dtype=torch.int64, generator=source)
    high = torch.arange(1 << 16) << 16
    lows = (0, 1, 0x0F, 0x10, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0x8001, 0xFF80, 0xFFFF)
    return reference.fp32_of(torch.cat([random, *(high | low for low in lows)]))


each_count = pytest.mark.parametrize(
    "random_bits", [16, pytest.param(22, marks=pytest.mark.slow)], ids=lambda n: f"2^{n}"
)


@each_count
def test_split16_round_trip(random_bits: int) -> None:
    values = patterns(random_bits)
    state = zero_state("split16", values.numel(), torch.bfloat16)
    kernels.set_master(state, values)
    nan = values.isnan()
    back = torch_kernels.decoded_master(state)
    assert torch.equal(bits(back)[~nan], bits(values)[~nan])
    assert torch.equal(bits(reference.master_of(state))[~nan], bits(values)[~nan])
    assert torch.equal(bits(state[0])[~nan], ((bits(values) + 0x8000 >> 16) & 0xFFFF)[~nan])
    assert bool(back[nan].isnan().all() and state[0][nan].isnan().all())


@each_count
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_int8_round_trip(dtype: torch.dtype, random_bits: int) -> None:
    values = patterns(random_bits)
    state = zero_state("int8", values.numel(), dtype)
    kernels.set_master(state, values)
    back, nan = torch_kernels.decoded_master(state), values.isnan()
    assert bool(back[nan].isnan().all() and state[0][nan].isnan().all())
    top = 65504.0 if dtype is torch.float16 else 3.38e38
    in_range = values.abs() <= top
    exact = values[in_range].double()
    error = (back[in_range].double() - exact).abs() / reference.master_step(state, exact)
    assert float(error.max()) <= 0.5 + 2.0**-16
    infinite = values.abs() >= (65536.0 if dtype is torch.float16 else float("inf"))
    assert bool((back[infinite].isinf() & (back[infinite].sign() == values[infinite].sign())).all())
    again = zero_state("int8", values.numel(), dtype)
    kernels.set_master(again, back)
    assert torch.equal(bits(torch_kernels.decoded_master(again))[~nan], bits(back)[~nan])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_weight_with_every_correction_decodes(dtype: torch.dtype) -> None:
    weights = torch.arange(1 << 16).to(torch.int16).view(dtype)
    weights = weights[weights.isfinite() & (weights != 0)]
    for correction in range(-128, 128, 17):
        state = zero_state("int8", weights.numel(), dtype)
        state[0].copy_(weights)
        state[1].fill_(correction)
        assert torch.equal(
            bits(torch_kernels.decoded_master(state)), bits(reference.master_of(state))
        )


def test_moment_codes_are_the_family_of_the_definition() -> None:
    """Two blocks of every code: their values are in the ratio of the codes', whatever the scale."""
    state = zero_state("int8", 256, torch.bfloat16)
    assert isinstance(state, Int8State)
    for field in (state.exp_avg, state.exp_avg_sq):
        field.copy_(torch.arange(256).to(torch.uint8))
    for scale in state.scales:
        scale.fill_(3.0)
    wide, codes = torch_kernels.to_fp32(state), torch.arange(256)
    squares = reference.decoded_code(codes + 1)
    ratio = wide.exp_avg_sq.double() / squares
    assert float((ratio / ratio[-1] - 1).abs().max()) < 1e-6
    plain = reference.decoded_code(torch.arange(128))
    for half in wide.exp_avg.double().view(2, 128).abs():
        assert float((half / half[-1] - plain / plain[-1]).abs().max()) < 1e-6
    signs = wide.exp_avg.view(2, 128)[:, 1:].sign().unique(dim=1)
    assert signs.shape == (2, 1) and int(signs.sum()) == 0


@each_backend
@each_state
def test_a_parameter_may_go_on_beyond_2_to_the_32_elements(
    name: str, dtype: torch.dtype, backend: Backend
) -> None:
    """The elements on both sides have another key: one shard has the bits of two."""
    state, grad = random_state(name, 384, dtype), gradient(384, dtype)
    both = Layout([0], [384], [5], [2**32 - 128])
    apart = Layout([0, 128], [128, 256], [5, 5], [2**32 - 128, 2**32])
    expected = stepped(state, grad, apart, reference.PLAIN)
    assert differing(stepped(state, grad, both, backend), expected) == {}
    assert differing(stepped(state, grad, Layout([0], [384], [5]), backend), expected)


@pytest.mark.parametrize(
    "backend", [backend for backend in BACKENDS if backend.name == "native"], ids=lambda b: b.isa
)
@each_state
def test_native_masters_are_those_of_torch(name: str, dtype: torch.dtype, backend: Backend) -> None:
    """Bit for bit, a NaN and its sign too, at lengths around those of vectors and of threads."""
    values = patterns(14)
    for used in threaded(backend):
        for numel in (*LENGTHS, values.numel()):
            actual, expected = (zero_state(name, numel, dtype) for _ in range(2))
            with kernels.use(used):
                kernels.set_master(actual, values[-numel:].clone() if numel else values[:0])
            torch_kernels.set_master(expected, values[-numel:].clone() if numel else values[:0])
            for x, y in zip(actual, expected, strict=True):
                assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.slow
@each_backend
@each_state
def test_masters_are_decoded_as_the_codec_does(
    name: str, dtype: torch.dtype, backend: Backend
) -> None:
    """Any bits that a state can hold, at lengths around those of vectors and of threads."""
    values = patterns(14)
    state = zero_state(name, values.numel(), dtype)
    torch_kernels.set_master(state, values)
    for used in threaded(backend):
        for numel in (*LENGTHS, values.numel()):
            part = kernels.cut(state.format.fields(ADAM_MOMENTS), state, 0, numel)
            actual, expected = (
                torch.full((numel,), 5.0),
                torch_kernels.master_of(type(state)(part)),
            )
            with kernels.use(used):
                kernels.read_master(state.format, ADAM_MOMENTS, part, actual)
            assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


@each_state
def test_masters_of_another_size_are_refused(name: str, dtype: torch.dtype) -> None:
    with kernels.use(BACKENDS[0]), pytest.raises(ValueError, match="128 elements, 127 are needed"):
        kernels.set_master(zero_state(name, 128, dtype), torch.zeros(127))


@each_backend
def test_the_largest_of_a_block_is_kept(backend: Backend) -> None:
    """t may come out above T by a rounding: no random bit may carry it to the next code."""
    blocks = 4096
    case = one_case("int8", torch.bfloat16, blocks * 128)
    result = torch_kernels.to_fp32(kernel_step(backend)(case))
    wide = reference.wide_after(case)
    for name in ("exp_avg", "exp_avg_sq"):
        exact, stored = (getattr(x, name).view(blocks, 128) for x in (wide, result))
        at = exact.abs().argmax(1, keepdim=True)
        relative = stored.gather(1, at).double() / exact.gather(1, at).double() - 1
        assert float(relative.abs().max()) < 1e-6, name
        assert bool((stored.abs() <= exact.abs().amax(1, keepdim=True) * (1 + 1e-6)).all())


def test_the_double_comparison_outside_is_not_blind() -> None:
    case = case_of("int8", torch.bfloat16, torch.float32)
    touched = clone(case.state)
    touched[1][0] ^= 1
    assert changed_elements(touched, case.state, case.layout) == 1
    assert differing_inside(touched, case.state, case.layout) == 0


# ---- mutants -----------------------------------------------------------------------------------

KERNEL = kernel_step(BACKENDS[0])
GROSS: dict[str, reference.Step] = {
    "does nothing": lambda case: clone(case.state),
    "late bias correction": reference.changed(KERNEL, step=SCALARS.step + 1),
    "forgets decay": reference.changed(KERNEL, weight_decay=0.0),
    "forgets grad_scale": reference.changed(KERNEL, grad_scale=1.0),
}
FINE: dict[str, reference.Step] = {
    "rounds to nearest": reference.nearest_step,
    "another seed": reference.changed(KERNEL, seed=SCALARS.seed + 1),
}


@each_state
def test_mutants_are_told_apart(name: str, dtype: torch.dtype) -> None:
    case = one_case(name, dtype)
    assert wrong_bits(KERNEL(case), case) == {}
    assert max(float64_errors(KERNEL(case), case).values()) <= 1.0
    for mutant, step in (GROSS | FINE).items():
        assert wrong_bits(step(case), case) != {}, mutant
        assert mutant in FINE or float64_errors(step(case), case)["master"] > 3.0, mutant


def test_fp32_state_passes_the_same_comparison() -> None:
    case = one_case("fp32", torch.float32)
    assert isinstance(case.state, Fp32State)
    assert max(float64_errors(KERNEL(case), case).values()) <= 1.0
