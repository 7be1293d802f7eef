"""Text to token files, in parallel, with the same result for any number of jobs.

[Note: held-out documents]
Validation text consists of whole documents, chosen by a hash and not by position: of its relative
name for a text file, of its content for a line of JSONL. So the choice does not depend on the
machine, and hardly changes when the source grows. If the fraction would leave one side empty, the
nearest document moves there.

A few text files, or one among them that is most of the text, cannot be divided like this. If the
bytes of one side were less than half or more than twice the target, the end of every file is held
out instead; for a single file, always. If neither comes close, as with few lines of JSONL,
`PreparedFiles.remark` says so.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from offloadtrain.config.errors import ConfigError
from offloadtrain.data.documents import (
    PIECE_BYTES,
    Piece,
    Reading,
    SourceFile,
    Text,
    cut,
    find_files,
    hash64,
    read_pieces,
)
from offloadtrain.data.sniff import refuse_binary
from offloadtrain.data.tokenizer import tokenizer as tokenizer_named
from offloadtrain.data.tokens import DataError, Progress, TokenFile, TokenWriter

Task = tuple[Piece, ...]

_VERSION = 2  # version of the rules in this file; a new one makes cached files stale
_PROCESSES_FROM_BYTES = 64 << 20  # of JSONL; below, starting processes costs more than it saves
_SHOWN_BAD_LINES = 10
_MOST_JOBS = 4096
_LEAST_PART = 256  # bytes of a text file on either side of a cut
_FAR = 2.0  # a side with so many times more or fewer tokens than asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedFiles:
    """The files that `prepare` wrote or found.

    Attributes:
        val: None if nothing is held out.
        val_fraction: the requested share of all tokens.
        skipped_lines: bad JSONL lines skipped by this call; 0 if the files were reused.
        skipped: the first few of them, as "file:line: what is wrong: how it begins".
        reused: the files existed already, made from the same source and settings.
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
        """A sentence if the split is far from the requested one; else empty."""
        total, held = self.train_tokens + self.val_tokens, self.val_tokens
        if not held or _near(held, self.val_fraction, total):
            return ""
        return (
            f"{held} of {total} tokens are held out ({100 * held / total:.2g} %), but val_fraction "
            f"= {self.val_fraction:g} requests {100 * self.val_fraction:.2g} %: whole documents "
            f"are held out, and none of {self.train_documents + self.val_documents} come closer"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """All settings that affect the result."""

    val_fraction: float
    tokenizer: str
    field: str
    bad_lines: str

    def fingerprint(self, files: Sequence[SourceFile]) -> str:
        """Return a hash of the settings and of each file's name, size and time of change."""
        facts = [_VERSION, self.val_fraction, self.tokenizer, self.field, self.bad_lines]
        facts.append([(file.name, file.num_bytes, file.mtime_ns) for file in files])
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    val_fraction: float = 0.05,
    tokenizer: str = "bytes",
    field: str = "text",
    bad_lines: Literal["error", "skip"] = "error",
    jobs: int = 0,
    progress: Progress | None = None,
) -> PreparedFiles:
    """Make `out`/train.bin and `out`/val.bin, unless they exist and are up to date.

    Several processes may call this at once for one `out`: the first prepares, the others wait
    and find it done. A script that calls this on much JSONL needs the usual
    `if __name__ == "__main__":`, because large JSONL is parsed in processes of their own.

    Args:
        source: a text or JSONL file, a folder of them, or "python-stdlib"; see `find_files`.
        out: a folder, made if missing.
        val_fraction: of the documents, held out: see [Note: held-out documents]; 0: none.
        field: of each JSONL object, holds the text.
        bad_lines: action for a JSONL line without text: "error" or "skip".
        jobs: workers; 0: one per CPU of this process.
        progress: called in this thread with (bytes done, bytes in all).

    Raises:
        ConfigError: an invalid argument.
        DataError: nothing to read, a bad line, an unreadable file, a full disk; `out` is then
            unchanged.
    """
    if not 0.0 <= val_fraction < 1.0:
        raise ConfigError(f"val_fraction = {val_fraction:g} must be in [0, 1)")
    if bad_lines not in ("error", "skip"):
        raise ConfigError(f'bad_lines = {bad_lines!r} must be "error" or "skip"')
    if not 0 <= jobs <= _MOST_JOBS:
        raise ConfigError(f"jobs = {jobs} must be from 1 to {_MOST_JOBS}, or 0: all CPUs")
    tokenizer_named(tokenizer)
    _refuse_unguarded_script()
    settings = _Settings(
        val_fraction=val_fraction, tokenizer=tokenizer, field=field, bad_lines=bad_lines
    )
    out = Path(out)
    try:
        files = find_files(source, excluded=out.resolve())
        if found := _reuse(out, settings, settings.fingerprint(files)):
            return found
        refuse_binary(files)
        out.mkdir(parents=True, exist_ok=True)
        with _locked(out):
            found = _reuse(out, settings, settings.fingerprint(files))
            return found or _build(files, out, settings, jobs or _usable_cpus(), progress)
    except OSError as error:
        raise DataError(
            f"cannot prepare {error.filename or out}: {error.strerror or error}"
        ) from error
    except BrokenExecutor as error:
        raise DataError(
            "a worker process ended early: it ran out of memory (use fewer jobs), or "
            'the calling script lacks `if __name__ == "__main__":`'
        ) from error


def _refuse_unguarded_script() -> None:
    """End a worker that is running the caller's script again because it has no main guard.

    Otherwise it would deadlock with its parent, which holds the lock.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError('call prepare under `if __name__ == "__main__":`')


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    with open(out / ".prepare.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
    pieces = _cut_all(files, settings.val_fraction)
    known = [piece.split_hash for piece in pieces if piece.split_hash is not None]
    threshold = math.ceil(settings.val_fraction * 2.0**64)
    if threshold and all(piece.split_hash is not None for piece in pieces):
        threshold = _divide(threshold, min(known), max(known))
    for _ in range(2):
        with _writer(out / "train.bin", settings, files) as train:
            with _writer(out / "val.bin", settings, files) as val:
                tally = _Tally(sum(file.num_bytes for file in files), progress)
                reading = Reading(threshold, settings.field, settings.bad_lines == "skip")
                for task, text in _read_in_order(_group(pieces), reading, jobs):
                    tally.add(task, text, reading)
                    _append(text, train, val)
                if train.count and bool(val.count) == bool(threshold):
                    return _commit(train, val, tally, settings.val_fraction)
        if tally.lowest >= tally.highest:
            break
        threshold = _divide(threshold, tally.lowest, tally.highest)
    raise DataError(_why_not(files, tally))


def _writer(path: Path, settings: _Settings, files: Sequence[SourceFile]) -> TokenWriter:
    encoding = tokenizer_named(settings.tokenizer)
    return TokenWriter(
        path,
        vocab_size=encoding.vocab_size,
        tokenizer=encoding.name,
        fingerprint=settings.fingerprint(files),
    )


def _cut_all(files: Sequence[SourceFile], val_fraction: float) -> list[Piece]:
    """Split all files; if whole files cannot give the fraction, so that their ends can be held
    out."""
    tails = _tails(files, val_fraction)
    return [piece for file in files for piece in cut(file, tails.get(file.name, 0))]


def _tails(files: Sequence[SourceFile], val_fraction: float) -> dict[str, int]:
    """Return name → bytes at its end to hold out; empty if whole files are held out."""
    if not val_fraction or any(file.is_jsonl for file in files):
        return {}
    ends = {file.name: round(file.num_bytes * val_fraction) for file in files}
    if len(files) == 1:
        size = files[0].num_bytes
        return {name: min(max(end, 1), size - 1) for name, end in ends.items()}
    hashes = {file.name: hash64(os.fsencode(file.name)) for file in files}
    chosen = math.ceil(val_fraction * 2.0**64)
    threshold = _divide(chosen, min(hashes.values()), max(hashes.values()))
    total = sum(file.num_bytes for file in files)
    whole = sum(file.num_bytes for file in files if hashes[file.name] < threshold)
    if _near(whole, val_fraction, total):
        return {}
    sizes = {file.name: file.num_bytes for file in files}
    tails = {
        name: end for name, end in ends.items() if _LEAST_PART <= end <= sizes[name] - _LEAST_PART
    }
    return tails if _near(sum(tails.values()), val_fraction, total) else {}


def _near(held: int, fraction: float, total: int) -> bool:
    """Return whether both sides are near their targets."""
    sides = (held, fraction * total), (total - held, (1 - fraction) * total)
    return all(asked / _FAR <= found <= asked * _FAR for found, asked in sides)


def _divide(threshold: int, lowest: int, highest: int) -> int:
    """Move the threshold just enough to leave a document on each side, if there are two."""
    return max(min(threshold, highest), lowest + 1)


def _group(pieces: Iterable[Piece]) -> Iterator[Task]:
    """Group small text pieces; a JSONL piece stays alone, since its lines are counted."""
    group: list[Piece] = []
    num_bytes = 0
    for piece in pieces:
        size = piece.stop - piece.start
        if group and (num_bytes + size > PIECE_BYTES or piece.split_hash is None):
            yield tuple(group)
            group, num_bytes = [], 0
        group.append(piece)
        num_bytes += PIECE_BYTES if piece.split_hash is None else size
    yield tuple(group)


def _read_in_order(
    tasks: Iterable[Task], reading: Reading, jobs: int
) -> Iterator[tuple[Task, Text]]:
    """Read tasks in parallel and yield them in order, a few in memory at a time."""
    tasks = list(tasks)
    executor = _executor(tasks, jobs)
    try:
        waiting: deque[tuple[Task, Future[Text]]] = deque()
        for task in tasks:
            waiting.append((task, executor.submit(read_pieces, task, reading)))
            if len(waiting) > 2 * jobs:
                yield _finished(waiting)
        while waiting:
            yield _finished(waiting)
    finally:
        executor.shutdown(cancel_futures=True)


def _finished(waiting: deque[tuple[Task, Future[Text]]]) -> tuple[Task, Text]:
    task, future = waiting.popleft()
    return task, future.result()


def _executor(tasks: Iterable[Task], jobs: int) -> Executor:
    """Return threads for reading, processes for parsing JSON, which would hold the GIL."""
    jsonl = (piece for task in tasks for piece in task if piece.split_hash is None)
    if jobs > 1 and sum(piece.stop - piece.start for piece in jsonl) >= _PROCESSES_FROM_BYTES:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(jobs, mp_context=context, initializer=_ignore_interrupt)
    return ThreadPoolExecutor(jobs)


def _ignore_interrupt() -> None:
    """Leave Ctrl-C to the parent, which ends the workers in its own time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


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
    _path: str = ""  # the current JSONL file, and its lines so far
    _lines: int = 0

    def add(self, task: Task, text: Text, reading: Reading) -> None:
        self.lowest = min(self.lowest, text.lowest)
        self.highest = max(self.highest, text.highest)
        self._add_lines(task[-1].file.path, text, reading)
        self.done_bytes += sum(piece.stop - piece.start for piece in task)
        if self.progress:
            self.progress(self.done_bytes, self.total_bytes)

    def _add_lines(self, path: str, text: Text, reading: Reading) -> None:
        if path != self._path:
            self._path, self._lines = path, 0
        for number, problem in text.bad:
            self._note(f"{path}:{self._lines + number + 1}: {problem}", reading)
        self._lines += text.lines

    def _note(self, bad_line: str, reading: Reading) -> None:
        if not reading.keep_going:
            raise DataError(f'{bad_line}\nset bad_lines = "skip" to skip such lines')
        self.skipped_lines += 1
        if len(self.skipped) < _SHOWN_BAD_LINES:
            self.skipped.append(bad_line)


def _append(text: Text, train: TokenWriter, val: TokenWriter) -> None:
    train.write(np.frombuffer(b"".join(text.train), dtype=np.uint8))
    val.write(np.frombuffer(b"".join(text.val), dtype=np.uint8))
    train.documents += text.train_documents
    val.documents += text.val_documents


def _commit(
    train: TokenWriter, val: TokenWriter, tally: _Tally, val_fraction: float
) -> PreparedFiles:
    """Publish both files; an old validation file without a successor is removed."""
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
        return f"{where}: no line holds text ({tally.skipped_lines} skipped)"
    return f"{where}: a single document, so none can be held out; set val_fraction = 0"
