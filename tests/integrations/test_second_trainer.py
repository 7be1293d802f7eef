"""Trainers one after the other over one model, and what a trainer leaves when it is gone."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadtrain as ot
from benchmarks.frameworks import data, trainers
from offloadtrain.engine import ModelError

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # advice on workers, on pinned memory


def make(folder: Path, offload: dict[str, Any] | None, model: Any, **settings: Any) -> Any:
    settings = {"arguments": {"max_steps": 3}, **settings}
    return trainers.make("Trainer", folder, offload, model=model, **settings)


@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize("offload", [{}, {"working": "host"}], ids=str)
def test_a_second_trainer_goes_on(
    tmp_path: Path, offload: dict[str, Any], lives: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With new moments, as the plain one; the first one's evaluation does not disturb it."""

    def run(offload: dict[str, Any] | None) -> tuple[list[Any], float]:
        model = data.model()
        first = make(tmp_path, offload, model)
        first.train()
        logged = trainers.logged(first)
        if not lives:
            del first
        second = make(tmp_path, offload, model, eval_dataset=data.Texts())
        second.train()
        if lives:
            first.evaluate(data.Texts())
        second.train()
        return logged + trainers.logged(second), second.evaluate()["eval_loss"]

    expected, expected_loss = run(None)
    logged, loss = run(offload)
    assert logged == expected and loss == pytest.approx(expected_loss, rel=1e-5)
    assert not [record for record in caplog.records if record.name.startswith("offloadtrain")]


def test_the_first_trainer_says_that_its_moments_are_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = data.model()
    first, second = make(tmp_path, {}, model), make(tmp_path, {}, model)
    first.train()
    second.train()
    first.train()
    (record,) = [record for record in caplog.records if record.name.startswith("offloadtrain")]
    assert "the optimizer of this trainer was closed" in record.message
    assert second.optimizer.phase.name == "CLOSED"


def test_an_optimizer_that_no_trainer_has_taken_is_not_closed(tmp_path: Path) -> None:
    model = data.model()
    optimizer = ot.offload(model, device="cpu")
    with pytest.raises(ModelError, match="offloaded already"):
        make(tmp_path, {}, model).train()
    optimizer.close()


@pytest.mark.parametrize("offload", [{}, {"working": "host"}], ids=str)
def test_a_deleted_trainer_is_gone_at_once(tmp_path: Path, offload: dict[str, Any]) -> None:
    """Without a collection of garbage, as the plain one; the model has its weights."""
    model = data.model()
    trainer = make(tmp_path, offload, model)
    trainer.train()
    ledger, gone = trainer.optimizer.ledger, weakref.ref(trainer.optimizer)
    mapped = weakref.ref(next(iter(trainer.optimizer.state.values()))["master"])
    gc.collect()
    gc.disable()
    try:
        del trainer
        assert gone() is None and mapped() is None
    finally:
        gc.enable()
    assert not any(row.bytes for row in ledger.rows() if row.tier == "host")
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert not any(param.isnan().any() for param in model.parameters())
    assert torch.isfinite(model(**{"input_ids": data.Texts()[0]["input_ids"][None]}).logits).all()
