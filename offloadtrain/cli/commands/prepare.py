"""`offloadtrain prepare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from offloadtrain.config.units import format_count
from offloadtrain.train.log.console import ProgressBar


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
    quiet: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Turn text or records into token files, OUT/train.bin and OUT/val.bin, and print their names.

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
        "bytes", a folder with a tokenizer of transformers, a tokenizer.json, or a .tiktoken file.
    form
        Form of a record. "text": one field. "chat": `messages`; the loss counts the assistant's.
        "completion": `prompt` and `completion`; the loss counts the second. "auto": chosen by the
        first record's fields.
    field
        Field of a record with the text.
    chat_template
        Jinja file that renders conversations in place of the tokenizer's own template.
    bad_lines
        Action for a record that cannot be used.
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
        form=form,
        field=field,
        chat_template=chat_template,
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
