"""What each of several processes runs, under torchrun or accelerate launch.

Rank 0 writes its losses as JSON, and under Accelerate each rank the texts that it has trained on.

torchrun --nproc-per-node 2 -m benchmarks.frameworks.ranks Trainer '{"zero_stage": 3}' FOLDER
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.frameworks.trainers import Logged

GLOBAL_BATCH, ACCUM = 4, 2
_ENVIRONMENT = dict(os.environ)
"""As it was before a framework has trained in this process: some leave their variables in it."""
TRAINER: dict[str, Any] = {"gradient_accumulation_steps": ACCUM}

LAUNCHERS: dict[str, list[str]] = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node={ranks}"],
    "accelerate launch": [
        "accelerate.commands.launch",
        *("--multi_gpu", "--num_processes={ranks}", "--num_machines=1", "--main_process_port=0"),
        *("--mixed_precision=no", "--dynamo_backend=no"),
    ],
}
"""Modules that start processes, and their options. Without MPI Accelerate starts several only as if
for GPUs; the script's `Accelerator(cpu=True)` then takes gloo."""


def run(kind: str, offload: Mapping[str, Any] | None, folder: Path, ranks: int) -> Logged:
    """Train on this rank of `ranks`, at the same global batch for any number of them."""
    from benchmarks.frameworks import trainers, with_lightning

    batch = GLOBAL_BATCH // ranks
    if kind == "Accelerate":
        return _accelerated(offload, folder, batch)
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


def _accelerated(offload: Mapping[str, Any] | None, folder: Path, batch: int) -> Logged:
    from benchmarks.frameworks import accelerated, data

    texts: list[list[int]] = []

    def watch(net: Any, inputs: Mapping[str, Any]) -> None:
        assert type(net) is type(data.model()), f"the model is wrapped in {type(net).__name__}"
        texts.extend(inputs["input_ids"].tolist())

    found = accelerated.train(offload, accum=ACCUM, batch=batch, steps=3, watch=watch)
    texts_of(folder, int(os.environ.get("RANK", "0"))).write_text(json.dumps(texts))
    return found


def texts_of(folder: Path, rank: int) -> Path:
    """Return the file of the token ids that a rank has trained on, in order."""
    return folder / f"texts-{rank}.json"


def launch(
    kind: str,
    offload: Mapping[str, Any] | None,
    folder: Path,
    ranks: int,
    launcher: str = "torchrun",
) -> Logged:
    """Start the processes; returns what rank 0 has found.

    Raises:
        subprocess.CalledProcessError: a rank has failed; its output has been shown.
    """
    started = [part.format(ranks=ranks) for part in LAUNCHERS[launcher]]
    command = [sys.executable, "-m", *started, "-m", __name__]
    command += [kind, json.dumps(offload), str(folder)]
    environment = {**_ENVIRONMENT, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
    found = json.loads((folder / "found.json").read_text())
    return [(loss, norm) for loss, norm in found]


def main(kind: str, offload: str, folder: str) -> None:
    import torch

    torch.set_num_threads(1)  # small shapes gain nothing
    found = run(kind, json.loads(offload), Path(folder), int(os.environ["WORLD_SIZE"]))
    if os.environ["RANK"] == "0":
        (Path(folder) / "found.json").write_text(json.dumps(found))
    gc.collect()  # the engine's threads end before the group does, and before the interpreter
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
