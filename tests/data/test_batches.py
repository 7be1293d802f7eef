"""Batches: complete epochs in a computed order, exact resume, the same samples for any number of
ranks; and what packing makes of documents."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.config.sections import IGNORED, Packing
from offloadtrain.data.batches import (
    Batch,
    Batches,
    Masking,
    Permutation,
    Prefetch,
)
from offloadtrain.data.tokens import DataError, TokenFile, TokenWriter
from tests import levels
from tests.data.tiny import write_tokens


def counting_file(path: Path, lengths: list[int], mask: list[int] | None = None) -> TokenFile:
    """Write documents of these lengths. Token i is i, so that a sample tells where it begins."""
    count = sum(lengths)
    with TokenWriter(path, vocab_size=1 << 20, tokenizer="none", masked=mask is not None) as writer:
        counted = None if mask is None else np.array(mask, np.uint8)
        writer.write(np.arange(count), np.cumsum(lengths), counted)
        writer.commit()
    return TokenFile(path)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    return counting_file(tmp_path_factory.mktemp("tokens") / "a.bin", [1003])


def starts(batches: Batches, calls: int) -> list[int]:
    return [start for _ in range(calls) for start in batches.next().tokens_BT[:, 0].tolist()]


def plain_row(
    first: int, lengths: list[int], mask: list[int] | None, packing: Packing, seq_len: int
) -> tuple[list[int], list[int], list[int]]:
    """Return tokens, targets and positions of the sample that begins with this token, by a loop."""
    ends = np.cumsum(lengths).tolist()
    end = min(e for e in ends if e > first) if packing == "padded" else ends[-1]
    tokens, targets, positions, position = [], [], [], 0
    for token in range(first, first + seq_len):
        position = 0 if token in ends else position
        target = token + 1
        counts = target < end and (mask is None or mask[target])
        if packing == "isolated" and target in ends:
            counts = False
        tokens.append(min(token, end - 1))
        targets.append(target if counts else IGNORED)
        positions.append(position)
        position += 1
    return tokens, targets, positions


@levels.examples(100)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=8, max_size=20),
    packing=st.sampled_from(get_args(Packing)),
    seq_len=st.integers(1, 7),
    batch=st.integers(1, 4),
    before=st.integers(0, 30),
    worlds=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    masked=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_number_of_ranks_takes_the_same_samples_in_one_order(
    lengths: list[int],
    packing: Packing,
    seq_len: int,
    batch: int,
    before: int,
    worlds: tuple[int, int],
    masked: bool,
    shuffle: bool,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Some calls on one number of ranks, the rest on another after a resume, in any epoch, against
    one rank, sample by sample. Each sample is that of a plain loop, and the number of counted
    targets is known in advance."""
    mask = np.random.default_rng(seed).integers(0, 2, sum(lengths)).tolist() if masked else None
    file = counting_file(tmp_path_factory.mktemp("tokens") / "a.bin", lengths, mask)

    def ranks(size: int, seed: int) -> list[Batches]:
        options = {"seq_len": seq_len, "packing": packing, "shuffle": shuffle, "seed": seed}
        return [Batches(file, batch=batch, rank=r, world=size, **options) for r in range(size)]

    order: list[int] = []
    state = ranks(1, seed)[0].state_dict()
    for size, calls in zip(worlds, (before, 3), strict=True):
        group = ranks(size, seed=100)  # the saved seed is used
        for batches in group:
            batches.load_state_dict(state)
            assert batches.state_dict() == state
        expected_count = group[0].counted(calls)
        assert {batches.counted(calls) for batches in group} == {expected_count}
        count = 0
        for _ in range(calls):
            taken_by_rank = [batches.next() for batches in group]
            firsts = [b.tokens_BT[:, 0].tolist() for b in taken_by_rank]
            order += [first for row in zip(*firsts, strict=True) for first in row]
            for tokens_BT, targets_BT, positions_BT in taken_by_rank:
                for i, first in enumerate(tokens_BT[:, 0].tolist()):
                    tokens, targets, positions = plain_row(first, lengths, mask, packing, seq_len)
                    assert tokens_BT[i].tolist() == tokens
                    assert targets_BT[i].tolist() == targets
                    assert (positions_BT is not None) == (packing == "isolated")
                    assert positions_BT is None or positions_BT[i].tolist() == positions
                count += int((targets_BT != IGNORED).sum())
        assert count == expected_count
        state = group[0].state_dict()
        assert all(batches.state_dict() == state for batches in group)
    alone = Batches(file, batch=1, seq_len=seq_len, seed=seed, shuffle=shuffle, packing=packing)
    assert order == starts(alone, len(order))


@pytest.mark.parametrize("seq_len", [7, 10, 501, 1002])
def test_an_epoch_visits_each_window_of_a_shifted_grid_once(file: TokenFile, seq_len: int) -> None:
    batches = Batches(file, batch=1, seq_len=seq_len, seed=1)
    tokens_BT, targets_BT, _ = batches.next()
    assert tokens_BT.dtype == targets_BT.dtype == torch.int64
    assert tokens_BT.is_contiguous() and targets_BT.is_contiguous()
    assert batches.all_count and batches.counted(5) == 5 * seq_len
    batches.skip(batches.windows - 1)
    offsets = set()
    for _ in range(4):
        epoch = sorted(starts(batches, batches.windows))
        assert epoch == [epoch[0] + i * seq_len for i in range(batches.windows)]
        assert 0 <= epoch[0] and epoch[-1] + seq_len + 1 <= 1003
        offsets.add(epoch[0])
    assert len(offsets) > 1 or seq_len == 1002


def test_epochs_and_seeds_have_orders_of_their_own(tmp_path: Path) -> None:
    documents = counting_file(tmp_path / "a.bin", [2] * 9)
    orders = set()
    for seed in (1, 2):
        batches = Batches(documents, batch=9, seq_len=4, packing="padded", seed=seed)
        orders |= {tuple(starts(batches, 1)) for _ in range(4)}
    assert len(orders) == 8 and all(sorted(order) == list(range(0, 18, 2)) for order in orders)


def test_the_order_never_changes(file: TokenFile) -> None:
    """Saved runs rely on it: these values are part of the format."""
    assert starts(Batches(file, batch=4, seq_len=10, seed=1234), 2) == GOLDEN_STARTS
    assert Permutation(10, 1234, 0)(np.arange(10)).tolist() == GOLDEN_10
    assert Permutation(123457, 1234, 7)(np.arange(5)).tolist() == GOLDEN_LARGE
    assert Permutation(10, 1234, 0).noise == GOLDEN_NOISE


GOLDEN_STARTS = [778, 788, 418, 358, 588, 448, 208, 878]
GOLDEN_10 = [7, 5, 8, 6, 3, 9, 4, 0, 2, 1]
GOLDEN_LARGE = [96744, 121942, 99684, 110843, 105404]
GOLDEN_NOISE = 18049754603367098256


def test_the_state_is_the_global_position_and_is_refused_for_other_data(
    file: TokenFile, tmp_path: Path
) -> None:
    batches = Batches(file, batch=4, seq_len=100, seed=6, rank=1, world=2)
    starts(batches, 3)
    state = batches.state_dict()
    position = {"seed": 6, "epoch": 2, "sample": 6}
    assert state.items() >= position.items()
    resumed, bare = (Batches(file, batch=2, seq_len=100) for _ in range(2))
    resumed.load_state_dict(state)
    bare.load_state_dict(position)
    assert starts(bare, 3) == starts(resumed, 3)
    other = counting_file(tmp_path / "b.bin", [1004])
    for wrong, what in (
        (Batches(other, batch=2, seq_len=100), "tokens 1003 -> 1004, other tokens"),
        (Batches(file, batch=2, seq_len=99), "seq_len 100 -> 99"),
        (Batches(file, batch=2, seq_len=100, shuffle=False), "order shuffled -> spread"),
        (Batches(file, batch=2, seq_len=100, packing="isolated"), "packing stream -> isolated"),
    ):
        with pytest.raises(DataError, match=rf"not the data .* \(.*{what}"):
            wrong.load_state_dict(state)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_file_of_one_window_is_enough_and_less_is_an_error(tmp_path: Path, shuffle: bool) -> None:
    small = counting_file(tmp_path / "a.bin", [8])
    batches = Batches(small, batch=3, seq_len=7, shuffle=shuffle)
    assert next(iter(batches)).tokens_BT.tolist() == [list(range(7))] * 3
    with pytest.raises(DataError, match=r"holds 8 tokens, less than one window of .* = 9"):
        Batches(small, batch=3, seq_len=8, shuffle=shuffle)


def test_a_file_written_meanwhile_ends_the_batches_and_one_replaced_does_not(
    tmp_path: Path,
) -> None:
    file = counting_file(tmp_path / "a.bin", [1003])
    batches = Batches(file, seq_len=8, batch=2)
    expected = batches.at(2).tokens_BT
    content = file.path.read_bytes()
    file.path.rename(file.path.with_name("before"))
    file.path.write_bytes(content[:4096])
    assert torch.equal(batches.at(2).tokens_BT, expected), "the file of before is mapped"
    file.path.with_name("before").rename(file.path)
    with file.path.open("ab") as opened:
        opened.write(b"x")
    with pytest.raises(DataError, match=r"was written while it was in use: it has \d+ bytes"):
        batches.at(2)


def test_padding_counts_what_it_cuts_and_needs_documents(tmp_path: Path) -> None:
    documents = counting_file(tmp_path / "a.bin", [4, 9, 5, 7])
    cut = {
        packing: Batches(documents, batch=1, seq_len=4, packing=packing).cut_documents()
        for packing in get_args(Packing)
    }
    assert cut == {"stream": (0, 0), "isolated": (0, 0), "padded": (2, 4 + 2)}
    write_tokens(tmp_path / "b.bin", [np.arange(50)], vocab_size=100, tokenizer="none")
    for packing in ("isolated", "padded"):
        with pytest.raises(DataError, match="does not say where its documents begin"):
            Batches(TokenFile(tmp_path / "b.bin"), batch=1, seq_len=4, packing=packing)


# ---- the order


@levels.examples(100)
@given(size=st.integers(1, 5000), seed=st.integers(), epoch=st.integers(0, 1 << 40))
def test_every_size_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(size, seed, epoch)(np.arange(size)).tolist()) == list(range(size))


# ---- masked language modelling

MASKING = Masking(mask_token=1 << 20, vocab_size=1 << 20)
LENGTHS = [3, 40, 1, 77, 200, 8]


@pytest.fixture
def documents(tmp_path: Path) -> TokenFile:
    """Token i is i."""
    return counting_file(tmp_path / "a.bin", LENGTHS)


def batches_of(documents: TokenFile, batch: int = 4, **options: Any) -> Batches:
    settings: dict[str, Any] = {
        "seq_len": 16,
        "packing": "isolated",
        "seed": 3,
        "masking": MASKING,
        **options,
    }
    return Batches(documents, batch=batch, **settings)


def assert_equal(batch: Batch, expected: Batch) -> None:
    for x, wanted in zip(batch, expected, strict=True):
        assert x is not None and wanted is not None and torch.equal(x, wanted)


def test_targets_are_the_hidden_tokens(documents: TokenFile) -> None:
    plain, masked = batches_of(documents, masking=None), batches_of(documents)
    hidden = 0
    for _ in range(20):
        count = masked.counted(1)
        before, batch = plain.next(), masked.next()
        chosen_BT = batch.targets_BT != IGNORED
        assert count == int(chosen_BT.sum())
        assert torch.equal(batch.targets_BT[chosen_BT], before.tokens_BT[chosen_BT])
        assert torch.equal(batch.tokens_BT[~chosen_BT], before.tokens_BT[~chosen_BT])
        assert batch.positions_BT is not None and before.positions_BT is not None
        assert torch.equal(batch.positions_BT, before.positions_BT)
        hidden += int((batch.tokens_BT == MASKING.mask_token).sum())
    assert hidden > 50 and not masked.all_count


def test_ranks_and_resumed_runs_draw_the_same(documents: TokenFile) -> None:
    alone = batches_of(documents)
    expected = [alone.next() for _ in range(12)]
    ranks = [batches_of(documents, batch=2, rank=rank, world=2) for rank in range(2)]
    for number, batch in enumerate(expected):
        if number == 5:  # from here on as a run that begins again, which gives another seed
            saved = ranks[0].state_dict()
            ranks = [
                batches_of(documents, batch=2, rank=rank, world=2, seed=9) for rank in range(2)
            ]
            for batches in ranks:
                batches.load_state_dict(saved)
        assert (
            ranks[0].counted(1) == ranks[1].counted(1) == int((batch.targets_BT != IGNORED).sum())
        )
        parts = [batches.next() for batches in ranks]
        columns = zip(*parts, strict=True)
        assert_equal(batch, Batch(*(torch.stack(rows, 1).flatten(0, 1) for rows in columns)))


def test_the_draws_never_change_and_differ_by_epoch(documents: TokenFile) -> None:
    """Resumed runs rely on it."""
    batches = batches_of(documents, shuffle=False, packing="stream")
    chosen, later = (batches.at(at).targets_BT != IGNORED for at in (0, batches.windows))
    assert not torch.equal(chosen, later)
    targets_BT = batches_of(documents, batch=3, packing="stream").next().targets_BT
    assert targets_BT[targets_BT != IGNORED].tolist() == GOLDEN_TARGETS


GOLDEN_TARGETS = [120, 122, 123, 274, 283, 286, 41, 42]


def test_tokens_outside_the_mask_of_the_file_are_not_hidden(tmp_path: Path) -> None:
    mask = [int(token % 3 > 0) for token in range(sum(LENGTHS))]
    batches = batches_of(counting_file(tmp_path / "a.bin", LENGTHS, mask))
    targets = torch.cat([batches.next().targets_BT for _ in range(20)])
    chosen = targets[targets != IGNORED]
    assert len(chosen) > 50 and bool((chosen % 3 > 0).all())


def test_impossible_settings_are_refused(documents: TokenFile) -> None:
    with pytest.raises(ValueError, match="mask_token = 9 is one of the 10 tokens"):
        Masking(mask_token=9, vocab_size=10)
    with pytest.raises(ValueError, match="what pads would be seen"):
        batches_of(documents, packing="padded")
    with pytest.raises(DataError, match=r"not the data .*masked 0.15 -> None"):
        batches_of(documents, masking=None).load_state_dict(batches_of(documents).state_dict())


# ---- a batch made ahead


def of(file: TokenFile) -> Batches:
    return Batches(file, batch=3, seq_len=7, seed=1, rank=1, world=2)


def test_the_batches_are_those_of_a_plain_run(file: TokenFile) -> None:
    """Also where they are skipped, and go back to a saved position; what is saved does not count
    the one ahead."""
    plain, prefetched = of(file), of(file)
    saved: dict[str, Any] = {}
    with closing(Prefetch(prefetched, lambda batch: batch)) as prefetch:
        for call in range(60):
            if call == 20:
                saved = plain.state_dict()
            if call == 30:
                for batches in (plain, prefetched):
                    batches.skip(2)
            if call == 40:
                for batches in (plain, prefetched):
                    batches.load_state_dict(saved)
            assert all(map(torch.equal, prefetch.next()[:2], plain.next()[:2]))
            assert prefetched.state_dict() == plain.state_dict()


def test_one_is_made_ahead_on_another_thread(file: TokenFile) -> None:
    made: list[int] = []
    second = threading.Event()

    def ready(batch: Batch) -> Batch:
        made.append(threading.get_ident())
        if len(made) == 2:
            second.set()
        return batch

    with closing(Prefetch(of(file), ready)) as prefetch:
        prefetch.next()
        assert second.wait(120)
        assert made[0] == threading.get_ident() != made[1]
        prefetch.next()
    assert len(made) == 3


def test_its_errors_are_raised_where_the_batch_is_taken(file: TokenFile) -> None:
    def ready(batch: Batch) -> Batch:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("planted")
        return batch

    batches = of(file)
    with closing(Prefetch(batches, ready)) as prefetch:
        prefetch.next()
        position = batches.position
        with pytest.raises(OSError, match="planted"):
            prefetch.next()
    assert batches.position == position
