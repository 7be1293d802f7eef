"""`offloadtrain prepare`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from offloadtrain.units import format_bytes, format_count

_BAR_CELLS = 30
_TERMINAL_INTERVAL_S, _PLAIN_INTERVAL_S = 0.1, 5.0


def prepare(
    source: str,
    out: Path,
    /,
    *,
    val_fraction: float = 0.05,
    tokenizer: str = "bytes",
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
        Folder for the token files; made if missing.
    val_fraction
        Share of the documents held out for validation; 0: none.
    tokenizer
        How text becomes tokens.
    field
        Of each JSONL object: the field with the text.
    bad_lines
        What to do about a JSONL line without text.
    jobs
        Workers; 0: as many as there are CPUs.
    quiet
        No progress bar.
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
    what = "found, made before from the same source" if done.reused else "written"
    for path, tokens, documents in (
        (done.train, done.train_tokens, done.train_documents),
        (done.val, done.val_tokens, done.val_documents),
    ):
        if path is not None:
            sizes = f"{format_count(tokens)} tokens of {documents} documents"
            print(f"{path}: {sizes}, {what}", file=sys.stderr)
            print(path)


class ProgressBar:
    """A bar on stderr if that is a terminal, and a plain line now and then if not."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._terminal = sys.stderr.isatty()
        self._shown_at = time.monotonic()
        self._shown = False

    def show(self, done_bytes: int, total_bytes: int) -> None:
        interval = _TERMINAL_INTERVAL_S if self._terminal else _PLAIN_INTERVAL_S
        now = time.monotonic()
        if now - self._shown_at < interval:
            return
        self._shown_at, self._shown = now, True
        text = self._text(done_bytes, total_bytes)
        print(f"\r{text}\x1b[K" if self._terminal else text, end="", file=sys.stderr)
        print(end="" if self._terminal else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the line that the bar was drawn on."""
        if self._terminal and self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _text(self, done_bytes: int, total_bytes: int) -> str:
        share = done_bytes / total_bytes if total_bytes else 1.0
        cells = int(share * _BAR_CELLS)
        bar = "█" * cells + "░" * (_BAR_CELLS - cells)
        sizes = f"{format_bytes(done_bytes)} of {format_bytes(total_bytes)}"
        return f"{self._label} {bar} {share:4.0%}  {sizes}"
