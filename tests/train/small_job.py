"""A job that trains in a second, and what its run folder says about it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from offloadtrain.cli.commands import train
from offloadtrain.config import job as jobs
from offloadtrain.config.job import Config
from offloadtrain.events import log_lines, schema

JOB = """
name = "small"
runs_dir = "{folder}/runs"
[model]
size = "debug"
d_model = 32
num_heads = 2
max_seq_len = 32
dropout = 0.1
[data]
source = "{folder}/text"
cache = "{folder}/data"
val_fraction = 0.2
seq_len = 32
[optim]
lr = 1e-2
warmup_steps = 2
[offload]
precision = "bf16"
[device]
kind = "cpu"
[train]
steps = 12
micro_batch = 4
grad_accum_steps = 2
eval_every = 4
eval_batches = 2
checkpoint_every = 3
log_every_s = 1000.0
"""

ENCODER = ("model.objective=mlm", "model.vocab_size=257", "data.packing=isolated")
"""Overrides of a job of an encoder."""

AnyEvent = TypeVar("AnyEvent", bound=schema.Event)


def write_text(folder: Path) -> None:
    """Write ten small text files that hold something to learn."""
    (folder / "text").mkdir(exist_ok=True)
    for number in range(10):
        sums = (f"{a} + {number} = {a + number}\n" for a in range(200))
        (folder / "text" / f"{number}.txt").write_text("".join(sums))


def small_job(folder: Path, *overrides: str) -> Config:
    write_text(folder)
    return jobs.loads(JOB.format(folder=folder), "small", overrides)


class StopAfter:
    """What hears signals, as if one came during the n-th step of a start."""

    wants_checkpoint = False

    def __init__(self, steps: int) -> None:
        self._left = steps

    def defer(self) -> None:
        return None

    def __enter__(self) -> StopAfter:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    @property
    def requested(self) -> bool:
        self._left -= 1
        return self._left < 0


def run(
    job: Config, path: Path | None, *, resume: str = "never", stop_after: int | None = None
) -> int:
    """Train in-process in the run folder `path`, None: a dated one; return the exit code.

    Args:
        stop_after: this start is asked to stop during its n-th step.
    """
    stopping = mock.patch.object(train, "StopRequests", lambda **_: StopAfter(stop_after or 0))
    with nullcontext() if stop_after is None else stopping:
        return train.run_job(job, jobs.dump(job), run_dir=path, resume=resume)


def run_in_parts(job: Config, path: Path, *stops: int) -> None:
    """Train in the run folder to the end, with a stop during the n-th step of each start before
    the last one."""
    for number, stop in enumerate((*stops, None)):
        resume = str(path) if number else "auto"
        assert run(job, path, resume=resume, stop_after=stop) == (0 if stop is None else 75)


def events_of(path: Path, kind: type[AnyEvent]) -> list[AnyEvent]:
    log = log_lines.read(path / "events" / "rank000.jsonl")
    return [record.event for record in log if isinstance(record.event, kind)]


def history(path: Path) -> list[tuple[Any, ...]]:
    """Return all that is exact about each step, bit for bit, as floats."""
    return [
        (e.step, e.loss, e.grad_norm, e.lr, e.loss_scale, e.skipped, e.tokens)
        for e in events_of(path, schema.Step)
    ]


def tensor_hashes(path: Path, step: int) -> dict[str, str]:
    """Return the hashes of a checkpoint's tensor files, masters and moments included."""
    folder = path / "checkpoints" / f"step-{step:08d}"
    hashes = {file.name: sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.bin")}
    assert hashes
    return hashes


def assert_same_run(path: Path, expected: Path, last: int = 12) -> None:
    """All steps and the final tensors, to the bit."""
    assert history(path) == history(expected)
    assert tensor_hashes(path, last) == tensor_hashes(expected, last)


def kinds(events: Sequence[schema.Event]) -> set[str]:
    return {event.KIND for event in events}
