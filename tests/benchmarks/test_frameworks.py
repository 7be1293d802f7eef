"""The table of frameworks: its cases can be made, and its cells say what differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.frameworks import __main__ as table


def test_every_case_has_options_of_its_own() -> None:
    made = table.cases()
    assert len({(case.framework, case.name) for case in made}) == len(made)
    stages = [case.offload["zero_stage"] for case in made if "2 processes" in case.name]
    assert stages == [2, 3, 2, 3, 2, 3]


def test_a_cell_that_differs_is_an_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(offload: object, folder: Path) -> list[tuple[float, float]]:
        return [(1.0, 0.0 if offload else 2.0)]

    assert table._compared([(1.0, 2.0)], [(1.0, 2.0)]) == "equal in 1 steps"
    assert table._compared([(1.0, 2.0)], []) == "**1 steps, and 0**"
    monkeypatch.setattr(table, "cases", lambda: [table.Case("Loop", "clipping", run)])
    assert table.main(["--only", "Loop"]) == 1
    assert "| Loop | clipping | **2.0000 off** |" in capsys.readouterr().out
