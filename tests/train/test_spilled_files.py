"""What is written from the spill has the bytes of what is written in place."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from offloadtrain.hardware import direct_io
from offloadtrain.runtime.lanes.seeded import SeededLanes
from offloadtrain.step.layout.step_spec import SPILL_BLOCK
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.manifest import MANIFEST
from tests.engine.test_proof import CASES, MODES, PLACEMENTS, options_of
from tests.train.bitwise import Case, running

BLOCKS = (5, 1, 1000, 14)
"""Of the spill: a bucket and a half, the least, more than all state, several buckets."""

ON_HOST = [name for name, options in PLACEMENTS.items() if options.get("state_on") != "device"]
"""Placements with state to copy."""

EACH = [
    (mode, kept, ON_HOST[number % len(ON_HOST)], BLOCKS[number % len(BLOCKS)])
    for number, (mode, kept) in enumerate(product(MODES, CASES))
]
"""Every format in every mode, placements and spills in turn."""


def files(case: Case, folder: Path) -> tuple[bytes, object]:
    """Save while later steps are trained; return the tensors' file and what the manifest says."""
    with running(case) as run:
        run.train(range(1, 3))
        run.save(folder, 2)
        run.train(range(3, 6))
        run.commit()
    (path,) = checkpoint.find(folder)
    return (path / "rank-000.bin").read_bytes(), json.loads((path / MANIFEST).read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "kept", "placement", "blocks"), EACH)
def test_a_spill_changes_no_byte(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    kept: tuple[str, str],
    placement: str,
    blocks: int,
) -> None:
    # Most fields are larger than a window: parts end in the midst of one.
    monkeypatch.setattr(direct_io, "WINDOW_BYTES", 2 * direct_io.BLOCK)
    options = {**options_of(mode, kept[1]), "state": kept[0], "precision": kept[1]}
    expected = files(Case(options, PLACEMENTS[placement]), tmp_path / "none")
    spilled = Case(options | {"checkpoint_spill": blocks * SPILL_BLOCK}, PLACEMENTS[placement])
    late = replace(spilled, lanes=lambda: SeededLanes(7, late=True))
    assert files(late, tmp_path / "spilled") == expected
