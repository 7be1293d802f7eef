"""The bus, measured: on a CPU the memory's own copy takes its place."""

from __future__ import annotations

import pytest

from offloadtrain.runtime.bandwidth import bandwidth
from tests.gpu.precision import DEVICE


@pytest.mark.gpu
def test_a_copy_has_a_speed() -> None:
    found = bandwidth(DEVICE)
    assert 0.1 < found.h2d_gbps < 2000 and 0.1 < found.d2h_gbps < 2000
