"""Commands before training: `offloadtrain ls`, `cp` and `prepare`; also finds job files."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

from offloadtrain.cli.options import Flag, Json
from offloadtrain.config import job as jobs
from offloadtrain.config.errors import ConfigError, InputError, OffloadTrainError
from offloadtrain.config.toml import nearest
from offloadtrain.config.units import format_count

_FOLDER = Path(__file__).parent.parent / "jobs"


class JobExistsError(InputError):
    """The target of the copy exists already."""


def list_jobs(*, as_json: Json = False) -> None:
    """List the shipped jobs with their sizes.

    Parameters
    ----------
    as_json
        Print one line of JSON per job.
    """
    rows = [_described(name, path) for name, path in shipped_jobs().items()]
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    print(f"{'job':<18}{'parameters':>10}{'tokens/step':>13}{'steps':>8}  what it is")
    for row in rows:
        sizes = (format_count(row["params"]), format_count(row["batch_tokens"]), row["steps"])
        print("{:<18}{:>10}{:>13}{:>8}  {}".format(row["job"], *sizes, row["what"]))


def _described(name: str, path: Path) -> dict[str, Any]:
    with path.open(encoding="utf-8") as file:
        what = file.readline().lstrip("# ").strip()
    job = jobs.load(path)
    sizes = {"params": job.num_params, "batch_tokens": job.batch_tokens, "steps": job.train.steps}
    return {"job": name, **sizes, "what": what}


def copy_job(name: str, dest: Path | None = None, /) -> None:
    """Copy a shipped job into a file to edit.

    Parameters
    ----------
    name
        A name listed by `offloadtrain ls`.
    dest
        Target file or folder. Default: NAME.toml in the current folder.
    """
    source = _shipped(name)
    target = dest or Path()
    target = target / source.name if os.path.isdir(target) else target
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise JobExistsError(f"{target} exists; name another file, or remove it first") from None
    except OSError as error:
        raise OffloadTrainError(f"{target} cannot be written: {error.strerror}") from error
    print(target)
    print(f"edit it, then: offloadtrain train {target}", file=sys.stderr)


def find_job(job: str) -> Path:
    """Return the job file for a command line argument: a path, or the name of a shipped job.

    Raises:
        ConfigError: it is neither.
    """
    path = Path(job)
    looks_like_a_path = path.suffix == ".toml" or os.sep in job
    return path if looks_like_a_path or os.path.isfile(path) else _shipped(job)


def shipped_jobs() -> dict[str, Path]:
    """Return the shipped jobs by name, sorted."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def _shipped(name: str) -> Path:
    shipped = shipped_jobs()
    if name not in shipped:
        raise ConfigError(
            f"{name}: no such file, and no shipped job of this name{nearest(name, shipped) or '.'} "
            f"Shipped: {', '.join(shipped)}"
        )
    return shipped[name]


def prepare(
    source: str,
    out: Path,
    /,
    *,
    val_fraction: float = 0.05,
    tokenizer: str = "bytes",
    form: Literal["auto", "text", "chat", "completion"] = "auto",
    field: str = "text",
    chat_template: str = "",
    bad_lines: Literal["error", "skip"] = "error",
    jobs: int = 0,
    quiet: Flag = False,
) -> None:
    """Turn text or records into token files, OUT/train.bin and OUT/val.bin, and print their names.

    On stderr it prints how long the documents are, and what each data.seq_len would cut.
    A second call with the same source, tokenizer and options does nothing.

    Parameters
    ----------
    source
        A file of text, JSONL, CSV, TSV, Parquet or Arrow, a folder of them, a folder saved by
        `datasets` (save_to_disk), "hf:NAME" or "hf:NAME:SPLIT" (as `datasets` loads it), or
        "python-stdlib".
    out
        Folder for the token files; created if missing.
    val_fraction
        Share of the documents held out for validation; 0: none.
    tokenizer
        "bytes", a folder with a tokenizer of transformers, or a tokenizer.json.
    form
        Form of a record. "text": one field. "chat": `messages`, or the fields of ShareGPT or
        Alpaca; the loss counts the assistant's. "completion": `prompt` and `completion`; the loss
        counts the second. "auto": chosen by the first record's fields.
    field
        Field of a record with the text.
    chat_template
        Jinja file that renders conversations in place of the tokenizer's own template.
    bad_lines
        Action for a record that cannot be used. skip: leave it out, and name it with the reason.
    jobs
        Number of worker processes; 0: one per CPU.
    quiet
        Print no progress, and no lengths.
    """
    import numpy as np

    from offloadtrain.data import prepare as preparing
    from offloadtrain.data.lengths import length_table
    from offloadtrain.data.tokens import TokenFile
    from offloadtrain.runtime.heartbeat import HEARTBEAT
    from offloadtrain.train.log.console import Console

    with Console(quiet=quiet).never_silent("preparing"):
        done = preparing.prepare(
            source,
            out,
            val_fraction=val_fraction,
            tokenizer=tokenizer,
            form=form,
            field=field,
            chat_template=chat_template,
            bad_lines=bad_lines,
            jobs=jobs,
            progress=partial(HEARTBEAT.advance, "preparing the data"),
        )
    for line in done.skipped:
        print(f"left out: {line}", file=sys.stderr)
    if done.skipped_lines:
        read = done.skipped_lines + done.train_documents + done.val_documents
        print(f"left out: {done.skipped_lines} of {read} records", file=sys.stderr)
    if done.remark:
        print(f"warning: {done.remark}", file=sys.stderr)
    what = "found, made before from the same source" if done.reused else "written"
    for path, tokens, documents in (
        (done.train, done.train_tokens, done.train_documents),
        (done.val, done.val_tokens, done.val_documents),
    ):
        if path is not None:
            plural = "" if documents == 1 else "s"
            sizes = f"{format_count(tokens)} tokens of {documents} document{plural}"
            print(f"{path}: {sizes}, {what}", file=sys.stderr)
            print(path)
    if done.train_documents > 1 and not quiet:
        ends = TokenFile(done.train).document_ends()
        print(length_table(np.diff(ends, prepend=0)), file=sys.stderr)
