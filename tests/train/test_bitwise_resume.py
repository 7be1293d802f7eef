"""A run that was saved and stopped twice has the bits of one that was never saved: every update
mode, placement and state format."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.engine.saved_state import WORKING
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.step.layout.step_spec import SPILL_BLOCK
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.manifest import MANIFEST, DamagedCheckpointError, digest_of
from offloadtrain.train.checkpoint.restore import saved_weights
from tests.engine.test_proof import CASES, MODES, PLACEMENTS, options_of
from tests.train.bitwise import STEPS, Case, differ, parted, running, saving, whole

SPILL = 5 * SPILL_BLOCK
"""Bytes: some buckets, or a part of one."""

LANES = {"sequential": Case.lanes, "threads": lambda: ThreadLanes(longest_delay_ms=0.2)}


def case_of(mode: str, placement: str, kept: tuple[str, str], **options: Any) -> Case:
    state, precision = kept
    chosen = {**options_of(mode, precision), "state": state, "precision": precision}
    chosen["checkpoint_spill"] = SPILL
    return Case(chosen, PLACEMENTS[placement], **options)


def check(case: Case, placements: Sequence[str], folder: Path) -> int:
    """Compare a run with the same that saves, and with one of three starts, each of them with its
    weights elsewhere; return the number of resumes."""
    expected = whole(case)
    assert differ(saving(case, folder / "saving"), expected) == [], "a save changed the run"
    cases = [replace(case, placement=PLACEMENTS[one]) for one in placements]
    assert differ(parted(cases, folder / "parted"), expected) == []
    return len(cases) - 1


ALL = list(product(MODES, PLACEMENTS, CASES))


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["on the device", "streamed"])
def test_a_delay_goes_on(tmp_path: Path, placement: str) -> None:
    check(case_of("delayed", placement, ("fp32", "bf16")), [placement] * 3, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_one_run_of_each_mode(tmp_path: Path, request: Any, mode: str) -> None:
    draw = random.Random(f"{request.config.option.seed} {mode}")
    case = case_of(mode, draw.choice(sorted(PLACEMENTS)), draw.choice(CASES), accum=2)
    check(case, draw.choices(sorted(PLACEMENTS), k=3), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["on the device", "partly streamed"])
def test_a_run_goes_back_to_a_delay(tmp_path: Path, placement: str) -> None:
    """As after a spike of the loss: newer weights wait when older ones are loaded."""
    case = case_of("delayed", placement, ("split16", "bf16"))
    expected = whole(case)
    with running(case) as run:
        run.train(range(1, 4))
        run.save(tmp_path, 3)
        run.train(range(4, 6))
        run.commit()
        run.losses = run.losses[:3]
        run.load(tmp_path)
        run.train(range(4, STEPS + 1))
        assert differ((run.losses, run.bits()), expected) == []


@pytest.mark.slow
def test_weights_in_use_of_some_parameters_are_damage(tmp_path: Path) -> None:
    with running(case_of("delayed", "on the device", ("fp32", "bf16"))) as run:
        run.train(range(1, 3))
        run.save(tmp_path, 2)
        run.commit()
    (path,) = checkpoint.find(tmp_path)
    content = json.loads((path / MANIFEST).read_text())
    next(one for one in content["tensors"] if one["kind"] == WORKING)["kind"] = "other"
    (path / MANIFEST).write_text(json.dumps(content | {"sha256": digest_of(content)}))
    with pytest.raises(DamagedCheckpointError, match="weights in use of some parameters only"):
        checkpoint.open_checkpoint(path)


@pytest.mark.slow
def test_another_mode_goes_on_with_the_newest_weights(tmp_path: Path) -> None:
    delayed = case_of("delayed", "on the device", ("fp32", "bf16"))
    exact = case_of("exact", "on the device", ("fp32", "bf16"))
    with running(delayed) as run:
        run.train(range(1, 4))
        run.save(tmp_path, 3)
        run.commit()
        newest = run.bits()
    with running(exact, seed=1) as run:
        run.load(tmp_path)
        assert differ(([], run.bits()), ([], newest)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kept", CASES[:3])
def test_exports_hold_the_newest_weights(tmp_path: Path, kept: tuple[str, str]) -> None:
    with running(case_of("delayed", "streamed", kept)) as run:
        run.train(range(1, 4))
        run.save(tmp_path, 3)
        run.commit()
        (path,) = checkpoint.find(tmp_path)
        found = dict(saved_weights(checkpoint.verify(path), ot.AdamW()))
        expected = dict(run.optimizer.master_weights())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.long
def test_every_mode_placement_and_format(tmp_path: Path) -> None:
    draw = random.Random(0)
    resumes = 0
    for number, (mode, placement, kept) in enumerate(ALL):
        lanes = LANES[draw.choice(sorted(LANES))]
        case = case_of(mode, placement, kept, accum=1 + number % 2, lanes=lanes)
        others = draw.choices(sorted(PLACEMENTS), k=2)
        resumes += check(case, [placement, *others], tmp_path / f"{number}")
    print(f"{resumes} resumes of {len(ALL)} runs: 0 bits differ")
    assert resumes >= 200
