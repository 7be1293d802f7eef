"""Weights loaded into an offloaded model: the masters are what was given, in full precision."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.step.program.updates import UpdateError
from tests.numerics.comparison import assert_equal
from tests.numerics.models import Chain, Frozen, batches, loss_of

PLACEMENTS: dict[str, dict[str, Any]] = {
    "on the device": {},
    "streamed": {"working": "host"},
    "streamed, early": {"working": "host", "skip_nonfinite": False},
    "streamed, speculative": {"working": "host", "update": "speculative"},
    "delayed": {"update": "delayed"},
    "accumulating": {"grad_accum_steps": 2},
}
FORMATS = [("fp32", "bf16"), ("fp32", "fp16"), ("split16", "bf16"), ("int8", "bf16")]


def made(seed: int = 0, **kwargs: Any) -> Chain:
    torch.manual_seed(seed)
    return Chain(**kwargs)


def offloaded(net: nn.Module, **options: Any) -> ot.OffloadOptimizer:
    return ot.offload(net, ot.AdamW(lr=1e-2), device="cpu", **options)


def train(optimizer: ot.OffloadOptimizer, net: nn.Module, steps: int) -> list[float]:
    losses = []
    for tokens in batches(steps, seed=3):
        loss = loss_of(net, tokens)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    optimizer.synchronize()
    return losses


def state(optimizer: ot.OffloadOptimizer) -> dict[str, Tensor]:
    result = {}
    for name, tensors in optimizer.named_state():
        result |= {f"{name}/{key}": value.clone() for key, value in tensors.items()}
    return result


@pytest.mark.parametrize(
    ("placement", "state_format", "precision"),
    [
        pytest.param(placement, *formats, marks=pytest.mark.slow if (row + column) % 4 else ())
        for row, placement in enumerate(PLACEMENTS)
        for column, formats in enumerate(FORMATS)
        if (row + column) % 2 == 0
    ],
)
def test_loaded_after_offload_is_as_given_before_it(
    placement: str, state_format: str, precision: str
) -> None:
    options = {"state": state_format, "precision": precision, **PLACEMENTS[placement]}
    if precision == "fp16":
        options.pop("skip_nonfinite", None)
    weights, before, after = made(1).state_dict(), made(1), made(2)
    expected = offloaded(before, **options)
    optimizer = offloaded(after, **options)
    after.load_state_dict(weights)
    assert_equal(state(optimizer), state(expected))
    assert train(optimizer, after, 3) == train(expected, before, 3)
    assert_equal(state(optimizer), state(expected))


def test_tied_and_frozen_and_inside_of_another_module() -> None:
    for build in (lambda seed: made(seed, tied=True), lambda seed: (made(seed), Frozen())[1]):
        weights, before, after = build(1).state_dict(), build(1), build(2)
        before.load_state_dict(weights)
        expected, optimizer = offloaded(before), offloaded(after)
        nn.ModuleDict({"inner": after}).load_state_dict(
            {f"inner.{name}": value for name, value in weights.items()}
        )
        assert_equal(state(optimizer), state(expected))


def test_the_order_of_loading_model_and_optimizer_is_no_question() -> None:
    """16-bit weights that the model has already say nothing new: masters stay."""
    net = made()
    optimizer = offloaded(net)
    train(optimizer, net, 3)
    weights, saved = net.state_dict(), copy.deepcopy(optimizer.state_dict())
    expected = train(optimizer, net, 3)
    for model_last in (False, True):
        other = made(5)
        resumed = offloaded(other)
        if not model_last:
            other.load_state_dict(weights)
        resumed.load_state_dict(saved)
        if model_last:
            other.load_state_dict(weights)
        assert train(resumed, other, 3) == expected
        assert_equal(state(resumed), state(optimizer))


class Renaming(nn.Linear):
    """Reads its weight under another name, as modules that have a history do."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "old_weight")
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_values_that_cannot_be_found_again_are_told(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(Renaming(4, 4), nn.Linear(4, 1))
    loaded = {k.replace("0.weight", "0.old_weight"): v for k, v in net.state_dict().items()}
    loaded = {name: value + 0.001 for name, value in loaded.items()}
    optimizer = offloaded(net)
    with caplog.at_level(logging.WARNING, "offloadtrain.engine.weights"):
        net.load_state_dict(loaded)
    masters = {name: tensors["master"] for name, tensors in optimizer.named_state()}
    assert torch.equal(masters["1.weight"], loaded["1.weight"])
    assert torch.equal(masters["0.weight"], loaded["0.old_weight"].bfloat16().float())
    assert "'0.weight'" in caplog.text and "bfloat16" in caplog.text


@pytest.mark.parametrize("placement", ["on the device", "streamed"])
def test_weights_written_before_a_load_that_says_nothing_new_count(placement: str) -> None:
    net = made()
    optimizer = offloaded(net, **PLACEMENTS[placement])
    optimizer.synchronize()
    written = ["head.weight", "layers.1.down.weight"]
    with torch.no_grad():
        for name in written:
            net.get_parameter(name).add_(1)
    weights = net.state_dict()
    del weights["head.weight"]
    net.load_state_dict(weights, strict=False)
    masters = {name: tensors["master"] for name, tensors in optimizer.named_state()}
    for name in written:
        assert torch.equal(masters[name], net.get_parameter(name).float())


def test_weights_set_after_adam_inside_backward_are_refused() -> None:
    net = made()
    optimizer = offloaded(net, skip_nonfinite=False)
    saved = copy.deepcopy(net.state_dict())
    train(optimizer, net, 1)
    optimizer.backward(loss_of(net, batches(1)[0]))
    with pytest.raises(UpdateError, match="after Adam has run inside backward"):
        net.load_state_dict(saved)
