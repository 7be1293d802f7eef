"""A checkpoint of any number of ranks is read by any other; who fails, fails together."""

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
from offloadtrain.train.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpointError,
    NotFiniteError,
)
from offloadtrain.train.checkpoint.restore import restore
from offloadtrain.train.checkpoint.save import save
from tests.distributed.conftest import Run
from tests.distributed.reference import whole_state
from tests.distributed.test_sharded import own_batches
from tests.numerics.models import Chain, Frozen, batches, loss_of
from tests.numerics.test_offload import train

FIELDS = {
    "fp32": ("master", "exp_avg", "exp_avg_sq"),
    "split16": ("weight", "low", "exp_avg", "exp_avg_sq"),
    "int8": ("weight", "correction", "exp_avg", "exp_avg_sq"),
}
MODELS = {"chain": Chain, "frozen": Frozen}


def made(name: str, **options: Any) -> tuple[torch.nn.Module, ot.OffloadOptimizer]:
    torch.manual_seed(1)
    model = MODELS[name]()
    return model, ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", **options)


def all_of(optimizer: ot.OffloadOptimizer, state: str) -> dict[str, Any]:
    """Every element of every parameter's state, whoever has it."""
    optimizer.synchronize()
    return {
        key: {name: value.reshape(-1).tolist() for name, value in values.items()}
        for key, values in whole_state(optimizer, *FIELDS[state]).items()
    }


def trained_and_saved(folder: Path, name: str, state: str, **options: Any) -> Any:
    model, optimizer = made(name, state=state, **options)
    for tokens in own_batches(3):
        train(optimizer, model, [tokens])
    optimizer.synchronize()
    save(folder, 3, model, optimizer, {"step": 3}, ranks=optimizer.ranks)
    found = all_of(optimizer, state)
    found["loss"] = fixed_loss(model)
    optimizer.close()
    return found


def fixed_loss(model: torch.nn.Module) -> float:
    """On the same batch everywhere: it depends on frozen weights too."""
    with torch.no_grad():
        return loss_of(model, batches(1)[0]).item()


def loaded(folder: Path, name: str, state: str, **options: Any) -> Any:
    torch.manual_seed(2)
    model = MODELS[name]()
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", state=state, **options)

    def never(path: Path, damage: DamagedCheckpointError) -> None:
        raise damage

    saved = checkpoint.newest_good(folder, never, optimizer.ranks)
    assert saved is not None
    restore(saved, model, optimizer)
    optimizer.finish_load(step=3)
    found = all_of(optimizer, state)
    found["loss"] = fixed_loss(model)
    train(optimizer, model, own_batches(1))
    optimizer.close()
    return found


@pytest.mark.cover(0, 2)
@pytest.mark.parametrize("state", FIELDS)
@pytest.mark.parametrize(("wrote", "reads"), [(1, 1), (1, 4), (3, 2), (2, 4), (4, 1)])
@pytest.mark.slow
def test_any_number_of_ranks_reads_any_other(
    ranks: Run, tmp_path: Path, wrote: int, reads: int, state: str
) -> None:
    (before, *_), of_readers = (
        ranks(wrote, trained_and_saved, tmp_path, "frozen", state),
        ranks(reads, loaded, tmp_path, "frozen", state),
    )
    assert of_readers == [before] * reads


STREAMED: dict[str, Any] = {"zero_stage": 3, "working": "host"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"zero_stage": 3}, STREAMED])
def test_any_placement_reads_any_other(ranks: Run, tmp_path: Path, options: dict[str, Any]) -> None:
    before = ranks(2, trained_and_saved, tmp_path, "frozen", "fp32", **options)[0]
    resident, half = {"state_on": "device"}, {"state_on": {"device": 0.5}}
    disk = {"state_on": "disk", "scratch_dir": str(tmp_path / "scratch"), "scratch_in_memory": True}
    others = ((1, {}), (2, resident), (2, half), (2, {"zero_stage": 3}), (2, disk), (4, STREAMED))
    for size, other in others:
        assert ranks(size, loaded, tmp_path, "frozen", "fp32", **other) == [before] * size


def test_no_element_is_written_twice(ranks: Run, tmp_path: Path) -> None:
    ranks(4, trained_and_saved, tmp_path, "chain", "fp32")
    (path,) = checkpoint.find(tmp_path)
    taken: dict[tuple[str, str], list[tuple[int, int]]] = {}
    sizes = {}
    for entry in checkpoint.verify(path).manifest.entries:
        sizes[entry.name, entry.kind] = torch.Size(entry.shape).numel()
        taken.setdefault((entry.name, entry.kind), []).append((entry.lo, entry.hi))
    assert any(len(spans) > 1 for spans in taken.values())
    for key, spans in taken.items():
        flat = [bound for span in sorted(spans) for bound in span]
        assert flat[0] == 0 and flat[-1] == sizes[key]
        assert flat[1:-1:2] == flat[2::2], key  # each begins where the one before ends


def full_disk(folder: Path, broken: int) -> str:
    model, optimizer = made("chain")
    optimizer.synchronize()
    write, os.pwrite = os.pwrite, _full if optimizer.ranks.rank == broken else os.pwrite
    try:
        save(folder, 1, model, optimizer, {}, ranks=optimizer.ranks)
    except CheckpointError as error:
        return str(error)
    finally:
        os.pwrite = write
        optimizer.close()
    return ""


def _full(fd: int, data: bytes, offset: int) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("broken", [0, 1])
def test_who_fails_fails_together(ranks: Run, tmp_path: Path, broken: int) -> None:
    for message in ranks(2, full_disk, tmp_path, broken):
        assert f"rank {broken}: " in message and "No space left" in message
    assert not list(tmp_path.iterdir())


def damaged(folder: Path) -> list[str]:
    reported: list[str] = []
    found = checkpoint.newest_good(
        folder, lambda path, error: reported.append(str(error)), Ranks(dist.group.WORLD)
    )
    assert found is None
    return reported


def test_a_damaged_file_is_seen_by_all(ranks: Run, tmp_path: Path) -> None:
    ranks(2, trained_and_saved, tmp_path, "chain", "fp32")
    (path,) = checkpoint.find(tmp_path)
    file = path / "rank-001.bin"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    first, second = ranks(2, damaged, tmp_path)
    assert first == second and file.name in first[0]


def saved_with_nan(folder: Path, spoilt: int) -> str:
    """One rank holds a weight that is not finite."""
    model, optimizer = made("chain")
    for tokens in own_batches(1):
        train(optimizer, model, [tokens])
    if optimizer.ranks.rank == spoilt:
        _, state = next(one for one in optimizer.named_state() if one[1]["master"].numel())
        state["master"].view(-1)[0] = float("nan")
    try:
        save(folder, 1, model, optimizer, {}, ranks=optimizer.ranks)
    except NotFiniteError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


@pytest.mark.parametrize("spoilt", [0, 1])
def test_what_is_not_finite_on_one_rank_is_saved_by_none(
    ranks: Run, tmp_path: Path, spoilt: int
) -> None:
    for said in ranks(2, saved_with_nan, tmp_path, spoilt):
        assert said.startswith(f"rank {spoilt}: the weights of ") and said.endswith("not finite")
    assert list(tmp_path.iterdir()) == []
