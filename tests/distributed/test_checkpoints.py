"""A checkpoint of any number of ranks is read by any other, and continues to the bit; ranks that
fail to save fail together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offloadtrain as ot
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.manifest import CheckpointError, NotFiniteError
from offloadtrain.train.checkpoint.restore import restore
from offloadtrain.train.checkpoint.save import save
from tests.distributed.conftest import Run
from tests.distributed.reference import own_batches, whole_state
from tests.numerics.comparison import train
from tests.numerics.models import MODELS, batches, loss_of

FIELDS = {
    "fp32": ("master", "exp_avg", "exp_avg_sq"),
    "split16": ("weight", "low", "exp_avg", "exp_avg_sq"),
    "int8": ("weight", "correction", "exp_avg", "exp_avg_sq"),
}
STREAMED: dict[str, Any] = {"zero_stage": 3, "working": "host"}


def offloaded(
    name: str, seed: int = 1, **options: Any
) -> tuple[torch.nn.Module, ot.OffloadOptimizer]:
    torch.manual_seed(seed)
    model = MODELS[name]()
    return model, ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", **options)


def values_of(model: torch.nn.Module, optimizer: ot.OffloadOptimizer, state: str) -> dict[str, Any]:
    """Every element of every parameter's state, whichever rank has it, and a loss."""
    optimizer.synchronize()
    values = {
        key: {name: value.reshape(-1).tolist() for name, value in tensors.items()}
        for key, tensors in whole_state(optimizer, *FIELDS[state]).items()
    }
    return values | {"loss": fixed_loss(model)}


def fixed_loss(model: torch.nn.Module) -> float:
    """On the same batch everywhere: it depends on frozen weights too."""
    with torch.no_grad():
        return loss_of(model, batches(1)[0]).item()


def train_and_save(folder: Path, name: str, state: str, **options: Any) -> dict[str, Any]:
    model, optimizer = offloaded(name, state=state, **options)
    for tokens in own_batches(3):
        train(optimizer, model, [tokens])
    optimizer.synchronize()
    save(folder, 3, model, optimizer, {"step": 3}, ranks=optimizer.ranks)
    values = values_of(model, optimizer, state)
    optimizer.close()
    return values


def raise_damage(path: Path, damage: Exception) -> None:
    raise damage


def load(folder: Path, name: str, state: str, **options: Any) -> dict[str, Any]:
    model, optimizer = offloaded(name, seed=2, state=state, **options)
    saved = checkpoint.newest_good(folder, raise_damage, optimizer.ranks)
    assert saved is not None
    restore(saved, model, optimizer)
    optimizer.finish_load(step=3)
    values = values_of(model, optimizer, state)
    train(optimizer, model, own_batches(1))
    optimizer.close()
    return values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "state"),
    [({"zero_stage": 3}, "fp32"), (STREAMED, "int8"), ({"zero_stage": 2}, "split16")],
)
def test_any_placement_reads_any_other(
    ranks: Run, tmp_path: Path, options: dict[str, Any], state: str
) -> None:
    """On any number of ranks."""
    before = ranks(2, train_and_save, tmp_path, "frozen", state, **options)[0]
    resident, half = {"state_on": "device"}, {"state_on": {"device": 0.5}}
    disk = {"state_on": "disk", "scratch_dir": str(tmp_path), "scratch_in_memory": True}
    readers = ((1, {}), (2, resident), (2, half), (2, {"zero_stage": 3}), (2, disk), (4, STREAMED))
    for size, other in readers:
        assert ranks(size, load, tmp_path, "frozen", state, **other) == [before] * size


def message_of_save(folder: Path, rank: int, fault: str) -> str:
    """The error of a save in which the disk of one rank is full, or a weight of it not finite."""
    model, optimizer = offloaded("chain")
    train(optimizer, model, own_batches(1))
    optimizer.synchronize()
    is_broken = optimizer.ranks.rank == rank
    if is_broken and fault == "nan":
        _, state = next(item for item in optimizer.named_state() if item[1]["master"].numel())
        state["master"].view(-1)[0] = float("nan")
    try:
        with pytest.MonkeyPatch.context() as patch:
            if is_broken and fault == "full disk":
                patch.setattr(os, "pwrite", raise_no_space)
            save(folder, 1, model, optimizer, {}, ranks=optimizer.ranks)
    except (CheckpointError, NotFiniteError) as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


def raise_no_space(fd: int, data: bytes, offset: int) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_fail_to_save_fail_together(ranks: Run, tmp_path: Path, rank: int) -> None:
    for message in ranks(2, message_of_save, tmp_path, rank, "full disk"):
        assert f"rank {rank}: " in message and "No space left" in message
    for message in ranks(2, message_of_save, tmp_path, rank, "nan"):
        assert message.startswith(f"rank {rank}: the weights of ")
        assert message.endswith("not finite")
    assert not list(tmp_path.iterdir())


def damage_reports(folder: Path) -> list[str]:
    reports: list[str] = []
    newest = checkpoint.newest_good(
        folder, lambda path, error: reports.append(str(error)), Ranks(dist.group.WORLD)
    )
    assert newest is None
    return reports


def test_all_ranks_report_a_damaged_file(ranks: Run, tmp_path: Path) -> None:
    ranks(2, train_and_save, tmp_path, "chain", "fp32")
    (path,) = checkpoint.find(tmp_path)
    file = path / "rank-001.bin"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    first, second = ranks(2, damage_reports, tmp_path)
    assert first == second and file.name in first[0]
