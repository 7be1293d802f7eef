"""`python -m tests.distributed.faulty_job POINT[:ACTION] STEP RANK train …`: offloadtrain, but in
the first attempt one rank fails at a point of a step, without a word: it is killed as the kernel
would, stopped, or hangs. The time of the fault goes to the file that $FAULT_AT names."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from offloadtrain.cli import main as command_line
from offloadtrain.engine.engine import Engine
from offloadtrain.model.transformer import Transformer
from offloadtrain.optim import AdamW
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.train import build
from offloadtrain.train.checkpoint.save import TensorWriter
from offloadtrain.train.trainer import Trainer, UnflushedTrainer

POINTS: dict[str, tuple[Any, str]] = {
    "forward": (Transformer, "forward"),
    "backward": (Engine, "deliver"),
    "reduce-scatter": (Ranks, "reduce_scatter"),
    "adam": (AdamW, "update"),
    "all-gather": (Ranks, "all_gather"),
    "checkpoint": (TensorWriter, "write"),
    "error": (Transformer, "forward"),
}
MORE_POINTS: dict[str, tuple[Any, str]] = {
    "building": (build, "open_tokens"),
    "evaluation": (Trainer, "_evaluate"),
}


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _wait() -> None:
    threading.Event().wait()


def _read() -> None:
    """A read that nobody answers."""
    os.read(os.pipe()[0], 1)


def _lock() -> None:
    """A call that keeps the interpreter's lock: no thread of Python runs any more."""
    ctypes.PyDLL(None).pause()


def _fail() -> NoReturn:
    raise FloatingPointError("something of its own")


ACTIONS: dict[str, Callable[[], None]] = {
    "kill": _kill,
    "stop": _stop,
    "wait": _wait,
    "read": _read,
    "lock": _lock,
    "error": _fail,
}


def arm(point: str, action: str, step: int) -> None:
    """The first call of the point in the step after `step` is the last thing that happens."""
    owner, name = (POINTS | MORE_POINTS)[point]
    original: Callable[..., Any] = getattr(owner, name)
    live = point == "building"

    def last(*args: Any, **kwargs: Any) -> Any:
        if live:
            if "FAULT_AT" in os.environ:
                Path(os.environ["FAULT_AT"]).write_text(str(time.time()))
            ACTIONS[action]()
        return original(*args, **kwargs)

    setattr(owner, name, last)
    for kind in (Trainer, UnflushedTrainer):
        take = kind._step

        def watched(trainer: Any, *args: Any, take: Callable[..., Any] = take) -> Any:
            nonlocal live
            live = live or trainer.progress.step >= step
            return take(trainer, *args)

        kind._step = watched  # type: ignore[method-assign]


def main(arguments: list[str]) -> int:
    point, step, rank, *rest = arguments
    if os.environ["RANK"] == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        point, _, action = point.partition(":")
        arm(point, "error" if point == "error" else action or "kill", int(step))
    return command_line.main(rest)


def in_a_fork(output: Path, environ: dict[str, str], arguments: list[str]) -> None:
    """All of a process that was forked with torch imported: `main`, what it prints in `output`."""
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environ)
    torch.set_num_threads(1)
    sys.exit(main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
