"""Hugging Face models among ranks: each reads the folder, rank 0 writes one; gradient checkpointing
over weights that are shards, gathered for their use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offloadtrain as ot
from benchmarks.round_trip import different_weights
from offloadtrain.runtime.process_group import RankError
from tests.distributed.conftest import Run


def llama() -> Any:
    from benchmarks.architectures.models import ARCHITECTURES

    return ARCHITECTURES["llama"]


def trained(folder: Path, out: str, **options: Any) -> None:
    # A new head, which every rank draws for itself.
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    rule = ot.AdamW(lr=1e-2)
    model, optimizer = ot.from_pretrained(
        folder, rule, auto_class="AutoModelForCausalLM", device="cpu", **options
    )
    batch = llama().batch(torch.Generator().manual_seed(2))
    for _ in range(2):
        optimizer.backward(model(**batch).loss)
        optimizer.step()
    ot.save_pretrained(optimizer, folder / out, dtype="fp32", max_shard_size="60KB")
    optimizer.close()


def refused(folder: Path, **options: Any) -> str:
    _, optimizer = ot.from_pretrained(folder, device="cpu", **options)
    try:
        ot.save_pretrained(optimizer, folder)
    except (FileExistsError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        optimizer.close()
    return "saved"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    llama().build().model.save_pretrained(tmp_path)  # the base model: its head is missing
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_two_ranks_export_what_one_does(ranks: Run, folder: Path, zero_stage: int) -> None:
    # Both see the same batch: the mean of the gradients is that of one rank.
    ranks(2, trained, folder, "two", zero_stage=zero_stage)
    trained(folder, "one")
    assert different_weights(folder / "one", folder / "two") == ""
    assert {path.name for path in folder.iterdir()} >= {"one", "two", "config.json"}


@pytest.mark.slow
def test_a_rank_that_cannot_save_is_named_on_every_rank(ranks: Run, folder: Path) -> None:
    first, second = ranks(2, refused, folder, zero_stage=3)
    assert first.startswith("FileExistsError") and "is not empty" in first
    assert second.startswith("RankError: rank 0 could not save: FileExistsError")


def train_checkpointed(**options: Any) -> list[tuple[float, float]]:
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
@pytest.mark.parametrize(("working", "use_reentrant"), [("device", True), ("host", False)])
def test_checkpointing_over_shards_has_the_bits_of_weights_on_every_rank(
    ranks: Run, working: str, use_reentrant: bool
) -> None:
    expected = ranks(2, train_checkpointed, zero_stage=2)
    sharded = ranks(
        2, train_checkpointed, zero_stage=3, working=working, use_reentrant=use_reentrant
    )
    assert sharded == expected
    assert all(loss == loss for loss, _ in sharded[0])
