"""A disk that refuses any call of a save: once, for some calls, or for good."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

from offloadtrain.train.checkpoint.manifest import CheckpointError
from tests.train.faulty_os import FaultyOs, through
from tests.train.storage.kills import calls_of
from tests.train.storage.linked_ranks import on_threads
from tests.train.storage.saves import ASYNC, KINDS, NEW, Case, Kind

CODES = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
LENGTHS = (1, 3, 10**9)
"""Calls that fail: one, a few, all that follow."""


class FailingOs(FaultyOs):
    """Refuses so many calls from number `at` on."""

    def __init__(self, at: int, count: int, code: int) -> None:
        super().__init__()
        self._from, self._to, self._code = at, at + count, code

    def fails(self, number: int) -> OSError | None:
        refused = self._from <= number < self._to
        return OSError(self._code, os.strerror(self._code)) if refused else None


def cases(scratch: Path) -> list[Case]:
    """Every call of every kind of save with each error; how long it lasts takes turns."""
    ASYNC.make_reference(scratch)
    made = []
    for kind in (*KINDS, ASYNC):
        for at, name in enumerate(calls_of(kind, scratch)):
            for number, code in enumerate(CODES):
                count = LENGTHS[(at + number) % len(LENGTHS)]
                lasting = {1: "once", 3: "for a moment"}.get(count, "for good")
                title = f"{kind.name}: {errno.errorcode[code]} at call {at} ({name}), {lasting}"
                made.append(Case(title, partial(_refused, kind, at, count, code)))
    return made


def _refused(kind: Kind, at: int, count: int, code: int, root: Path) -> str:
    folder = kind.prepare(root)
    with through(FailingOs(at, count, code)):
        raised = on_threads(kind.ranks, partial(kind.perform, folder))
    published = (folder / f"step-{NEW:08d}").exists()
    assert published or all(isinstance(error, CheckpointError) for error in raised), raised
    for error in raised:
        assert error is None or isinstance(error, CheckpointError | OSError), repr(error)
        assert error is None or ("\n" not in str(error) and os.strerror(code) in str(error)), error
    newest = kind.check(folder, {NEW if published else kind.newest})
    return "saved" if newest == NEW else "refused, the one before"
