"""The learning rate at the points that define it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.optim.lr_schedule import Schedule, learning_rate


def rates(schedule: Schedule, total: int, warmup: int, floor: float = 0.1) -> list[float]:
    return [
        learning_rate(
            step,
            peak=2.0,
            schedule=schedule,
            total_steps=total,
            warmup_steps=warmup,
            min_ratio=floor,
        )
        for step in range(total + 5)
    ]


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert rates("constant", 10, 4)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_linear_ends_at_its_floor_in_the_last_step() -> None:
    assert rates("linear", 5, 1, floor=0.0)[:5] == [2.0, 1.5, 1.0, 0.5, 0.0]
    assert rates("linear", 9, 0)[8] == pytest.approx(0.2)


def test_cosine_is_half_way_in_the_middle() -> None:
    cosine = rates("cosine", 11, 0, floor=0.0)
    assert (cosine[0], cosine[5], cosine[10]) == pytest.approx((2.0, 1.0, 0.0))
    assert cosine[2] > 2.0 * (1 - 2 / 10), "above the straight line at first"


@given(
    st.sampled_from(["cosine", "linear", "constant"]),
    st.integers(1, 60),
    st.integers(0, 60),
    st.floats(0, 1),
)
def test_up_to_the_peak_then_never_up_again(
    schedule: Schedule, total: int, warmup: int, floor: float
) -> None:
    result = rates(schedule, total, min(warmup, total), floor)
    assert all(0.0 <= rate <= 2.0 for rate in result) and max(result) == 2.0
    top = result.index(2.0)
    assert result[:top] == sorted(result[:top])
    assert result[top:] == sorted(result[top:], reverse=True)
    assert result[-1] == (2.0 if schedule == "constant" else pytest.approx(result[total - 1]))
