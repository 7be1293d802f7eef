"""Every case has its recorded program, without a race: see [Note: Canonical programs]."""

from __future__ import annotations

import pytest

from offloadtrain.step.program.operations import Dependencies
from tests.distributed.conftest import Run
from tests.oracle.cases import CASES, COVERING
from tests.oracle.programs import difference, known
from tests.oracle.record import together
from tests.oracle.runs import RaceError, limit_of, recorded

ALONE = [name for name, case in CASES.items() if case.ranks == 1 and name not in COVERING]
AMONG_RANKS = [name for name, case in CASES.items() if case.ranks > 1 and name not in COVERING]
COVERING_ALONE = [name for name, case in COVERING.items() if case.ranks == 1]
COVERING_AMONG_RANKS = [name for name, case in COVERING.items() if case.ranks > 1]
SHOWN = 40
"""Lines of a difference."""


def compare(name: str, now: str) -> None:
    before = known()[name]
    if before != now:
        lines = difference(before, now)
        more = [f"… and {len(lines) - SHOWN} more lines"] if len(lines) > SHOWN else []
        pytest.fail("\n".join([f"{name}: - recorded, + now", *lines[:SHOWN], *more]), pytrace=False)


def compare_ranks(name: str, ranks: Run) -> None:
    case = CASES[name]
    compare(name, together(ranks(case.ranks, recorded, case, limit_of(known()[name]))))


def test_every_case_is_recorded() -> None:
    assert list(CASES) == list(known())


@pytest.mark.cover(1, 1)
@pytest.mark.parametrize("name", COVERING_ALONE, ids=str)
def test_the_program_of_a_covering_case_is_the_recorded_one(name: str) -> None:
    compare(name, recorded(CASES[name], limit_of(known()[name])))


@pytest.mark.cover(1, 1)
@pytest.mark.parametrize("name", COVERING_AMONG_RANKS, ids=str)
def test_the_programs_of_covering_cases_among_ranks_are_the_recorded_ones(
    name: str, ranks: Run
) -> None:
    compare_ranks(name, ranks)


@pytest.mark.draws(0.4)
@pytest.mark.cover(0)
@pytest.mark.parametrize("name", ALONE, ids=str)
def test_the_program_is_the_recorded_one(name: str) -> None:
    compare(name, recorded(CASES[name], limit_of(known()[name])))


@pytest.mark.draws(0.6)
@pytest.mark.cover(0)
@pytest.mark.parametrize("name", AMONG_RANKS, ids=str)
def test_the_programs_of_all_ranks_are_the_recorded_ones(name: str, ranks: Run) -> None:
    compare_ranks(name, ranks)


def test_a_program_with_a_race_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute does not wait for the weights that it reads."""
    monkeypatch.setattr(Dependencies, "needs", lambda *_: None)
    with pytest.raises(RaceError, match="is not ordered after"):
        recorded(next(iter(COVERING.values())))
