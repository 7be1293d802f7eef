"""What a save asks of the file system, in order, and what the disk may hold if the power fails.

The model is a pessimist's. A file's content is safe once the file was fsynced; its name, once its
folder was. Everything else may be there or be lost, in any combination: names and contents know
nothing of each other, nor do two folders, and no order holds. A write that is not safe yet may be
torn between sectors of 512 or blocks of 4096 bytes; what is lost of it reads as zeros or as old
bytes.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Union

from tests.train.faulty_os import FaultyOs

MIXED = 14
"""States per combination of names in which each file has its own fate."""
MOST = 16
"""Combinations of names that are tried at one moment; of more, a draw."""

Tree = dict[str, Union[bytes, "Tree"]]
"""Name → content, of a file or a folder."""
Names = dict[int, dict[str, "File | Folder"]]
"""id of a folder whose names are not safe → those that it has kept."""


class Written(NamedTuple):
    offset: int
    data: bytes


@dataclass(eq=False)
class File:
    safe: bytes = b""
    pending: list[Written] = field(default_factory=list)

    def settle(self) -> None:
        self.safe, self.pending = written(self.safe, self.pending), []


class Entered(NamedTuple):
    """A name that a folder gets, or loses (None), and one that it loses in the same instant."""

    name: str
    node: File | Folder | None
    before: str = ""


@dataclass(eq=False)
class Folder:
    safe: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[Entered] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path) -> Folder:
        """Return what is there, all of it safe."""
        inside = sorted(path.iterdir())
        return cls({p.name: cls.of(p) if p.is_dir() else File(p.read_bytes()) for p in inside})

    def at(self, parts: tuple[str, ...]) -> File | Folder:
        node: File | Folder = self
        for part in parts:
            assert isinstance(node, Folder)
            node = entered(node.safe, node.pending)[part]
        return node

    def settle(self) -> None:
        self.safe, self.pending = entered(self.safe, self.pending), []


def written(content: bytes, writes: list[Written]) -> bytes:
    result = bytearray(content)
    for offset, data in writes:
        result.extend(bytes(max(0, offset + len(data) - len(result))))
        result[offset : offset + len(data)] = data
    return bytes(result)


def entered(names: dict[str, File | Folder], changes: list[Entered]) -> dict[str, File | Folder]:
    result = dict(names)
    for name, node, before in changes:
        result.pop(before, None)
        result.pop(name, None)
        if node is not None:
            result[name] = node
    return result


class Recorder(FaultyOs):
    """Passes calls on, one at a time, and keeps the disk as it is behind each.

    Attributes:
        moments: (the call, the folder `root` behind it).
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root, self._disk = root, Folder.of(root)
        self.moments = [("nothing", copy.deepcopy(self._disk))]
        self._opened: dict[int, File | Folder] = {}
        self._places: dict[int, int] = {}
        """Descriptor → where the next `write` goes."""
        self._one_at_a_time = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        real = super().__getattr__(name)
        effect = _EFFECTS.get(name)
        if effect is None:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._one_at_a_time:
                result = real(*args, **kwargs)
                effect(self, result, *args)
                self.moments.append((name, copy.deepcopy(self._disk)))
            return result

        return call

    def _node(self, path: Path) -> File | Folder:
        return self._disk.at(path.relative_to(self._root).parts)

    def _enter(self, path: Path, node: File | Folder | None, before: str = "") -> None:
        folder = self._node(path.parent)
        assert isinstance(folder, Folder)
        folder.pending.append(Entered(path.name, node, before))

    def _open(self, fd: int, path: Path, flags: int, *mode: int) -> None:
        if flags & os.O_CREAT:
            self._enter(path, File())
        self._opened[fd], self._places[fd] = self._node(path), 0

    def _write(self, count: int, fd: int, data: memoryview) -> None:
        self._pwrite(count, fd, data, self._places[fd])
        self._places[fd] += count

    def _pwrite(self, count: int, fd: int, data: memoryview, offset: int) -> None:
        file = self._opened[fd]
        assert isinstance(file, File)
        file.pending.append(Written(offset, bytes(data[:count])))

    def _posix_fallocate(self, _: None, fd: int, offset: int, count: int) -> None:
        self._pwrite(count, fd, memoryview(bytes(count)), offset)

    def _fsync(self, _: None, fd: int) -> None:
        self._opened[fd].settle()

    def _mkdir(self, _: None, path: Path, *mode: int) -> None:
        self._enter(path, Folder())

    def _rename(self, _: None, source: Path, target: Path) -> None:
        assert source.parent == target.parent
        self._enter(target, self._node(source), source.name)

    def _remove(self, _: None, path: Path) -> None:
        self._enter(path, None)


_EFFECTS: dict[str, Callable[..., None]] = {
    "open": Recorder._open,
    "write": Recorder._write,
    "pwrite": Recorder._pwrite,
    "posix_fallocate": Recorder._posix_fallocate,
    "fsync": Recorder._fsync,
    "mkdir": Recorder._mkdir,
    "rename": Recorder._rename,
    "unlink": Recorder._remove,
    "rmdir": Recorder._remove,
}


# ---- what may be left


def states(top: Folder, draw: random.Random) -> Iterator[Callable[[], Tree]]:
    """Every combination of names, or a draw of them; for each, what may become of the contents.

    Each is made when it is called, and again the same.
    """
    unsafe = [folder for folder in _folders(top, set()) if folder.pending]
    for choice in _choices(sum(len(folder.pending) for folder in unsafe), draw):
        left = iter(choice)
        names = {
            id(folder): entered(folder.safe, [e for e in folder.pending if next(left)])
            for folder in unsafe
        }
        for way in (*_WAYS, *[None] * MIXED):
            yield partial(_made, top, names, way, draw.random())


def _choices(count: int, draw: random.Random) -> list[tuple[bool, ...]]:
    if 2**count <= MOST:
        return list(itertools.product((False, True), repeat=count))
    some = {tuple(draw.random() < 0.5 for _ in range(count)) for _ in range(MOST - 2)}
    return [(False,) * count, (True,) * count, *sorted(some)]


def _folders(folder: Folder, visited: set[int]) -> Iterator[Folder]:
    """Every folder that has, had or may get a name."""
    if id(folder) in visited:
        return
    visited.add(id(folder))
    yield folder
    for node in (*folder.safe.values(), *(change.node for change in folder.pending)):
        if isinstance(node, Folder):
            yield from _folders(node, visited)


def _made(top: Folder, names: Names, way: Way | None, seed: float) -> Tree:
    """`way`: of all files; None: each file its own."""
    draw = random.Random(seed)

    def tree(folder: Folder) -> Tree:
        inside = names.get(id(folder), folder.safe)
        return {
            name: tree(node) if isinstance(node, Folder) else left(node)
            for name, node in sorted(inside.items())
        }

    def left(file: File) -> bytes:
        if not file.pending:
            return file.safe
        return (way or draw.choice((*_WAYS, _torn, _torn)))(file, draw)

    return tree(top)


def _lost(file: File, draw: random.Random) -> bytes:
    return file.safe


def _whole(file: File, draw: random.Random) -> bytes:
    return written(file.safe, file.pending)


def _sizes_only(file: File, draw: random.Random) -> bytes:
    return file.safe.ljust(len(written(file.safe, file.pending)), b"\0")


def _reordered(file: File, draw: random.Random) -> bytes:
    """Any of the writes are lost."""
    return written(file.safe, [write for write in file.pending if draw.random() < 0.5])


def _torn(file: File, draw: random.Random) -> bytes:
    """Some sectors are lost, and the file may end early."""
    sector, old = draw.choice((512, 4096)), draw.choice((b"\0", b"\xa5"))
    complete = bytearray(written(file.safe, file.pending))
    for at in range(0, len(complete), sector):
        if draw.random() < 0.5:
            size = len(complete[at : at + sector])
            complete[at : at + sector] = file.safe[at : at + sector].ljust(size, old)
    shortest = min(len(file.safe), len(complete))
    return bytes(complete[: draw.choice([len(complete), draw.randint(shortest, len(complete))])])


Way = Callable[[File, random.Random], bytes]
_WAYS: tuple[Way, ...] = (_lost, _whole, _sizes_only, _reordered, _torn)
