"""The optimizer's state in files of frameworks: each bit is checked before it is used."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import nn

import offloadtrain as ot
from offloadtrain.integrations import checkpoint_files
from offloadtrain.integrations.checkpoint_files import CheckpointError


def test_a_changed_bit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """In tensors, in their description and in the directory of the file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    optimizer = ot.offload(model, ot.AdamW(lr=0.01), device="cpu")
    checkpoint_files.save_state(optimizer, tmp_path)
    (path,) = tmp_path.glob("offload_rank*.pt")
    content, draw = path.read_bytes(), random.Random(0)
    tensors = content.index(optimizer.state_dict()["state"][0]["master"].numpy().tobytes())
    for at in [tensors, tensors + 7, *draw.sample(range(len(content)), 60)]:
        changed = bytearray(content)
        changed[at] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            state = checkpoint_files.read_file(path)
        except CheckpointError as error:
            assert "cannot be read" in str(error)
            continue
        assert at not in range(tensors, tensors + 1024), "a bit of a tensor"
        for key, entry in optimizer.state_dict()["state"].items():  # padding, or a time
            assert all(torch.equal(state["state"][key][name], x) for name, x in entry.items())
    path.write_bytes(content)
    checkpoint_files.load_state(optimizer, tmp_path)
    optimizer.close()
