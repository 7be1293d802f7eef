"""Only what has a gradient is updated: against torch's fused AdamW over those parameters alone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.engine.checks import ModelError
from offloadtrain.model.experts import grouped_linear
from offloadtrain.runtime import kernels

LR, DECAY, EXPERTS, WIDTH = 1e-2, 0.1, 4, 16
ENDS = [(5, 5, 5, 12), (0, 12, 12, 12), (3, 3, 12, 12), (12, 12, 12, 12), (2, 4, 8, 12)]
"""Rows up to each expert, a step: some get none, and all in the last one."""


class Layer(nn.Module):
    """A stack of experts; another part, not lazy, beside a part that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor, ends: tuple[int, ...], adapted: bool) -> Tensor:
        found = grouped_linear(rows, self.experts, torch.tensor(ends, dtype=torch.int32))
        found = found * self.scale
        return rows + (self.adapter(found) if adapted else found)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, rows: Tensor, ends: tuple[int, ...], adapted: bool) -> Tensor:
        for layer in self.layers:
            rows = layer(rows, ends, adapted)
        return rows


Micro = tuple[Tensor, tuple[int, ...], bool]
NAMED = ("*.experts", "*.adapter.*")


def rows_of(number: int) -> Tensor:
    return torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(number))


class Reference:
    """fp32 masters of each matrix and parameter, and torch's fused AdamW over those with a
    gradient, at the optimizer's own step."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        self.masters = {
            name: [piece.detach().clone() for piece in pieces_of(name, param)]
            for name, param in model.named_parameters()
        }
        self.model = model.to(dtype)
        self.params = dict(self.model.named_parameters())
        every = [piece for pieces in self.masters.values() for piece in pieces]
        self.adam = torch.optim.AdamW(every, lr=LR, weight_decay=DECAY, fused=True)
        for piece in every:
            moments = {key: torch.zeros_like(piece) for key in ("exp_avg", "exp_avg_sq")}
            self.adam.state[piece] = {"step": torch.tensor(0.0), **moments}

    def master(self, name: str) -> Tensor:
        return torch.cat([piece.flatten() for piece in self.masters[name]])

    def step(self, number: int, micro: list[Micro]) -> None:
        sums = {name: torch.zeros_like(param).float() for name, param in self.params.items()}
        for one in micro:
            self.model.zero_grad()
            (self.model(*one).square().mean() / len(micro)).backward()
            for name, param in self.params.items():
                if param.grad is not None:
                    sums[name] += param.grad.float()
        for name, total in sums.items():
            is_lazy = name.endswith("experts") or "adapter" in name
            for master, grad in zip(self.masters[name], pieces_of(name, total), strict=True):
                master.grad = None if is_lazy and not grad.any() else grad.clone()
                self.adam.state[master]["step"].fill_(number)
        self.adam.step()
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(self.master(name).view_as(param))


def pieces_of(name: str, tensor: Tensor) -> list[Tensor]:
    return list(tensor) if name.endswith("experts") else [tensor]


def microbatches(number: int, accum: int, dtype: torch.dtype = torch.float32) -> list[Micro]:
    return [
        (rows_of(10 * number + one).to(dtype), ENDS[(number + one) % len(ENDS)], number % 2 == 0)
        for one in range(accum)
    ]


CASES: list[dict[str, Any]] = [
    {},
    {"precision": "bf16"},
    {"working": "host"},
    {"update": "speculative"},
    {"update": "speculative", "precision": "bf16", "host_memory_limit": 140 << 10},
    {"skip_nonfinite": False},
    {"grad_accum_steps": 2},
    {"grad_accum_steps": 2, "precision": "bf16", "working": "host"},
    {"state_on": "disk"},
]


def train(optimizer: ot.OffloadOptimizer, model: Model, micro: list[Micro]) -> None:
    for rows, ends, adapts in micro:
        optimizer.backward(model(rows, ends, adapts).square().mean())
    optimizer.step()
    optimizer.synchronize()


@pytest.mark.parametrize("options", CASES, ids=str)
def test_what_has_no_gradient_stays(options: dict[str, Any], tmp_path: Path) -> None:
    options = {"precision": "fp32", **options}
    accum = options.get("grad_accum_steps", 1)
    if "state_on" in options:
        options["scratch_dir"] = str(tmp_path)
    dtype = torch.bfloat16 if options["precision"] == "bf16" else torch.float32
    reference = Reference(Model(), dtype)
    model = Model()
    rule = ot.AdamW(lr=LR, weight_decay=DECAY)
    optimizer = ot.offload(model, rule, device="cpu", lazy_updates=NAMED, **options)
    for number in range(len(ENDS) + 2):
        micro = microbatches(number, accum, dtype)
        train(optimizer, model, micro)
        reference.step(number, micro)
        for name, state in optimizer.named_state():
            assert torch.equal(state["master"].flatten(), reference.master(name)), (number, name)
        for name, param in model.named_parameters():
            assert torch.equal(param, reference.params[name]), (number, name)
    optimizer.close()


@pytest.mark.parametrize("update", ["exact", "speculative", "delayed"])
@pytest.mark.parametrize("state", ["split16", "int8"])
def test_narrow_state_stays_to_the_bit(state: str, update: str) -> None:
    model = Model()
    rule = ot.AdamW(lr=LR, weight_decay=DECAY)
    optimizer = ot.offload(
        model, rule, device="cpu", state=state, update=update, lazy_updates=NAMED
    )
    before = fields_of(optimizer)
    for number in range(len(ENDS)):
        [micro] = microbatches(number, 1, torch.bfloat16)
        train(optimizer, model, [micro])
        after = fields_of(optimizer)
        used = [hi > lo for lo, hi in pairwise((0, *micro[1]))]
        for name, pieces in after.items():
            for index, (then, now) in enumerate(zip(before[name], pieces, strict=True)):
                moves = micro[2] if "adapter" in name else len(pieces) == 1 or used[index]
                same = all(map(torch.equal, then, now))
                assert same != moves, (number, name, index)
        before = after
    optimizer.close()


def fields_of(optimizer: ot.OffloadOptimizer) -> dict[str, list[list[Tensor]]]:
    """Parameter → the fields of each of its pieces, copied."""
    found = {}
    for _, slot in optimizer._slots():
        bucket = next(
            one for block in optimizer._blocks for one in block.buckets if slot in one.slots
        )
        fields = [field.clone() for field in bucket.state_of(slot)]
        count = EXPERTS if slot.name.endswith("experts") else 1
        parts = [field.chunk(count) for field in fields]
        found[slot.name] = [list(piece) for piece in zip(*parts, strict=True)]
    return found


def test_without_the_option_nothing_is_lazy() -> None:
    model = Model()
    before = model.layers[0].adapter.weight.detach().clone()
    rule = ot.AdamW(lr=LR, weight_decay=DECAY)
    optimizer = ot.offload(model, rule, device="cpu", precision="fp32")
    train(optimizer, model, microbatches(1, 1))
    assert not torch.equal(model.layers[0].adapter.weight, before)
    optimizer.close()


def test_kernels_do_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four experts one has rows: a quarter of the elements is updated, beside what is not
    lazy."""
    updated: list[int] = []
    real = kernels.update

    def counting(state: Any, grad: Tensor, *args: Any, **kwargs: Any) -> None:
        updated.append(grad.numel())
        real(state, grad, *args, **kwargs)

    model = Model()
    optimizer = ot.offload(
        model, ot.AdamW(), device="cpu", precision="fp32", lazy_updates=["*.experts"]
    )
    monkeypatch.setattr(kernels, "update", counting)
    train(optimizer, model, [(rows_of(0), (0, 12, 12, 12), True)])
    others = sum(
        bucket.numel - EXPERTS * WIDTH * WIDTH
        for block in optimizer._blocks
        for bucket in block.buckets
    )
    assert sum(updated) == 3 * WIDTH * WIDTH + others
    optimizer.close()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"lazy_updates": ["*.missing"]},
            ModelError,
            "no trained parameter is called '\\*.missing'",
        ),
        ({"lazy_updates": NAMED, "state_on": "device"}, ValueError, "looked at on the host"),
        ({"lazy_updates": NAMED, "rule": ot.LAMB()}, ValueError, "updates a tensor as a whole"),
        ({"lazy_updates": NAMED, "rule": ot.Muon()}, ValueError, "updates a tensor as a whole"),
    ],
)
def test_what_it_does_not_go_with(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        ot.offload(Model(), device="cpu", **options)


def test_matrices_that_share_a_scale_are_refused() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Parameter(torch.randn(3, 5, 5))

        def forward(self) -> Tensor:
            return self.stack.sum()

    with pytest.raises(ModelError, match="3 matrices of 25 elements: they must be multiples"):
        ot.offload(Narrow(), device="cpu", lazy_updates=["stack"])
