"""The lanes that a test runs on, as one more parameter of it.

On the CPU everything runs when it is launched, which hides races and stale reads. The other kinds
of lanes are legal orders of a GPU. `tests/levels.py` gives each case of a test one of them; a test
that is named on the command line runs on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from offloadtrain.runtime.lanes import Lanes, on_lanes
from offloadtrain.runtime.lanes.seeded import SeededLanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from tests.levels import LANES_PREFIX

KINDS: dict[str, Callable[[], Lanes] | None] = {
    "default": None,
    "late": lambda: SeededLanes(11, late=True),
    "seeded": lambda: SeededLanes(12),
    "threads": lambda: ThreadLanes(seed=13, longest_delay_ms=0.2),
}


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Add the parameter to a test, unless it is marked `default_lanes` or its models are in other
    processes."""
    apart = {"ranks", "pools"} & set(metafunc.fixturenames)
    if not apart and metafunc.definition.get_closest_marker("default_lanes") is None:
        ids = [LANES_PREFIX + kind for kind in KINDS]
        metafunc.parametrize("drawn_lanes", KINDS, ids=ids, indirect=True)


@pytest.fixture(autouse=True)
def drawn_lanes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Models that the test offloads run on the lanes of its parameter."""
    make = KINDS[getattr(request, "param", "default")]
    if make is None:
        yield
    else:
        with on_lanes(make):
            yield
