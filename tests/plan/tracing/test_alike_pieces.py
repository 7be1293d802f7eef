"""A trace of a few pieces of a loss is the trace of all of them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from offloadtrain.config.offload import OffloadConfig
from offloadtrain.model import loss as loss_module
from offloadtrain.model.loss import few_stand_for_all, made_of_each
from offloadtrain.plan.costs.microbatch import TracedStep, Work
from offloadtrain.plan.tracing import step as tracing
from offloadtrain.plan.tracing.alike import AlikePieces
from offloadtrain.plan.tracing.meter import Meter

ROWS, CLASSES, WIDTH = 96, 640, 16


class Head(nn.Module):
    """A loss in parts, or of whole logits in fp32 or bf16, some rows at a time."""

    def __init__(self, *, in_parts: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.in_parts = in_parts

    def forward(self, x: Tensor) -> Tensor:
        targets = torch.zeros(len(x), dtype=torch.long)
        hidden = self.layers(x)
        if self.in_parts:
            return loss_module.linear_cross_entropy(hidden, self.head.weight, targets)
        return loss_module.cross_entropy(self.head(hidden), targets)


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 9, 10])
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_few_pieces_stand_for_all(
    monkeypatch: pytest.MonkeyPatch, in_parts: bool, pieces: int
) -> None:
    """10 pieces, or parts of 64 classes, are all of one size; of the others the last is smaller."""
    rows, classes = -(-ROWS // pieces), -(-CLASSES // pieces)
    monkeypatch.setattr(loss_module, "_ROWS_BYTES_CPU", 4 * CLASSES * rows)
    monkeypatch.setattr(loss_module, "classes_of_part", lambda tokens, on_cpu: classes)
    ran: list[Any] = []
    name = "parts" if in_parts else "_row_ranges"
    module: Any = loss_module
    cut = getattr(module, name)

    def traced() -> TracedStep:
        def loss(model: nn.Module) -> Tensor:
            loss_value: Tensor = model(torch.empty(ROWS, WIDTH))
            return loss_value

        return tracing.trace_step(
            Head(in_parts=in_parts), loss, OffloadConfig(precision="bf16"), on_cpu=True
        )

    def noted(*args: Any) -> Any:
        ran.append(len(list(cut(*args))))
        return cut(*args)

    monkeypatch.setattr(module, name, noted)
    few = traced()
    monkeypatch.setattr(tracing, "few_stand_for_all", nullcontext)
    assert few == traced()
    assert ran == 4 * [pieces]


def test_pieces_that_are_left_out_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of nine run."""
    rows: list[int] = []
    original = torch.nn.functional.cross_entropy

    def noted(*args: Any, **options: Any) -> Tensor:
        rows.append(len(args[0]))
        return original(*args, **options)

    monkeypatch.setattr(loss_module, "F", SimpleNamespace(cross_entropy=noted))
    monkeypatch.setattr(loss_module, "_ROWS_BYTES_CPU", 4 * CLASSES * 11)
    tracing.trace_step(
        Head(in_parts=False),
        lambda model: model(torch.empty(ROWS, WIDTH)),
        OffloadConfig(precision="bf16"),
        on_cpu=True,
    )
    assert rows == [11, 11, ROWS - 8 * 11]


@pytest.mark.parametrize("pieces", [3, 4, 30])
def test_what_pieces_make_is_held_until_all_have_run(pieces: int) -> None:
    def traced(few: bool) -> tuple[int, Work]:
        with FakeTensorMode(), Meter() as meter:
            with few_stand_for_all(AlikePieces(meter)) if few else nullcontext():
                made = made_of_each(range(pieces), lambda _: torch.empty(50).sum().view(1))
                torch.cat(made)
        work = Work()
        for segment in meter.segments:
            work.add(segment.work)
        return max(segment.peak for segment in meter.segments), work

    # All of them and their copy, or the last one's operand beside them.
    most = max(8 * pieces, 4 * pieces + 4 * 50)
    assert traced(few=True) == traced(few=False) == (most, traced(few=False)[1])


def test_a_loss_of_thousands_of_pieces_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, where a piece is as large as the cache: they are no layer without end."""
    monkeypatch.setattr(loss_module, "_ROWS_BYTES_CPU", 4 * CLASSES)
    step = tracing.trace_step(
        Head(in_parts=False),
        lambda model: model(torch.empty(5000, WIDTH)),
        OffloadConfig(precision="bf16"),
        on_cpu=True,
    )
    assert step.activations.total > 2 * 5000 * CLASSES
