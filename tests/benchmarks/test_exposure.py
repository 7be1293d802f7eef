"""The planned table of docs/plan.md is what the code gives, and near its bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.exposure import STATES, TOKENS, cell

DOCS = Path(__file__).parents[2] / "docs" / "plan.md"


@pytest.mark.slow
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("state", STATES)
def test_the_table_of_the_page_is_computed_and_near_its_bound(state: str, tokens: int) -> None:
    row = cell(state, tokens)
    assert row.line in DOCS.read_text().splitlines()
    assert row.bound - 0.005 <= row.auto <= row.bound + 0.03
    assert row.auto < row.host - 0.05
