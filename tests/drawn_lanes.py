"""The lanes that a test runs on, drawn by the seed.

On the CPU everything runs when it is launched, which hides races and stale reads. The other kinds
of lanes are legal orders of a GPU. Of a test's cases that a level selects, each runs on one kind,
all kinds in turn from a drawn one on. A test that is named on the command line runs on all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from offloadtrain.runtime.lanes import Lanes, on_lanes
from tests import levels
from tests.harsh_lanes import PausingLanes
from tests.seeded_lanes import SeededLanes

KINDS: dict[str, Callable[[], Lanes] | None] = {
    "default": None,
    "late": lambda: SeededLanes(11, late=True),
    "seeded": lambda: SeededLanes(12),
    "threads": lambda: PausingLanes(0.2, seed=13),
}
_KIND = pytest.StashKey[str]()


def draw(items: Sequence[pytest.Item], seed: int) -> None:
    """Give each of the selected cases its lanes; those whose models are in other processes, and
    tests marked `default_lanes`, stay on the default ones."""
    drawn = [item for item in items if _draws(getattr(item, "fixturenames", ()), item)]
    kinds = list(KINDS)
    for name, cases in levels.by_test(drawn).items():
        first = random.Random(f"{seed} lanes of {name}").randrange(len(kinds))
        for number, case in enumerate(cases):
            case.stash[_KIND] = kinds[(first + number) % len(kinds)]


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make the lanes a parameter of a test that is named on the command line."""
    named = any("::" in arg for arg in metafunc.config.args)
    if named and _draws(metafunc.fixturenames, metafunc.definition):
        metafunc.parametrize("drawn_lanes", KINDS, indirect=True)


@pytest.fixture(autouse=True)
def drawn_lanes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Models that the test offloads run on its lanes."""
    kind = getattr(request, "param", request.node.stash.get(_KIND, "default"))
    request.node.add_report_section("setup", "lanes", kind)
    make = KINDS[kind]
    if make is None:
        yield
    else:
        with on_lanes(make):
            yield


def _draws(fixtures: Sequence[str], item: pytest.Item) -> bool:
    others = {"ranks", "pools"} & set(fixtures)
    marked = item.get_closest_marker("default_lanes") is not None
    return "drawn_lanes" in fixtures and not others and not marked
