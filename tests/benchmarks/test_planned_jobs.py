"""Plans of measured jobs: the goals, the table of docs/validation.md, and the fit."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from benchmarks import planned_jobs
from benchmarks.planned_jobs import STRIDED, errors_by_value, fitted, key_of, measured
from offloadtrain.plan.search.compare import MEASURED

DOC = Path(__file__).parents[2] / "docs/validation.md"


def test_the_fit_finds_the_value_that_made_its_cells() -> None:
    """Cells without error at 2 and at 3 give these, each alone, and together what lies between."""
    errors = {
        name: {value: 1.1 ** (value - best) - 1 for value in planned_jobs.VALUES}
        for name, best in (("a", 2.0), ("b", 3.0))
    }
    assert [fitted(errors, names) for names in (["a"], ["b"], ["a", "b"])] == [2.0, 3.0, 2.5]


@pytest.mark.slow
def test_measured_steps_are_planned_without_them() -> None:
    """The engine's own, each left out of the fit, within 12 %; resident torch loops within 13 %.
    `plan --compare` prints these figures of the plan."""
    cells = [cell for cell, _ in measured()]
    errors = errors_by_value(cells)
    assert len(cells) == 12 and fitted(errors, list(errors)) == STRIDED
    left_out = {}
    for cell in cells:
        others = [key for key in errors if key != key_of(cell)]
        left_out[key_of(cell)] = errors[key_of(cell)][fitted(errors, others)]
        limit = 0.13 if "resident" in cell.name else 0.12
        assert abs(left_out[key_of(cell)]) <= limit, cell.name
    assert MEASURED.cells == len(left_out)
    assert MEASURED.median == pytest.approx(median(map(abs, left_out.values())), abs=5e-4)
    assert MEASURED.worst == pytest.approx(max(left_out.values(), key=abs), abs=5e-4)


@pytest.mark.slow
def test_the_documentation_shows_what_the_command_prints() -> None:
    """After a change: paste the first part of what `python -m benchmarks.validate_plan` prints."""
    printed = "\n".join(planned_jobs.lines()).rstrip()
    assert f"```text\n{printed}\n```" in DOC.read_text(encoding="utf-8")
