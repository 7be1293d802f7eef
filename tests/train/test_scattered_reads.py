"""What lies in memory as in the file is read where it lies; all of it is what was written."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import offloadtrain as ot
from offloadtrain.hardware.direct_io import BLOCK, aligned_buffer
from offloadtrain.train.checkpoint import checkpoint, reader
from offloadtrain.train.checkpoint.reader import Piece, Target, scatter
from offloadtrain.train.checkpoint.restore import restore
from offloadtrain.train.checkpoint.save import save

MEMORY = 64 * BLOCK


def memory() -> torch.Tensor:
    """Return aligned memory of bytes that no file has."""
    found = torch.frombuffer(aligned_buffer(), dtype=torch.uint8)[:MEMORY]
    return found.fill_(255)


def targets_of(draw: random.Random, whole: torch.Tensor) -> list[Target]:
    """Draw parameters of some buffers, each of which lies somewhere else than in the file."""
    found, at, start = [], draw.randrange(3 * BLOCK), 0
    while at < MEMORY // 2:
        shift = draw.choice((0, 512, 4608, 100))
        for _ in range(draw.randrange(1, 5)):
            numel = draw.randrange(1, 4 * BLOCK)
            if start + shift + numel > MEMORY:
                return found
            found.append(Target(at, at + numel, whole[start + shift : start + shift + numel]))
            gap = -numel % 256
            at, start = at + numel + gap, start + numel + gap
        start = -(-(start + shift) // BLOCK) * BLOCK
        at = -(-at // BLOCK) * BLOCK + draw.choice((0, BLOCK, 1000))
    return found


def filled(targets: list[Target], pieces: list[Piece], file: bytes) -> None:
    """Read a file into the pieces, and copy what is not in place."""
    for piece in pieces:
        piece.memory[:] = file[piece.lo : piece.hi]
        for target in () if piece.in_place else targets:
            reader._copy(piece, target)


@pytest.mark.parametrize("seed", range(6))
def test_every_target_gets_its_bytes(seed: int) -> None:
    draw, file = random.Random(seed), random.Random(seed).randbytes(MEMORY)
    whole = memory()
    targets = targets_of(draw, whole)
    last = -(-targets[-1].hi // BLOCK) * BLOCK
    pieces = scatter(0, last, targets, aligned_buffer())
    assert pieces[0].lo == 0 and pieces[-1].hi == last
    assert all(before.hi == piece.lo for before, piece in pairwise(pieces))
    assert all(piece.lo % BLOCK == piece.hi % BLOCK == 0 for piece in pieces)
    filled(targets, pieces, file)
    for target in targets:
        assert bytes(target.memory.numpy()) == file[target.lo : target.hi]


def test_nothing_beside_a_buffer_is_touched() -> None:
    whole = memory()
    targets = [Target(BLOCK + 256, 9 * BLOCK - 256, whole[2 * BLOCK + 256 : 10 * BLOCK - 256])]
    pieces = scatter(BLOCK, 9 * BLOCK, targets, aligned_buffer())
    assert [piece.in_place for piece in pieces] == [False, True, False]
    filled(targets, pieces, bytes(MEMORY))
    assert (
        set(whole[: 2 * BLOCK + 256].tolist()) == set(whole[10 * BLOCK - 256 :].tolist()) == {255}
    )
    assert not whole[2 * BLOCK + 256 : 10 * BLOCK - 256].any()


def test_other_tensors_between_two_are_not_overwritten() -> None:
    whole = memory()
    first, second = whole[: 4 * BLOCK], whole[6 * BLOCK : 10 * BLOCK]
    targets = [Target(0, 4 * BLOCK, first), Target(6 * BLOCK, 10 * BLOCK, second)]
    pieces = scatter(0, 10 * BLOCK, targets, aligned_buffer())
    assert [piece.in_place for piece in pieces] == [True, False, True]
    filled(targets, pieces, bytes(MEMORY))
    assert set(whole[4 * BLOCK : 6 * BLOCK].tolist()) == {255}


@pytest.mark.slow
def test_state_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than two blocks of each buffer go through scratch memory."""
    copied: list[int] = []
    real = reader._copy

    def spy(piece: Piece, target: Target) -> None:
        copied.append(max(0, min(piece.hi, target.hi) - max(piece.lo, target.lo)))
        real(piece, target)

    monkeypatch.setattr(reader, "_copy", spy)
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    optimizer = ot.offload(model, ot.AdamW(), device="cpu")
    save(tmp_path, 1, model, optimizer, {})
    (path,) = checkpoint.find(tmp_path)
    restore(checkpoint.open_checkpoint(path), model, optimizer)
    buffers = len(optimizer.flat_states())
    optimizer.close()
    size = checkpoint.open_checkpoint(path).manifest.num_bytes
    assert 0 < sum(copied) < 2 * BLOCK * buffers < size / 10
