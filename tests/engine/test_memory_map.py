"""The memory map is the buffer table with tensors in it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.step.layout.buffers import BufferSpec, not_late
from offloadtrain.step.layout.tiers import Tier
from tests.numerics.models import Chain, batches, loss_of

DISK: dict[str, Any] = {"state_on": "disk", "scratch_in_memory": True, "precision": "bf16"}
OPTIONS: dict[str, dict[str, Any]] = {
    "resident": {"grad_accum_steps": 2, "sums_on": "device", "state_on": {"device": 0.5}},
    "sums on both": {"grad_accum_steps": 2, "sums_on": {"device": 0.4}, "sums_down": "working"},
    "speculative": {"update": "speculative", "clip_norm": 1.0, "checkpoint_spill": 1 << 20},
    "streamed": {"working": "host", "update": "delayed", "resident_blocks": 1},
    "on the disk": {"working": "disk", "grad_on": "disk", "state": "split16", **DISK},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_row_has_memory_of_its_size_and_only_parts_share_any(
    options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    if options.get("state_on") == "disk":
        options = options | {"scratch_dir": str(tmp_path)}
    model = Chain(4)
    optimizer = ot.offload(model, device="cpu", **options)
    for batch in batches(options.get("grad_accum_steps", 1)):
        optimizer.backward(loss_of(model, batch))
    optimizer.step()
    optimizer.synchronize()
    memory = optimizer._engine.residency.memory
    extents: dict[int, tuple[int, BufferSpec]] = {}
    for key, row in memory.table.rows.items():
        if row.on_first_use and key not in memory:
            continue
        flat = memory[key].flat
        assert (flat.numel(), str(flat.dtype)) == (row.numel, f"torch.{row.dtype}"), key
        if row.within is None:
            extents[flat.data_ptr()] = flat.nbytes, row
        else:
            parent, offset = row.within
            assert flat.data_ptr() == memory[parent].flat.data_ptr() + offset, key
    ordered = sorted(extents.items())
    for (start, (nbytes, row)), (following, _) in itertools.pairwise(ordered):
        assert start + nbytes <= following, row
    for tier in Tier:
        rows = [row for _, row in extents.values() if row.tier is tier and not_late(row)]
        booked = {row.owner: row.bytes for row in optimizer.ledger.rows() if row.tier == tier}
        for owner in {row.owner for row in rows}:
            assert sum(row.nbytes for row in rows if row.owner == owner) == booked[owner]
    optimizer.close()
