"""The planted faults: each replaces a text of one source file by another one.

[Note: Planted faults]
A test earns its place by a fault that only it finds. The files `*.toml` of this folder list small
faults that a change of the source could introduce, and for each the tests that find it. Whoever
merges or removes tests runs `make test-faults` afterwards: every fault must still be found. Whoever
moves the text of a fault ports the fault in the same commit. A fault is dropped only together with
the code it was planted in, and the commit says so.

A fault has

    name       a word per idea, unique: `FAULTS=pattern` selects by it
    operator   the kind of mistake: one of `OPERATORS`
    file       the source file, from the root of the repository
    old, new   the text, which occurs once in the file, and its replacement
    about      what goes wrong
    tests      the tests that find it: `file` or `file::test`, without parameters
    level      "rest" where these are slow tests, see `tests/levels.py`; else "quick"

The text of a native fault is a whole expression, or a whole statement with `switch = "statement"`.
One build holds all of them: see `native_build.py`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = Path(__file__).resolve().parent

OPERATORS = (
    "drop a wait",
    "drop a call",
    "swap a slot",
    "swap a version",
    "swap an operand",
    "off by one",
    "wrong constant",
    "wrong dtype",
    "wrong order",
    "wrong owner",
    "wrong tier",
    "wrong unit",
    "missing clip",
    "missing check",
    "skipped flush",
    "skipped reset",
    "stale value",
    "swallowed error",
    "negated condition",
    "dropped condition",
)


class CatalogueError(Exception):
    """An entry of the list is not valid, or the source has moved away from it."""


@dataclass(frozen=True)
class Fault:
    """One planted fault; see [Note: Planted faults]."""

    name: str
    operator: str
    file: str
    old: str
    new: str
    about: str
    tests: tuple[str, ...]
    level: Literal["quick", "rest"] = "quick"
    switch: Literal["expression", "statement"] = "expression"

    @property
    def is_native(self) -> bool:
        return self.file.startswith("native/")

    def apply(self, source: str) -> str:
        """Return the source with this fault.

        Raises:
            CatalogueError: the text is missing, or occurs more than once.
        """
        count = source.count(self.old)
        if count != 1:
            raise CatalogueError(f"{self.name}: its text occurs {count} times in {self.file}")
        return source.replace(self.old, self.new)


def load(folder: Path = FOLDER) -> list[Fault]:
    """Read all faults, in the order of the files.

    Raises:
        CatalogueError: an entry lacks a key, or has an unknown one.
    """
    faults = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["fault"]:
            try:
                faults.append(Fault(**{**entry, "tests": tuple(entry["tests"])}))
            except (KeyError, TypeError) as error:
                raise CatalogueError(f"{path.name}, {entry.get('name', entry)}: {error}") from error
    return faults


def problems(faults: Sequence[Fault], root: Path = ROOT) -> list[str]:
    """Return what is wrong with the entries, a sentence each."""
    sentences = []
    names = [fault.name for fault in faults]
    sentences += [f"{name}: the name is used twice" for name in {*names} if names.count(name) > 1]
    for fault in faults:
        if fault.operator not in OPERATORS:
            sentences.append(f"{fault.name}: unknown operator '{fault.operator}'")
        if fault.old == fault.new:
            sentences.append(f"{fault.name}: it changes nothing")
        if not fault.tests:
            sentences.append(f"{fault.name}: no test is named")
        sentences += [
            f"{fault.name}: there is no test {test}"
            for test in fault.tests
            if not _test_exists(root, test)
        ]
        try:
            changed = fault.apply((root / fault.file).read_text())
        except (CatalogueError, OSError) as error:
            sentences.append(str(error))
            continue
        if fault.file.endswith(".py"):
            try:
                compile(changed, fault.file, "exec", dont_inherit=True)
            except SyntaxError as error:
                sentences.append(f"{fault.name}: {error}")
    return sentences


def _test_exists(root: Path, test: str) -> bool:
    file, _, name = test.partition("::")
    path = root / file
    return path.is_file() and (not name or f"def {name}(" in path.read_text())
