"""The loop on a GPU: it learns, and a resume gives the same bits there too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offloadtrain.config.errors import ConfigError
from offloadtrain.events import schema
from offloadtrain.train.build import assemble
from tests import levels
from tests.gpu.precision import DEVICE, DTYPES, HAS_GPU
from tests.train.small_job import assert_same_run, events_of, run, run_in_parts, small_job

pytestmark = pytest.mark.gpu


@pytest.mark.cover(0, levels.ALL)
@pytest.mark.parametrize("precision", sorted(DTYPES.keys() - {"fp32"}))
def test_resume_is_bit_exact_on_a_gpu(tmp_path: Path, precision: str) -> None:
    job = small_job(
        tmp_path,
        f"device.kind={DEVICE.type}",
        f"offload.precision={precision}",
        "train.deterministic=true",
    )
    uninterrupted, parted = tmp_path / "whole", tmp_path / "parted"
    assert run(job, uninterrupted) == 0
    run_in_parts(job, parted, 5)
    assert_same_run(parted, uninterrupted)
    losses = [e.val_loss for e in events_of(uninterrupted, schema.Eval)]
    assert losses[-1] < losses[0] - 1.0
    owners = {(row.owner, row.tier) for row in events_of(uninterrupted, schema.Memory)[-1].rows}
    assert (("activations and gradients", "device") in owners) == HAS_GPU


@pytest.mark.gpu(until="torch.cuda.get_device_properties")
def test_the_process_stays_below_its_limit(tmp_path: Path) -> None:
    kind = f"device.kind={DEVICE.type}"
    job, too_large = (
        small_job(tmp_path, kind, f"device.process_memory_limit={limit}")
        for limit in ("2 GiB", "9999 GiB")
    )
    assert torch.cuda.get_device_properties(DEVICE).total_memory > 3 << 30
    optimizer = assemble(job).optimizer
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(3 << 30, dtype=torch.uint8, device=DEVICE)
        torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    finally:
        optimizer.close()
        torch.cuda.set_per_process_memory_fraction(1.0)
    with pytest.raises(ConfigError, match="the GPU has"):
        assemble(too_large)
