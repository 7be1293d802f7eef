"""Loss of power between any two calls of a save: every state that the disk may be left in."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.train.faulty_os import through
from tests.train.storage.linked_ranks import on_threads
from tests.train.storage.recorder import Recorder, Tree, states
from tests.train.storage.saves import KINDS, NEW, Case, Kind, one_thread

SEED = 1


def cases(scratch: Path) -> list[Case]:
    """Every state of every kind of save, once."""
    return [case for kind in KINDS for case in _of(kind, scratch)]


def _of(kind: Kind, scratch: Path) -> list[Case]:
    root = scratch / f"recorded-{kind.name}"
    folder, recorder, returned = record(kind, root)
    draw, known, made = random.Random(SEED), set[int](), []
    for at, (call, top) in enumerate(recorder.moments):
        allowed: set[int | None] = {NEW} if at >= returned else {kind.newest, NEW}
        for state in states(top, draw):
            # Of a state that several moments may leave, the first behind the return asks more.
            if (key := hash((_frozen(state()), at >= returned))) not in known:
                known.add(key)
                title = f"{kind.name}: behind call {at} ({call})"
                inside = folder.relative_to(root)
                made.append(Case(title, partial(_lost_power, kind, state, inside, allowed)))
    return made


def record(kind: Kind, root: Path) -> tuple[Path, Recorder, int]:
    """Save once; return the folder, the record, and the moment at which the save had returned."""
    root.mkdir()
    folder = kind.prepare(root)
    recorder = Recorder(root)
    with through(recorder):
        raised = on_threads(kind.ranks, lambda ranks: kind.save(folder, ranks))
        returned = len(recorder.moments) - 1
        kind.prune(folder)
    assert raised == [None] * kind.ranks, raised
    return folder, recorder, returned


def _frozen(tree: Tree) -> object:
    """Return it as something that has a hash."""
    return tuple((k, v if isinstance(v, bytes) else _frozen(v)) for k, v in tree.items())


def _lost_power(
    kind: Kind, state: Callable[[], Tree], inside: Path, allowed: set[int | None], root: Path
) -> str:
    _lay(state(), root)
    with one_thread():
        newest = kind.check_newest(root / inside, allowed)
    return "saved" if newest == NEW else "the one before"


def _lay(tree: Tree, folder: Path) -> None:
    for name, content in tree.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            (folder / name).mkdir()
            _lay(content, folder / name)
