"""Gradient checkpointing as Hugging Face models do it, over streamed weights."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import nn

from benchmarks.architectures.cells import first_difference
from benchmarks.architectures.models import ARCHITECTURES, Architecture
from benchmarks.architectures.training import Trained, train_offloaded
from tests import levels

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
def without_cache(name: str) -> Trained:
    """Resident, keeping everything, and asked for no key-value cache: checkpointing of transformers
    leaves it out, and what passes through one is summed in another order."""
    architecture = ARCHITECTURES[name]

    def build() -> nn.Module:
        model = architecture.build()
        for config in (getattr(module, "config", None) for module in model.modules()):
            if getattr(config, "use_cache", False):
                config.use_cache = False
        return model

    return train_offloaded(replace(architecture, build=build), STEPS)


def assert_same(trained: Trained, expected: Trained) -> None:
    """And no step was skipped: `train_offloaded` raises."""
    assert first_difference(trained, expected) == ""


@pytest.mark.cover(0, levels.ALL)
@pytest.mark.parametrize(
    ("name", "use_reentrant"), list(zip(NAMES, itertools.cycle([False, True])))
)
def test_checkpointing_over_streamed_weights_has_the_bits_of_a_resident_run(
    name: str, use_reentrant: bool
) -> None:
    architecture = checkpointed(ARCHITECTURES[name], use_reentrant)
    streamed = train_offloaded(architecture, STEPS, working="host")
    assert_same(streamed, train_offloaded(architecture, STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_and_recompute_have_the_bits_of_keeping_everything(name: str) -> None:
    architecture = ARCHITECTURES[name]
    by_transformers = train_offloaded(checkpointed(architecture, False), STEPS, working="host")
    assert_same(by_transformers, without_cache(name))
    ours = train_offloaded(architecture, STEPS, working="host", activation="recompute")
    assert_same(ours, train_offloaded(architecture, STEPS))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_both_ways_of_recomputing_at_once(use_reentrant: bool) -> None:
    both = checkpointed(ARCHITECTURES["gpt2"], use_reentrant)
    trained = train_offloaded(both, STEPS, working="host", activation="recompute")
    assert_same(trained, without_cache("gpt2"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "use_reentrant"),
    [
        ({"device_slots": 1}, False),
        ({"resident_blocks": 1, "device_slots": 1}, True),
        ({"update": "speculative"}, False),
        ({"precision": "fp32"}, True),
        ({"skip_nonfinite": False}, True),
        ({"activation": "offload"}, False),
    ],
    ids=str,
)
def test_checkpointing_with_other_options(options: dict[str, Any], use_reentrant: bool) -> None:
    architecture = checkpointed(ARCHITECTURES["llama"], use_reentrant)
    streamed = train_offloaded(architecture, STEPS, working="host", **options)
    plain = {key: options[key] for key in ("precision", "skip_nonfinite") if key in options}
    assert_same(streamed, train_offloaded(ARCHITECTURES["llama"], STEPS, **plain))
