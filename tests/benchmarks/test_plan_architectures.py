"""The plans of a few architectures beside their steps; one that cannot be planned is told."""

from __future__ import annotations

import pytest

from benchmarks import plan_architectures


@pytest.mark.slow
def test_plans_beside_steps(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert plan_architectures.main(["--only", "gpt2", "wav2vec2", "siglip", "dbrx"]) == 0
    printed = capsys.readouterr().out
    assert "dbrx" in printed and "cannot be traced" in printed
    assert "3 planned, 1 cannot be traced; the engine's bytes differ in 0" in printed
    assert "within 5% of 3" in printed
