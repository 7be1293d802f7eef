"""The bus, measured: on a CPU the memory's own copy takes its place."""

from __future__ import annotations

import pytest

from offloadtrain.runtime.device_memory import bandwidth
from tests.gpu.precision import DEVICE


@pytest.mark.gpu
def test_a_copy_has_a_speed() -> None:
    result = bandwidth(DEVICE)
    assert 0.1 < result.h2d_gbps < 2000 and 0.1 < result.d2h_gbps < 2000
