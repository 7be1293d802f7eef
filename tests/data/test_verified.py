"""Token files are read through before they are trained on: once, and again when they change."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from offloadtrain.data import tokens as token_files
from offloadtrain.data.tokens import HEADER_BYTES, DataError, TokenFile, verify
from tests.data.tiny import write_tokens


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "a.bin"
    write_tokens(made, [np.arange(5000) % 1000], vocab_size=1000, tokenizer="none")
    return made


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Which files were read through."""
    done: list[Path] = []
    real = TokenFile.scan
    monkeypatch.setattr(
        TokenFile, "scan", lambda self, *rest: (done.append(self.path), real(self, *rest))[1]
    )
    return done


def flip(path: Path, token: int = 7) -> None:
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 2 * token)
        low = file.read(1)[0]
        file.seek(HEADER_BYTES + 2 * token)
        file.write(bytes([low ^ 1]))


def test_a_file_is_read_once(path: Path, scans: list[Path]) -> None:
    for _ in range(3):
        verify(TokenFile(path))
    assert scans == [path]


def _touched(path: Path) -> None:
    os.utime(path)


def _replaced(path: Path) -> None:
    other = path.with_name("b.bin")
    other.write_bytes(path.read_bytes())
    facts = path.stat()
    os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [_touched, _replaced])
def test_a_file_that_changed_is_read_again(
    path: Path, scans: list[Path], change: Callable[[Path], None]
) -> None:
    verify(TokenFile(path))
    change(path)
    verify(TokenFile(path))
    assert len(scans) == 2


def test_a_flipped_byte_is_found_though_the_times_are_set_back(path: Path) -> None:
    verify(TokenFile(path))
    facts = path.stat()
    flip(path)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    file = TokenFile(path)
    for _ in range(2):  # what is wrong is not remembered as read
        with pytest.raises(DataError) as caught:
            verify(file)
    found = token_files.new_hash()
    found.update(file.tokens.tobytes())
    for part in (str(path), found.hexdigest(), file.header.content, "prepare it again"):
        assert part in str(caught.value)


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    """Of a file of another program's, whose hash is right."""
    path = tmp_path / "a.bin"
    write_tokens(path, [np.array([1, 2, 999, 4])], vocab_size=1000, tokenizer="none")
    path.write_bytes(path.read_bytes().replace(b'"vocab_size": 1000', b'"vocab_size":  999'))
    with pytest.raises(
        DataError, match=r"a\.bin: token 999 at index 2 is not below vocab_size = 999"
    ):
        verify(TokenFile(path))


def test_progress_counts_every_byte(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "_SCAN_TOKENS", 2048)
    told: list[tuple[int, int]] = []
    verify(TokenFile(path), lambda done, total: told.append((done, total)))
    assert told == [(4096, 10000), (8192, 10000), (10000, 10000)]


def test_a_relative_cache_is_where_the_user_is(
    path: Path, scans: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOADTRAIN_CACHE", "relative")
    monkeypatch.chdir(path.parent)
    for _ in range(2):
        verify(TokenFile(path))
    assert len(scans) == 1
    assert len(list(Path("relative", "tokens").iterdir())) == 1


@pytest.mark.parametrize(
    ("key", "folder"), [("OFFLOADTRAIN_CACHE", "/dev/null/cache"), ("XDG_CACHE_HOME", "relative")]
)
def test_without_a_place_to_remember_it_is_read_every_time(
    path: Path, scans: list[Path], monkeypatch: pytest.MonkeyPatch, key: str, folder: str
) -> None:
    monkeypatch.delenv("OFFLOADTRAIN_CACHE")
    monkeypatch.setenv(key, folder)
    monkeypatch.chdir(path.parent)
    for _ in range(2):
        verify(TokenFile(path))
    assert len(scans) == 2
    assert list(path.parent.iterdir()) == [path]


def test_a_damaged_memory_is_no_memory(
    path: Path, scans: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OFFLOADTRAIN_CACHE", str(tmp_path / "cache"))
    verify(TokenFile(path))
    (memory,) = (tmp_path / "cache" / "tokens").iterdir()
    assert memory.parent.stat().st_mode & 0o777 == 0o700
    memory.write_text("[" * 100_000)
    verify(TokenFile(path))
    assert len(scans) == 2
