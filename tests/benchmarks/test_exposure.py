"""Tables of the pages: the exposed time that is planned, plans of architectures, journals."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plan_architectures, undo_journal
from benchmarks.exposure import STATES, TOKENS, cell
from benchmarks.undo_journal import coded, entropy, journals

DOCS = Path(__file__).parents[2] / "docs" / "plan.md"


@pytest.mark.slow
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("state", STATES)
def test_the_table_of_the_page_is_computed_and_near_its_bound(state: str, tokens: int) -> None:
    row = cell(state, tokens)
    assert row.line in DOCS.read_text().splitlines()
    assert row.bound - 0.005 <= row.auto <= row.bound + 0.03
    assert row.auto < row.host - 0.05


# ---- the plans of a few architectures beside their steps; one that cannot be planned is told


@pytest.mark.slow
def test_plans_beside_steps(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert plan_architectures.main(["--only", "gpt2", "wav2vec2", "siglip", "dbrx"]) == 0
    printed = capsys.readouterr().out
    assert "dbrx" in printed and "cannot be traced" in printed
    assert "3 planned, 1 cannot be traced; the engine's bytes differ in 0" in printed
    assert "within 5% of 3" in printed


# ---- the journal that undoes an update is small, as docs/state_formats.md says


@pytest.mark.parametrize("state", ["fp32", "split16"])
@pytest.mark.parametrize("kind", undo_journal.KINDS)
def test_a_journal_has_about_a_byte_per_parameter(
    state: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early, when moments are far from the squares of gradients, too."""
    monkeypatch.setattr(undo_journal, "NUMEL", 1 << 13)
    monkeypatch.setattr(undo_journal, "STEPS", (20,))
    (journal,) = journals(state, kind).values()
    assert 0.2 < sum(map(entropy, journal)) / 8 < 0.6
    assert sum(map(coded, journal)) / 8 < 1.3
