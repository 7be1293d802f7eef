"""The opener that trusts nothing: what it refuses, in words, without ever blocking."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from offloadtrain.boundary.safe_open import (
    UnsafeFileError,
    bounded_lines,
    open_regular,
    read_json,
    read_regular,
    read_text,
)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.with_name("target").write_text("{}")
    path.symlink_to("target")


def _circle(path: Path) -> None:
    path.symlink_to(path.name)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


HOSTILE: list[tuple[str, Callable[[Path], object], str]] = [
    ("a FIFO", _fifo, "it is a FIFO, not a regular file"),
    ("a link", _link, "it is a symbolic link, which is not followed here"),
    ("a circle of links", _circle, "it is a symbolic link"),
    ("a socket", _socket, "it is a socket or a device, not a regular file"),
    ("a folder", Path.mkdir, "it is a folder, not a regular file"),
    ("a sparse terabyte", _sparse, "bytes, and at most 1,000 are read"),
]


@pytest.mark.parametrize(("make", "why"), [case[1:] for case in HOSTILE], ids=lambda _: "")
def test_only_a_small_regular_file_is_opened(
    make: Callable[[Path], object], why: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    make(path)
    with pytest.raises(UnsafeFileError) as refused:
        read_json(path, max_bytes=1000)
    assert why in str(refused.value) and str(path) in str(refused.value)


def test_devices_and_names_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsafeFileError, match="a character device"):
        open_regular("/dev/zero")
    with pytest.raises(UnsafeFileError, match="no file has such a name"):
        open_regular("a\0b")
    (tmp_path / "link").symlink_to("/dev/zero")
    with pytest.raises(UnsafeFileError, match="a character device"):
        open_regular(tmp_path / "link", follow_link=True)


def test_a_link_is_followed_where_the_user_named_it(tmp_path: Path) -> None:
    _link(tmp_path / "link")
    assert read_regular(tmp_path / "link", max_bytes=2, follow_link=True) == b"{}"


def test_a_file_that_grows_while_it_is_read_is_too_large() -> None:
    """Files of /proc have size 0 and content."""
    with pytest.raises(UnsafeFileError, match="at most 10 are read"):
        read_regular("/proc/self/status", max_bytes=10)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "it is not JSON"),
        (b"{", "it is not JSON"),
        (b"\xff\xfe{", "it is not JSON"),
        (b"\xff", "it is not JSON"),
    ],
    ids=["deep", "digits", "torn", "half a word", "no text"],
)
def test_json_that_is_none_is_one_error(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UnsafeFileError, match=why):
        read_json(tmp_path / "file", max_bytes=1 << 20)


def test_text_is_utf8(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbfa = 1")
    assert read_text(tmp_path / "file", max_bytes=100) == "a = 1"
    (tmp_path / "file").write_bytes(b"a = \x80")
    with pytest.raises(UnsafeFileError, match="it is not UTF-8 text: byte 4"):
        read_text(tmp_path / "file", max_bytes=100)


def test_another_users_file_is_refused_where_it_must_be_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("{}")
    assert read_json(tmp_path / "file", max_bytes=100, trusted_owner=True) == {}
    owner = (tmp_path / "file").stat().st_uid
    if owner == 0:
        os.chown(tmp_path / "file", 12345, -1)
        owner = 12345
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(UnsafeFileError, match=f"it belongs to user {owner}"):
        read_json(tmp_path / "file", max_bytes=100, trusted_owner=True)


def test_long_lines_are_cut_and_endless_ones_end_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a\n" + b"b" * 25 + b"\nc")
    with open_regular(path) as file:
        assert list(bounded_lines(file, 10)) == [(b"a\n", 2), (b"b" * 10, 26), (b"c", 1)]
    path.touch()
    os.truncate(path, 1 << 40)
    with open_regular(path) as file, pytest.raises(UnsafeFileError, match="a line of more than"):
        list(bounded_lines(file, 10))
