"""The computed shuffle: a bijection, well mixed, and the same for ever."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.data.batches import Permutation
from tests import levels


def shuffled(size: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return Permutation(size, seed, epoch)(np.arange(size)).tolist()  # type: ignore[no-any-return]


@levels.examples(100)
@given(size=st.integers(1, 5000), seed=st.integers(), epoch=st.integers(0, 1 << 40))
def test_every_size_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(size, seed, epoch)) == list(range(size))


@pytest.mark.parametrize("bits", [33, 62])
def test_sizes_beyond_memory_work(bits: int) -> None:
    size = (1 << bits) + 12345
    places = np.unique(np.linspace(0, size - 1, 1000, dtype=np.int64))
    moved = Permutation(size, 1, 2)(places)
    assert len(set(moved.tolist())) == len(places)
    assert moved.min() >= 0 and moved.max() < size


def test_one_element_at_a_time_gives_the_same_order() -> None:
    permutation = Permutation(1000, 3, 4)
    single = [int(permutation(np.array([i]))[0]) for i in range(1000)]
    assert single == permutation(np.arange(1000)).tolist()


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = {tuple(shuffled(500, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


@pytest.mark.parametrize("size", [64, 100, 1000, 65536])
def test_elements_go_anywhere_with_equal_chance(size: int) -> None:
    """Mean place of the first and last elements, and neighbours that stay together."""
    seeds = range(400)
    ends = np.array([Permutation(size, s, 0)(np.array([0, 1, size - 1])) for s in seeds]) / size
    # the mean of 400 uniform numbers is within 5 deviations of one half
    assert np.abs(ends.mean(axis=0) - 0.5).max() < 5 * 12**-0.5 / 20
    together = np.abs(ends[:, 0] - ends[:, 1]) * size <= 1.5
    assert together.mean() < 2 / size + 5 * (2 / size / 400) ** 0.5


def test_a_shuffle_has_no_trend() -> None:
    order = np.array(shuffled(20000))
    assert abs(np.corrcoef(order, np.arange(20000))[0, 1]) < 0.04
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.04


def test_the_order_never_changes() -> None:
    """Saved runs rely on it: these values are part of the format."""
    assert shuffled(10, seed=1234, epoch=0) == GOLDEN_10
    assert Permutation(123457, 1234, 7)(np.arange(5)).tolist() == GOLDEN_LARGE
    assert Permutation(10, 1234, 0).noise == GOLDEN_NOISE


GOLDEN_10 = [7, 5, 8, 6, 3, 9, 4, 0, 2, 1]
GOLDEN_LARGE = [96744, 121942, 99684, 110843, 105404]
GOLDEN_NOISE = 18049754603367098256


def test_an_empty_permutation_is_refused() -> None:
    with pytest.raises(ValueError, match="0 elements"):
        Permutation(0, 0, 0)
