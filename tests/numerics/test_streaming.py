"""Weights that live on the host and take turns on the device: the bits of a resident run, never
more blocks on the device than slots, and the bytes that this costs."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.engine.block import Block
from offloadtrain.step.layout import step_spec as spec
from offloadtrain.step.program.streaming import StreamError
from tests.numerics.comparison import compare, follow, make, pair, train
from tests.numerics.models import Chain, Layer, batches, loss_of

MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "early": {"skip_nonfinite": False, "clip": None},
    "speculative": {"update": "speculative"},
}


def block_bytes(block: Block) -> int:
    """Device memory of a block's working weights."""
    return sum(bucket.spec.nbytes for bucket in block.all_buckets)


@pytest.mark.parametrize("activation", ["keep", "recompute"])
def test_a_backward_through_a_backward(activation: str) -> None:
    """A gradient penalty: what the first backward reads is saved for the second."""
    torch.manual_seed(0)
    resident, model = (
        nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)))
        for _ in range(2)
    )
    model.load_state_dict(resident.state_dict())
    options: dict[str, Any] = {"device": "cpu", "precision": "fp32"}
    streamed = {"working": "host", "device_slots": 2, "activation": activation}
    pair = ot.offload(resident, **options), ot.offload(model, **options, **streamed)
    for _ in range(3):
        given_x = torch.randn(4, 8)
        for optimizer, item in zip(pair, (resident, model), strict=True):
            x = given_x.clone().requires_grad_()
            energy = item(x).square().sum()
            (forces,) = torch.autograd.grad(energy, x, create_graph=True)
            optimizer.backward(energy + (forces.norm() - 1).square())
            optimizer.step()
    masters = (optimizer.master_weights() for optimizer in pair)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(*masters, strict=True))


def deep(depth: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return Chain(depth)


def blocks_of(optimizer: ot.OffloadOptimizer) -> list[Block]:
    return [block for block in optimizer._blocks if block.streamed]


@pytest.mark.parametrize(("slots", "loads"), [(1, 15), (2, 14), (4, 12), (8, 8)])
def test_the_bytes_of_streaming(slots: int, loads: int) -> None:
    """Each of 8 blocks once in forward, and once in backward unless it is still there."""
    _, optimizer, model = pair(deep(8), working="host", device_slots=slots)
    blocks = blocks_of(optimizer)
    size = block_bytes(blocks[0])
    rest = sum(block_bytes(b) for b in optimizer._blocks if not b.streamed)
    moved = []
    for tokens in batches(4):
        before = optimizer._engine.lanes.totals.h2d_bytes
        train(optimizer, model, [tokens])
        moved.append(optimizer._engine.lanes.totals.h2d_bytes - before)
    # From step to step: what is loaded ahead for the next step is counted to this one.
    assert moved[2] == moved[3] == rest + loads * size


def test_a_kept_graph_is_run_again() -> None:
    """retain_graph: handles stay, and the second backward loads what the first one evicted."""
    model = deep(5)
    plain_model = deep(5).bfloat16()
    optimizer = ot.offload(model, device="cpu", working="host", grad_accum_steps=2)
    tokens = batches(1)[0]
    with torch.no_grad():
        for (_, a), (_, b) in zip(
            plain_model.named_parameters(), deep(5).named_parameters(), strict=True
        ):
            a.copy_(b)
    loss, expected = loss_of(model, tokens), loss_of(plain_model, tokens)
    grads: list[Tensor] = []
    for _ in range(2):
        grads.append(torch.autograd.grad(loss, model.layers[0].up.weight, retain_graph=True)[0])
    wanted = torch.autograd.grad(expected, plain_model.layers[0].up.weight)[0]
    assert all(torch.equal(grad, wanted) for grad in grads)
    optimizer.close()


class Around(Layer):
    """Calls another layer of the list inside its own forward."""

    def __init__(self, inner: Layer) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x))


class Nested(nn.Module):
    """Two blocks are in use at once."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 24)
        plain = [Layer(), Layer()]
        self.layers = nn.ModuleList([*plain, *map(Around, plain)])
        self.head = nn.Linear(24, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers[2:]:
            x = layer(x)
        return self.head(x)


def test_blocks_used_inside_of_each_other_need_a_slot_each() -> None:
    torch.manual_seed(0)
    with pytest.raises(StreamError, match="set device_slots = 2"):
        _, optimizer, model = pair(Nested(), working="host", device_slots=1)
        train(optimizer, model, batches(1))
    compare(Nested, working="host", device_slots=2)


def test_another_order_is_right_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Shuffled(Chain):
        turn = 0

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            layers = list(self.layers)
            for layer in layers if self.turn % 3 else reversed(layers):
                x = layer(x)
            self.turn += 1
            return self.head(self.norm(x))

    with caplog.at_level(logging.WARNING, logger="offloadtrain"):
        compare(partial(Shuffled, 5), steps=7, working="host")
    assert sum("another order" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(("name", "precision"), [("chain", "bf16"), ("frozen", "fp32")])
def test_buckets_larger_than_a_staging_slot_go_in_pieces(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of 1,000 bytes cut every bucket and parameter. There are as many as the largest layer
    has pieces, and one more; of what is outside of layers no more than a few."""
    monkeypatch.setattr(spec, "STAGING_BYTES", 1000)
    _, optimizer, _ = pair(make(name), precision, accum=2)
    bytes_of = {row.owner: row.bytes for row in optimizer.ledger.rows()}

    def slots(blocks: list[Block], most: int) -> int:
        sizes = [b.numel * b.dtype.itemsize for block in blocks for b in block.buckets]
        return min(-(-max(sizes, default=0) // 1000) + 1, most)

    layers = [block for block in optimizer._blocks if block.spec.repeated]
    expected = max(slots(list(optimizer._blocks), 8), slots(layers, 32))
    assert bytes_of["gradient staging"] == 1000 * expected
    assert bytes_of.get("host staging", 2000) == 2000


def test_pieces_of_other_memory_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transposed and a channels-last parameter, whose gradients come in other strides."""
    monkeypatch.setattr(spec, "STAGING_BYTES", 512)

    class Odd(Chain):
        def __init__(self) -> None:
            super().__init__(2)
            self.turned = nn.Parameter(torch.randn(37, 24).t())
            self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            image = x.float().mean().to(x.dtype) * torch.ones(1, 3, 8, 8, dtype=x.dtype)
            x = x + self.conv(image).mean() + (x @ self.turned) @ self.turned.t()
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))

    resident, optimizer, model = pair(make(Odd), "fp32")
    follow(resident, optimizer, model, batches(3))
    optimizer.synchronize()
    for name, param in model.named_parameters():
        assert torch.equal(param, resident.params[name]), name


def test_a_block_that_two_forwards_read_is_used_twice_in_backward() -> None:
    """Also where it has kept its slot since the read of the later forward."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4)]
            self.layers = nn.ModuleList(layers)

        def forward(self, x: Tensor) -> Tensor:
            for number in (0, 1, 0, 2, 3, 2):
                x = self.layers[number](x)
            return x

    model = Shared()
    optimizer = ot.offload(model, ot.AdamW(), device="cpu", precision="fp32", working="host")
    for _ in range(2):
        optimizer.backward(model(torch.ones(2, 8)).sum())
        optimizer.step()
    order = optimizer._engine.program.streaming.access_order.future
    assert list(order) == [0, 1, 0, 2, 3, 2, 3, 2, 0, 1, 0]
    optimizer.close()
