"""Batches: complete epochs, exact resume, and one global order for any number of ranks."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.data.batches import Batches
from offloadtrain.data.tokens import DataError, TokenFile
from tests import levels
from tests.data.tiny import write_tokens


def counting_file(path: Path, count: int) -> TokenFile:
    """Token i is i, so that a window tells where it began."""
    write_tokens(path, [np.arange(count)], vocab_size=1 << 20, tokenizer="none")
    return TokenFile(path)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    return counting_file(tmp_path_factory.mktemp("tokens") / "a.bin", 1003)


def starts(batches: Batches, calls: int) -> list[int]:
    return [start for _ in range(calls) for start in batches.next()[0][:, 0].tolist()]


def test_targets_are_the_next_tokens(file: TokenFile) -> None:
    tokens_BT, targets_BT, positions_BT = Batches(file, batch=5, seq_len=7, seed=1).next()
    assert positions_BT is None
    assert tokens_BT.shape == targets_BT.shape == (5, 7)
    assert tokens_BT.dtype == targets_BT.dtype == torch.int64
    assert tokens_BT.is_contiguous() and targets_BT.is_contiguous()
    assert torch.equal(targets_BT, tokens_BT + 1)
    assert torch.equal(tokens_BT, tokens_BT[:, :1] + torch.arange(7))


@pytest.mark.parametrize("seq_len", [1, 7, 10, 500, 501, 502, 1001, 1002])
def test_an_epoch_visits_each_window_of_a_shifted_grid_once(file: TokenFile, seq_len: int) -> None:
    batches = Batches(file, batch=1, seq_len=seq_len, seed=1)
    offsets = set()
    for _ in range(4):
        epoch = sorted(starts(batches, batches.windows))
        assert epoch == [epoch[0] + i * seq_len for i in range(batches.windows)]
        assert 0 <= epoch[0] and epoch[-1] + seq_len + 1 <= 1003
        offsets.add(epoch[0])
    assert len(offsets) > 1 or seq_len in (1, 1002)


def test_every_token_is_predicted_sooner_or_later(file: TokenFile) -> None:
    batches = Batches(file, batch=199, seq_len=5, seed=1)
    assert batches.windows == 199
    seen = {t for _ in range(100) for t in batches.next()[1].flatten().tolist()}
    assert seen == set(range(1, 1003))


def test_epochs_differ_and_seeds_differ(file: TokenFile) -> None:
    orders = set()
    for seed in (1, 2):
        batches = Batches(file, batch=1, seq_len=10, seed=seed)
        orders |= {tuple(starts(batches, batches.windows)) for _ in range(3)}
    assert len(orders) == 6


def test_the_order_never_changes(file: TokenFile) -> None:
    """Saved runs rely on it: these values are part of the format."""
    assert starts(Batches(file, batch=4, seq_len=10, seed=1234), 2) == GOLDEN_STARTS


GOLDEN_STARTS = [778, 788, 418, 358, 588, 448, 208, 878]


@levels.examples(100)
@given(
    seq_len=st.integers(1, 300),
    batch=st.integers(1, 9),
    before=st.integers(0, 60),
    worlds=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    shuffle=st.booleans(),
)
def test_any_number_of_ranks_takes_the_same_global_order(
    file: TokenFile,
    seq_len: int,
    batch: int,
    before: int,
    worlds: tuple[int, int],
    shuffle: bool,
) -> None:
    """Some calls on one number of ranks, the rest on another, against one rank, one by one."""

    def ranks(world: int) -> list[Batches]:
        return [
            Batches(
                file,
                batch=batch,
                seq_len=seq_len,
                seed=3,
                rank=rank,
                world=world,
                shuffle=shuffle,
            )
            for rank in range(world)
        ]

    taken: list[int] = []
    state = ranks(1)[0].state_dict()
    for world, calls in zip(worlds, (before, 3), strict=True):
        group = ranks(world)
        for batches in group:
            batches.load_state_dict(state)
        for _ in range(calls):
            by_rank = [batches.next()[0][:, 0].tolist() for batches in group]
            taken += [start for row in zip(*by_rank, strict=True) for start in row]
        states = [batches.state_dict() for batches in group]
        assert all(other == states[0] for other in states)
        state = states[0]
    alone = Batches(file, batch=1, seq_len=seq_len, seed=3, shuffle=shuffle)
    assert taken == starts(alone, len(taken))


@levels.examples(50)
@given(calls=st.integers(0, 200), batch=st.integers(1, 7))
def test_resume_is_exact_in_any_epoch(file: TokenFile, calls: int, batch: int) -> None:
    straight = Batches(file, batch=batch, seq_len=37, seed=9)
    starts(straight, calls)
    resumed = Batches(file, batch=batch, seq_len=37, seed=0)
    resumed.load_state_dict(straight.state_dict())
    assert resumed.state_dict() == straight.state_dict()
    assert starts(resumed, 5) == starts(straight, 5)


def test_the_state_is_the_global_position(file: TokenFile) -> None:
    batches = Batches(file, batch=4, seq_len=100, seed=6, rank=1, world=2)
    assert batches.windows == 9
    starts(batches, 3)
    state = batches.state_dict()
    assert (state["seed"], state["epoch"], state["sample"]) == (6, 2, 6)


def test_a_state_of_bare_numbers_is_accepted(file: TokenFile) -> None:
    straight = Batches(file, batch=2, seq_len=100, seed=6)
    starts(straight, 7)
    resumed = Batches(file, batch=2, seq_len=100)
    resumed.load_state_dict({"seed": 6, "epoch": 1, "sample": 5})
    assert starts(resumed, 3) == starts(straight, 3)


def test_a_state_of_other_data_is_refused(file: TokenFile, tmp_path: Path) -> None:
    state = Batches(file, batch=2, seq_len=100).state_dict()
    other = counting_file(tmp_path / "b.bin", 1004)
    for batches in (
        Batches(other, batch=2, seq_len=100),
        Batches(file, batch=2, seq_len=99),
        Batches(file, batch=2, seq_len=100, shuffle=False),
    ):
        with pytest.raises(DataError, match="saved for tokens 1003"):
            batches.load_state_dict(state)


def test_evaluation_visits_all_windows_in_the_same_order_each_epoch(file: TokenFile) -> None:
    batches = Batches(file, batch=1, seq_len=10, shuffle=False)
    assert batches.windows == 100
    first, second = starts(batches, 100), starts(batches, 100)
    assert first == second
    assert sorted(first) == list(range(0, 1000, 10))
    assert first == starts(Batches(file, batch=1, seq_len=10, seed=5, shuffle=False), 100)


@pytest.mark.parametrize("count", [11, 102, 5000, 9973])
def test_a_few_evaluation_windows_sample_the_whole_file(tmp_path: Path, count: int) -> None:
    batches = Batches(counting_file(tmp_path / "a.bin", count), batch=1, seq_len=1, shuffle=False)
    quarters = Counter(start * 4 // count for start in starts(batches, 8))
    assert all(1 <= quarters[quarter] <= 4 for quarter in range(4))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_file_of_one_window_is_enough_and_less_is_an_error(tmp_path: Path, shuffle: bool) -> None:
    file = counting_file(tmp_path / "a.bin", 8)
    batches = Batches(file, batch=3, seq_len=7, shuffle=shuffle)
    assert batches.next()[0].tolist() == [list(range(7))] * 3
    with pytest.raises(DataError, match=r"holds 8 tokens, less than one window of .* = 9"):
        Batches(file, batch=3, seq_len=8, shuffle=shuffle)


def test_it_is_an_endless_iterator(file: TokenFile) -> None:
    batches = Batches(file, batch=2, seq_len=500)
    assert len([pair for pair, _ in zip(batches, range(10), strict=False)]) == 10


@pytest.mark.parametrize(
    "wrong", [{"batch": 0}, {"seq_len": 0}, {"rank": 2}, {"rank": -1}, {"world": 0}]
)
def test_impossible_arguments_are_refused(file: TokenFile, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        Batches(file, **({"batch": 1, "seq_len": 5, "rank": 0, "world": 2} | wrong))  # type: ignore[arg-type]
