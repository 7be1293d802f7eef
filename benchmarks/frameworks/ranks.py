"""What each of several processes runs, under torchrun: its losses as JSON, from rank 0.

torchrun --nproc-per-node 2 -m benchmarks.frameworks.ranks Trainer '{"zero_stage": 3}' FOLDER
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.frameworks.trainers import Logged

GLOBAL_BATCH, ACCUM = 4, 2
TRAINER: dict[str, Any] = {"gradient_accumulation_steps": ACCUM}


def run(kind: str, offload: Mapping[str, Any] | None, folder: Path, ranks: int) -> Logged:
    """Train on this rank of `ranks`, at the same global batch for any number of them."""
    from benchmarks.frameworks import accelerated, trainers, with_lightning

    batch = GLOBAL_BATCH // ranks
    if kind == "Accelerate":
        return accelerated.train(offload, accum=ACCUM, batch=batch, steps=3)
    if kind == "Lightning":
        return with_lightning.train_and_resume(offload, folder, ranks, batch, ACCUM)
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    arguments = {**TRAINER, **saving, "per_device_train_batch_size": batch}
    once = trainers.train(kind, folder, offload, arguments=arguments)
    if offload is not None:
        at = folder / "checkpoint-2"
        again = trainers.train(kind, folder, offload, arguments=arguments, resume=at)
        assert again == once, f"resumed {again}, and once {once}"
    return once


def launch(kind: str, offload: Mapping[str, Any] | None, folder: Path, ranks: int) -> Logged:
    """Start the processes; returns what rank 0 has found.

    Raises:
        subprocess.CalledProcessError: a rank has failed; its output has been shown.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", __name__, kind, json.dumps(offload), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
    found = json.loads((folder / "found.json").read_text())
    return [(loss, norm) for loss, norm in found]


def main(kind: str, offload: str, folder: str) -> None:
    import torch

    torch.set_num_threads(1)  # small shapes gain nothing
    found = run(kind, json.loads(offload), Path(folder), int(os.environ["WORLD_SIZE"]))
    if os.environ["RANK"] == "0":
        (Path(folder) / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
