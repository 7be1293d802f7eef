"""The journal that undoes an update is small, as docs/state_formats.md says."""

from __future__ import annotations

import pytest

from benchmarks import undo_journal
from benchmarks.undo_journal import coded, entropy, journals


@pytest.mark.parametrize("state", ["fp32", "split16"])
@pytest.mark.parametrize("kind", undo_journal.KINDS)
def test_a_journal_has_about_a_byte_per_parameter(
    state: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early, when moments are far from the squares of gradients, too."""
    monkeypatch.setattr(undo_journal, "NUMEL", 1 << 13)
    monkeypatch.setattr(undo_journal, "STEPS", (20,))
    (found,) = journals(state, kind).values()
    assert 0.2 < sum(map(entropy, found)) / 8 < 0.6
    assert sum(map(coded, found)) / 8 < 1.3
