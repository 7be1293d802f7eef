"""Records to tokens and a loss mask, in threads or processes, in order.

    text        a string in one field; every token counts
    chat        a conversation, rendered by the chat template; the assistant's tokens count
    completion  `prompt` and `completion`, strings or messages; the completion's tokens count

A text, and a completion that is a string, begins and ends with the tokenizer's tokens for start and
end. A chat template writes its own tokens.

The work of a worker is pure: its result depends only on the file and the piece. Threads are enough
if reading is all the work. Processes parse records and encode text, because Python holds its lock
during parsing and during a part of encoding. Processes are spawned, so a script that causes this
needs the usual `if __name__ == "__main__":`.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from offloadtrain.boundary.safe_open import open_regular
from offloadtrain.config.sections import Form
from offloadtrain.data.chat import (
    FIELDS,
    ChatError,
    ChatTemplate,
    Mask,
    is_conversation,
    messages_of,
)
from offloadtrain.data.records import PIECE_BYTES, Bad, Piece, Record, excerpt, hash64, records
from offloadtrain.data.tokenizer import ByteTokenizer, Ids, Tokenizer
from offloadtrain.data.tokens import DataError

_COLUMNS = {"chat": FIELDS, "completion": ("prompt", "completion", "tools")}


@dataclass(frozen=True, slots=True)
class Document:
    """The tokens of one record.

    Attributes:
        split_hash: hash of the content, which decides if the record is held out.
        counted: 1 for a token that the loss counts; None: all tokens count.
    """

    split_hash: int
    tokens: Ids
    counted: Mask | None


def form_of(record: Record | None) -> Form:
    """Return the form that the fields of a record suggest."""
    if record and is_conversation(record):
        return "chat"
    if record and {"prompt", "completion"} <= record.keys():
        return "completion"
    return "text"


@dataclass(frozen=True, slots=True)
class Encoder:
    """Converts records of one form into documents.

    Attributes:
        field: the field with the text, in the form "text".
        chat: None if no conversation is rendered.
    """

    tokenizer: Tokenizer
    form: Form
    field: str
    chat: ChatTemplate | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return _COLUMNS.get(self.form, (self.field,))

    @property
    def masked(self) -> bool:
        return self.form != "text"

    def encode(self, batch: Sequence[Record]) -> list[Document | Bad | None]:
        """Return a document for each record; None for a record without text."""
        if self.form == "text":
            return self._texts(batch)
        return [self._encode_record(record) for record in batch]

    def _texts(self, batch: Sequence[Record]) -> list[Document | Bad | None]:
        documents: list[Document | Bad | None] = []
        good, texts = [], []
        for number, record in enumerate(batch):
            raw = self._raw(record)
            documents.append(raw if isinstance(raw, Bad) else None)
            if isinstance(raw, bytes) and raw:
                good.append((number, hash64(raw)))
                texts.append(record[self.field])
        encoded = self.tokenizer.encode_batch(texts)
        for (number, split_hash), ids in zip(good, encoded, strict=True):
            documents[number] = Document(split_hash, self.ended(ids), None)
        return documents

    def _raw(self, record: Record) -> bytes | Bad:
        """Return the text in UTF-8. With bytes as tokens, half a surrogate pair is allowed."""
        text = record.get(self.field)
        if not isinstance(text, str):
            problem = f'field "{self.field}" is not a string'
            if self.field not in record:
                problem = f'no field "{self.field}"{_fields_of(record)}'
            return Bad(f"{problem}: {excerpt(json.dumps(record, default=str).encode())}")
        errors = "surrogatepass" if isinstance(self.tokenizer, ByteTokenizer) else "strict"
        try:
            return text.encode("utf-8", errors)
        except UnicodeEncodeError:
            return Bad(f'field "{self.field}" is not Unicode: it holds half a surrogate pair')

    def ended(self, ids: Ids, *, begins: bool = True, ends: bool = True) -> Ids:
        """Return the tokens with the tokens for the start and the end of a document."""
        begin = self.tokenizer.begin if begins else ()
        end = (self.tokenizer.end_of_document,) if ends else ()
        parts = (np.array(begin, ids.dtype), ids, np.array(end, ids.dtype))
        return np.concatenate(parts) if begin or end else ids

    def _encode_record(self, record: Record) -> Document | Bad:
        try:
            tools = json.loads(raw) if isinstance(raw := record.get("tools"), str) else raw
            if self.form == "chat":
                values = [messages_of(record)]
                assert self.chat is not None
                ids, counted = self.chat.encode(values[0], tools)
            else:
                values = _prompt_and_completion(record)
                if isinstance(values[0], str):
                    ids, counted = self._completion(*values)
                elif self.chat is None:
                    raise ChatError(
                        "its prompt is a list of messages, but that of the first record was a "
                        "string"
                    )
                else:
                    ids, counted = self.chat.encode_completion(values[0], values[1], tools)
        except (ChatError, UnicodeEncodeError, json.JSONDecodeError) as error:
            return Bad(f"{error}: {excerpt(repr(record).encode('utf-8', 'replace'))}")
        return Document(hash64(json.dumps(values, sort_keys=True).encode()), ids, counted)

    def _completion(self, prompt: str, completion: str) -> tuple[Ids, Mask]:
        """Return the tokens of prompt + completion and their mask. Counted tokens begin at the end
        of the prompt's own tokens, or at a token that spans both (as in TRL)."""
        alone, together = self.tokenizer.encode_batch([prompt, prompt + completion])
        least = min(len(alone), len(together))
        differ = np.flatnonzero(alone[:least] != together[:least])
        shared = int(differ[0]) if differ.size else least
        tokens = self.ended(together)
        counted = np.zeros(len(tokens), dtype=np.uint8)
        counted[len(self.tokenizer.begin) + shared :] = 1
        return tokens, counted


def _prompt_and_completion(record: Record) -> list[Any]:
    """Return prompt and completion, as strings or lists of messages.

    Raises:
        ChatError: if a field is missing or has another type.
    """
    values: list[Any] = [record.get(name) for name in ("prompt", "completion")]
    if all(isinstance(value, str) for value in values):
        if not values[1].strip():
            raise ChatError("its completion is empty")
        return values
    if not all(isinstance(value, list) for value in values):
        there = ", ".join(ascii(key) for key in record) or "nothing"
        raise ChatError(
            f"prompt and completion must both be a string or a list of messages; there is {there}"
        )
    return [messages_of({"messages": value}) for value in values]


def _fields_of(record: Record) -> str:
    """Return a hint with the fields that the user may have meant."""
    if (form := form_of(record)) != "text":
        return f' (its fields are those of the form "{form}": choose it with --form {form})'
    if {"chosen", "rejected"} <= record.keys():
        return " (chosen and rejected are preferences: examples/dpo.py trains on them)"
    texts = [ascii(key) for key, value in record.items() if isinstance(value, str)]
    if texts:
        pair = ", or rename a question to prompt and its answer to completion" * (len(texts) > 1)
        return f" (text is in {', '.join(texts[:4])}: choose one with --field{pair})"
    there = f"there is {', '.join(map(ascii, record))}" if record else "it is empty"
    return f" ({there}: conversations are read from messages or conversations)"


_BATCH = 1000  # number of records encoded in one call


@dataclass(frozen=True, slots=True)
class Reading:
    """Reading options.

    Attributes:
        threshold: documents with a smaller 64-bit hash are held out for validation.
        keep_going: count bad records instead of stopping at the first.
    """

    encoder: Encoder
    threshold: int
    keep_going: bool


@dataclass(slots=True)
class Side:
    """The tokens of the documents of one side, training or validation.

    Attributes:
        ends: index after the last token of each document that ends here.
    """

    parts: list[Ids] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    size: int = 0

    def add(self, tokens: Ids, counted: Mask | None, ends_document: bool) -> None:
        self.parts.append(tokens)
        if counted is not None:
            self.masks.append(counted)
        self.size += len(tokens)
        if ends_document:
            self.ends.append(self.size)

    def join(self) -> None:
        """Make one array of each kind, because sending it to another process is faster."""
        self.parts = [np.concatenate(self.parts)] if self.parts else []
        self.masks = [np.concatenate(self.masks)] if self.masks else []


@dataclass(slots=True)
class Encoded:
    """The documents of one or more pieces.

    Attributes:
        lowest, highest: bounds of the documents' hashes; lowest > highest if there are none.
        lines: number of records read, including bad and blank records.
        bad: (number of the record in the piece from 0, problem of the record).
    """

    train: Side = field(default_factory=Side)
    val: Side = field(default_factory=Side)
    lowest: int = 1 << 64
    highest: int = -1
    lines: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)

    def add(self, document: Document, threshold: int, ends_document: bool = True) -> None:
        split_hash = document.split_hash
        side = self.val if split_hash < threshold else self.train
        side.add(document.tokens, document.counted, ends_document)
        self.lowest = min(self.lowest, split_hash)
        self.highest = max(self.highest, split_hash)


def read_pieces(pieces: tuple[Piece, ...], reading: Reading) -> Encoded:
    """Read and encode pieces in order.

    Raises:
        OSError: if a file cannot be read.
        DataError: if a file became shorter after the search, or has another form.
    """
    encoded = Encoded()
    for piece in pieces:
        if piece.split_hash is None:
            _read_table(piece, reading, encoded)
        else:
            document = Document(piece.split_hash, _read_text(piece, reading.encoder), None)
            encoded.add(document, reading.threshold, piece.ends_document)
    encoded.train.join()
    encoded.val.join()
    return encoded


def _read_text(piece: Piece, encoder: Encoder) -> Ids:
    with open_regular(piece.file.path, follow_link=True) as file:
        file.seek(piece.start)
        raw = file.read(piece.stop - piece.start)
    if len(raw) < piece.stop - piece.start:
        raise DataError(f"{piece.file.path} became shorter while it was read")
    if isinstance(encoder.tokenizer, ByteTokenizer):
        ids = np.frombuffer(raw, np.uint8)
    else:
        try:
            (ids,) = encoder.tokenizer.encode_batch([raw.decode("utf-8")])
        except UnicodeDecodeError as error:
            raise DataError(
                f"{piece.file.path} is not UTF-8 at byte {piece.start + error.start}: convert it "
                '(iconv -f LATIN1 -t UTF-8), or set tokenizer = "bytes"'
            ) from error
    return encoder.ended(ids, begins=piece.begins_document, ends=piece.ends_document)


def _read_table(piece: Piece, reading: Reading, output: Encoded) -> None:
    stream = records(piece, reading.encoder.columns)
    while batch := list(itertools.islice(stream, _BATCH)):
        encoded = iter(
            reading.encoder.encode([record for record in batch if isinstance(record, dict)])
        )
        for record in batch:
            number, output.lines = output.lines, output.lines + 1
            document = next(encoded) if isinstance(record, dict) else record
            if isinstance(document, Bad):
                output.bad.append((number, document.problem))
                if not reading.keep_going:
                    return
            elif document is not None:
                output.add(document, reading.threshold)


Task = tuple[Piece, ...]

PROCESSES_FROM_BYTES = 128 << 20
"""Bytes of tables from which processes are used; with less, starting them costs more than it
saves."""
_SLOWER = 16
"""A tokenizer is at least this many times slower than bytes, so processes are faster from a
correspondingly smaller size."""
FEWEST_PROCESSES = 3
"""Smallest number of processes that are faster than one thread for records and bytes. Their results
go to the writing process, which has as much work as one of them (benchmarks/data_speed.py)."""

_reading: Reading | None = None  # set in a worker process


def encode_in_order(
    pieces: Iterable[Piece], reading: Reading, jobs: int
) -> Iterator[tuple[Task, Encoded]]:
    """Read and encode pieces in parallel and yield the results in order, with few in memory.

    Raises:
        DataError, OSError: from `read_pieces`.
        BrokenExecutor: if a process ended early.
    """
    tasks = list(_group(pieces))
    executor, read = _executor(tasks, reading, jobs)
    try:
        waiting: deque[tuple[Task, Future[Encoded]]] = deque()
        for task in tasks:
            waiting.append((task, executor.submit(read, task)))
            if len(waiting) > 2 * jobs:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        executor.shutdown(cancel_futures=True)


def _group(pieces: Iterable[Piece]) -> Iterator[Task]:
    """Group small text pieces; a piece of a table stays alone, because its records are counted."""
    group: list[Piece] = []
    num_bytes = 0
    for piece in pieces:
        if group and (num_bytes + piece.num_bytes > PIECE_BYTES or piece.split_hash is None):
            yield tuple(group)
            group, num_bytes = [], 0
        group.append(piece)
        num_bytes += PIECE_BYTES if piece.split_hash is None else piece.num_bytes
    if group:
        yield tuple(group)


def _executor(
    tasks: Sequence[Task], reading: Reading, jobs: int
) -> tuple[Executor, Callable[[Task], Encoded]]:
    pieces = [piece for task in tasks for piece in task]
    if _processes_pay(pieces, reading, jobs):
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(
            jobs, mp_context=context, initializer=_start, initargs=(reading,)
        )
        return pool, _read
    # Python's lock lets only one thread parse records.
    parses = _of_bytes(reading) and any(piece.split_hash is None for piece in pieces)
    return ThreadPoolExecutor(1 if parses else jobs), partial(read_pieces, reading=reading)


def _of_bytes(reading: Reading) -> bool:
    return isinstance(reading.encoder.tokenizer, ByteTokenizer)


def _processes_pay(pieces: Sequence[Piece], reading: Reading, jobs: int) -> bool:
    """Return True if processes finish earlier than threads."""
    if not _of_bytes(reading):
        work = sum(piece.num_bytes for piece in pieces)
        return jobs > 1 and 0 < work >= PROCESSES_FROM_BYTES // _SLOWER
    parsed = sum(piece.num_bytes for piece in pieces if piece.split_hash is None)
    return jobs >= FEWEST_PROCESSES and 0 < parsed >= PROCESSES_FROM_BYTES


def _start(reading: Reading) -> None:
    """Initialize a worker process: it encodes with one thread, and ignores Ctrl-C, which the parent
    handles. If the parent is killed, the worker also ends. Otherwise it would wait forever for its
    queue, because it holds both ends of the queue."""
    global _reading
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _reading = reading


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # waits for its end, for any reason
        os._exit(1)


def _read(task: Task) -> Encoded:
    assert _reading is not None
    return read_pieces(task, _reading)
