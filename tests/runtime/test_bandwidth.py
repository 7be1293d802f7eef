"""The bus, measured: on a CPU the memory's own copy takes its place."""

from __future__ import annotations

import pytest
import torch

from offloadtrain.runtime.bandwidth import bandwidth


def test_a_copy_has_a_speed() -> None:
    found = bandwidth(torch.device("cpu"), 8 << 20)
    assert 0.1 < found.h2d_gbps < 1000 and 0.1 < found.d2h_gbps < 1000


@pytest.mark.gpu
def test_the_bus_of_a_gpu() -> None:
    found = bandwidth(torch.device("cuda"))
    assert 1.0 < found.h2d_gbps < 2000 and 1.0 < found.d2h_gbps < 2000
