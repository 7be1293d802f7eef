"""Models of transformers that are divided among ranks: what each rank reads, divides and draws.

Their bits, plans, checkpoints and restarts are in `test_divisions.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offloadtrain as ot
from benchmarks.round_trip import different_weights
from offloadtrain.integrations.deferred import DeferredWeights
from offloadtrain.runtime.failure_detector import RankInfo
from offloadtrain.runtime.process_group import RankError, Ranks
from offloadtrain.train.build import assemble
from tests.distributed.conftest import Run
from tests.distributed.divisions import STAGES, TENSOR
from tests.distributed.rank_jobs import FP32, job_of, train
from tests.distributed.test_divisions import HF_GPT2

pytest.importorskip("transformers")


def next_random_number(data: Path, **options: Any) -> float:
    """Return what dropout would draw first on this rank, once its model is built."""
    ranks = Ranks.of(None, torch.device("cpu"))
    place = RankInfo(rank=ranks.rank, size=ranks.size)
    context = assemble(job_of(data, **options), ranks=ranks, rank_info=place)
    number = float(torch.rand(()))
    context.optimizer.close()
    ranks.close()
    return number


@pytest.mark.slow
@pytest.mark.parametrize("init", ["random", "weights"])
def test_ranks_with_other_batches_draw_other_numbers(ranks: Run, data: Path, init: str) -> None:
    """All ranks draw the same first weights; only parts of one replica draw the same dropout."""
    options = HF_GPT2 | FP32 | {"model.init": f'"{init}"'}
    job_of(data, **options)  # saves the model once
    first, second = ranks(2, next_random_number, data, **options)
    assert first != second
    first, second = ranks(2, next_random_number, data, **options, **TENSOR)
    assert first == second


def names_read(folder: Path, data: Path) -> set[str]:
    """Return the names of the weights in the folder that this rank reads."""
    names: set[str] = set()
    take = DeferredWeights._take

    def noted(weights: DeferredWeights, name: str) -> torch.Tensor:
        names.add(name)
        return take(weights, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeferredWeights, "_take", noted)
        train(folder, data, hf="Llama", **STAGES, **{"train.steps": 2, "optim.warmup_steps": 0})
    return names


@pytest.mark.slow
def test_a_rank_reads_only_its_stage(ranks: Run, tmp_path: Path, data: Path) -> None:
    job_of(data, hf="Llama")
    first, last = ranks(2, names_read, tmp_path / "run", data)
    assert not first & last and len(first | last) == 4 * 9 + 3
    assert "model.embed_tokens.weight" in first and "lm_head.weight" in last


# Hugging Face models among ranks: each reads the folder, rank 0 writes one; gradient
# checkpointing over weights that are shards, gathered for their use.


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
