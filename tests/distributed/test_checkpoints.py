"""A checkpoint of any number of ranks is read by any other, and continues to the bit; ranks that
fail to save fail together."""

from __future__ import annotations

import os
import random
from itertools import product
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
from tests.engine.test_proof import CASES, MODES, options_of
from tests.numerics.comparison import train
from tests.numerics.models import MODELS, batches, loss_of
from tests.train.bitwise import Case, differ, parted, running, saving, whole

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


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
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


# Runs that save and stop twice, against runs that never do.

STAGES: dict[str, dict[str, Any]] = {
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 3": {"zero_stage": 3},
    "stage 3, host": STREAMED,
    "stage 3, partly": STREAMED | {"resident_blocks": 1},
}


def differences(
    folder: Path, mode: str, placement: str, formats: tuple[str, str], accum: int
) -> list[Any]:
    """Return what differs on this rank, of a run that saves, and of one of three starts."""
    state, precision = formats
    options = {**options_of(mode, precision), "state": state, "precision": precision}
    case = Case(options, STAGES[placement], accum=accum)
    expected = whole(case)
    runs = saving(case, folder / "saving"), parted([case] * 3, folder / "parted")
    return [differ(run, expected) for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["stage 1", "stage 3, partly"])
def test_a_delay_continues_among_ranks(ranks: Run, tmp_path: Path, placement: str) -> None:
    of_ranks = ranks(2, differences, tmp_path, "delayed", placement, ("fp32", "bf16"), 1)
    assert of_ranks == [[[], []]] * 2


@pytest.mark.long
def test_every_mode_stage_and_format_continues_to_the_bit(ranks: Run, tmp_path: Path) -> None:
    cases, draw = list(product(MODES, STAGES, CASES)), random.Random(0)
    for number, (mode, placement, formats) in enumerate(cases):
        size = draw.choice((2, 2, 3))
        folder = tmp_path / f"{number}"
        of_ranks = ranks(size, differences, folder, mode, placement, formats, 1 + number % 2)
        assert of_ranks == [[[], []]] * size, (mode, placement, formats, size)
    print(f"{2 * len(cases)} resumes of {len(cases)} runs among ranks: 0 bits differ")


def save_or_load_delayed(
    folder: Path, state: str, options: dict[str, Any], *, loads: bool
) -> tuple[float, dict[str, Any]]:
    """Return the loss of the weights in use, and the newest state with its loss."""
    case = Case({"update": "delayed", "state": state}, options, model="frozen")
    with running(case, seed=int(loads)) as run:
        if loads:
            run.load(folder)
        else:
            run.train(range(1, 4))
            run.save(folder, 3)
            run.commit()
        return fixed_loss(run.model), values_of(run.model, run.optimizer, state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "readers", "state"), [(2, 1, "split16"), (1, 2, "fp32"), (2, 3, "int8")]
)
def test_any_number_of_ranks_continues_from_a_delay(
    ranks: Run, tmp_path: Path, size: int, readers: int, state: str
) -> None:
    before, *_ = ranks(size, save_or_load_delayed, tmp_path, state, {"zero_stage": 2}, loads=False)
    assert before[0] != before[1]["loss"], "the weights in use are not the newest"
    after = ranks(readers, save_or_load_delayed, tmp_path, state, STREAMED, loads=True)
    assert after == [before] * readers
