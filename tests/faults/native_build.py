"""One build of the extension with every native fault, each behind a switch.

The sources are copied, and the text of each fault becomes a choice: `(fault(n) ? (new) : (old))`,
or `if (fault(n)) { new } else { old }` for statements. `fault(n)` compares n with a number that the
library reads from the environment variable `PLANTED_FAULT` when it is loaded; without it no fault
is active. The sources of the repository hold none of this.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tests.faults.catalogue import CatalogueError, Fault

VARIABLE = "PLANTED_FAULT"
HEADER = "planted_fault.h"
_HEADER_TEXT = """\
#pragma once
// The active fault; 0 for none. Defined in module.cpp.
extern int planted_fault_number;
static inline bool planted_fault(int number) { return planted_fault_number == number; }
"""
_DEFINITION = f"""
#include <cstdlib>
static int read_planted_fault() {{
  const char* text = std::getenv("{VARIABLE}");
  return text ? std::atoi(text) : 0;
}}
int planted_fault_number = read_planted_fault();
"""


def with_switches(source: str, faults: Sequence[tuple[int, Fault]]) -> str:
    """Return the source with a choice in place of each fault's text.

    Raises:
        CatalogueError: the text of a fault does not occur once, or overlaps with another one's.
    """
    pieces, end = [f'#include "{HEADER}"\n'], 0
    for number, fault in sorted(faults, key=lambda pair: source.find(pair[1].old)):
        fault.apply(source)
        start = source.find(fault.old)
        if start < end:
            raise CatalogueError(f"{fault.name}: its text overlaps with that of another fault")
        condition = f"planted_fault({number})"
        if fault.switch == "statement":
            choice = f"if ({condition}) {{ {fault.new} }} else {{ {fault.old} }}"
        else:
            choice = f"({condition} ? ({fault.new}) : ({fault.old}))"
        pieces += [source[end:start], choice]
        end = start + len(fault.old)
    return "".join([*pieces, source[end:]])


def write_sources(native: Path, faults: Sequence[tuple[int, Fault]]) -> None:
    """Put the switches into a copy of the folder `native`."""
    (native / HEADER).write_text(_HEADER_TEXT)
    for file in sorted({fault.file for _, fault in faults}):
        path = native / Path(file).relative_to("native")
        here = [(number, fault) for number, fault in faults if fault.file == file]
        path.write_text(with_switches(path.read_text(), here))
    module = native / "module.cpp"
    text = module.read_text()
    if HEADER not in text:
        text = f'#include "{HEADER}"\n{text}'
    module.write_text(text + _DEFINITION)


def build(tree: Path, faults: Sequence[tuple[int, Fault]], folder: Path) -> Path:
    """Build the extension of a copy of the repository with switches; returns the library.

    Raises:
        CatalogueError: it does not compile.
    """
    folder.mkdir()
    copy = folder / "native_tree"
    shutil.copytree(tree, copy, ignore=shutil.ignore_patterns("_native*.so", "__pycache__"))
    write_sources(copy / "native", faults)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    wheels = folder / "wheels"
    process = subprocess.run(
        [*command, "--wheel-dir", str(wheels), str(copy)], capture_output=True, text=True
    )
    if process.returncode:
        raise CatalogueError(f"the native faults do not compile:\n{process.stdout[-6000:]}")
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if "/_native" in name]
        if len(names) != 1:
            raise CatalogueError("the wheel has no extension: is a C++ compiler installed?")
        archive.extract(names[0], folder)
    return folder / names[0]
