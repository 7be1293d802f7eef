"""Lines of a file that grows, is torn, is replaced, or lies."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offloadtrain_tui.reading.tail import Tail


def test_a_torn_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.poll() == []
    path.write_bytes(b"one\ntw")
    assert tail.poll() == [b"one"]
    assert tail.poll() == []
    with open(path, "ab") as log:
        log.write(b"o\nthree\n")
    assert tail.poll() == [b"two", b"three"]
    path.unlink()
    assert tail.poll() == []
    tail.close()


@pytest.mark.parametrize("lines", [1, 3])
def test_a_replaced_file_is_read_from_its_beginning(tmp_path: Path, lines: int) -> None:
    """Whether it is shorter or longer than the file before."""
    path = tmp_path / "log"
    path.write_bytes(b"old\nold\n")
    tail = Tail(path)
    assert len(tail.poll()) == 2
    fresh = tmp_path / "fresh"
    fresh.write_bytes(b"new\n" * lines)
    fresh.rename(path)
    assert tail.poll() == [b"new"] * lines
    assert tail.restarts == 1
    path.write_bytes(b"cut\n")
    path.write_bytes(b"")
    assert tail.poll() == []
    path.write_bytes(b"again\n")
    assert tail.poll() == [b"again"]
    tail.close()


def test_of_an_endless_line_the_end_is_left(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (6 << 20) + b"\nend\n")
    tail = Tail(path)
    lines = tail.poll()
    assert lines[-1] == b"end"
    assert len(lines) == 2 and 0 < len(lines[0]) < 4 << 20, "a line that is no record"
    tail.close()


@settings(max_examples=50)
@given(pieces=st.lists(st.binary(max_size=40), max_size=12))
def test_lines_are_the_same_however_they_are_written(
    tmp_path_factory: object, pieces: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("t") / "log"  # type: ignore[attr-defined]
    tail, lines = Tail(path), []
    for piece in pieces:
        with open(path, "ab") as log:
            log.write(piece)
        lines += tail.poll()
    assert lines == b"".join(pieces).split(b"\n")[:-1]
    tail.close()
