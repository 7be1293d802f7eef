"""The update of narrow state that a GPU compiles, on the CPU: the host's values and random bits."""

from __future__ import annotations

import logging
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import AdamScalars, State, on_device
from offloadtrain.runtime.kernels.formats import CODECS
from offloadtrain.runtime.kernels.state import BLOCK, STATES, Layout
from offloadtrain.step.layout.formats import ADAM_MOMENTS
from tests.runtime.kernels import format_reference

LAYOUT = Layout([0, 512], [500, 70_000], [3, 1], [0, 1280])
"""Two parameters, the second from its element 1280 on; padding between them."""
NUMEL = 512 + 70_016


def made(name: str, weights: str = "bfloat16") -> State:
    torch.manual_seed(0)
    kind = STATES[name]
    fields = (
        torch.zeros(field.numel(NUMEL), dtype=getattr(torch, field.dtype or weights))
        for field in kind.format.fields(ADAM_MOMENTS)
    )
    state = kind(fields)
    values = torch.randn(NUMEL) * 0.02, torch.randn(NUMEL) * 1e-3, torch.rand(NUMEL) * 1e-5
    CODECS[name].store(state, values, None)
    return state


def scalars(*, decoupled: bool = True, beta1: float = 0.9) -> AdamScalars:
    return AdamScalars(
        lr=1e-2,
        beta1=beta1,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        step=3,
        grad_scale=0.5,
        seed=7,
        decoupled=decoupled,
    )


def check_close(name: str, host: State, device: State, where: Tensor) -> None:
    values = [[x[where] for x in CODECS[name].load(state)] for state in (host, device)]
    for of_host, of_device in zip(*values, strict=True):
        scale = of_device.abs().max().item()
        # A code that is rounded from the other side of a boundary is the next one: 1/8 of a binade.
        assert torch.allclose(of_host, of_device, rtol=0.13, atol=1e-6 * scale)
    # int8 rounds masters to 16 bits of mantissa, at random: to one neighbour or the other.
    tolerance = 2e-6 if name == "split16" else 2**-14
    torch.testing.assert_close(values[1][0], values[0][0], rtol=tolerance, atol=1e-8)


def compare(name: str, scalars_of_step: AdamScalars, on: str | torch.device = "cpu") -> float:
    """Update both ways; returns the share of bytes that differ."""
    host, state = made(name), [field.to(on) for field in made(name)]
    grad = torch.randn(NUMEL).bfloat16()
    kernels.update(host, grad, scalars_of_step, layout=LAYOUT)
    on_device.update_narrow(STATES[name](state), grad.to(on), LAYOUT, scalars_of_step)
    device = STATES[name](field.cpu() for field in state)
    pairs = [(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(host, device, strict=True)]
    check_close(name, host, device, torch.ones(NUMEL, dtype=torch.bool))
    return sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)


@pytest.mark.parametrize("name", ["split16", "int8"])
@pytest.mark.parametrize(
    "scalars_of_step",
    [
        scalars(),
        pytest.param(scalars(decoupled=False), marks=pytest.mark.slow),
        pytest.param(scalars(beta1=0.3), marks=pytest.mark.slow),
    ],
    ids=["adamw", "adam", "towards the gradient"],
)
def test_it_is_the_hosts_update_to_the_rounding_of_fp32(
    name: str, scalars_of_step: AdamScalars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_device, "_compiled", lambda *_: on_device.narrow_adam)
    monkeypatch.setattr(on_device, "_NARROW_PIECE", 1 << 14)
    assert compare(name, scalars_of_step) < 0.05


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("name", ["split16", "int8"])
def test_compiled_it_is_the_same(name: str) -> None:
    """By torch's compiler for the CPU."""
    assert compare(name, scalars()) < 0.05


def test_another_default_dtype_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "_compiled", lambda *_: on_device.narrow_adam)
    states = [made("split16") for _ in range(2)]
    grad = torch.randn(NUMEL).bfloat16()
    for state, dtype in zip(states, (torch.float32, torch.bfloat16), strict=True):
        torch.set_default_dtype(dtype)
        try:
            on_device.update_narrow(state, grad, LAYOUT, scalars())
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, *states))


FORMATS = ("split16", "bfloat16"), ("int8", "bfloat16"), ("int8", "float16")
"""And the dtypes of weights."""


@pytest.mark.slow
def test_every_size_of_every_format_has_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes eight variants of a function and refuses more; here it refuses the third, as each
    format and dtype needs two. The generated code is left out."""
    torch.compiler.reset()
    compiled = partial(torch.compile, backend="eager")
    monkeypatch.setattr(on_device.torch, "compile", compiled)
    monkeypatch.setattr(on_device, "_TRIAL", 1024)
    on_device._compiled.cache_clear()
    kinds = [(*kind, grads) for kind in FORMATS for grads in (kind[1], "float32")]
    try:
        # Not by monkeypatch: torch's settings refuse reads after its undo.
        with torch._dynamo.config.patch(recompile_limit=2):
            for (name, weights, grads), numel in product(kinds, (1000, 100)):
                for layout in (
                    Layout([0], [numel], [3]),
                    Layout([0, 1024, 2048], [numel] * 3, [3, 4, 5]),
                ):
                    grad = torch.randn(NUMEL).to(getattr(torch, grads))
                    on_device.update_narrow(made(name, weights), grad, layout, scalars())
    finally:
        on_device._compiled.cache_clear()


def test_without_triton_that_is_said_once_and_torch_does_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_device._has_compiler.cache_clear()
    monkeypatch.setattr(on_device, "has_triton", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert [on_device.compiles(scalars()) for _ in range(2)] == [False, False]
    on_device._has_compiler.cache_clear()
    assert len(caplog.records) == 1 and "Triton is missing" in caplog.text


@pytest.mark.parametrize("name", ["split16", "int8"])
def test_one_launch_updates_adjacent_parameters_and_nothing_else(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters of one, two and three blocks; the last block of each ends with other values."""
    launches: list[int] = []

    def counted(*operands: Any) -> list[Tensor]:
        launches.append(operands[-1])
        return on_device.narrow_adam(*operands)

    monkeypatch.setattr(on_device, "_compiled", lambda *_: counted)
    layout = Layout([128, 256, 512, 2048], [100, 129, 384, 257], [2, 7, 4, 3])
    host, state, before = made(name), made(name), made(name)
    inside = format_reference.inside(layout, NUMEL)
    grad = torch.randn(NUMEL).where(inside, 1e4).bfloat16()
    kernels.update(host, grad, scalars(), layout=layout)
    on_device.update_narrow(state, grad, layout, scalars())
    assert launches == [6, 3]
    blocks = inside.view(-1, BLOCK).any(1)
    for new, old in zip(state, before, strict=True):
        updated = inside if new.numel() == NUMEL else blocks
        assert torch.equal(new[~updated], old[~updated])
        assert float((new != old)[updated].float().mean()) > 0.3
    check_close(name, host, state, inside)
    # Other random bits would change a third of what they round.
    for of_host, new in ((host.exp_avg, state.exp_avg), (host.exp_avg_sq, state.exp_avg_sq)):
        assert float((of_host != new)[inside].float().mean()) < 0.02


def test_a_launch_has_no_more_elements_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row counts from the start of its launch, with the key of its first element."""
    monkeypatch.setattr(on_device, "_NARROW_PIECE", 1024)
    layout = Layout([0, 1024, 1280], [900, 200, 2500], [2, 7, 4], [0, 128, 256])
    runs = [*on_device._runs(layout)]
    assert all(run[-1][1] - run[0][0] <= 1024 for run in runs)
    rows = [row for run in runs for row in run]
    elements = [(id, first + n) for start, end, id, first in rows for n in range(end - start)]
    expected = [(2, n) for n in range(900)] + [(7, 128 + n) for n in range(200)]
    assert elements == expected + [(4, 256 + n) for n in range(2500)]


def test_buffers_that_end_within_a_block_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "_compiled", lambda *_: on_device.narrow_adam)
    fields = (field[:100] if field.numel() == NUMEL else field[:1] for field in made("int8"))
    with pytest.raises(ValueError, match="100 elements end within a block of 128"):
        state = STATES["int8"](fields)
        on_device.update_narrow(state, torch.randn(100), Layout.of_one(100), scalars())


def test_compiling_is_said_and_touches_no_state(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first call is for zeros of a fixed size."""
    sizes: list[int] = []

    def counted(name: str, fields: Any, grad: Tensor, *operands: Any) -> list[Tensor]:
        sizes.append(grad.numel())
        return on_device.narrow_adam(name, fields, grad, *operands)

    monkeypatch.setattr(on_device.torch, "compile", lambda *_, **__: counted)
    monkeypatch.setattr(on_device, "_TRIAL", 1024)
    on_device._compiled.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            on_device.update_narrow(made("int8"), torch.randn(NUMEL), LAYOUT, scalars())
    on_device._compiled.cache_clear()
    assert sizes == [1024, NUMEL, NUMEL] and len(caplog.records) == 1
    assert (
        "int8 state on the device, for weights in bfloat16 and gradients in float32" in caplog.text
    )
