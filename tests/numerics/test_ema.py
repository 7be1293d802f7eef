"""Moving averages: the bits of torch's `AveragedModel` over a plain loop, in every placement and
state format, on any lanes; saved, resumed and exported."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import offloadtrain as ot
from tests.numerics.comparison import ADAMW, make, pair, train
from tests.numerics.configurations import DISK_PLACEMENTS, PLACEMENTS, UPDATES
from tests.numerics.models import Chain, batches, loss_of
from tests.numerics.reference import SEED

DECAY = 0.7
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "resident": ("chain", {}),
    "early, streamed": ("tied", UPDATES["early"] | PLACEMENTS["1 slot"] | {"precision": "fp32"}),
    "clipped": ("frozen", {"clip": 0.3, "accum": 2}),
    "guessed wrong": ("chain", UPDATES["speculative"] | {"clip": 0.01, "working": "host"}),
    "guessed right": ("tied", UPDATES["speculative"] | {"clip": 1e9}),
    "delayed": ("chain", UPDATES["delayed"]),
    "state on the device": ("unusual", PLACEMENTS["state on the device"]),
    "half of it": ("frozen", PLACEMENTS["half of the state on the device"]),
    "state on the disk": ("chain", DISK_PLACEMENTS["state on the disk"]),
    "all on the disk": ("frozen", DISK_PLACEMENTS["all on the disk"] | {"accum": 2}),
    "three tiers": ("chain", DISK_PLACEMENTS["three tiers"]),
    "exact masters": ("tied", {"state": "split16"}),
    "exact masters on the device": ("chain", {"state": "split16", "state_on": "device"}),
    "narrow masters": ("chain", {"state": "int8", "working": "host"}),
    "narrow masters on the disk": ("frozen", {"state": "int8", "state_on": "disk"}),
}


class Averages:
    """torch's own average of the masters, which the caller gives it after each step."""

    def __init__(self) -> None:
        self.holder = nn.Module()
        self.averaged: Any = None

    def update(self, masters: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for number, value in enumerate(masters.values()):
                if not hasattr(self.holder, f"p{number}"):
                    setattr(self.holder, f"p{number}", nn.Parameter(torch.zeros_like(value)))
                getattr(self.holder, f"p{number}").copy_(value)
        if self.averaged is None:
            average = get_ema_multi_avg_fn(DECAY)
            self.averaged = AveragedModel(self.holder, multi_avg_fn=average)
        self.averaged.update_parameters(self.holder)
        values = [param.detach() for param in self.averaged.parameters()]
        self.values = dict(zip(masters, values, strict=True))


def masters_of(run: Any, other: ot.OffloadOptimizer, state: str) -> dict[str, Tensor]:
    """Return the trained masters of a plain loop; in narrow formats those of another optimizer."""
    if state == "fp32":
        return {name: run.master(name).clone() for name in run.trained}
    trained = {name for name, param in other.model.named_parameters() if param.requires_grad}
    return {name: value for name, value in other.master_weights() if name in trained}


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a file gives back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


@pytest.mark.parametrize("case", CASES)
def test_the_averages_are_those_of_torch(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offloadtrain.engine.ema._CHUNK", 256)
    name, options = CASES[case]
    options = dict(options)
    accum, state = options.get("accum", 1), options.get("state", "fp32")
    if "disk" in str(options):
        options |= {"scratch_dir": str(tmp_path), "scratch_in_memory": True}
    run, optimizer, model = pair(make(name), **options)
    other = pair(make(name), **options)[1] if state != "fp32" else optimizer
    ema = ot.EMA(optimizer, DECAY)
    expected, stream = Averages(), batches(5 * accum)
    before = {name: value.clone() for name, value in ema.weights()}
    for key, param in make(name).named_parameters():
        if param.requires_grad and state != "int8":
            assert torch.equal(before[key], param), key
    middle: dict[str, Any] = {}
    for step in range(5):
        micro = stream[step * accum : (step + 1) * accum]
        if state == "fp32":
            run.step(micro, loss_of)
        train(optimizer, model, micro)
        if other is not optimizer:
            train(other, other.model, micro)
        expected.update(masters_of(run, other, state))
        ema.update()
        if step == 2:
            middle = saved(ema.state_dict())
            at_middle = {name: value.clone() for name, value in expected.values.items()}
    averages = dict(ema.weights())
    assert list(averages) == [name for name, _ in model.named_parameters()]
    masters = dict(optimizer.master_weights())
    for name, value in averages.items():
        assert value.dtype is torch.float32
        assert torch.equal(value, expected.values.get(name, masters[name])), name
    assert ema.num_updates == 5
    ema.load_state_dict(middle)
    assert (ema.num_updates, ema.decay) == (3, DECAY)
    resumed = dict(ema.weights())
    assert all(torch.equal(resumed[name], value) for name, value in at_middle.items())
    optimizer.close()
    after = dict(ema.weights())  # at the end of a script
    assert all(torch.equal(after[name], value) for name, value in resumed.items())


def offloaded(**options: Any) -> tuple[nn.Module, ot.OffloadOptimizer]:
    torch.manual_seed(0)
    model = Chain()
    return model, ot.offload(model, ADAMW, device="cpu", seed=SEED, **options)


def test_a_resumed_run_has_the_averages_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    """In another placement. The decay changes on the way."""

    def go(optimizer: ot.OffloadOptimizer, ema: ot.EMA, steps: range) -> None:
        for step in steps:
            ema.decay = min(DECAY, (1 + step) / (10 + step))
            train(optimizer, optimizer.model, [batches(6)[step]])
            ema.update()

    _, whole = offloaded()
    expected = ot.EMA(whole, DECAY)
    go(whole, expected, range(6))
    model, first = offloaded(working="host")
    ema = ot.EMA(first, DECAY)
    go(first, ema, range(3))
    file = {"model": model.state_dict(), "adam": first.state_dict(), "ema": ema.state_dict()}
    loaded = saved(file)
    first.close()
    options = {"state_on": "disk", "scratch_dir": str(tmp_path), "scratch_in_memory": True}
    model, second = offloaded(**options)
    model.load_state_dict(loaded["model"])
    second.load_state_dict(loaded["adam"])
    ema = ot.EMA(second)
    ema.load_state_dict(loaded["ema"])
    go(second, ema, range(3, 6))
    for (name, value), (_, other) in zip(ema.weights(), expected.weights(), strict=True):
        assert torch.equal(value, other), name


class Normed(nn.Sequential):
    """Running statistics, a tie, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6))
        self[2].weight = self[0].weight
        self[3].requires_grad_(False)


@pytest.mark.parametrize("options", [{}, {"working": "host"}])
def test_averages_are_copied_to_models(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Normed()
    optimizer = ot.offload(model, ADAMW, device="cpu", precision="fp32", **options)
    ema = ot.EMA(optimizer, DECAY)
    for _ in range(3):
        optimizer.backward(model(torch.randn(4, 6)).square().mean())
        optimizer.step()
        ema.update()
    other = Normed()
    ema.copy_to(other)
    averages = {name: value.clone() for name, value in ema.weights()}
    assert other[2].weight is other[0].weight
    for name, param in other.named_parameters():
        assert torch.equal(param, averages[name]), name
    for name, buffer in other.named_buffers():
        assert torch.equal(buffer, dict(model.named_buffers())[name]), name
    # Into the trained model: they are its masters from here on.
    ema.copy_to(model)
    for name, value in optimizer.master_weights():
        assert torch.equal(value, averages[name]), name
    with pytest.raises(ot.ModelError, match=r"no '0\.weight'"):
        ema.copy_to(nn.BatchNorm1d(6))
    optimizer.close()


def wrong_calls() -> Iterator[Any]:
    def early(optimizer: ot.OffloadOptimizer, ema: ot.EMA) -> None:
        optimizer.backward(loss_of(optimizer.model, batches(1)[0]))
        ema.update()

    def closed(optimizer: ot.OffloadOptimizer, ema: ot.EMA) -> None:
        optimizer.close()
        ema.update()

    def decay(optimizer: ot.OffloadOptimizer, ema: ot.EMA) -> None:
        ema.decay = 1.5
        ema.update()

    def shape(optimizer: ot.OffloadOptimizer, ema: ot.EMA) -> None:
        state = copy.deepcopy(ema.state_dict())
        state["averages"]["norm.weight"] = torch.ones(3)
        ema.load_state_dict(state)

    def name(optimizer: ot.OffloadOptimizer, ema: ot.EMA) -> None:
        state = copy.deepcopy(ema.state_dict())
        state["averages"]["norm.scale"] = state["averages"].pop("norm.weight")
        ema.load_state_dict(state)

    yield early, ot.OffloadTrainError, "between backward and step"
    yield closed, ot.OffloadTrainError, "after close"
    yield decay, ValueError, "not between 0 and 1"
    yield shape, ot.OffloadTrainError, r"'norm.weight' has shape \(24,\), the state has \(3,\)"
    yield name, ot.OffloadTrainError, r"average of 'norm.scale', which is not trained"


@pytest.mark.parametrize(("call", "error", "message"), list(wrong_calls()))
def test_what_cannot_be_averaged_says_so(call: Any, error: Any, message: str) -> None:
    _, optimizer = offloaded()
    ema = ot.EMA(optimizer)
    before = {name: value.clone() for name, value in ema.weights()}
    with pytest.raises(error, match=message):
        call(optimizer, ema)
    for name, value in ema.weights():
        assert torch.equal(value, before[name])
    assert ema.num_updates == 0
    optimizer.close()


class Stages:
    """A model whose head is never trained at first, and its first layer for a while."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.offloads = bool(options)
        self.model: Any = Chain(3)
        self.model.head.requires_grad_(False)
        params = list(self.model.parameters())
        if self.offloads:
            options |= {"device": "cpu", "params": params}
            self.optimizer: Any = ot.offload(self.model, ot.AdamW(lr=1e-2), **options)
            self.average: Any = ot.EMA(self.optimizer, DECAY)
        else:
            self.optimizer = torch.optim.AdamW(params, lr=1e-2)
            average = get_ema_multi_avg_fn(DECAY)
            self.average = AveragedModel(self.model, multi_avg_fn=average)

    def go(self, stages: range) -> None:
        for stage in stages:
            self.model.layers[0].requires_grad_(stage not in (1, 2))
            self.model.head.requires_grad_(stage >= 2)
            if stage == 2:
                nn.init.constant_(self.model.layers[0].norm.weight, 0.5)
            for tokens in batches(6)[2 * (stage % 3) :][:2]:
                self.optimizer.zero_grad()
                loss_of(self.model, tokens).backward()
                self.optimizer.step()
                if self.offloads:
                    self.average.update()
                else:
                    self.average.update_parameters(self.model)

    def averages(self) -> dict[str, Tensor]:
        if self.offloads:
            return dict(self.average.weights())
        return dict(self.average.module.named_parameters())


@pytest.mark.parametrize("options", [{"state_on": "device"}, {"working": "host"}], ids=str)
def test_averages_go_on_where_what_is_trained_changes(options: dict[str, Any]) -> None:
    """As torch's, to its rounding: frozen parameters are averaged with what they are."""
    plain, run = Stages(), Stages(precision="fp32", **options)
    for stage in range(4):
        for each in (plain, run):
            each.go(range(stage, stage + 1))
        found = run.averages()
        for name, value in plain.averages().items():
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-5, atol=1e-6)
    run.optimizer.close()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_state_dict_of_the_optimizer_has_the_averages(stages: int, first: bool) -> None:
    """Whether they are made before it is loaded or after; of what is frozen meanwhile, too."""
    options = {"working": "host", "state": "split16"}
    whole = Stages(**options)
    whole.go(range(stages))
    whole.model.head.requires_grad_(stages >= 2)  # trained from the next step on
    model, state = saved(whole.model.state_dict()), saved(whole.optimizer.state_dict())
    whole.go(range(stages, 4))
    resumed = Stages(**options)
    if not first:
        resumed.average = None
    resumed.model.layers[0].requires_grad_(stages == 1)
    resumed.model.head.requires_grad_(stages >= 2)
    resumed.model.load_state_dict(model)
    resumed.optimizer.load_state_dict(state)
    if not first:
        assert len(resumed.optimizer.state_dict()["averages"]) == 1
        resumed.average = ot.EMA(resumed.optimizer)
    assert resumed.average.decay == DECAY
    assert len(resumed.optimizer.state_dict()["averages"]) == 1
    resumed.go(range(stages, 4))
    expected = whole.averages()
    for name, value in resumed.averages().items():
        assert torch.equal(value, expected[name]), name
    for each in (whole, resumed):
        each.optimizer.close()
