"""`python -m tests.distributed.faulty_job POINT STEP RANK train …`: offloadtrain, but in the first
attempt one rank kills itself in a step: as the kernel would, without a word."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offloadtrain.cli import main as command_line
from offloadtrain.engine.engine import Engine
from offloadtrain.hardware import atomic_io
from offloadtrain.model.transformer import Transformer
from offloadtrain.optim import AdamW
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.train.trainer import Trainer

POINTS: dict[str, tuple[Any, str]] = {
    "forward": (Transformer, "forward"),
    "backward": (Engine, "deliver"),
    "reduce-scatter": (Ranks, "reduce_scatter"),
    "adam": (AdamW, "update"),
    "all-gather": (Ranks, "all_gather"),
    "checkpoint": (atomic_io, "write_file"),
    "error": (Transformer, "forward"),
}


def arm(point: str, step: int) -> None:
    """The first call of the point in the step after `step` is the last thing that happens."""
    owner, name = POINTS[point]
    whole: Callable[..., Any] = getattr(owner, name)
    live = False

    def last(*args: Any, **kwargs: Any) -> Any:
        if live and point == "error":
            raise FloatingPointError("something of its own")
        if live:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args, **kwargs)

    setattr(owner, name, last)
    take = Trainer._step

    def watched(trainer: Trainer, *args: Any) -> Any:
        nonlocal live
        live = live or trainer.progress.step >= step
        return take(trainer, *args)

    Trainer._step = watched  # type: ignore[method-assign]


def main(arguments: list[str]) -> int:
    point, step, rank, *rest = arguments
    if os.environ["RANK"] == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        arm(point, int(step))
    return command_line.main(rest)


def in_a_fork(said: Path, environ: dict[str, str], arguments: list[str]) -> None:
    """All of a process that was forked with torch imported: `main`, what it prints in `said`."""
    with said.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environ)
    torch.set_num_threads(1)
    sys.exit(main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
