"""More than 2^31 elements, where the memory allows: no index is cut to 32 bits."""

from __future__ import annotations

import pytest
import torch

from offloadtrain.hardware.host_memory import available_bytes
from offloadtrain.runtime import kernels
from offloadtrain.runtime.arena import Arena, Ledger
from offloadtrain.runtime.kernels import Layout
from offloadtrain.step.layout.buffers import BufferSpec
from tests.runtime.kernels.format_cases import (
    SCALARS,
    differing,
    gradient,
    preferred,
    random_state,
    stepped,
)

LARGE, TAIL = 1 << 31, 1000
NUMEL = LARGE + 1024


def needs(gib: int) -> None:
    if available_bytes() < gib << 30:
        pytest.skip(f"needs {gib} GiB of memory")


def arena(*kinds: torch.dtype) -> list[torch.Tensor]:
    """Zeros on huge pages; the last two of int8 state are scales."""
    names = [str(kind).removeprefix("torch.") for kind in kinds]
    sizes = [kernels.blocks(NUMEL) if i in (5, 6) else NUMEL for i in range(len(kinds))]
    requests = [BufferSpec("test", size, name) for size, name in zip(sizes, names, strict=True)]
    return Arena(Ledger(), pin=False).map(requests)


@pytest.mark.slow
def test_a_parameter_beyond_2_31_elements() -> None:
    needs(20)
    codes = (torch.int8, torch.uint8, torch.uint8, torch.float32, torch.float32)
    grad, *fields = arena(torch.bfloat16, torch.bfloat16, *codes)
    state = kernels.Int8State(fields)
    small, small_grad = random_state("int8", TAIL, torch.bfloat16), gradient(TAIL, torch.bfloat16)
    grad[LARGE : LARGE + TAIL] = small_grad
    grad[5] = grad[LARGE - 1] = 1.0
    for buffer, piece in zip(state, small, strict=True):
        tail_of(buffer, piece)[:] = piece
    with kernels.use(preferred()):
        kernels.update(state, grad, SCALARS, layout=Layout([0, LARGE], [LARGE, TAIL], [1, 2]))
    expected = stepped(small, small_grad, Layout([0], [TAIL], [2]), preferred())
    actual = (tail_of(buffer, piece) for buffer, piece in zip(state, expected, strict=True))
    assert differing(kernels.Int8State(actual), expected) == {}
    changed = [i for i, piece in enumerate(state.weight[:LARGE].split(1 << 24)) if piece.any()]
    assert changed == [0, (LARGE >> 24) - 1]
    assert state.weight[5] != 0 and state.weight[LARGE - 1] != 0


def tail_of(buffer: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    begin = LARGE // (NUMEL // buffer.numel())
    return buffer[begin : begin + piece.numel()]


@pytest.mark.slow
def test_sums_beyond_2_31_elements() -> None:
    needs(16)
    (total,) = arena(torch.float32)
    grad = torch.zeros(NUMEL, dtype=torch.bfloat16)  # only read: pages of it are never made
    grad[3] = grad[LARGE - 1] = grad[LARGE + 5] = 2.0
    layout = Layout([0, LARGE], [LARGE, TAIL], [0, 1])
    with kernels.use(preferred()):
        squares = torch.zeros(2, 2, dtype=torch.float64)
        kernels.accumulate_squares(total, grad, False, layout, squares[0])
        kernels.sum_squares_many(grad, layout, squares[1])
        assert squares.tolist() == [[8.0, 4.0]] * 2
    assert total[LARGE + 5] == 2.0
