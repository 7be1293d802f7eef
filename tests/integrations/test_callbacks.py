"""Callbacks of the Trainer and of Lightning read the newest weights, on lanes that are late too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.frameworks import data, trainers, with_lightning
from benchmarks.frameworks.accelerated import BATCH
from offloadtrain.engine import OffloadOptimizer
from offloadtrain.runtime.lanes import on_lanes
from offloadtrain.runtime.lanes.seeded import SeededLanes

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # advice on workers, on batches, on deprecations

PLACEMENTS: list[dict[str, Any]] = [{}, {"working": "host"}, {"update": "speculative"}]


@pytest.fixture
def synchronized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry per call of `synchronize`."""
    calls: list[int] = []
    synchronize = OffloadOptimizer.synchronize
    monkeypatch.setattr(
        OffloadOptimizer, "synchronize", lambda self: (calls.append(1), synchronize(self))[1]
    )
    return calls


class Average(transformers.TrainerCallback):  # type: ignore[misc]
    """A moving average of the weights, made after each step; starts after the second one."""

    def __init__(self) -> None:
        self.average: list[Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 2:
            self.average = [param.detach().clone() for param in model.parameters()]
        for mean, param in zip(self.average, model.parameters(), strict=False):
            mean.lerp_(param.detach(), 0.1)


class Quiet(Average):
    """One that says that it reads none."""

    reads_weights = False


@pytest.mark.parametrize("offload", PLACEMENTS)
def test_a_callback_of_the_trainer_reads_the_newest_weights(
    offload: dict[str, Any], tmp_path: Path
) -> None:
    def averaged(offload: dict[str, Any] | None) -> list[Tensor]:
        average = Average()
        trainers.train("Trainer", tmp_path, offload, callbacks=[average], arguments={})
        return average.average

    expected = averaged(None)
    with on_lanes(SeededLanes(0, late=True)):
        means = averaged(offload)
    assert expected and len(means) == len(expected)
    for value, mean in zip(means, expected, strict=True):
        torch.testing.assert_close(value, mean, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("callbacks", "offload"), [([], {}), ([Quiet], {}), ([Average], {"update": "delayed"})]
)
def test_nobody_who_reads_weights_nothing_that_waits(
    callbacks: list[Any], offload: dict[str, Any], tmp_path: Path, synchronized: list[int]
) -> None:
    """Adam stays beside the next forward; and `synchronize` would end the delay of "delayed"."""
    made = [kind() for kind in callbacks]
    trainers.train("Trainer", tmp_path, offload, callbacks=made, arguments={})
    assert not synchronized


@pytest.mark.slow
@pytest.mark.parametrize("offload", PLACEMENTS)
def test_an_average_of_lightning_reads_the_newest_weights(
    offload: dict[str, Any], tmp_path: Path
) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    def averaged(offload: dict[str, Any] | None) -> list[Tensor]:
        average = EMAWeightAveraging(decay=0.9)
        runner, module = with_lightning.make(offload, tmp_path, callbacks=[average])
        loader = torch.utils.data.DataLoader(data.Texts(), batch_size=BATCH)
        runner.fit(module, loader)
        assert average._average_model is not None
        return [param.detach() for param in average._average_model.module.parameters()]

    expected = averaged(None)
    with on_lanes(SeededLanes(0, late=True)):
        means = averaged(offload)
    for value, mean in zip(means, expected, strict=True):
        torch.testing.assert_close(value, mean, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_lightning_waits_for_nothing_without_such_a_callback(
    tmp_path: Path, synchronized: list[int]
) -> None:
    with_lightning.train({}, tmp_path, enable_checkpointing=False)
    assert not synchronized
