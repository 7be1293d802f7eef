"""What each level runs: every pair of values, every case somewhere, the same draw for a seed."""

from __future__ import annotations

import inspect
import itertools
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import levels

pytest_plugins = ["pytester"]

HERE = Path(__file__).parent
MOST_IN_QUICK = 4900
"""Cases that every change runs. A new product of parameters that exceeds it needs `cover`."""

SUITE = """
import pytest
from hypothesis import given, strategies as st
from tests import levels

SIX = pytest.mark.parametrize("a", range(6))
FIVE = pytest.mark.parametrize("b", range(5))
TWO = pytest.mark.parametrize("c", ["x", "y"])

def test_alone(): ...
@FIVE
@TWO
def test_few(b, c): ...
@SIX
@FIVE
@TWO
def test_many(a, b, c): ...
@SIX
@FIVE
@pytest.mark.cover(1)
def test_values(a, b): ...
@SIX
@FIVE
@pytest.mark.cover(0)
def test_draw(a, b): ...
@SIX
@FIVE
@pytest.mark.cover(0, levels.ALL)
def test_later(a, b): ...
@pytest.mark.parametrize("a", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_is_slow(a): ...
@pytest.mark.slow
@SIX
@FIVE
def test_slow(a, b): ...
@pytest.mark.slow
@SIX
@FIVE
@pytest.mark.cover(1)
def test_slow_values(a, b): ...
@pytest.mark.long
@TWO
def test_long(c): ...
@SIX
@FIVE
@pytest.mark.draws(0.3)
@pytest.mark.cover(0)
def test_some(a, b): ...
@pytest.mark.parametrize("a", [0, pytest.param(1, marks=pytest.mark.long)])
@levels.examples(10)
@given(n=st.integers())
def test_draws(a, n): ...
"""


def ids(items: Sequence[pytest.Item], name: str = "") -> set[str]:
    """The names of the cases, or of the cases of one test."""
    names = {item.nodeid.rpartition("::")[2] for item in items}
    return {case for case in names if not name or case.partition("[")[0] == name}


_COLLECTED: list[pytest.Item] = []
"""Once: to end a collection takes a second."""


@pytest.fixture
def suite(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """All cases of `SUITE`, as pytest collects them."""
    if not _COLLECTED:
        pytester = request.getfixturevalue("pytester")
        marks = ("slow", "long", "draws", "cover")
        pytester.makeini("[pytest]\nmarkers =\n" + "".join(f"  {mark}:\n" for mark in marks))
        _COLLECTED.extend(pytester.getitems(SUITE))
    return _COLLECTED


Cases = list[levels.Axes]


@st.composite
def cases_of_a_test(draw: st.DrawFn) -> Cases:
    """Some, seldom all, of a product of parameters."""
    values = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    product = list(itertools.product(*map(range, values)))
    chosen = draw(st.lists(st.sampled_from(product), min_size=1, max_size=60, unique=True))
    return [tuple(enumerate(case)) for case in chosen]


@levels.examples(200)
@given(cases=cases_of_a_test(), strength=st.integers(0, 3))
def test_a_covering_array_has_every_combination_and_no_useless_case(
    cases: Cases, strength: int
) -> None:
    def combinations(chosen: Cases) -> set[levels.Axes]:
        count = min(strength, len(cases[0]))
        return {axes for case in chosen for axes in itertools.combinations(case, count) if axes}

    chosen = levels.covering(cases, cases, strength)
    assert combinations(chosen) == combinations(cases) and len(set(chosen)) == len(chosen)
    assert (chosen == []) is (strength == 0)
    for number in range(len(chosen)):
        assert combinations(chosen[:number]) != combinations(chosen[: number + 1])


def test_levels_quick_and_rest(suite: list[pytest.Item]) -> None:
    quick, rest = (levels.selected(suite, level, 0) for level in ("quick", "rest"))

    def count(items: list[pytest.Item]) -> dict[str, int]:
        names = [item.name.partition("[")[0] for item in items]
        return {name: names.count(name) for name in sorted(set(names))}

    assert [item for item in suite if item in quick] == quick, "in their order"
    many = [item for item in quick if item.name.startswith("test_many")]
    pairs = {pair for item in many for pair in itertools.combinations(levels.axes(item), 2)}
    assert len(pairs) == 6 * 5 + 6 * 2 + 5 * 2 and 30 < len(many) < 45
    values = [item for item in quick if item.name.startswith("test_values")]
    assert len({axis for item in values for axis in levels.axes(item)}) == 5 + 6
    assert count(quick) | {"test_many": 0} == {
        **{"test_alone": 1, "test_few": 10, "test_many": 0, "test_draw": 1, "test_later": 1},
        **{"test_values": 6 + 1, "test_one_is_slow": 1, "test_draws": 1, "test_some": 1},
    }
    assert count(rest) | {"test_many": 0, "test_values": 0} == {
        **{"test_slow": 30, "test_slow_values": 6 + 3, "test_one_is_slow": 1, "test_draws": 1},
        **{"test_some": 9, "test_draw": 3, "test_later": 30, "test_many": 0, "test_values": 0},
    }
    assert ids(quick, "test_one_is_slow") == {"test_one_is_slow[0]"}
    assert ids(rest, "test_one_is_slow") == {"test_one_is_slow[1]"}


def test_no_case_is_out_of_reach(suite: list[pytest.Item]) -> None:
    """Every case is drawn with some seed; `long` ones are run at level full."""
    assert levels.selected(suite, "full", 0) == suite
    reached = {
        item
        for seed in range(150)
        for level in ("quick", "rest")
        for item in levels.selected(suite, level, seed)
    }
    assert ids([item for item in suite if item not in reached]) == {
        "test_long[x]",
        "test_long[y]",
        "test_draws[1]",
    }


@pytest.mark.parametrize("level", ["quick", "rest"])
def test_a_seed_is_a_draw(suite: list[pytest.Item], level: levels.Level) -> None:
    """Whatever other tests are collected with it."""
    draws = [frozenset(ids(levels.selected(suite, level, seed))) for seed in range(20)]
    assert draws == [frozenset(ids(levels.selected(suite, level, seed))) for seed in range(20)]
    assert len(set(draws)) > 10
    part = [item for item in suite if item.name.startswith(("test_many", "test_slow"))]
    expected = [item for item in levels.selected(suite, level, 7) if item in part]
    assert levels.selected(part, level, 7) == expected


def test_a_case_that_is_named_is_run(
    suite: list[pytest.Item], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Under the name that it was collected by: draws depend on it.
    file = pytester.makepyfile(**{suite[0].path.stem: SUITE})

    def collected(*arguments: str) -> set[str]:
        monkeypatch.setattr(levels, "_at", "quick")  # that of this session is restored
        done = pytester.inline_run("-p", "tests.conftest", "--collect-only", "-q", *arguments)
        assert done.ret == 0
        return ids(done.getcalls("pytest_collection_finish")[0].session.items)

    quick = ids(levels.selected(suite, "quick", 0))
    for name in (min(ids(suite, "test_many") - quick), "test_long[x]"):
        assert collected(f"{file.name}::{name}") == {name}
    assert collected("--level", "quick", "--seed", "0", file.name) == quick


@pytest.mark.slow
def test_workers_run_the_same_cases(suite: list[pytest.Item], pytester: pytest.Pytester) -> None:
    """Those of the seed that the header prints."""
    file = pytester.makepyfile(**{suite[0].path.stem: SUITE})
    folder = pytester.mkpydir("tests")
    for name in ("levels.py", "drawn_lanes.py", "harsh_lanes.py", "seeded_lanes.py"):
        shutil.copy(HERE / name, folder)
    shutil.copy(HERE / "conftest.py", pytester.path)
    done = pytester.runpytest_subprocess("-n", "2", "--level", "quick", "-v", file.name)
    assert done.ret == 0
    (seed,) = re.findall(r"cases drawn by --seed (\d+)", done.stdout.str())
    run = set(re.findall(r"::(\S+)", done.stdout.str()))
    assert run == ids(levels.selected(suite, "quick", int(seed)))


def test_quick_is_no_more_than_a_change_affords(request: pytest.FixtureRequest) -> None:
    """Of what this run has collected: the whole suite under `make test`."""
    if request.config.option.level == "quick":
        assert len(request.session.items) <= MOST_IN_QUICK


def test_cases_run_on_every_kind_of_lanes(pytester: pytest.Pytester) -> None:
    """In turn, from a drawn one on; all of them where a test is named."""
    pytester.makeconftest("""
from tests import drawn_lanes as lanes
from tests.drawn_lanes import drawn_lanes
from tests.drawn_lanes import parametrize as pytest_generate_tests
def pytest_collection_modifyitems(items): lanes.draw(items, 3)
""")
    file = pytester.makepyfile("""
import pytest
from offloadtrain.runtime.lanes import lanes_for
import torch
def kind(): return type(lanes_for(torch.device("cpu"))).__name__
@pytest.mark.parametrize("n", range(8))
def test_eight(n): print("ran on", kind())
@pytest.mark.default_lanes
def test_default(): print("ran on", kind())
""")

    def kinds(name: str) -> list[str]:
        done = pytester.runpytest_inprocess("-s", "-p", "no:cacheprovider", name)
        return re.findall(r"ran on (\w+)", done.stdout.str())

    eight, default = kinds(file.name)[:8], kinds(file.name)[8:]
    assert eight[:4] == eight[4:] and default == ["SequentialLanes"]
    assert sorted(set(eight)) == ["PausingLanes", "SeededLanes", "SequentialLanes"]
    assert len(kinds(f"{file.name}::test_eight")) == 32
    assert kinds(f"{file.name}::test_default") == ["SequentialLanes"]


def test_each_value_is_run_in_one_case_and_a_failure_names_it() -> None:
    values = []

    @levels.each("value", [1, 2, 3])
    def check(other: int, value: int) -> None:
        values.append((other, value))
        assert value < 3

    assert list(inspect.signature(check).parameters) == ["other"]
    with pytest.raises(AssertionError) as raised:
        check(other=7)
    assert values == [(7, 1), (7, 2), (7, 3)] and raised.value.__notes__ == ["value = 3"]
