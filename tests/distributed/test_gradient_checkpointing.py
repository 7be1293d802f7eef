"""Hugging Face's gradient checkpointing over weights that are shards, gathered for their use."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.conftest import Run


def train(**options: Any) -> list[tuple[float, float]]:
    """Losses and norms on one rank; the packages are its own to import."""
    from benchmarks.architectures.models import ARCHITECTURES
    from benchmarks.architectures.training import train_offloaded
    from tests.integrations.test_transformers import checkpointed

    architecture = ARCHITECTURES["llama"]
    if "use_reentrant" in options:
        architecture = checkpointed(architecture, options.pop("use_reentrant"))
    trained = train_offloaded(architecture, 3, **options)
    return [*zip(trained.losses[::2], trained.norms, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("working", "use_reentrant"), [("device", False), ("device", True), ("host", False)]
)
def test_checkpointing_over_shards_has_the_bits_of_whole_weights(
    ranks: Run, working: str, use_reentrant: bool
) -> None:
    whole = ranks(2, train, zero_stage=2)
    sharded = ranks(2, train, zero_stage=3, working=working, use_reentrant=use_reentrant)
    assert sharded == whole
    assert all(loss == loss for loss, _ in sharded[0])
