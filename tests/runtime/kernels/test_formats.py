"""Narrow state: the same bits everywhere, and the values that its definition says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import Backend, Fp32State, Layout, codec
from offloadtrain.step.layout.formats import ADAM_MOMENTS
from tests.runtime.kernels.format_cases import (
    NARROW,
    SCALARS,
    bits,
    clone,
    differing,
    gradient,
    ids_of,
    layout_of,
    neighbours,
    preferred,
    random_bits,
    random_state,
    special_gradient,
    split16_of,
    stepped,
    zero_state,
)
from tests.runtime.kernels.kernel_cases import BACKENDS, DTYPES, each_backend, threaded

LENGTHS = [0, 1, 127, 128, 129, 1021]
PLAIN = BACKENDS[-1]
each_state = pytest.mark.parametrize(("name", "dtype"), NARROW, ids=ids_of)


def test_the_last_backend_is_plain_torch() -> None:
    assert PLAIN.name == "torch"


@each_backend
@each_state
@pytest.mark.parametrize("grad", DTYPES, ids=str)
def test_backends_agree(grad: torch.dtype, name: str, dtype: torch.dtype, backend: Backend) -> None:
    layout, numel = layout_of(LENGTHS, gap=1)
    state, given = random_state(name, numel, dtype), gradient(numel, grad)
    expected = stepped(state, given, layout, PLAIN)
    assert differing(stepped(state, given, layout, backend), expected) == {}


@each_backend
@each_state
@pytest.mark.parametrize("grad", DTYPES, ids=str)
def test_special_values_agree(
    grad: torch.dtype, name: str, dtype: torch.dtype, backend: Backend
) -> None:
    numel = 3 * 1021
    state, layout = random_state(name, numel, dtype), Layout.of_one(numel)
    given = special_gradient(numel, grad)
    expected = stepped(stepped(state, given, layout, PLAIN), given, layout, PLAIN)
    found = stepped(stepped(state, given, layout, backend), given, layout, backend)
    assert differing(found, expected) == {}
    masters = kernels.master_of(found)
    assert bool(masters[given.isnan()].isnan().all())
    assert name == "int8" or not bool(masters[given == 1.0].isnan().any())


@each_state
def test_thread_counts_agree(name: str, dtype: torch.dtype) -> None:
    layout, numel = layout_of([100_003, 5, 60_000])
    state, given = random_state(name, numel, dtype), gradient(numel, dtype)
    expected = stepped(state, given, layout, replace(BACKENDS[0], threads=1))
    for backend in threaded(BACKENDS[0]):
        assert differing(stepped(state, given, layout, backend), expected) == {}, backend


@each_backend
@each_state
def test_nothing_outside_of_the_layout_is_written(
    name: str, dtype: torch.dtype, backend: Backend
) -> None:
    layout, numel = layout_of([130, 77], gap=2)
    state = random_state(name, numel, dtype)
    found = stepped(state, gradient(numel, dtype), layout, backend)
    inside = torch.zeros(numel, dtype=torch.bool)
    for offset, length, _, _ in layout.rows():
        inside[offset : offset + length] = True
    for before, after in zip(state, found, strict=True):
        per_block = before.numel() != numel
        kept = ~(inside.view(-1, 128).any(1) if per_block else inside)
        assert torch.equal(before.view(torch.uint8).view(before.numel(), -1)[kept],
                           after.view(torch.uint8).view(after.numel(), -1)[kept])  # fmt: skip


@each_state
def test_where_a_parameter_lies_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    alone, given = random_state(name, 300, dtype), gradient(300, dtype)
    expected = stepped(alone, given, Layout([0], [300], [5]), preferred())
    together, wide = random_state(name, 1024, dtype, seed=3), gradient(1024, dtype, seed=4)
    wide[256:556] = given
    for whole, piece in zip(together, alone, strict=True):
        start = 2 if piece.numel() != 300 else 256
        whole[start : start + piece.numel()] = piece
    found = stepped(together, wide, Layout([0, 256], [200, 300], [1, 5]), preferred())
    for whole, piece in zip(found, expected, strict=True):
        start = 2 if piece.numel() != 300 else 256
        assert torch.equal(whole[start : start + piece.numel()], piece)


@each_backend
@each_state
def test_a_parameter_may_go_on_beyond_2_to_the_32_elements(
    name: str, dtype: torch.dtype, backend: Backend
) -> None:
    """The elements on both sides have another key: one shard has the bits of two."""
    state, given = random_state(name, 384, dtype), gradient(384, dtype)
    both = Layout([0], [384], [5], [2**32 - 128])
    apart = Layout([0, 128], [128, 256], [5, 5], [2**32 - 128, 2**32])
    expected = stepped(state, given, apart, PLAIN)
    assert differing(stepped(state, given, both, backend), expected) == {}
    assert differing(stepped(state, given, Layout([0], [384], [5]), backend), expected)


@pytest.mark.cover(1, 2)
@each_backend
@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), *NARROW])
def test_the_double_buffered_form(name: str, dtype: torch.dtype, backend: Backend) -> None:
    layout, numel = layout_of([1000, 129, 40_000])
    first = random_state(name, numel, dtype)
    second, straight = zero_state(name, numel, dtype), clone(first)
    with kernels.use(backend):
        for step, (source, target) in enumerate(pairwise([first, second] * 3), start=1):
            grad, untouched = gradient(numel, torch.bfloat16, seed=step), clone(source)
            scalars = replace(SCALARS, step=step)
            kernels.update(source, grad, scalars, layout=layout, out=target)
            kernels.update(straight, grad, scalars, layout=layout)
            assert differing(source, untouched) == {}
            for offset, length, _, _ in layout.rows():
                for a, b in zip(target, straight, strict=True):
                    lo, hi = (offset // 128, -(-(offset + length) // 128))
                    at = slice(lo, hi) if a.numel() != numel else slice(offset, offset + length)
                    assert torch.equal(a[at], b[at])


@each_backend
def test_unaligned_buffers(backend: Backend) -> None:
    wide = random_state("split16", 1001, torch.bfloat16)
    views = type(wide)(*(tensor[1:] for tensor in wide))
    grad, layout = gradient(1001, torch.bfloat16)[1:], Layout.of_one(1000)
    out = zero_state("split16", 1001, torch.bfloat16)
    shifted = type(out)(*(tensor[1:] for tensor in out))
    expected = stepped(clone(views), grad.clone(), layout, PLAIN)
    with kernels.use(backend):
        kernels.update(views, grad, SCALARS, layout=layout, out=shifted)
    assert differing(shifted, expected) == {}


@each_backend
@each_state
def test_the_arithmetic_is_that_of_fp32_state(
    name: str, dtype: torch.dtype, backend: Backend
) -> None:
    """Masters of split16 are those of fp32 state to the bit; of int8, to its last place."""
    numel, layout = 5000, Layout.of_one(5000)
    state, given = random_state(name, numel, dtype), gradient(numel, torch.bfloat16)
    wide = Fp32State(*(tensor.clone() for tensor in kernels.to_fp32(state)))
    expected = stepped(wide, given, layout, backend)
    found = kernels.to_fp32(stepped(state, given, layout, backend))
    error = (found.master - expected.master).abs().double()
    if name == "split16":
        assert bool((error == 0).all())
        return
    least = 2.0**-16 if dtype is torch.bfloat16 else 2.0**-19
    floor = 0.0 if dtype is torch.bfloat16 else 2.0**-32
    bound = (expected.master.abs().double() * least * 2).clamp(min=floor)
    assert bool((error <= bound).all())


@each_backend
def test_split16_has_the_bits_of_its_definition(backend: Backend) -> None:
    numel = 700
    state, given = random_state("split16", numel, torch.bfloat16), gradient(numel, torch.bfloat16)
    wide = Fp32State(*(tensor.clone() for tensor in kernels.to_fp32(state)))
    exact = [x.numpy() for x in stepped(wide, given, Layout.of_one(numel, 9), PLAIN)]
    found = stepped(state, given, Layout.of_one(numel, 9), backend)
    kept = [
        found.weight.view(torch.uint16).tolist(),
        found.low.tolist(),
        found.exp_avg.view(torch.uint16).tolist(),
        found.exp_avg_sq.view(torch.uint16).tolist(),
    ]
    for i in range(numel):
        random = random_bits(SCALARS.key(9, i), i)
        expected = split16_of(exact[0][i], exact[1][i], exact[2][i], random)
        assert tuple(field[i] for field in kept) == expected, i


@pytest.mark.cover(1, 2)
@each_backend
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_8_bit_moments_are_neighbours_of_the_exact_ones(
    dtype: torch.dtype, backend: Backend
) -> None:
    numel = 300
    state, given = random_state("int8", numel, dtype), gradient(numel, dtype)
    wide = Fp32State(*(tensor.clone() for tensor in kernels.to_fp32(state)))
    exact = stepped(wide, given, Layout.of_one(numel), PLAIN)
    found = kernels.to_fp32(stepped(state, given, Layout.of_one(numel), backend))
    for name in ("exp_avg", "exp_avg_sq"):
        true, kept = getattr(exact, name), getattr(found, name)
        for start in range(0, numel, 128):
            largest = float(true[start : start + 128].abs().max())
            for i in range(start, min(start + 128, numel)):
                low, high = neighbours(name, float(true[i]), largest)
                value = abs(float(kept[i]))
                assert min(abs(value - low), abs(value - high)) <= 1e-6 * largest, (name, i)
                assert value == 0 or np.sign(float(kept[i])) == np.sign(float(true[i]))


def test_the_second_moment_is_never_zero_once_there_was_a_gradient() -> None:
    numel = 128
    state, grad = zero_state("int8", numel, torch.bfloat16), torch.full((numel,), 1e-9)
    grad[0] = 1.0
    found = kernels.to_fp32(stepped(state, grad.bfloat16(), Layout.of_one(numel), preferred()))
    assert bool((found.exp_avg_sq > 0).all())


@each_backend
def test_a_block_with_a_bad_moment_is_nan_and_no_other(backend: Backend) -> None:
    numel = 3 * 128
    state, grad = random_state("int8", numel, torch.bfloat16), gradient(numel, torch.float32)
    grad[200] = float("inf")
    found = kernels.to_fp32(stepped(state, grad, Layout.of_one(numel), backend))
    bad = found.exp_avg_sq.isnan().view(3, 128)
    assert bool(bad[1].all()) and not bool(bad[0].any()) and not bool(bad[2].any())


def patterns() -> torch.Tensor:
    """fp32 numbers of every exponent, and those around every tie and boundary."""
    source = torch.Generator().manual_seed(5)
    drawn = torch.randint(-(2**31), 2**31, (1 << 20,), dtype=torch.int64, generator=source)
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    ties = torch.cat([high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    wrapped = torch.where(ties >= 1 << 31, ties - (1 << 32), ties)
    return torch.cat([drawn, wrapped]).to(torch.int32).view(torch.float32)


def test_split16_keeps_every_master() -> None:
    values = patterns()
    state = zero_state("split16", values.numel(), torch.bfloat16)
    kernels.set_master(state, values)
    back, nan = kernels.master_of(state), values.isnan()
    assert torch.equal(back.view(torch.int32)[~nan], values.view(torch.int32)[~nan])
    assert bool(back[nan].isnan().all()) and bool(state.weight[nan].isnan().all())
    rounding = (state.weight[~nan].double() - values[~nan].double()).abs()
    nearest = (values[~nan].bfloat16().double() - values[~nan].double()).abs()
    finite = rounding.isfinite()
    assert torch.equal(rounding[finite], nearest[finite])


@pytest.mark.parametrize(
    "backend", [one for one in BACKENDS if one.name == "native"], ids=lambda b: b.isa
)
@each_state
def test_native_masters_are_those_of_torch(name: str, dtype: torch.dtype, backend: Backend) -> None:
    """Bit for bit, a NaN and its sign too, at lengths around those of vectors and of threads."""
    values = patterns()[::31]
    for used in threaded(backend):
        for numel in (*LENGTHS, values.numel()):
            found, expected = (zero_state(name, numel, dtype) for _ in range(2))
            with kernels.use(used):
                kernels.set_master(found, values[-numel:].clone() if numel else values[:0])
            codec.set_master(expected, values[-numel:].clone() if numel else values[:0])
            for x, y in zip(found, expected, strict=True):
                assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.slow
@each_backend
@each_state
def test_masters_are_decoded_as_the_codec_does(
    name: str, dtype: torch.dtype, backend: Backend
) -> None:
    """Any bits that a state can hold, at lengths around those of vectors and of threads."""
    values = patterns()[::31]
    state = zero_state(name, values.numel(), dtype)
    codec.set_master(state, values)
    for used in threaded(backend):
        for numel in (*LENGTHS, values.numel()):
            own = kernels.cut(state.format.fields(ADAM_MOMENTS), state, 0, numel)
            found, expected = torch.full((numel,), 5.0), codec.master_of(type(state)(*own))
            with kernels.use(used):
                kernels.read_master(state.format, ADAM_MOMENTS, own, found)
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@each_state
def test_masters_of_another_size_are_refused(name: str, dtype: torch.dtype) -> None:
    with kernels.use(BACKENDS[0]), pytest.raises(ValueError, match="128 elements, 127 are needed"):
        kernels.set_master(zero_state(name, 128, dtype), torch.zeros(127))


def test_ties_of_split16_go_away_from_zero() -> None:
    tie = torch.tensor([1.0 + 2.0**-8, -(1.0 + 2.0**-8)])
    state = zero_state("split16", 2, torch.bfloat16)
    kernels.set_master(state, tie)
    assert state.weight.tolist() == [1.0 + 2.0**-7, -(1.0 + 2.0**-7)]
    assert tie.bfloat16().tolist() == [1.0, -1.0]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_int8_keeps_masters_to_a_256th_of_the_weights_last_place(dtype: torch.dtype) -> None:
    values = patterns()
    values = values[values.isfinite() & (values.abs() < torch.finfo(dtype).max)]
    state = zero_state("int8", values.numel(), dtype)
    kernels.set_master(state, values)
    exponent = torch.frexp(values.double()).exponent.double()
    digits, least = (16, -133 - 8 + 7) if dtype is torch.bfloat16 else (19, -32)
    step = torch.exp2((exponent - digits).clamp(min=least))
    error = (kernels.master_of(state).double() - values.double()).abs()
    assert bool((error <= step * (0.5 + 2.0**-20)).all())  # the half is added in fp32
    weight = (state.weight.double() - values.double()).abs()
    assert bool((weight <= step * 256 * 0.502).all())


@pytest.mark.parametrize("wrong", ["seed", "step", "id", "element", "decay", "nothing"])
def test_the_comparison_tells_a_wrong_kernel(wrong: str) -> None:
    numel = 5000
    state, given = random_state("split16", numel, torch.bfloat16), gradient(numel, torch.bfloat16)
    expected = stepped(state, given, Layout.of_one(numel, 1), preferred())
    scalars = {
        "seed": replace(SCALARS, seed=12),
        "step": replace(SCALARS, step=4),
        "decay": replace(SCALARS, weight_decay=0.0),
    }.get(wrong, SCALARS)
    layout = Layout.of_one(numel, 2 if wrong == "id" else 1)
    if wrong == "nothing":
        assert differing(state, expected) != {}
    elif wrong == "element":
        tail = type(state)(*(tensor[128:] for tensor in state))
        found = stepped(tail, given[128:], Layout.of_one(numel - 128, 1), preferred())
        assert differing(found, type(state)(*(tensor[128:] for tensor in expected))) != {}
    else:
        assert differing(stepped(state, given, layout, preferred(), scalars), expected) != {}


def test_bits_helpers() -> None:
    assert bits(1.0) == 0x3F800000
