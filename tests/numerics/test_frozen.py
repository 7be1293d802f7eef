"""Frozen weights of streamed blocks come and go with the trained ones: adapters on a large model
that the device does not hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.config.errors import HostMemoryError
from offloadtrain.model.experts import grouped_linear
from offloadtrain.step.layout.tiers import Tier
from tests.numerics.comparison import compare, pair, train
from tests.numerics.models import VOCAB, WIDTH, Chain, Layer, batches
from tests.numerics.test_streaming import MODES, block_bytes


class Adapted(Layer):
    """A frozen layer with a trained low-rank adapter (LoRA) beside its first matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a = nn.Linear(WIDTH, 4, bias=False)
        self.b = nn.Linear(4, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(F.gelu(self.up(normed) + self.b(self.a(normed))))


class Adapters(Chain):
    """Every layer with an adapter but the second, which is frozen whole; embedding and head too."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__(depth)
        self.layers = nn.ModuleList(Adapted() for _ in range(depth))
        self.layers[1].requires_grad_(False)
        self.embed.requires_grad_(False)
        self.head.requires_grad_(False)


@pytest.mark.parametrize(
    ("precision", "mode", "activation"),
    [
        ("bf16", "exact", "keep"),
        ("fp16", "speculative", "recompute"),
        ("fp32", "early", "offload"),
        pytest.param("bf16", "speculative", "offload", marks=pytest.mark.slow),
        pytest.param("fp16", "exact", "offload", marks=pytest.mark.slow),
        pytest.param("bf16", "early", "recompute", marks=pytest.mark.slow),
    ],
)
def test_adapters_train_with_the_bits_of_a_resident_run(
    precision: str, mode: str, activation: str
) -> None:
    options: dict[str, Any] = {"clip": 0.5, **MODES[mode]}
    steps = 10 if precision == "fp16" else 4
    compare(Adapters, precision, steps=steps, working="host", activation=activation, **options)


def test_frozen_weights_move_up_only_and_have_no_state() -> None:
    _, optimizer, model = pair(Adapters(8), working="host", device_slots=2)
    for tokens in batches(2):
        train(optimizer, model, [tokens])
    blocks = [block for block in optimizer._blocks if block.streamed]
    before = optimizer._engine.lanes.totals.copy()
    train(optimizer, model, batches(1))
    moved = optimizer._engine.lanes.totals.minus(before)
    trained = sum(b.numel * b.dtype.itemsize for x in optimizer._blocks for b in x.buckets)
    assert moved.d2h_bytes == trained
    size = block_bytes(blocks[0])
    frozen_only = block_bytes(blocks[1])
    rest = sum(block_bytes(b) for b in optimizer._blocks if not b.streamed)
    # Each block in forward, and in backward but the last one, which is still there, and what the
    # next step begins with.
    loads = moved.h2d_bytes - rest
    assert 12 * frozen_only < loads <= 14 * size
    assert {name for name, _ in optimizer.named_state()} == {
        name for name, param in model.named_parameters() if param.requires_grad
    }
    optimizer.close()


def test_they_count_in_the_limits() -> None:
    def offload(**limits: int) -> ot.OffloadOptimizer:
        return pair(Adapters(16), working="host", **limits)[1]

    unlimited = offload()
    needed, on_device = unlimited.ledger.total(Tier.HOST), unlimited.ledger.total(Tier.DEVICE)
    unlimited.close()
    offload(host_memory_limit=needed).close()
    with pytest.raises(HostMemoryError, match="frozen weights"):
        offload(host_memory_limit=needed // 2)
    layer = sum(p.numel() for p in Adapted().parameters()) * 2
    some = offload(device_memory_limit=on_device + 6 * layer)
    stay = [block for block in some._blocks if block.spec.repeated and not block.streamed]
    assert 3 <= len(stay) <= 6
    some.close()


# What a step does to an expert that got no tokens. Experts with tokens are among all `MODELS`.


class Divided(nn.Module):
    """Rows are divided among the first and the last of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, rows: Tensor, ends: tuple[int, ...]) -> Tensor:
        return grouped_linear(rows, self.weight, torch.tensor(ends, dtype=torch.int32)).square()


@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
@pytest.mark.parametrize("ends", [[(5, 5, 12)] * 3, [(4, 8, 12), (6, 6, 12)]])
def test_an_expert_without_tokens_only_decays(
    weight_decay: float, ends: list[tuple[int, ...]]
) -> None:
    """As in torch; moments of earlier tokens still move it."""
    model, plain_model = Divided(), Divided()
    adam = torch.optim.AdamW(
        plain_model.parameters(), lr=1e-2, weight_decay=weight_decay, fused=True
    )
    groups = [{"params": list(model.parameters()), "weight_decay": weight_decay}]
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), params=groups, device="cpu", precision="fp32")
    for number, end in enumerate(ends):
        rows = torch.randn(12, 8, generator=torch.Generator().manual_seed(number))
        optimizer.backward(model(rows, end).mean())
        optimizer.step()
        plain_model(rows, end).mean().backward()
        adam.step()
        adam.zero_grad()
    optimizer.synchronize()
    assert torch.equal(model.weight, plain_model.weight)
    unused = len(set(ends)) == 1 and not weight_decay
    assert torch.equal(model.weight[1], Divided().weight[1]) == unused
    optimizer.close()
