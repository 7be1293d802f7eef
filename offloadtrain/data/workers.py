"""Reading and encoding in threads or processes, in order.

A thread does where reading is all the work. Processes parse records and encode text: Python holds
its lock for the first, and for a part of the second. They are spawned, so a script that causes this
needs the usual `if __name__ == "__main__":`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial

from offloadtrain.data.cut import PIECE_BYTES, Piece
from offloadtrain.data.documents import Encoded, Reading, read_pieces
from offloadtrain.data.tokenizer import ByteTokenizer

Task = tuple[Piece, ...]

PROCESSES_FROM_BYTES = 128 << 20
"""Bytes of tables from which processes are used; starting them costs more than it saves below."""
_SLOWER = 16
"""A tokenizer is at least this many times slower than bytes, so processes pay off that much
earlier."""
FEWEST_PROCESSES = 3
"""Fewest processes that are faster than one thread with records and bytes: their results go to the
process that writes, which is as busy as one of them (benchmarks/data_speed.py)."""

_reading: Reading | None = None  # of a worker process


def encode_in_order(
    pieces: Iterable[Piece], reading: Reading, jobs: int
) -> Iterator[tuple[Task, Encoded]]:
    """Read and encode pieces in parallel and yield the results in order, a few in memory at a time.

    Raises:
        DataError, OSError: from `read_pieces`.
        BrokenExecutor: a process ended early.
    """
    tasks = list(_group(pieces))
    executor, read = _executor(tasks, reading, jobs)
    try:
        waiting: deque[tuple[Task, Future[Encoded]]] = deque()
        for task in tasks:
            waiting.append((task, executor.submit(read, task)))
            if len(waiting) > 2 * jobs:
                yield _finished(waiting)
        while waiting:
            yield _finished(waiting)
    finally:
        executor.shutdown(cancel_futures=True)


def _group(pieces: Iterable[Piece]) -> Iterator[Task]:
    """Group small text pieces; a piece of a table stays alone, since its records are counted."""
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


def _finished(waiting: deque[tuple[Task, Future[Encoded]]]) -> tuple[Task, Encoded]:
    task, future = waiting.popleft()
    return task, future.result()


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
    """Tell whether processes are sooner done than threads."""
    if not _of_bytes(reading):
        work = sum(piece.num_bytes for piece in pieces)
        return jobs > 1 and 0 < work >= PROCESSES_FROM_BYTES // _SLOWER
    parsed = sum(piece.num_bytes for piece in pieces if piece.split_hash is None)
    return jobs >= FEWEST_PROCESSES and 0 < parsed >= PROCESSES_FROM_BYTES


def _start(reading: Reading) -> None:
    """Begin a worker process: one thread of it encodes, and Ctrl-C is left to the parent, which
    ends the workers in its own time. If the parent is killed, they end too: they hold the other end
    of their queue themselves, and would wait on it for ever."""
    global _reading
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _reading = reading


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # waits for its end, however it ends
        os._exit(1)


def _read(task: Task) -> Encoded:
    assert _reading is not None
    return read_pieces(task, _reading)
