"""What each level runs: every pair of values, every case somewhere, the same draw for a seed."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import levels

pytest_plugins = ["pytester"]

HERE = Path(__file__).parent
MOST_IN_QUICK = 4900
"""Cases that every change runs. A new product of parameters that exceeds it wants `cover`."""

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
    found = {item.nodeid.rpartition("::")[2] for item in items}
    return {one for one in found if not name or one.partition("[")[0] == name}


_COLLECTED: list[pytest.Item] = []
"""Once: to end a collection takes a second."""


@pytest.fixture
def suite(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """All cases of `SUITE`, as pytest collects them."""
    if not _COLLECTED:
        _COLLECTED.extend(_collect(request.getfixturevalue("pytester")))
    return _COLLECTED


def _collect(pytester: pytest.Pytester) -> list[pytest.Item]:
    marks = ("slow", "long", "draws", "cover")
    pytester.makeini("[pytest]\nmarkers =\n" + "".join(f"  {mark}:\n" for mark in marks))
    return pytester.getitems(SUITE)


def written(suite: list[pytest.Item], pytester: pytest.Pytester) -> Path:
    """Under the name that it was collected by: draws depend on it."""
    return pytester.makepyfile(**{suite[0].path.stem: SUITE})


def test_drawn_cases_are_not_timed() -> None:
    """Hypothesis would fail slow ones, on a busy machine any."""
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check


Cases = list[levels.Axes]


@st.composite
def cases_of_a_test(draw: st.DrawFn) -> Cases:
    """Some, seldom all, of a product of parameters."""
    values = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    product = list(itertools.product(*map(range, values)))
    kept = draw(st.lists(st.sampled_from(product), min_size=1, max_size=60, unique=True))
    return [tuple(enumerate(one)) for one in kept]


@levels.examples(200)
@given(cases=cases_of_a_test(), strength=st.integers(0, 3))
def test_what_any_case_holds_is_held(cases: Cases, strength: int) -> None:
    """Pairs that no case holds are not waited for, and no case is chosen in vain."""

    def held(chosen: Cases) -> set[levels.Axes]:
        count = min(strength, len(cases[0]))
        return {one for case in chosen for one in itertools.combinations(case, count) if one}

    chosen = levels.covering(cases, cases, strength)
    assert held(chosen) == held(cases) and len(set(chosen)) == len(chosen)
    assert (chosen == []) is (strength == 0)
    for number in range(len(chosen)):
        assert held(chosen[:number]) != held(chosen[: number + 1])


def test_a_covering_array_is_small() -> None:
    """120 cases hold 300 pairs, and a case six of them."""
    cases = [tuple(enumerate(one)) for one in itertools.product(*[range(5)] * 3)]
    assert 25 <= len(levels.covering(cases, cases, 2)) <= 32


def test_quick_holds_every_pair_and_draws_a_few_others(suite: list[pytest.Item]) -> None:
    quick = levels.selected(suite, "quick", 0)
    assert [item for item in suite if item in quick] == quick, "in their order"
    assert ids(quick, "test_alone") and len(ids(quick, "test_few")) == 10, "a few cases are all run"
    many = [item for item in quick if item.name.startswith("test_many")]
    pairs = {pair for item in many for pair in itertools.combinations(levels.axes(item), 2)}
    assert len(pairs) == 6 * 5 + 6 * 2 + 5 * 2 and 30 < len(many) < 45
    values = [item for item in quick if item.name.startswith("test_values")]
    assert {axis for item in values for axis in levels.axes(item)} == {
        *itertools.product([0], map(str, range(5))),
        *itertools.product([1], map(str, range(6))),
    }
    assert (
        len(values) == 6 + 1 and len(ids(quick, "test_draw")) == len(ids(quick, "test_later")) == 1
    )
    assert ids(quick, "test_one_is_slow") == {"test_one_is_slow[0]"}
    assert ids(quick, "test_draws") == {"test_draws[0]"}
    assert not ids(quick, "test_slow") and not ids(quick, "test_long")
    assert not ids(quick, "test_slow_values")


def test_rest_is_what_is_slow_a_larger_draw_and_what_draws_itself(suite: list[pytest.Item]) -> None:
    rest = levels.selected(suite, "rest", 0)
    assert not ids(rest, "test_alone") and not ids(rest, "test_few") and not ids(rest, "test_long")
    assert len(ids(rest, "test_slow")) == 30, "all of them"
    assert len(ids(rest, "test_slow_values")) == 6 + 3, "every value, and a tenth of the others"
    assert ids(rest, "test_one_is_slow") == {"test_one_is_slow[1]"}
    assert ids(rest, "test_draws") == {"test_draws[0]"}
    assert len(ids(rest, "test_some")) == 9, "three tenths of thirty"
    assert len(ids(rest, "test_draw")) == 3, "a tenth of thirty"
    assert len(ids(rest, "test_later")) == 30 and len(rest) == len(set(rest))


def test_no_case_is_out_of_reach(suite: list[pytest.Item]) -> None:
    """What is left out of quick comes up in the draws of some seeds; what is long, in full."""
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
    """Whatever other tests are collected beside it."""
    draws = [frozenset(ids(levels.selected(suite, level, seed))) for seed in range(20)]
    assert draws == [frozenset(ids(levels.selected(suite, level, seed))) for seed in range(20)]
    assert len(set(draws)) > 10
    part = [item for item in suite if item.name.startswith(("test_many", "test_slow"))]
    whole = levels.selected(suite, level, 7)
    assert levels.selected(part, level, 7) == [item for item in whole if item in part]


@pytest.mark.parametrize(("level", "count"), [("quick", 20), ("rest", 100), ("full", 500)])
def test_a_level_has_its_number_of_examples(
    level: levels.Level, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "_at", "quick")
    levels.choose(level)
    seen: list[int] = []

    @levels.examples(100)
    @given(n=st.integers())
    def test(n: int) -> None:
        seen.append(n)

    test()
    assert len(seen) == count
    assert [mark.name for mark in test.pytestmark] == ["draws"]


def collected(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> set[str]:
    """What pytest would run with these arguments."""
    monkeypatch.setattr(levels, "_at", "quick")  # that of this session comes back
    done = pytester.inline_run("-p", "tests.conftest", "--collect-only", "-q", *arguments)
    assert done.ret == 0
    items: Sequence[pytest.Item] = done.getcalls("pytest_collection_finish")[0].session.items
    return ids(items)


def test_a_case_that_is_named_is_run(
    suite: list[pytest.Item], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(suite, pytester)
    left_out = ids(suite, "test_many") - ids(levels.selected(suite, "quick", 0))
    for name in (min(left_out), "test_long[x]"):
        assert collected(pytester, monkeypatch, f"{file.name}::{name}") == {name}
    assert "test_long[x]" not in collected(pytester, monkeypatch, file.name)
    level = ("--level", "quick", "--seed", "0")
    asked = collected(pytester, monkeypatch, *level, file.name)
    assert asked == ids(levels.selected(suite, "quick", 0))


@pytest.mark.slow
def test_workers_run_the_same_cases(suite: list[pytest.Item], pytester: pytest.Pytester) -> None:
    """Also without a seed on the command line: those of the seed that the header tells."""
    file = written(suite, pytester)
    folder = pytester.mkpydir("tests")
    for name in ("levels.py", "drawn_lanes.py"):
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
    assert sorted(set(eight)) == ["SeededLanes", "SequentialLanes", "ThreadLanes"]
    assert len(kinds(f"{file.name}::test_eight")) == 32
    assert kinds(f"{file.name}::test_default") == ["SequentialLanes"]
