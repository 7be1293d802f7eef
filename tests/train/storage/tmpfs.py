"""Trainings on a small file system of their own (tmpfs, mounted as root): too small, or full for
some steps. Checkpoints and the log lie there."""

from __future__ import annotations

import io
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from unittest import mock

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.events import schema
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.trainer import Trainer
from tests.train.small_job import events_of, run, small_job
from tests.train.storage.saves import Case, refuse_damage

COUNT = 60
STEPS = 12
SMALL = ("model.num_layers=1", "train.micro_batch=1", "train.eval_every=0", f"train.steps={STEPS}")
LEAST_KIB, MOST_KIB = 1200, 6000


def cases(scratch: Path) -> list[Case]:
    """Half are too small for good; the others are full for some steps."""
    kinds = {"too small": _too_small, "full for some steps": _full_meanwhile}
    names = [name for _ in range(COUNT // 2) for name in kinds]
    return [
        Case(f"{name}: {number}", partial(_on_disk, kinds[name], f"{number}"))
        for number, name in enumerate(names)
    ]


def _on_disk(train: Callable[[Path, Path, random.Random], str], seed: str, root: Path) -> str:
    disk = root / "disk"
    disk.mkdir()
    draw = random.Random(seed)
    size = draw.randrange(LEAST_KIB, MOST_KIB, 100)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", disk], check=True)
    try:
        return train(root, disk, draw)
    finally:
        subprocess.run(["umount", disk], check=True)


def _too_small(root: Path, disk: Path, draw: random.Random) -> str:
    return _checked(root, disk)


def _full_meanwhile(root: Path, disk: Path, draw: random.Random) -> str:
    first = draw.randrange(1, STEPS - 1)
    with _filled(disk, first, first + draw.randint(1, 5)):
        return _checked(root, disk)


@contextmanager
def _filled(disk: Path, first: int, last: int) -> Iterator[None]:
    """Between these steps there is not a byte left."""
    real, ballast = Trainer._between_steps, disk / "ballast"

    def between(self: Trainer) -> None:
        if first <= self.progress.step < last and not ballast.exists():
            with suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        elif self.progress.step >= last:
            ballast.unlink(missing_ok=True)
        real(self)

    with mock.patch.object(Trainer, "_between_steps", between):
        yield


def _checked(root: Path, disk: Path) -> str:
    """Train; what is saved loads, the log is whole or says what it lost."""
    job, path, output = small_job(root, *SMALL), disk / "run", io.StringIO()
    try:
        with redirect_stdout(output), redirect_stderr(output):
            code = run(job, path)
    except OffloadTrainError as error:
        assert "\n" not in str(error), error
        if path.exists():
            checkpoint.newest_good(path / "checkpoints", refuse_damage)
        return "ended with one line"
    assert code == 0 and "Traceback" not in output.getvalue()
    newest = checkpoint.newest_good(path / "checkpoints", refuse_damage)
    assert newest is not None and newest.step == STEPS
    steps = {event.step for event in events_of(path, schema.Step)}
    lost = STEPS - len(steps)
    reported = re.search(
        r"([1-9]\d*) (?:records|events) were lost", _told(path) + output.getvalue()
    )
    assert not lost or reported, (steps, output.getvalue()[-2000:])
    refused = "could not be saved" in output.getvalue() or "a checkpoint needs" in output.getvalue()
    saves = "a save refused" if refused else "all saved"
    return f"trained on, {saves}, {'events lost, and said' if lost else 'log whole'}"


def _told(path: Path) -> str:
    return " ".join(event.message for event in events_of(path, schema.Warning_))
