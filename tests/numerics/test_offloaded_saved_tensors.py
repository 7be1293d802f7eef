"""activation = "offload_saved": what moves, once, and what stays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.engine.autograd.offload import ActivationError, SavedOffloader
from tests.numerics.comparison import compare
from tests.plan.tracing.measured import most_allocated

SAVED: dict[str, Any] = {"activation": "offload_saved", "offload_saved_above": 0}
BATCH, SEQ_LEN, WIDTH = 3, 16, 32


class UNet(nn.Module):
    """No list of layers; a connection past the others; values in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.down = nn.Conv2d(16, 32, 3, padding=1, stride=2)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.last = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.relu(self.norm(self.first(x)))
        output: Tensor = self.last(torch.cat([self.up(torch.relu(self.down(wide))), wide], 1))
        return output


class Attention(nn.Module):
    """Queries, keys and values are cut out of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.randn(SEQ_LEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x * self.table).view(BATCH, SEQ_LEN, 3, 2, -1).unbind(2)
        heads = (item.transpose(1, 2) for item in (q, k, v))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        output: Tensor = self.out(mixed.transpose(1, 2).reshape(BATCH, SEQ_LEN, WIDTH))
        return output


class Cells(nn.Module):
    """torch cuts the gates of a cell out of one product so that each has a version counter of its
    own, and changes them in place one after the other."""

    def __init__(self, cell: type[nn.LSTMCell | nn.GRUCell]) -> None:
        super().__init__()
        self.inp, self.cell = nn.Linear(WIDTH, WIDTH), cell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, state, output = self.inp(x), None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            output.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(output, 1)


class Spectrum(nn.Module):
    """Saves numbers that torch conjugates or negates only when it reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.filter = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        lazy = torch.view_as_complex(self.filter(x).unflatten(-1, (WIDTH, 2))).conj()
        shifted = torch.fft.fft(self.inp(x)) * lazy
        return torch.fft.ifft(shifted * shifted.conj()).real + lazy.imag * lazy.imag.exp()


def offloaded(model: nn.Module, **options: Any) -> ot.OffloadOptimizer:
    return ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", precision="fp32", **options)


def saved_bytes(optimizer: ot.OffloadOptimizer) -> int:
    rows = optimizer.ledger.rows()
    return sum(row.bytes for row in rows if row.owner == "saved tensors")


@pytest.mark.parametrize("above", [0, 1 << 15, 1 << 30])
def test_a_model_without_layers_has_the_same_bits(above: int) -> None:
    torch.manual_seed(0)
    plain, model = UNet(), UNet()
    model.load_state_dict(plain.state_dict())
    pair = offloaded(plain), offloaded(model, activation="offload_saved", offload_saved_above=above)
    for _ in range(3):
        x = torch.randn(4, 3, 32, 32)
        losses = []
        for optimizer, item in zip(pair, (plain, model), strict=True):
            loss = F.mse_loss(item(x), x)
            optimizer.backward(loss)
            optimizer.step()
            losses.append(loss)
        assert torch.equal(*losses)
    for optimizer in pair:
        optimizer.synchronize()
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True)
    )
    assert bool(saved_bytes(pair[1])) == (above < 1 << 30)


@pytest.mark.parametrize(
    "make", [partial(Cells, nn.LSTMCell), partial(Cells, nn.GRUCell), Spectrum]
)
def test_memory_that_tensors_see_in_different_ways(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    pair = offloaded(plain), offloaded(model, **SAVED)
    for _ in range(2):
        x = torch.randn(BATCH, SEQ_LEN, WIDTH)
        for optimizer, item in zip(pair, (plain, model), strict=True):
            optimizer.backward(item(x).square().mean())
            optimizer.step()
    for optimizer in pair:
        optimizer.synchronize()
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True)
    )
    assert saved_bytes(pair[1]) > 0


def test_what_is_cut_out_of_one_product_is_one_copy_and_weights_and_buffers_stay() -> None:
    torch.manual_seed(0)
    model = Attention()
    optimizer = offloaded(model, **SAVED)
    x = torch.randn(BATCH, SEQ_LEN, WIDTH)
    before = optimizer._engine.lanes.totals.copy()
    model(x).mean().backward()
    optimizer.step()
    optimizer.synchronize()
    element = x.element_size()
    tokens = BATCH * SEQ_LEN
    # x * table; the product; attention's result, which `out` reads too; its sums by head and row
    expected = element * tokens * (WIDTH + 3 * WIDTH + WIDTH + 2)
    assert saved_bytes(optimizer) == expected
    weights = sum(b.numel * 4 for block in optimizer._blocks for b in block.buckets)
    moved = optimizer._engine.lanes.totals.minus(before)
    assert moved.d2h_bytes == weights + expected, "each once, for all readers"
    assert moved.h2d_bytes == weights, "backward needs them while they are leaving"


@pytest.mark.parametrize("retained", [False, True])
def test_what_is_still_leaving_does_not_come_back(retained: bool) -> None:
    """Of 20 inputs the last 8 are in the queue when backward begins. For a second backward of the
    same graph all are there."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
    optimizer = offloaded(model, **SAVED)
    before = optimizer._engine.lanes.totals.copy()
    loss = model(torch.randn(2, 64)).mean()
    loss.backward(retain_graph=retained)
    if retained:
        loss.backward()
    optimizer.step()
    optimizer.synchronize()
    weights = sum(b.numel * 4 for block in optimizer._blocks for b in block.buckets)
    item = 2 * 64 * 4
    moved = optimizer._engine.lanes.totals.minus(before)
    assert saved_bytes(optimizer) == 20 * item
    assert moved.h2d_bytes == weights + 12 * item


def test_a_forward_past_the_models_own_call() -> None:
    """Frozen weights stay there too, and nothing is remembered once backward is over."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].requires_grad_(False)
    optimizer = offloaded(model, **SAVED)
    for _ in range(2):
        hidden = torch.randn(2, 64)
        for layer in model:
            hidden = layer(hidden)
        optimizer.backward(hidden.mean())
        optimizer.step()
        assert saved_bytes(optimizer) == 2 * 2 * 64 * 4
    offloader = optimizer._engine.forward_hooks._offloader
    assert isinstance(offloader, SavedOffloader) and not offloader._known


def test_where_nothing_is_large_enough_it_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Attention()
    optimizer = offloaded(model, activation="offload_saved")
    for _ in range(3):
        optimizer.backward(model(torch.randn(BATCH, SEQ_LEN, WIDTH)).mean())
        optimizer.step()
    (record,) = caplog.records
    assert "moved nothing" in record.getMessage() and "18.0 KiB" in record.getMessage()


def test_a_graph_that_is_kept_runs_backward_again() -> None:
    torch.manual_seed(0)
    model = Attention()
    optimizer = offloaded(model, **SAVED)
    x = torch.randn(BATCH, SEQ_LEN, WIDTH, requires_grad=True)
    loss = model(x).square().mean()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    again = torch.autograd.grad(loss, x)
    assert first[0].any() and torch.equal(first[0], again[0])
    optimizer.close()


class InPlace(nn.Module):
    """Changes what a product has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        output = self.last(hidden)
        hidden += 1.0
        return output + hidden


def test_a_change_in_place_is_told() -> None:
    model = InPlace()
    optimizer = offloaded(model, **SAVED)
    with pytest.raises(ActivationError, match="changed in place"):
        optimizer.backward(model(torch.randn(4, 8)).mean())


def peak_bytes(depth: int, **options: Any) -> int:
    """Largest sum of what torch's allocator has given out, in the second step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(depth)))
    optimizer = offloaded(model, **options)

    def step() -> None:
        optimizer.backward(model(torch.randn(4096, 64)).mean())
        optimizer.step()

    return most_allocated(step)


def test_the_peak_does_not_grow_with_depth() -> None:
    shallow, deep = (peak_bytes(depth, **SAVED) for depth in (12, 36))
    saved = peak_bytes(36) - peak_bytes(12)
    assert saved >= 24 * 2 * 4096 * 64 * 4
    assert deep - shallow < 0.02 * saved


@pytest.mark.parametrize(
    ("options", "prefix"),
    [
        ({"activation": "recompute"}, "activation = 'recompute'"),
        (
            {"activation": "offload", "working": "host"},
            "activation = 'offload' and working = 'host'",
        ),
        ({"activation": "offload_saved"}, ""),
        ({}, ""),
    ],
)
def test_options_for_layers_are_told_where_there_are_none(
    options: dict[str, Any], prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    for model in (UNet(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))):
        offloaded(model, **options).close()
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split(":")[0] for message in messages] == [prefix] * bool(prefix)


@pytest.mark.parametrize("working", ["device", "host"])
def test_what_a_users_recompute_drops_is_not_moved(working: str) -> None:
    """The size lies between those of its tensors: if some were moved, the second run would save
    others than the first."""
    options: dict[str, Any] = {"working": working, "activation": "offload_saved"}
    compare("recompute", offload_saved_above=1000, **options)
