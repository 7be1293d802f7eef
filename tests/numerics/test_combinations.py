"""The table of docs/speed.md: what goes together has the bits of a plain loop, what does not is
refused by name before memory is allocated."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import offloadtrain as ot
from offloadtrain.config.offload import ActivationMode, OptionError
from offloadtrain.engine import build
from offloadtrain.engine.autograd import compiled
from tests import levels
from tests.numerics import test_float8
from tests.numerics.comparison import ADAMW, assert_same, train
from tests.numerics.models import VOCAB, WIDTH, Chain, Layer, batches, loss_of
from tests.numerics.reference import ResidentRun

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch
PAGE = Path(__file__).resolve().parents[2] / "docs/speed.md"


def rows() -> list[list[str]]:
    lines = PAGE.read_text().partition("## What goes together")[2].splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ]


def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
    return "gelu" in str(operation)


def options_of(cell: str) -> dict[str, Any]:
    (code,) = re.findall(r"`(.*)`", cell)
    return dict(eval(f"dict({code})", {"policy": policy}))


COLUMNS = rows()[0][1:]
CELLS = {row: dict(zip(COLUMNS, cells, strict=True)) for row, *cells in rows()[1:]}


class Adapted(Layer):
    """A frozen layer with a trained product of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(requires_grad=False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(F.gelu(self.up(normed) + self.b(self.a(normed))))


@pytest.mark.cover(1, levels.ALL)
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", CELLS)
def test_a_cell_of_the_table(row: str, column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, cell = options_of(row) | options_of(column), CELLS[row][column]
    torch.manual_seed(0)
    model: Any = Chain(3)
    if "fp8" in options:
        model = test_float8.made()
    if "adapters" in column:
        model.layers = nn.ModuleList(Adapted() for _ in range(3))
    if cell == "refused":
        monkeypatch.setattr(build, "MemoryMap", None)
        named = next(name for name in ("activation_policy", "activation_budget") if name in options)
        with pytest.raises(OptionError, match=named):
            ot.offload(model, ADAMW, device="cpu", **options)
        return
    assert cell == "same bits"
    recipe = options.get("fp8")
    plain_model = test_float8.converted(model, recipe) if recipe else copy.deepcopy(model)
    if options.get("compile_blocks"):
        torch._dynamo.reset()
        counter, make = CompileCounterWithBackend("aot_eager"), torch.compile
        monkeypatch.setattr(compiled, "CODE_GENERATOR", counter)
        monkeypatch.setattr(
            torch,
            "compile",
            lambda forward, backend=counter, **how: make(forward, backend=backend, **how),
        )
        for layer in plain_model.layers:
            layer.forward = torch.compile(layer.forward)
    if options["activation"] == "offload_saved":
        options["offload_saved_above"] = 1
    resident = ResidentRun(plain_model, torch.bfloat16)
    optimizer = ot.offload(model, ADAMW, device="cpu", **options)
    for tokens in batches(2):
        assert train(optimizer, model, [tokens]) == resident.step([tokens], loss_of)
    assert_same(resident, optimizer, model)
    optimizer.close()


def test_the_table_has_every_activation_mode() -> None:
    shown = {options_of(row)["activation"] for row in CELLS}
    assert shown == set(get_args(ActivationMode))
