"""`benchmarks.paced_step` and `benchmarks.paced_ranks`: rows and ratios. Never a wall time."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from benchmarks import paced_ranks, paced_step
from benchmarks.paced_step import MILLISECONDS
from offloadtrain.config.model_shape import SIZES


@pytest.mark.slow
def test_a_step_against_its_schedule(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never faster than the schedule: it would not have taken the times it was given."""
    demo = replace(SIZES["demo"], num_layers=2, d_model=32, num_heads=2)
    monkeypatch.setattr(paced_step, "SIZES", {"demo": demo})
    monkeypatch.setattr(paced_step, "WARM_STEPS", 1)
    for name in ("run", "run_demo"):  # once for JSON and for the tables
        monkeypatch.setattr(paced_step, name, cache(getattr(paced_step, name)))
    flags = ["--layers", "2", "--steps", "2", "--rounds", "1"]
    paced_step.main([*flags, "--json"])
    values = json.loads(capsys.readouterr().out)
    assert len(values["paced"]) == 8 and values["machine"]["cores_usable"] >= 1
    for row in values["paced"]:
        assert row["busiest_ms"] <= row["schedule_ms"] * (1 + 1e-9)
        assert row["x_schedule"] > 0.95
    cases = {row["case"]: row for row in values["demo"]}
    assert cases["resident"]["x_resident"] == 1.0 and cases["exact"]["exposed_ms"] > 0
    paced_step.main(flags)
    assert "schedule" in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_on_more_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Paced copies and Adam take half of their time on two ranks: never less than compute."""
    flags = ["--ranks", "2", "--layers", "2", "--steps", "2", "--rounds", "1"]
    paced_ranks.main([*flags, "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["ranks"] for row in rows} == {1, 2} and len(rows) == 8
    for row in rows:
        assert row["efficiency"] == 1.0 if row["ranks"] == 1 else row["efficiency"] > 0
        if row["case"].startswith("paced"):
            assert row["step_ms"] > 2 * (MILLISECONDS["forward"] + MILLISECONDS["backward"])


def test_ranks_are_compared_with_their_prediction() -> None:
    """Each of two ranks has half of the copies and of Adam, and sends the rest."""
    predicted = {
        case: [paced_ranks.predicted(case, count, layers=4) for count in (1, 2)]
        for case in paced_ranks.CASES
    }
    assert predicted.pop("demo") == [None, None]
    for alone, two in predicted.values():
        assert alone == 1.0 and two is not None and 0.5 < two < 2.0
    measured = {(case, count): [50.0, 40.0, 60.0] for case in paced_ranks.CASES for count in (1, 2)}
    rows = [paced_ranks._row(case, 2, measured, 4) for case in paced_ranks.CASES]
    assert [(row.step_ms, row.efficiency) for row in rows] == [(50.0, 1.0)] * len(rows)
    assert all(case in paced_ranks.table(rows) for case in paced_ranks.CASES)


def test_flags_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--layers", "0"], ["--rounds", "-1"]):
        with pytest.raises(SystemExit):
            paced_step.main(flags)
    with pytest.raises(SystemExit):
        paced_ranks.main(["--ranks", "1,0"])
    assert capsys.readouterr().err.count("at least 1") == 3
