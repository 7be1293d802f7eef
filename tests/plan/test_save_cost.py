"""The cost of a checkpoint follows from the disk and the step."""

from __future__ import annotations

import pytest

from offloadtrain.plan.save_cost import SHARE, save_cost


@pytest.mark.parametrize(
    ("write_s", "step_s", "stall_s", "interval"),
    [(1.0, 2.0, 0.0, 1), (10.0, 1.0, 9.0, 300), (4.0, 4.0, 0.0, 1), (5.0, 2.0, 3.0, 50)],
)
def test_a_step_hides_what_it_can(
    write_s: float, step_s: float, stall_s: float, interval: int
) -> None:
    found = save_cost(write_s, step_s)
    assert (found.stall_s, found.interval) == (stall_s, interval)
    assert found.stall_s <= SHARE * interval * step_s
