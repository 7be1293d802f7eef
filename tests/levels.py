"""How much of the suite runs: `--level quick`, `rest` or `full`.

* quick: every test that is not marked `slow` or `long`. Of a test with more than a few cases, those
  that hold every pair of its parameters' values (a covering array), and a few of the others, drawn
  by the seed that the header prints.
* rest: what quick leaves out and an hour affords: tests marked `slow`, a larger draw of the other
  cases, and the tests that draw their own cases, with more of them.
* full: every case of every test.

A test marked `cover(strength)` says what quick must hold in place of pairs: 1, every value of each
parameter; 0, nothing but the draw. `cover(strength, later)`: also what rest must hold besides;
`ALL`, every case. A test marked `draws(share)` draws so many of its cases for rest, without a
number all. Of a test marked `slow` as a whole it says the same of rest.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import pytest
from hypothesis import settings

Level = Literal["quick", "rest", "full"]
Case = TypeVar("Case")
Axes = tuple[tuple[Hashable, Hashable], ...]

ALL = 99
"""A strength: no test has as many parameters."""
FEW = 12
"""A test with no more cases than this runs all of them."""
DRAWN = {"quick": 0.02, "rest": 0.1}
"""Share of a test's other cases that are drawn; of those that have any, one at least."""
EXAMPLES = {"quick": 0.2, "rest": 1.0, "full": 5.0}
"""Of the number that a test which draws its own cases asks for."""
_at: Level = "quick"


def choose(level: Level) -> None:
    """Before test modules are imported."""
    global _at
    _at = level


def examples(count: int) -> Callable[[Any], Any]:
    """Of a Hypothesis test: so many examples at level rest, fewer in quick, more in full."""
    few = max(5, math.ceil(count * EXAMPLES[_at]))

    def apply(test: Any) -> Any:
        return pytest.mark.draws(settings(max_examples=few)(test))

    return apply


def selected(items: Sequence[pytest.Item], level: Level, seed: int) -> list[pytest.Item]:
    """Those of the collected tests that this level runs, in their order."""
    if level == "full":
        return list(items)
    tests = by_test(items)
    kept = {item for name, cases in tests.items() for item in _of_one(name, cases, level, seed)}
    return [item for item in items if item in kept]


def _of_one(name: str, cases: list[pytest.Item], level: Level, seed: int) -> list[pytest.Item]:
    cases = [case for case in cases if not case.get_closest_marker("long")]
    draw = random.Random(f"{seed} {name}")
    if level == "rest" and cases and (mark := cases[0].get_closest_marker("draws")):
        share = mark.args[0] if mark.args else 1.0
        return draw.sample(cases, math.ceil(len(cases) * share))
    late = [case for case in cases if case.get_closest_marker("slow")]
    cases = [case for case in cases if not case.get_closest_marker("slow")]
    covered = not cases and bool(late) and late[0].get_closest_marker("cover") is not None
    if covered:  # slow as a whole: rest holds what quick would hold of it, and no more
        cases, late = ([], []) if level == "quick" else (late, [])
    quick, later = _covering(cases)
    others = [case for case in cases if case not in quick]
    drawn = draw.sample(others, math.ceil(len(others) * DRAWN[level]))
    if level == "quick":
        return [*quick, *drawn]
    return [*late, *(quick if covered else ()), *(later - quick), *drawn]


def _covering(cases: list[pytest.Item]) -> tuple[set[pytest.Item], set[pytest.Item]]:
    """What quick holds, and what rest holds of the others at least."""
    mark = cases[0].get_closest_marker("cover") if cases else None
    if mark is None and len(cases) <= FEW:
        return set(cases), set()
    where = [axes(case) for case in cases]
    strengths = (*mark.args, 0)[:2] if mark else (2, 0)
    quick, later = (set(covering(cases, where, strength)) for strength in strengths)
    return quick, later


def by_test(items: Sequence[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The cases of each test, by its name."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    return tests


def axes(item: pytest.Item) -> Axes:
    """Which value it has of each `parametrize`, by its id; values that come together are one."""
    callspec = getattr(item, "callspec", None)
    return tuple(enumerate(callspec._idlist)) if callspec else ()


def covering(cases: Sequence[Case], where: Sequence[Axes], strength: int) -> list[Case]:
    """Few of the cases that hold every combination of so many values which any case holds: always
    the one that adds most, the first of equals."""
    missing = [_combinations(one, strength) for one in where]
    uncovered: set[Axes] = set().union(*missing)
    found = []
    while uncovered:
        best = max(range(len(cases)), key=lambda number: len(missing[number] & uncovered))
        uncovered -= missing[best]
        found.append(cases[best])
    return found


def _combinations(one: Axes, strength: int) -> set[Axes]:
    count = min(strength, len(one))
    return set(itertools.combinations(one, count)) if count else set()


def each(name: str, values: Iterable[Any]) -> Callable[[Any], Any]:
    """Run a test with every value of an argument in one case, for what takes milliseconds; a
    failure names the value. Fixtures are set up once for all of them."""
    values = list(values)

    def apply(test: Any) -> Any:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            for value in values:
                try:
                    test(**arguments, **{name: value})
                except BaseException as error:
                    error.add_note(f"{name} = {value}")
                    raise

        others = [each for key, each in signature.parameters.items() if key != name]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return apply


def array(*axes: Sequence[Any], quick: int = 1) -> list[Any]:
    """Few combinations of the axes' values that hold every pair of them, for `parametrize`. Those
    that hold every value (`quick=2`: every pair) come first, the others are marked `slow`."""
    cases = list(itertools.product(*axes))
    where = [
        tuple(enumerate(axis.index(value) for axis, value in zip(axes, case, strict=True)))
        for case in cases
    ]
    first = covering(cases, where, quick)
    later = [case for case in covering(cases, where, 2) if case not in first]
    return [*first, *(pytest.param(*case, marks=pytest.mark.slow) for case in later)]
