"""Every test runs on one of several kinds of lanes."""

from __future__ import annotations

from tests.drawn_lanes import drawn_lanes
from tests.drawn_lanes import parametrize as pytest_generate_tests

__all__ = ["drawn_lanes", "pytest_generate_tests"]
