"""`offloadtrain prepare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from offloadtrain.config.units import format_count
from offloadtrain.train.progress_bar import ProgressBar


def prepare(
    source: str,
    out: Path,
    /,
    *,
    val_fraction: float = 0.05,
    tokenizer: Literal["bytes"] = "bytes",
    field: str = "text",
    bad_lines: Literal["error", "skip"] = "error",
    jobs: int = 0,
    quiet: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> None:
    """Turn text into token files, OUT/train.bin and OUT/val.bin, and print their names.

    Parameters
    ----------
    source
        A text or JSONL file, a folder of them, or "python-stdlib".
    out
        Folder for the token files; created if missing.
    val_fraction
        Share of the documents held out for validation; 0: none.
    tokenizer
        Tokenizer that converts the text.
    field
        Field of each JSONL object that contains the text.
    bad_lines
        Action for a JSONL line without text.
    jobs
        Number of worker processes; 0: one per CPU.
    quiet
        Print no progress bar.
    """
    from offloadtrain.data import prepare as preparing

    bar = ProgressBar("preparing")
    done = preparing.prepare(
        source,
        out,
        val_fraction=val_fraction,
        tokenizer=tokenizer,
        field=field,
        bad_lines=bad_lines,
        jobs=jobs,
        progress=None if quiet else bar.show,
    )
    bar.end()
    for line in done.skipped:
        print(f"left out: {line}", file=sys.stderr)
    if done.remark:
        print(f"warning: {done.remark}", file=sys.stderr)
    what = "found, made before from the same source" if done.reused else "written"
    for path, tokens, documents in (
        (done.train, done.train_tokens, done.train_documents),
        (done.val, done.val_tokens, done.val_documents),
    ):
        if path is not None:
            sizes = f"{format_count(tokens)} tokens of {documents} documents"
            print(f"{path}: {sizes}, {what}", file=sys.stderr)
            print(path)
