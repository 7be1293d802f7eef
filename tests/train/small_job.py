"""A job that trains in a second, and what its run folder says about it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from offloadtrain.cli.commands.train import run_job
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


def run(job: Config, path: Path | None, *, resume: str = "never") -> int:
    """Train in-process in the run folder `path`, None: a dated one; return the exit code."""
    return run_job(job, jobs.dump(job), run_dir=path, resume=resume)


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


def kinds(events: Sequence[schema.Event]) -> set[str]:
    return {event.KIND for event in events}
