"""Fifty losses of the debug model: the same bits on the machine class that made them."""

from __future__ import annotations

import pytest

from tests import levels
from tests.golden.golden import PRECISIONS, machine_class, read, train_losses

# Elsewhere rounding differs, and training amplifies it. Between AVX2 and AVX-512 the losses differ
# by at most 4e-3 (bf16) and 6e-7 (fp32) in these steps; one and two threads give the same bits.
TOLERANCE = {"bf16": 0.03, "fp32": 1e-4}


@pytest.mark.cover(0, levels.ALL)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_are_the_golden_ones(precision: str) -> None:
    made_on, golden = read(precision)
    losses = train_losses(precision)
    if made_on == machine_class():
        assert losses == golden
    else:
        assert losses == pytest.approx(golden, abs=TOLERANCE[precision])
    assert golden[-1] < golden[0] - 3.0
