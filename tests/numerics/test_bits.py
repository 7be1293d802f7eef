"""In every configuration an offloaded run has the bits of a plain loop: losses, norms, weights and
state; also where it is resumed in another configuration, and where a step is skipped."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given

from tests import levels
from tests.numerics.comparison import (
    assert_equal,
    assert_same,
    compare,
    contents,
    follow,
    make,
    pair,
    train,
)
from tests.numerics.configurations import Configuration, any_valid, covering, placed
from tests.numerics.models import batches, loss_of


def check(configuration: Configuration, folder: Path, steps: int) -> None:
    with placed(configuration, folder) as options:
        compare(
            configuration.model,
            configuration.precision,
            accum=configuration.accum,
            clip=configuration.clip,
            clips=configuration.clips,
            explicit=configuration.explicit,
            steps=10 if configuration.precision == "fp16" else steps,
            **options,
        )


@pytest.mark.parametrize("configuration", covering(60, disk=False), ids=str)
def test_a_run_has_the_bits_of_the_plain_loop(configuration: Configuration, tmp_path: Path) -> None:
    check(configuration, tmp_path, steps=4)


@pytest.mark.parametrize("configuration", covering(60, disk=True), ids=str)
def test_a_run_on_the_disk_has_the_bits_of_the_plain_loop(
    configuration: Configuration, tmp_path: Path
) -> None:
    check(configuration, tmp_path, steps=4)


@levels.examples(30)
@given(configuration=any_valid())
def test_a_drawn_run_has_the_bits_of_the_plain_loop(
    configuration: Configuration, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(configuration, tmp_path_factory.getbasetemp(), steps=3)


DISK: dict[str, Any] = {"state_on": "disk", "grad_on": "disk", "working": "disk"}
MOVES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fp16": ("fp16", {"clip": 0.5}, {"clip": 0.5}),
    "split16, streamed": ("bf16", {"state": "split16"}, {"state": "split16", "working": "host"}),
    "int8, to the device": ("bf16", {"state": "int8"}, {"state": "int8", "state_on": "device"}),
    "int8, fp16": ("fp16", {"state": "int8"}, {"state": "int8", "state_on": {"device": 0.5}}),
    "delayed": ("fp16", {"update": "delayed", "warmup_steps": 1}, {"state_on": {"device": 0.5}}),
    "from the device": ("fp32", {"state_on": "device"}, {"update": "speculative"}),
    "to the disk": ("bf16", {}, DISK),
    "from the disk": ("bf16", DISK, {"state_on": {"device": 0.3}}),
}


@pytest.mark.parametrize(("precision", "before", "after"), MOVES.values(), ids=MOVES.keys())
def test_a_resumed_run_has_the_bits_of_the_plain_loop(
    precision: str, before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    """From a state dict alone, in another placement; random bits are those of the saved seed."""
    disk = {"scratch_dir": str(tmp_path), "scratch_in_memory": True}
    stream = batches(20 if precision == "fp16" else 6)
    half = len(stream) // 2
    run, first, model = pair(
        make("tied"), precision, **before, **(disk if "grad_on" in before else {})
    )
    follow(run, first, model, stream[:half])
    saved = copy.deepcopy(first.state_dict())
    if "update" in before:
        run.flush()
        run.warmup = len(stream)
    first.close()
    _, second, other = pair(
        make("tied", seed=1), precision, **after, **(disk if "grad_on" in after else {})
    )
    second.load_state_dict(saved)
    follow(run, second, other, stream[half:])
    assert run.skipped < len(stream)
    assert_same(run, second, other)
    second.close()


SKIPS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("bf16", {}),
    "fp16": ("fp16", {}),
    "int8": ("bf16", {"state": "int8"}),
    "speculative": ("fp16", {"update": "speculative"}),
    "delayed, streamed": ("fp16", {"update": "delayed", "working": "host"}),
    "summed on the device": ("fp32", {"accum": 2, "sums_on": "device", "state_on": "device"}),
}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("precision", "options"), SKIPS.values(), ids=SKIPS.keys())
def test_a_gradient_that_is_not_finite_changes_nothing_but_the_loss_scale(
    precision: str, options: dict[str, Any], bad: float
) -> None:
    """One infinite gradient has an infinite norm, which is not NaN."""
    _, optimizer, model = pair(make("chain"), precision, **options)
    accum, stream = options.get("accum", 1), batches(4)
    train(optimizer, model, stream[:accum])
    before, scale = contents(optimizer, model), optimizer.loss_scale
    step = optimizer.last_step
    hook = next(iter(model.parameters())).register_hook(lambda grad: torch.full_like(grad, bad))
    for tokens in stream[:accum]:
        optimizer.backward(loss_of(model, tokens))
    optimizer.step()
    hook.remove()
    report = optimizer.last_step
    assert step is not None and report is not None and report.skipped
    assert report.step == step.step and str(report.grad_norm) == str(abs(bad))
    assert precision == "fp32" or optimizer.loss_scale in (scale, scale / 2)
    if precision == "fp16" and "update" not in options:
        assert optimizer.loss_scale == scale / 2
    assert_equal(contents(optimizer, model), before)
    train(optimizer, model, stream[:accum])
    optimizer.close()
