"""Losses and gradient norms under frameworks, with offload and without, as a table.

    python -m benchmarks.frameworks
    python -m benchmarks.frameworks --only Trainer Accelerate

A cell says whether all logged decimals (4) agree, in how many steps. "resumed": the run goes on
from a checkpoint of its own. Exit status 1: a cell differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.frameworks.trainers import Logged

Options = Mapping[str, Any]
STREAMED: Options = {"working": "host"}
ACCUM: dict[str, Any] = {"gradient_accumulation_steps": 5}
CHECKPOINTED: dict[str, Any] = {"gradient_checkpointing": True}
MASKED: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One script with offload and without.

    Attributes:
        run: gets the options of offload, None for the script as it was, and an empty folder.
        resumed: as `run`, from a checkpoint; returns it and what one uninterrupted run has logged.
    """

    framework: str
    name: str
    run: Callable[[Options | None, Path], Logged]
    resumed: Callable[[Options, Path], tuple[Logged, Logged]] | None = None
    offload: Options = field(default_factory=lambda: STREAMED)


def _trainer(kind: str, name: str, *, lora: bool = False, **arguments: Any) -> Case:
    from benchmarks.frameworks import trainers

    def run(offload: Options | None, folder: Path) -> Logged:
        return trainers.train(kind, folder, offload, lora=lora, arguments=arguments)

    def resumed(offload: Options, folder: Path) -> tuple[Logged, Logged]:
        saving = {"save_strategy": "steps", "save_steps": 2, **arguments}
        once = trainers.train(kind, folder, offload, lora=lora, arguments=saving)
        at = folder / "checkpoint-2"
        found = trainers.train(kind, folder, offload, lora=lora, arguments=saving, resume=at)
        return found, once

    return Case(kind, name, run, resumed)


def _accelerate(name: str, accum: int) -> Case:
    from benchmarks.frameworks import accelerated

    def run(offload: Options | None, folder: Path) -> Logged:
        _forget_accelerate()
        return accelerated.train(offload, accum=accum)

    def resumed(offload: Options, folder: Path) -> tuple[Logged, Logged]:
        saving: Any = dict(accum=accum, save=(2 * accum, folder))
        _forget_accelerate()
        once = accelerated.train(offload, **saving)
        _forget_accelerate()
        found = accelerated.train(offload, **saving, resume=folder)
        return found[: len(once) - 2], once[2:]

    return Case("Accelerate", name, run, resumed)


def _lightning(name: str, **trainer: Any) -> Case:
    from benchmarks.frameworks import with_lightning

    def run(offload: Options | None, folder: Path) -> Logged:
        return with_lightning.train(offload, folder, **trainer)

    def resumed(offload: Options, folder: Path) -> tuple[Logged, Logged]:
        from lightning.pytorch.callbacks import ModelCheckpoint

        # At the end of an epoch: within one, Lightning begins the data again.
        short = {**trainer, "limit_train_batches": 2 * trainer.get("accumulate_grad_batches", 1)}
        kept = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        once = with_lightning.train(offload, folder, callbacks=[kept], **short)
        found = with_lightning.train(offload, folder, resume=folder / "step=2.ckpt", **short)
        return found, once[2:]

    return Case("Lightning", name, run, resumed)


def _ranks(kind: str, stage: int, launcher: str = "torchrun") -> Case:
    from benchmarks.frameworks import ranks

    def run(offload: Options | None, folder: Path) -> Logged:
        _forget_accelerate()
        if offload is None:
            return ranks.run(kind, None, folder, 1)
        return ranks.launch(kind, offload, folder, 2, launcher)

    name = f"{launcher}, 2 processes, ZeRO-{stage}; without offload: 1 process"
    return Case(kind, name, run, offload={"zero_stage": stage})


def cases() -> list[Case]:
    return [
        _trainer("Trainer", "clipping"),
        _trainer("Trainer", "accumulation over masked tokens, cosine", **MASKED),
        _trainer("Trainer", "an epoch's last step is shorter", **ACCUM),
        _trainer("Trainer", "no clipping", max_grad_norm=0.0),
        _trainer("Trainer", "gradient checkpointing", **CHECKPOINTED),
        _trainer("SFTTrainer", "its defaults", **MASKED),
        _trainer("SFTTrainer", "LoRA", lora=True, **MASKED),
        _trainer("DPOTrainer", "a reference model", **MASKED),
        _trainer("DPOTrainer", "LoRA", lora=True, **MASKED),
        _accelerate("clipping", 1),
        _accelerate("accumulation", 2),
        _ranks("Trainer", 2),
        _ranks("Trainer", 3),
        _ranks("Accelerate", 2),
        _ranks("Accelerate", 3, "accelerate launch"),
        _lightning("gradient_clip_val"),
        _lightning("accumulation", accumulate_grad_batches=2),
        _ranks("Lightning", 2),
        _ranks("Lightning", 3),
    ]


def main(argv: list[str] | None = None) -> int:
    import torch

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all is built here; nothing is to be fetched
    warnings.simplefilter("ignore")  # frameworks advise on workers and pinned memory
    torch.set_num_threads(1)  # small shapes gain nothing
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frameworks")
    parser.add_argument("--only", nargs="+", metavar="FRAMEWORK", help="some of the first column")
    asked = parser.parse_args(argv)
    print("| framework | script | losses and norms | resumed |\n|---|---|---|---|", flush=True)
    right = True
    for case in cases():
        if asked.only and case.framework not in asked.only:
            continue
        cells = _fill(case)
        right = right and not any("**" in cell for cell in cells)
        print(f"| {case.framework} | {case.name} | {' | '.join(cells)} |", flush=True)
    return 0 if right else 1


def _fill(case: Case) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        expected = case.run(None, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        trained = _compared(case.run(case.offload, Path(folder)), expected)
    if case.resumed is None:
        return trained, ""
    with tempfile.TemporaryDirectory() as folder:
        return trained, _compared(*case.resumed(case.offload, Path(folder)))


def _compared(found: Logged, expected: Logged) -> str:
    if found == expected:
        return f"equal in {len(found)} steps"
    if len(found) != len(expected):
        return f"**{len(found)} steps, and {len(expected)}**"
    pairs = zip(found, expected, strict=True)
    return f"**{max(abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True)):.4f} off**"


def _forget_accelerate() -> None:
    """Its objects share their state in the process, which the last case has used."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


if __name__ == "__main__":
    sys.exit(main())
