"""The loop on a GPU: it learns, and a resume gives the same bits there too."""

from __future__ import annotations

from pathlib import Path

import pytest

from offloadtrain import events
from tests.trainer.conftest import StopAfter
from tests.trainer.small_job import events_of, history, run, small_job, tensor_hashes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resume_is_bit_exact_on_a_gpu(
    tmp_path: Path, stop_after: StopAfter, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    job = small_job(
        tmp_path,
        "device.kind=cuda",
        f"device.precision={precision}",
        "train.deterministic=true",
    )
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert run(job, whole) == 0
    stop_after(5)
    assert run(job, parted) == 75
    stop_after(None)
    assert run(job, parted, resume="auto") == 0
    assert history(parted) == history(whole)
    assert tensor_hashes(parted, 12) == tensor_hashes(whole, 12)

    losses = [e.val_loss for e in events_of(whole, events.Eval)]
    assert losses[-1] < losses[0] - 1.0
    owners = {(row.owner, row.tier) for row in events_of(whole, events.Memory)[-1].rows}
    assert ("activations and gradients", "device") in owners
