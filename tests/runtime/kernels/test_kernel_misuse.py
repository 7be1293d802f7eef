"""Whatever is not 1-D, contiguous, on the CPU and of the right kind is refused, and unharmed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from offloadtrain.runtime import kernels
from tests.runtime.kernels.kernel_cases import SCALARS, fused_adam

ROOT = Path(__file__).resolve().parents[3]
N = 64


def ones(numel: int = N, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(numel, dtype=dtype)


def operands() -> dict[str, Tensor | None]:
    names = ("master", "exp_avg", "exp_avg_sq")
    half = {"grad": ones(dtype=torch.bfloat16), "working": ones(dtype=torch.bfloat16)}
    return {name: ones() for name in names} | half


def _share(name: str, other: str, shift: int = 0) -> Callable[[dict[str, Tensor | None]], None]:
    def change(arguments: dict[str, Tensor | None]) -> None:
        memory = torch.ones(N + shift)
        arguments[name], arguments[other] = memory[:N], memory[shift:]

    return change


def _put(name: str, wrong: Callable[[], object]) -> Callable[[dict[str, Tensor | None]], None]:
    def change(arguments: dict[str, Tensor | None]) -> None:
        arguments[name] = wrong()  # type: ignore[assignment]

    return change


def _overlapping_halves(arguments: dict[str, Tensor | None]) -> None:
    memory = ones(N + 1, torch.bfloat16)
    arguments["grad"], arguments["working"] = memory[:N], memory[1:]


CASES: dict[str, tuple[type[Exception], Callable[[dict[str, Tensor | None]], None]]] = {
    "fp64 master": (TypeError, _put("master", lambda: ones(dtype=torch.float64))),
    "bf16 moment": (TypeError, _put("exp_avg", lambda: ones(dtype=torch.bfloat16))),
    "integer gradient": (TypeError, _put("grad", lambda: ones(dtype=torch.int16))),
    "complex working": (TypeError, _put("working", lambda: ones(dtype=torch.complex64))),
    "strided gradient": (ValueError, _put("grad", lambda: ones(2 * N)[::2])),
    "expanded gradient": (ValueError, _put("grad", lambda: ones(1).expand(N))),
    "sparse gradient": (ValueError, _put("grad", lambda: ones().to_sparse())),
    "2-D master": (ValueError, _put("master", lambda: torch.ones(8, 8))),
    "meta gradient": (ValueError, _put("grad", lambda: torch.ones(N, device="meta"))),
    "short gradient": (ValueError, _put("grad", lambda: ones(N - 1))),
    "long working": (ValueError, _put("working", lambda: ones(N + 1))),
    "moments shared": (ValueError, _share("exp_avg", "exp_avg_sq")),
    "moments overlap": (ValueError, _share("exp_avg", "exp_avg_sq", 1)),
    "master is the gradient": (ValueError, _share("master", "grad")),
    "gradient beside itself": (ValueError, _overlapping_halves),
}


def test_adam_refuses() -> None:
    for case, (error, change) in CASES.items():
        arguments = operands()
        change(arguments)
        with pytest.raises(error):
            fused_adam(**arguments, scalars=SCALARS)  # type: ignore[arg-type]
        for name, tensor in arguments.items():
            if tensor is not None and not tensor.is_meta:
                dense = tensor.to_dense() if tensor.is_sparse else tensor
                assert bool((dense == 1).all()), f"{case}: {name} was written"


def test_accumulate_and_cast_refuse() -> None:
    for call in (kernels.cast, lambda a, b: kernels.accumulate(a, b, True)):
        with pytest.raises(TypeError):
            call(ones(dtype=torch.bfloat16), ones())
        with pytest.raises(ValueError, match="elements"):
            call(ones(), ones(N + 1))
        with pytest.raises(ValueError, match="contiguous"):
            call(ones(), ones(2 * N)[::2])
        memory = ones(N + 1)
        with pytest.raises(ValueError, match="overlap"):
            call(memory[:N], memory[1:])


def test_norm_refuses_elements_outside() -> None:
    for offset, numel in ((-128, 2), (0, N + 1), (128, 1), (2, 1), (0, -1)):
        with pytest.raises(ValueError, match=r"beyond a buffer|offsets must be"):
            layout = kernels.Layout([offset], [numel], [0])
            kernels.sum_squares_many(ones(), layout, ones(1).double())


def test_a_layout_refuses_unequal_lists_and_overlaps() -> None:
    with pytest.raises(ValueError):
        kernels.Layout([0, 128], [1], [0, 1])
    with pytest.raises(ValueError, match="at least 200"):
        kernels.Layout([0, 128], [200, 1], [0, 1])


def test_threads_start_at_one() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        kernels.set_threads(0)


def test_step_zero_is_refused() -> None:
    arguments = operands()
    with pytest.raises(ValueError):
        fused_adam(**arguments, scalars=replace(SCALARS, step=0))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_tensor_without_memory_is_refused() -> None:
    with FakeTensorMode():
        fake = torch.empty(8)
    squares = torch.zeros(1, dtype=torch.float64)
    with pytest.raises(ValueError, match="has no memory: it is a FakeTensor"):
        kernels.sum_squares_each([(0, fake)], squares)
    with pytest.raises(ValueError, match="has no memory: it is a FakeTensor"):
        kernels.zero(fake)


def test_none_is_refused() -> None:
    with pytest.raises(TypeError):
        fused_adam(**(operands() | {"master": None}), scalars=SCALARS)  # type: ignore[arg-type]


def test_first_touch_refuses_strides() -> None:
    with pytest.raises((TypeError, ValueError)):
        kernels.first_touch(ones(2 * N, torch.uint8)[::2])


def test_operands_that_were_right_are_looked_at_again() -> None:
    arguments: dict[str, Any] = operands()
    fused_adam(**arguments, scalars=SCALARS)
    for changed in (ones(2 * N, torch.bfloat16)[::2], ones(N - 1, torch.bfloat16), ones()):
        arguments["working"].data = changed
        wanted = arguments["working"].dtype is torch.float32
        with pytest.raises(ValueError) if not wanted else contextlib.nullcontext():
            fused_adam(**arguments, scalars=SCALARS)
    arguments["grad"].data = arguments["master"].data
    with pytest.raises(ValueError, match="overlap"):
        fused_adam(**arguments, scalars=SCALARS)


@pytest.mark.slow
def test_a_freed_buffer_is_refused() -> None:
    code = """
import torch
from offloadtrain.runtime import kernels
from tests.runtime.kernels.kernel_cases import SCALARS, fused_adam, random_state
state = random_state(1 << 16, torch.float32, None)
state.step()  # right so far: not a reason to ask less
state.grad.untyped_storage().resize_(0)
try:
    state.step()
except ValueError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "refused\n"


def narrow(numel: int = N) -> kernels.Split16State:
    halves = [ones(numel, torch.bfloat16) for _ in range(3)]
    return kernels.Split16State((halves[0], ones(numel, torch.int16), *halves[1:]))


def eight(numel: int = N) -> kernels.Int8State:
    codes = (ones(numel, torch.int8), ones(numel, torch.uint8), ones(numel, torch.uint8))
    scales = [ones(kernels.blocks(numel)) for _ in range(2)]
    return kernels.Int8State((ones(numel, torch.bfloat16), *codes, *scales))


def replaced(state: kernels.State, **changed: Tensor) -> kernels.State:
    return type(state)((changed.get(name, x) for name, x in zip(state.names(), state, strict=True)))


ONE = kernels.Layout.of_one(N)
Given = dict[str, Any]
STATE_CASES: dict[str, tuple[type[Exception], str, Callable[[], Given]]] = {
    "no layout": (TypeError, "layout", lambda: {"state": narrow(), "layout": None}),
    "a layout beyond the end": (
        ValueError,
        "ends at element",
        lambda: {"state": narrow(), "layout": kernels.Layout.of_one(N + 1)},
    ),
    "working with narrow state": (
        TypeError,
        "working",
        lambda: {"state": narrow(), "working": ones(dtype=torch.bfloat16)},
    ),
    "fp16 high halves": (
        TypeError,
        "weight must be bfloat16",
        lambda: {"state": replaced(narrow(), weight=ones(dtype=torch.float16))},
    ),
    "short scales": (
        ValueError,
        "exp_avg_scale",
        lambda: {"state": replaced(eight(), exp_avg_scale=ones(2))},
    ),
    "fp32 correction": (
        TypeError,
        "correction must be int8",
        lambda: {"state": replaced(eight(), correction=ones())},
    ),
    "another kind of out": (TypeError, "one kind", lambda: {"state": narrow(), "out": eight()}),
    "out of another dtype": (
        TypeError,
        "float16",
        lambda: {"state": eight(), "out": replaced(eight(), weight=ones(dtype=torch.float16))},
    ),
    "out of another length": (
        ValueError,
        "elements",
        lambda: {"state": narrow(), "out": narrow(N + 1)},
    ),
    "no state": (TypeError, "one kind", lambda: {"state": (ones(), ones(), ones())}),
}


def test_narrow_states_refuse() -> None:
    for error, message, make in STATE_CASES.values():
        arguments = {"layout": ONE} | make()
        with pytest.raises(error, match=message):
            kernels.update(arguments.pop("state"), ones(dtype=torch.bfloat16), SCALARS, **arguments)


def test_out_may_not_share_memory_with_the_state() -> None:
    state = narrow()
    half_shared = replaced(narrow(), low=state.low)
    with pytest.raises(ValueError, match="overlap"):
        kernels.update(state, ones(), SCALARS, layout=ONE, out=half_shared)
    assert all(bool((tensor == 1).all()) for tensor in (*state, *half_shared))


def test_a_freed_narrow_state_is_refused() -> None:
    state = eight()
    state.correction.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="freed"):
        kernels.update(state, ones(), SCALARS, layout=ONE)


def test_accumulate_refuses_a_layout_beyond_the_end() -> None:
    with pytest.raises(ValueError, match="beyond a buffer"):
        layout = kernels.Layout.of_one(N + 1)
        kernels.accumulate_squares(ones(), ones(), True, layout, ones(1).double())


def test_the_traffic_loop_refuses() -> None:
    state = kernels.Fp32State((ones(), ones(), ones()))
    with pytest.raises(TypeError, match="16 bits"):
        kernels.traffic(state, ones(), ones(dtype=torch.bfloat16))
