"""Gradient checkpointing as Hugging Face models do it, over streamed weights."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from torch import nn

from benchmarks.architectures.cells import first_difference
from benchmarks.architectures.models import ARCHITECTURES, Architecture
from benchmarks.architectures.training import Trained, train_offloaded

pytestmark = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"
)
STEPS = 3
# dropout; grouped-query attention with a sliding window; experts; an encoder beside a decoder,
# whose layers share a cache; no tokens at all
NAMES = ["gpt2", "mistral", "qwen3_moe", "t5", "vit"]


def checkpointed(architecture: Architecture, use_reentrant: bool) -> Architecture:
    """The same with the model's own gradient checkpointing on."""

    def build() -> nn.Module:
        model: Any = architecture.build()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        assert model.is_activation_checkpointing
        return model

    return replace(architecture, build=build)


@cache
def resident(name: str, precision: str = "bf16") -> Trained:
    return train_offloaded(ARCHITECTURES[name], STEPS, precision=precision)


def assert_same(found: Trained, expected: Trained) -> None:
    assert first_difference(found, expected) == ""
    assert (
        found.losses[-1] < found.losses[1]
    )  # the last microbatch, at the end and before the start


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_over_streamed_weights_has_the_bits_of_a_resident_run(
    name: str, use_reentrant: bool
) -> None:
    architecture = checkpointed(ARCHITECTURES[name], use_reentrant)
    assert_same(train_offloaded(architecture, STEPS, working="host"), resident(name))


@pytest.mark.parametrize("name", NAMES)
def test_our_recompute_over_streamed_weights_has_the_same_bits(name: str) -> None:
    recompute = partial(train_offloaded, working="host", activation="recompute")
    assert_same(recompute(ARCHITECTURES[name], STEPS), resident(name))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_both_ways_of_recomputing_at_once(use_reentrant: bool) -> None:
    both = checkpointed(ARCHITECTURES["gpt2"], use_reentrant)
    found = train_offloaded(both, STEPS, working="host", activation="recompute")
    assert_same(found, resident("gpt2"))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"device_slots": 1},
        {"resident_blocks": 1, "device_slots": 1},
        {"update": "speculative"},
        {"precision": "fp32"},
        {"skip_nonfinite": False},
        {"activation": "offload"},
    ],
    ids=str,
)
def test_checkpointing_beside_other_options(options: dict[str, Any], use_reentrant: bool) -> None:
    architecture = checkpointed(ARCHITECTURES["llama"], use_reentrant)
    found = train_offloaded(architecture, STEPS, working="host", **options)
    assert_same(found, resident("llama", options.get("precision", "bf16")))
