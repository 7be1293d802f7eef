"""`tools/watch.py`: what `make` says of a command that is silent."""

from __future__ import annotations

import os
from pathlib import Path

from tools.watch import compiled, relay

NINJA = """
build CMakeFiles/kernels.dir/kernels.cpp.o: CXX /src/kernels.cpp || order
build CMakeFiles/wide.dir/kernels.cpp.o: CXX /src/kernels.cpp || order
build CMakeFiles/_native.dir/pool.cpp.o: CXX /src/pool.cpp || order
build libkernels.a: AR CMakeFiles/kernels.dir/kernels.cpp.o
"""


def test_a_silence_says_which_file_is_compiled(tmp_path: Path) -> None:
    folder = tmp_path / "build/tag"
    folder.mkdir(parents=True)
    assert compiled(tmp_path / "build", 100.0) == "", "not configured yet"
    (folder / "build.ninja").write_text(NINJA)
    os.utime(folder / "build.ninja", (90, 90))
    assert compiled(tmp_path / "build", 100.0) == "", "of an earlier build"
    os.utime(folder / "build.ninja", (110, 110))
    objects = [
        folder / f"CMakeFiles/{name}.cpp.o"
        for name in ("kernels.dir/kernels", "wide.dir/kernels", "_native.dir/pool")
    ]
    said = []
    for made, time_s in ((objects[0], 90), (objects[0], 120), (objects[2], 130), (objects[1], 140)):
        made.parent.mkdir(parents=True, exist_ok=True)
        made.touch()
        os.utime(made, (time_s, time_s))
        said.append(compiled(tmp_path / "build", 100.0))
    assert said == [
        ", 0 of 3 files compiled, next kernels/kernels.cpp",
        ", 1 of 3 files compiled, next wide/kernels.cpp",
        ", 2 of 3 files compiled, next wide/kernels.cpp",
        "",
    ]
    heard: list[bytes] = []
    data, times = [None, b"x", None, b""], iter((0.0, 9.0, 20.0))
    relay("it", lambda _: data.pop(0), heard.append, lambda: next(times), lambda: ", half")
    assert heard == [b"  ... it: 9 s so far, half\n", b"x", b"\n  ... it: 20 s so far, half\n"]
