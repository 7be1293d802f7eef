"""Sources to token files, in parallel, with the same result for any number of jobs.

`source.py` finds files, `records.py` cuts them into pieces and reads the pieces, `encode.py`
converts pieces to documents, and this module writes the documents in order.

[Note: held-out documents]
Validation text consists of whole documents, which a hash selects, not the position: the hash of the
relative name for a text file, the hash of the content for a record of a table. Therefore the choice
does not depend on the machine, and hardly changes when the source grows. If one side would be
empty, the nearest document moves to this side.

A few text files, or text files of which one has most of the text, cannot be divided like this. If
the bytes of one side would be less than half or more than twice the target, the end of every file
is held out instead; for a single file, always. If neither method comes close, for example with few
lines of JSONL, `PreparedFiles.remark` says so.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from offloadtrain.config.errors import ConfigError, OffloadTrainError, broken
from offloadtrain.config.sections import Form
from offloadtrain.data.chat import chat_template as template_of
from offloadtrain.data.encode import Encoded, Encoder, Reading, Side, Task, encode_in_order, form_of
from offloadtrain.data.records import cut, first_record, hash64
from offloadtrain.data.source import SourceFile, find_files, refuse_binary
from offloadtrain.data.tokenizer import ByteTokenizer
from offloadtrain.data.tokenizer import tokenizer as tokenizer_named
from offloadtrain.data.tokens import DataError, Progress, TokenFile, TokenWriter
from offloadtrain.hardware.file_system import lock

_LEAST_PART = 256  # smallest size in bytes of both parts of a divided text file
_FAR = 2.0  # a side with this many times more or fewer tokens than requested is far off
_VERSION = 3  # version of the rules in this package; a new version makes cached files stale
_SHOWN_BAD_LINES = 10
_MOST_JOBS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedFiles:
    """The files that `prepare` wrote or found.

    Attributes:
        val: None if nothing is held out.
        val_fraction: requested share of all tokens.
        skipped_lines: bad records skipped by this call; 0 if the files were reused.
        skipped: the first few of them, as "file:line: problem: start of the record".
        reused: the files already existed, made from the same source and settings.
    """

    train: Path
    val: Path | None
    train_tokens: int
    val_tokens: int
    train_documents: int
    val_documents: int
    val_fraction: float
    skipped_lines: int = 0
    skipped: tuple[str, ...] = ()
    reused: bool = False

    @property
    def remark(self) -> str:
        """A sentence if the split is far from the requested split; else empty."""
        total, held_out = self.train_tokens + self.val_tokens, self.val_tokens
        if not held_out or near(held_out, self.val_fraction, total):
            return ""
        return (
            f"{held_out} of {total} tokens are held out ({100 * held_out / total:.2g} %), but "
            f"val_fraction = {self.val_fraction:g} requests {100 * self.val_fraction:.2g} %: whole "
            f"documents are held out, and none of {self.train_documents + self.val_documents} come "
            "closer"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """All settings that affect the result."""

    val_fraction: float
    encoder: Encoder
    bad_lines: str

    def fingerprint(self, files: Sequence[SourceFile]) -> str:
        """Return a hash of the settings and of each file's name, size and modification time."""
        encoder = self.encoder
        facts: list[Any] = [
            *(_VERSION, self.val_fraction, self.bad_lines),
            *(encoder.tokenizer.identity, encoder.form, encoder.field),
            encoder.chat.identity if encoder.chat else "",
            [(file.name, file.num_bytes, file.mtime_ns) for file in files],
        ]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    val_fraction: float = 0.05,
    tokenizer: str = "bytes",
    form: Form | Literal["auto"] = "auto",
    field: str = "text",
    chat_template: str = "",
    bad_lines: Literal["error", "skip"] = "error",
    jobs: int = 0,
    progress: Progress | None = None,
) -> PreparedFiles:
    """Make `out`/train.bin and `out`/val.bin, unless they exist and are up to date.

    Several processes may call this at the same time for one `out`: the first prepares, and the
    other processes wait and reuse the files. A script that calls this on much data needs the usual
    `if __name__ == "__main__":`, because separate processes then encode the data.

    Args:
        source: see `find_files`.
        out: a folder, made if missing.
        val_fraction: share of held-out documents, see [Note: held-out documents]; 0: none.
        tokenizer: see `tokenizer.py`.
        form: form of records, see `encode.py`; "auto": determined by the first record's fields.
        field: the field with the text, in records of text.
        chat_template: a Jinja file; default: the tokenizer's own template.
        bad_lines: action for a record that cannot be used: "error" or "skip".
        jobs: workers; 0: one per CPU of this process.
        progress: called in this thread with (bytes done, total bytes).

    Raises:
        ConfigError: if an argument is invalid.
        DataError: for an empty source, a bad line, an unreadable file, or a full disk; `out` is
            then unchanged.
    """
    problems = broken(
        (not 0.0 <= val_fraction < 1.0, f"val_fraction = {val_fraction:g} must be in [0, 1)"),
        (
            bad_lines not in ("error", "skip"),
            f'bad_lines = {bad_lines!r} must be "error" or "skip"',
        ),
        (
            not 0 <= jobs <= _MOST_JOBS,
            f"jobs = {jobs} must be from 1 to {_MOST_JOBS}, or 0: all CPUs",
        ),
        (
            form not in ("auto", *get_args(Form)),
            f'form = {form!r} must be "auto", {", ".join(get_args(Form))}',
        ),
    )
    if problems:
        raise ConfigError(problems[0])
    _refuse_unguarded_script()
    out = Path(out)
    try:
        files = find_files(source, excluded=out.resolve())
        refuse_binary(files)
        settings = _Settings(
            val_fraction=val_fraction,
            encoder=_encoder(files, tokenizer, form, field, chat_template),
            bad_lines=bad_lines,
        )
        if prepared := _reuse(out, settings, settings.fingerprint(files)):
            return prepared
        out.mkdir(parents=True, exist_ok=True)
        with open(out / ".prepare.lock", "wb") as lock_file:
            lock(lock_file.fileno(), fcntl.LOCK_EX)
            prepared = _reuse(out, settings, settings.fingerprint(files))
            jobs = jobs or len(os.sched_getaffinity(0))
            return prepared or _build(files, out, settings, jobs, progress)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        raise (OffloadTrainError if full else DataError)(
            f"cannot prepare {error.filename2 or error.filename or out}: {error.strerror or error}"
        ) from error
    except BrokenExecutor as error:
        raise OffloadTrainError(
            "a worker process ended early: it ran out of memory (use fewer jobs), or "
            'the calling script lacks `if __name__ == "__main__":`'
        ) from error


def _encoder(
    files: Sequence[SourceFile], tokenizer: str, form: str, field: str, chat_template: str
) -> Encoder:
    """Return the encoder of these files, with one form for all of them.

    Raises:
        DataError: if a file or the tokenizer does not support the form.
    """
    words = tokenizer_named(tokenizer)
    tables = [file for file in files if file.is_table]
    first = first_record(tables[0]) if tables and form != "text" else None
    chosen: Any = form_of(first) if form == "auto" else form
    texts = [file.path for file in files if not file.is_table]
    if chosen != "text" and texts:
        raise DataError(
            f"{texts[0]} is text, and the records of this source are of the form {chosen!r}: leave "
            'it out, or set form = "text"'
        )
    of_messages = first is not None and isinstance(first.get("prompt"), list)
    renders = chosen == "chat" or (chosen == "completion" and of_messages)
    if chat_template and not renders:
        raise DataError(
            f"chat_template = {chat_template} renders conversations, and these records are of the "
            f"form {chosen!r}: leave it out"
        )
    return Encoder(words, chosen, field, template_of(words, chat_template) if renders else None)


def _refuse_unguarded_script() -> None:
    """End a worker that runs the caller's script again because the script has no main guard.

    Otherwise it would deadlock with its parent, which holds the lock.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError('call prepare under `if __name__ == "__main__":`')


def _reuse(out: Path, settings: _Settings, fingerprint: str) -> PreparedFiles | None:
    try:
        train = TokenFile(out / "train.bin")
        val = TokenFile(out / "val.bin") if settings.val_fraction else None
    except DataError:
        return None
    if any(file.header.fingerprint != fingerprint for file in (train, val) if file):
        return None
    return PreparedFiles(
        train=train.path,
        val=val.path if val else None,
        train_tokens=len(train),
        val_tokens=len(val) if val else 0,
        train_documents=train.header.documents,
        val_documents=val.header.documents if val else 0,
        val_fraction=settings.val_fraction,
        reused=True,
    )


def _build(
    files: Sequence[SourceFile],
    out: Path,
    settings: _Settings,
    jobs: int,
    progress: Progress | None,
) -> PreparedFiles:
    at_words = not isinstance(settings.encoder.tokenizer, ByteTokenizer)
    # If whole files cannot give the fraction, the ends of files are held out.
    tails = _tails(files, settings.val_fraction)
    pieces = [
        piece for file in files for piece in cut(file, tails.get(file.name, 0), at_words=at_words)
    ]
    known = [piece.split_hash for piece in pieces if piece.split_hash is not None]
    threshold = math.ceil(settings.val_fraction * 2.0**64)
    if threshold and known and len(known) == len(pieces):
        threshold = divide(threshold, min(known), max(known))
    for _ in range(2):
        with _writer(out / "train.bin", settings, files) as train:
            with _writer(out / "val.bin", settings, files) as val:
                tally = _Tally(sum(piece.num_bytes for piece in pieces), progress)
                reading = Reading(settings.encoder, threshold, settings.bad_lines == "skip")
                for task, encoded in encode_in_order(pieces, reading, jobs):
                    tally.add(task, encoded, reading)
                    _append(encoded.train, train)
                    _append(encoded.val, val)
                if train.count and bool(val.count) == bool(threshold):
                    return _commit(train, val, tally, settings.val_fraction)
        if tally.lowest >= tally.highest:
            break
        threshold = divide(threshold, tally.lowest, tally.highest)
    raise DataError(_why_not(files, tally))


def _writer(path: Path, settings: _Settings, files: Sequence[SourceFile]) -> TokenWriter:
    words = settings.encoder.tokenizer
    return TokenWriter(
        path,
        vocab_size=words.vocab_size,
        tokenizer=words.name,
        tokenizer_id=words.identity,
        fingerprint=settings.fingerprint(files),
        masked=settings.encoder.masked,
    )


def _append(side: Side, writer: TokenWriter) -> None:
    if side.parts:
        writer.write(side.parts[0], side.ends, side.masks[0] if side.masks else None)


@dataclass(slots=True)
class _Tally:
    """Totals so far."""

    total_bytes: int
    progress: Progress | None
    done_bytes: int = 0
    lowest: int = 1 << 64
    highest: int = -1
    skipped_lines: int = 0
    skipped: list[str] = field(default_factory=list)
    _path: str = ""  # the current table, and its records so far
    _lines: int = 0

    def add(self, task: Task, encoded: Encoded, reading: Reading) -> None:
        self.lowest = min(self.lowest, encoded.lowest)
        self.highest = max(self.highest, encoded.highest)
        file = task[-1].file
        if file.path != self._path:
            self._path, self._lines = file.path, 0
        where = f"{file.path}:" if file.kind == "jsonl" else f"{file.path}: row "
        for number, problem in encoded.bad:
            bad_line = f"{where}{self._lines + number + 1}: {problem}"
            if not reading.keep_going:
                if self.highest >= 0:  # without an earlier good record, all may be bad
                    bad_line += (
                        "\nCorrect it, or let `prepare --bad-lines skip` leave such records out: "
                        "it counts them"
                    )
                raise DataError(bad_line)
            self.skipped_lines += 1
            if len(self.skipped) < _SHOWN_BAD_LINES:
                self.skipped.append(bad_line)
        self._lines += encoded.lines
        self.done_bytes += sum(piece.num_bytes for piece in task)
        if self.progress:
            self.progress(self.done_bytes, self.total_bytes)


def _commit(
    train: TokenWriter, val: TokenWriter, tally: _Tally, val_fraction: float
) -> PreparedFiles:
    """Publish both files; an old validation file without a new version is removed."""
    train.commit()
    if val.count:
        val.commit()
    else:
        val.path.unlink(missing_ok=True)
    return PreparedFiles(
        train=train.path,
        val=val.path if val.count else None,
        train_tokens=train.count,
        val_tokens=val.count,
        train_documents=train.documents,
        val_documents=val.documents,
        val_fraction=val_fraction,
        skipped_lines=tally.skipped_lines,
        skipped=tuple(tally.skipped),
    )


def _why_not(files: Sequence[SourceFile], tally: _Tally) -> str:
    where = files[0].path if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more"
    if tally.highest < 0:
        problem = "no line holds text"
    else:
        problem = (
            "it has a single document, so none can be held out for validation: give "
            "--val-fraction 0 (in a job, data.val_fraction = 0)"
        )
    skipped = f" ({tally.skipped_lines} skipped)" if tally.skipped_lines else ""
    left_out = "".join(f"\nleft out: {line}" for line in tally.skipped)
    return f"{where}: {problem}{skipped}{left_out}"


def _tails(files: Sequence[SourceFile], val_fraction: float) -> dict[str, int]:
    """Return the held-out bytes at the end of each file; empty if whole files are held out."""
    if not val_fraction or any(file.is_table for file in files):
        return {}
    ends = {file.name: round(file.num_bytes * val_fraction) for file in files}
    if len(files) == 1:
        size = files[0].num_bytes
        return {name: min(max(end, 1), size - 1) for name, end in ends.items()}
    hashes = {file.name: hash64(os.fsencode(file.name)) for file in files}
    chosen = math.ceil(val_fraction * 2.0**64)
    threshold = divide(chosen, min(hashes.values()), max(hashes.values()))
    total = sum(file.num_bytes for file in files)
    chosen_bytes = sum(file.num_bytes for file in files if hashes[file.name] < threshold)
    if near(chosen_bytes, val_fraction, total):
        return {}
    sizes = {file.name: file.num_bytes for file in files}
    tails = {
        name: end for name, end in ends.items() if _LEAST_PART <= end <= sizes[name] - _LEAST_PART
    }
    return tails if near(sum(tails.values()), val_fraction, total) else {}


def near(size: int, fraction: float, total: int) -> bool:
    """Return True if both sides are near their targets."""
    sides = (size, fraction * total), (total - size, (1 - fraction) * total)
    return all(target / _FAR <= actual <= target * _FAR for actual, target in sides)


def divide(threshold: int, lowest: int, highest: int) -> int:
    """Change the threshold just enough to leave a document on each side, if there are two."""
    return max(min(threshold, highest), lowest + 1)
