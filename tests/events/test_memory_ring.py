"""The ring file: every sample is read once, in order, and a torn one is not read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offloadtrain.boundary.safe_open import UnsafeFileError
from offloadtrain.events import memory_ring
from offloadtrain.events.memory_ring import (
    CAPACITY,
    FILE_BYTES,
    MemoryPoint,
    RingReader,
    RingWriter,
)

HEADER, SLOT = 64, 112


def point(number: int) -> MemoryPoint:
    return MemoryPoint(1e9 + number, number, allocated=number << 30, rss=123, available=None)


def test_every_sample_is_read_once_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "rank000.ring"
    writer, reader = RingWriter(path), RingReader(path)
    assert reader.poll() == []
    points = []
    for number in range(1, 2500):
        writer.write(point(number))
        if number % 700 == 0:
            points += reader.poll()
    points += reader.poll()
    assert points == [point(number) for number in range(1, 2500)]
    assert reader.poll() == []
    assert path.stat().st_size == FILE_BYTES == HEADER + CAPACITY * SLOT
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_reader_that_was_lapped_continues_with_the_oldest_sample(tmp_path: Path) -> None:
    path = tmp_path / "rank000.ring"
    writer, reader = RingWriter(path), RingReader(path)
    for number in range(1, 3 * CAPACITY + 10):
        writer.write(point(number))
    last = 3 * CAPACITY + 9
    assert reader.poll() == [point(number) for number in range(last - CAPACITY + 1, last + 1)]
    writer.write(point(last + 1))
    assert reader.poll() == [point(last + 1)]


def test_half_a_sample_is_read_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "rank000.ring"
    writer, reader = RingWriter(path), RingReader(path)
    writer.write(point(1))
    assert len(reader.poll()) == 1
    writer.write(point(2))
    content = path.read_bytes()
    for cut in (8, 50, SLOT - 1):
        begin = HEADER + SLOT
        torn = content[: begin + cut] + bytes(FILE_BYTES - begin - cut)
        _overwrite(path, torn)
        assert reader.poll() == []
    _overwrite(path, content)
    assert reader.poll() == [point(2)]


def test_the_ring_of_a_new_start_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "rank000.ring"
    writer, reader = RingWriter(path), RingReader(path)
    for number in range(1, 9):
        writer.write(point(number))
    assert len(reader.poll()) == 8
    writer.close()
    again = RingWriter(path)
    again.write(point(77))
    assert reader.poll() == [point(77)]


def test_a_file_that_is_no_ring_is_refused(tmp_path: Path) -> None:
    """Wrong sizes; and another magic, version, size of a slot or number of slots."""
    path = tmp_path / "rank000.ring"
    RingWriter(path).close()
    right = path.read_bytes()
    wrong = [b"", b"x", bytes(FILE_BYTES), b"OTMEMRNG" * 100, right[:-1], right + b"x"]
    for offset in (0, 8, 12, 16):
        wrong.append(right[:offset] + bytes([right[offset] ^ 0xFF]) + right[offset + 1 :])
    for content in wrong:
        path.write_bytes(content)
        with pytest.raises(UnsafeFileError):
            RingReader(path).poll()


def test_links_and_endless_files_are_refused(tmp_path: Path) -> None:
    RingWriter(tmp_path / "real").close()
    for name, target in (("link", str(tmp_path / "real")), ("zero", "/dev/zero")):
        os.symlink(target, tmp_path / name)
        with pytest.raises(UnsafeFileError):
            RingReader(tmp_path / name).poll()
    os.truncate(tmp_path / "real", 1 << 40)
    with pytest.raises(UnsafeFileError):
        RingReader(tmp_path / "real").poll()
    with pytest.raises(FileNotFoundError):
        RingReader(tmp_path / "none").poll()


def test_the_documented_layout_is_the_written_one(tmp_path: Path) -> None:
    path = tmp_path / "rank000.ring"
    writer = RingWriter(path)
    writer.write(point(3))
    content = path.read_bytes()
    assert content[:8] == b"OTMEMRNG"
    assert content[8:20] == b"".join(n.to_bytes(4, "little") for n in (1, SLOT, CAPACITY))
    slot = content[HEADER : HEADER + SLOT]
    assert slot[:8] == (1).to_bytes(8, "little")
    assert slot[24:32] == (3 << 30).to_bytes(8, "little")  # allocated
    assert slot[32:40] == (-1).to_bytes(8, "little", signed=True)  # reserved: not known
    assert len(memory_ring.QUANTITIES) == 9


def _overwrite(path: Path, content: bytes) -> None:
    """In place: the file stays the same one."""
    with open(path, "r+b") as file:
        file.write(content)
