"""Packing: which tokens a sample holds, where its documents begin, and which targets count."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.config.sections import IGNORED, Packing
from offloadtrain.data.batches import Batch, Batches
from offloadtrain.data.tokens import DataError, TokenFile, TokenWriter
from tests import levels


def write(path: Path, lengths: list[int], mask: list[int] | None = None) -> TokenFile:
    """Token i is i; documents of these lengths."""
    count = sum(lengths)
    with TokenWriter(path, vocab_size=1 << 20, tokenizer="none", masked=mask is not None) as writer:
        counted = None if mask is None else np.array(mask, np.uint8)
        writer.write(np.arange(count), np.cumsum(lengths), counted)
        writer.commit()
    return TokenFile(path)


def test_padding_says_what_it_cuts(tmp_path: Path) -> None:
    file = write(tmp_path / "a.bin", [4, 9, 5, 7])
    cut = {
        packing: Batches(file, batch=1, seq_len=4, packing=packing).cut_documents()
        for packing in get_args(Packing)
    }
    assert cut == {"stream": (0, 0), "isolated": (0, 0), "padded": (2, 4 + 2)}


def test_the_mask_says_which_targets_count(tmp_path: Path) -> None:
    mask = [0, 1, 0, 0, 1, 1, 0, 1, 0, 1, 1]
    file = write(tmp_path / "a.bin", [4, 7], mask)
    batches = Batches(file, batch=3, seq_len=4, seed=1)
    assert not batches.all_count
    for _ in range(5):
        told, batch = batches.counted(1), batches.next()
        assert batch.positions_BT is None
        expected_BT = batch.tokens_BT + 1
        expected_BT[torch.tensor(mask)[expected_BT] == 0] = IGNORED
        assert torch.equal(batch.targets_BT, expected_BT)
        assert told == int((batch.targets_BT != IGNORED).sum())


def test_without_mask_and_packing_every_target_counts(tmp_path: Path) -> None:
    batches = Batches(write(tmp_path / "a.bin", [4, 7]), batch=3, seq_len=4)
    assert batches.all_count and batches.counted(5) == 5 * 3 * 4


def test_positions_begin_anew_with_each_document(tmp_path: Path) -> None:
    file = write(tmp_path / "a.bin", [3, 1, 4, 9])
    batch = Batches(file, batch=2, seq_len=8, packing="isolated", shuffle=False).next()
    assert batch.positions_BT is not None
    rows = dict(zip(batch.tokens_BT[:, 0].tolist(), range(2), strict=True))
    first, second = rows[0], rows[8]
    assert batch.positions_BT[first].tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert batch.targets_BT[first].tolist() == [1, 2, IGNORED, IGNORED, 5, 6, 7, IGNORED]
    assert batch.positions_BT[second].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert batch.targets_BT[second].tolist() == [9, 10, 11, 12, 13, 14, 15, 16]


def test_a_window_that_begins_within_a_document_begins_at_position_0(tmp_path: Path) -> None:
    file = write(tmp_path / "a.bin", [9, 4])
    batches = Batches(file, batch=1, seq_len=4, packing="isolated", shuffle=False)
    seen = {int(b.tokens_BT[0, 0]): b for b in (batches.next() for _ in range(3))}
    assert seen[4].positions_BT is not None and seen[8].positions_BT is not None
    assert seen[4].positions_BT.tolist() == [[0, 1, 2, 3]]
    assert seen[8].positions_BT.tolist() == [[0, 0, 1, 2]]
    assert seen[8].targets_BT.tolist() == [[IGNORED, 10, 11, 12]]


@pytest.mark.parametrize("shuffle", [True, False])
def test_padded_samples_are_the_documents(tmp_path: Path, shuffle: bool) -> None:
    mask = [0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1, 1]
    file = write(tmp_path / "a.bin", [3, 1, 8], mask)
    batches = Batches(file, batch=1, seq_len=4, packing="padded", shuffle=shuffle)
    assert batches.windows == 3
    for _ in range(4):
        epoch = [batches.next() for _ in range(3)]
        rows = {int(b.tokens_BT[0, 0]): (b.tokens_BT[0], b.targets_BT[0]) for b in epoch}
        assert rows[0][0].tolist() == [0, 1, 2, 2]
        assert rows[0][1].tolist() == [1, 2, IGNORED, IGNORED]
        assert rows[3][1].tolist() == [IGNORED] * 4
        assert rows[4][0].tolist() == [4, 5, 6, 7]
        assert rows[4][1].tolist() == [IGNORED, IGNORED, 7, 8]
        assert all(b.positions_BT is None for b in epoch)


def test_documents_shuffle_anew_in_each_epoch(tmp_path: Path) -> None:
    batches = Batches(write(tmp_path / "a.bin", [2] * 9), batch=9, seq_len=4, packing="padded")
    epochs = [tuple(batches.next().tokens_BT[:, 0].tolist()) for _ in range(4)]
    assert len(set(epochs)) == 4 and all(sorted(e) == list(range(0, 18, 2)) for e in epochs)


@levels.examples(60)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=8, max_size=20),
    packing=st.sampled_from(["stream", "isolated", "padded"]),
    seq_len=st.integers(1, 7),
    world=st.integers(1, 3),
    before=st.integers(0, 9),
    masked=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_count_is_known_before_and_the_same_on_all_ranks(
    lengths: list[int],
    packing: Packing,
    seq_len: int,
    world: int,
    before: int,
    masked: bool,
    shuffle: bool,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    mask = np.random.default_rng(seed).integers(0, 2, sum(lengths)).tolist() if masked else None
    file = write(tmp_path_factory.mktemp("tokens") / "a.bin", lengths, mask)
    ranks = [
        Batches(
            file, batch=2, seq_len=seq_len, packing=packing, rank=rank, world=world, shuffle=shuffle
        )
        for rank in range(world)
    ]
    for batches in ranks:
        for _ in range(before):
            batches.next()
    told = {batches.counted(3) for batches in ranks}
    taken: list[Batch] = [batches.next() for batches in ranks for _ in range(3)]
    assert told == {sum(int((batch.targets_BT != IGNORED).sum()) for batch in taken)}
    for batch in taken:
        kept = batch.targets_BT != IGNORED
        assert torch.equal(batch.targets_BT[kept], (batch.tokens_BT + 1)[kept])


def test_a_file_without_documents_cannot_be_packed_by_them(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "a.bin", vocab_size=100, tokenizer="none") as writer:
        writer.write(np.arange(50))
        writer.commit()
    for packing in ("isolated", "padded"):
        with pytest.raises(DataError, match="does not say where its documents begin"):
            Batches(TokenFile(tmp_path / "a.bin"), batch=1, seq_len=4, packing=packing)


def test_a_position_of_another_packing_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.bin", [20, 20])
    state = Batches(file, batch=1, seq_len=4).state_dict()
    with pytest.raises(DataError, match=r"packing stream, but this run has .* packing isolated"):
        Batches(file, batch=1, seq_len=4, packing="isolated").load_state_dict(state)
