"""Preparing text: the same tokens for any number of jobs, held-out documents, clear errors."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.boundary.safe_open import UnsafeFileError
from offloadtrain.config.errors import ConfigError, OffloadTrainError
from offloadtrain.data import encode, records
from offloadtrain.data.encode import Encoder
from offloadtrain.data.prepare import PreparedFiles, prepare
from offloadtrain.data.source import SourceFile, find_files
from offloadtrain.data.tokenizer import tokenizer
from offloadtrain.data.tokens import DataError
from tests.data import tiny


def tokens(path: Path | None) -> bytes:
    return tiny.scanned(path).tokens.tobytes() if path else b""


def both(files: PreparedFiles) -> tuple[bytes, bytes]:
    return tokens(files.train), tokens(files.val)


def written(folder: Path, texts: dict[str, bytes]) -> Path:
    for name, raw in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    return folder


def jsonl(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Text files in folders, a long one, every byte value, and two JSONL files."""
    texts = {f"notes/{i:02}.txt": bytes([65 + i]) * (7 * i + 1) for i in range(20)}
    texts["long.md"] = b"0123456789" * 55
    texts["bytes"] = bytes(range(256))
    texts["a.jsonl"] = jsonl([f"line {i} \u00e9\u4e2d " * (i % 9) for i in range(60)])
    texts["b/c.JSONL"] = b"\xef\xbb\xbf" + jsonl(["first", "x" * 300, "last"])[:-1]
    return written(tmp_path / "source", texts)


def test_files_and_lines_become_documents_that_end_with_a_zero(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Links to files are followed, and others counted. The output folder may lie in the source."""
    texts = {
        "b.txt": b"bee",
        "a/z.txt": b"\xff\xfe",
        "a.txt": b"ay",
        "empty": b"",
        ".hidden": b"no",
    }
    source = written(tmp_path / "source", texts)
    (source / "linked").symlink_to(source / "b.txt")
    (source / "broken").symlink_to(source / "nowhere")
    (source / "loop").symlink_to(source)
    (source / "a/itself").symlink_to("itself")
    os.mkfifo(source / "pipe")
    files = prepare(source, source / "out", val_fraction=0.0)
    (record,) = caplog.records
    assert record.message == (
        f"{source}: left out 3 links to folders or to nothing, such as 'loop'"
    )
    assert tokens(files.train) == b"ay\0\xff\xfe\0bee\0bee\0"
    assert (files.val, files.val_tokens, files.val_documents) == (None, 0, 0)
    assert (files.train_tokens, files.train_documents) == (14, 4)
    assert prepare(source, source / "out", val_fraction=0.0).reused

    raw = b'{"text": "one"}\r\n\n  \n{"id": 2, "text": "tw\\u00f6\\ud800"}\n'
    raw += b'{"text": ""}\n{"text": "3"}'
    lines = written(tmp_path, {"a.jsonl": raw}) / "a.jsonl"
    files = prepare(lines, tmp_path / "out", val_fraction=0.0)
    assert tokens(files.train) == b"one\0tw\xc3\xb6\xed\xa0\x80\0" + b"3\0"
    assert files.train_documents == 3
    lines.write_bytes(b'{"text": 1, "content": "yes"}\n')
    files = prepare(lines, tmp_path / "out", val_fraction=0.0, field="content")
    assert tokens(files.train) == b"yes\0"


@pytest.mark.parametrize("pool", ["threads", "processes"])
def test_any_number_of_jobs_and_pieces_gives_the_same_files(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: str
) -> None:
    """Bad lines are numbered through all pieces. The progress ends at all bytes."""
    serial = prepare(mixed, tmp_path / "serial", val_fraction=0.3, jobs=1)
    assert serial.train_documents + serial.val_documents == 22 + 53 + 3
    assert serial.train_tokens > serial.val_tokens > 0
    lines = jsonl([f"line {i}" for i in range(100)]).splitlines(keepends=True)
    for bad in (6, 49, 98):
        lines[bad] = b"?" * (bad + 1) + b"\n"
    damaged = written(tmp_path / "s", {"a.jsonl": b"".join(lines), "b.jsonl": b"?\n" * 20})

    monkeypatch.setattr(records, "PIECE_BYTES", 100)
    monkeypatch.setattr(encode, "PIECE_BYTES", 100)
    if pool == "processes":
        monkeypatch.setattr(encode, "PROCESSES_FROM_BYTES", 0)
        monkeypatch.setattr(encode, "FEWEST_PROCESSES", 2)
    progress: list[tuple[int, int]] = []
    parallel = prepare(
        mixed,
        tmp_path / "parallel",
        val_fraction=0.3,
        jobs=3,
        progress=lambda done, total: progress.append((done, total)),
    )
    assert both(parallel) == both(serial)
    total = sum(path.stat().st_size for path in mixed.rglob("*") if path.is_file())
    done = [num_bytes for num_bytes, _ in progress]
    assert {all_bytes for _, all_bytes in progress} == {total}
    assert done == sorted(done) and done[-1] == total and len(done) > 10
    with pytest.raises(DataError, match=r"a\.jsonl:7: "):
        prepare(damaged, tmp_path / "out", jobs=3)
    files = prepare(damaged, tmp_path / "out", jobs=3, bad_lines="skip")
    places = [line.split(": ")[0].rsplit("/")[-1] for line in files.skipped]
    assert places[:4] == ["a.jsonl:7", "a.jsonl:50", "a.jsonl:99", "b.jsonl:1"]
    assert len(places) == 10 and files.skipped_lines == 23
    assert files.train_documents + files.val_documents == 97


def test_held_out_documents_follow_their_name_or_text_not_their_place(tmp_path: Path) -> None:
    names = [f"{i:03}.txt" for i in range(200)]

    def held_out(root: str, count: int) -> set[bytes]:
        source = written(tmp_path / root, {name: name.encode() for name in names[:count]})
        files = prepare(source, tmp_path / f"{root}-out", val_fraction=0.2)
        return set(tokens(files.val).split(b"\0")) - {b""}

    all_documents, fewer = held_out("all", 200), held_out("fewer", 150)
    assert 20 < len(all_documents) < 60
    assert fewer == {name for name in all_documents if name < b"150.txt"}

    lines = [f"document {i % 50}" for i in range(300)]
    source = written(tmp_path, {"a.jsonl": jsonl(lines)}) / "a.jsonl"
    files = prepare(source, tmp_path / "out", val_fraction=0.3)
    train, val = (set(raw.split(b"\0")) - {b""} for raw in both(files))
    assert train and val and not train & val
    assert len(train | val) == 50


def test_files_are_reused_until_something_changes(tmp_path: Path) -> None:
    source = written(tmp_path / "source", {f"{i}.txt": b"text %d" % i for i in range(9)})

    def again(**changes: Any) -> PreparedFiles:
        return prepare(source, tmp_path / "out", **({"val_fraction": 0.2} | changes))

    first = again()
    assert not first.reused
    second = again(jobs=2)
    assert second.reused
    assert (second.train_tokens, second.val_documents) == (first.train_tokens, first.val_documents)
    assert not again(val_fraction=0.3).reused
    assert not again(field="content", val_fraction=0.3).reused
    (source / "new.txt").write_bytes(b"new")
    assert not again().reused
    os.utime(source / "new.txt", ns=(1, 1))
    assert not again().reused
    assert again().reused


def test_damaged_files_are_made_again(tmp_path: Path) -> None:
    source = written(tmp_path / "source", {f"{i}.txt": b"text %d" % i for i in range(9)})
    other = prepare(written(tmp_path / "b", {"1": b"1", "2": b"2"}), tmp_path / "other")
    expected = both(prepare(source, tmp_path / "out"))
    damages: tuple[Callable[[Path], object], ...] = (
        Path.unlink,
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: shutil.copy(other.train.with_name(path.name), path),
    )
    for damage, name in itertools.product(damages, ("train.bin", "val.bin")):
        damage(tmp_path / "out" / name)
        again = prepare(source, tmp_path / "out")
        assert not again.reused and both(again) == expected


BAD_LINES: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{text: 1}", r"not JSON \(Expecting property name"),
    "cut off": (b'{"text": "abc', r"not JSON \(Unterminated string"),
    "two objects": (b'{"text": "a"} {"text": "b"}', r"not JSON \(Extra data"),
    "a list": (b'["text"]', "not a JSON object"),
    "a number": (b"17", "not a JSON object"),
    "no field": (
        b'{"txt": "abc"}',
        r'no field "text" \(text is in \'txt\': choose one with --field',
    ),
    "a conversation": (
        b'{"messages": []}',
        r'no field "text" \(its fields are those of the form "chat": choose it with --form',
    ),
    "a number in the field": (b'{"text": 5}', 'field "text" is not a string'),
    "null": (b'{"text": null}', 'field "text" is not a string'),
    "not UTF-8": (b'{"text": "\xff"}', "not UTF-8"),
    "deep": (b"[" * 100_000, "JSON nested too deep"),
    "a huge number": (b'{"text": ' + b"9" * 10_000 + b"}", "not JSON"),
    "control characters": (b'{"a": "\x1b]52;c;AAAA\x07"}', "not JSON"),
}


def test_a_bad_line_is_named_with_file_and_number(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    for line, reason in BAD_LINES.values():
        source.write_bytes(jsonl(["one", "two"]) + line + b"\n" + jsonl(["three"]))
        with pytest.raises(DataError, match=rf"a\.jsonl:3: {reason}") as caught:
            prepare(source, tmp_path / "out")
        first, second = str(caught.value).split("\n")
        assert first.isprintable() and len(first) < len(str(source)) + 180
        assert "skip" in second
        files = prepare(source, tmp_path / "out", val_fraction=0.0, bad_lines="skip")
        assert tokens(files.train) == b"one\0two\0three\0"
        assert files.skipped_lines == 1 and files.skipped == (first,)
        shutil.rmtree(tmp_path / "out")


def read(path: Path, num_bytes: int | None = None) -> list[object]:
    file = SourceFile(path.name, str(path), num_bytes or path.stat().st_size, 0)
    return [record for piece in records.cut(file) for record in records.records(piece, ())]


def test_a_line_of_any_length_is_never_entirely_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is too long is a bad record, and a file without lines ends the reading."""
    monkeypatch.setattr(records, "LONGEST_LINE", 100)
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n{"n": "' + "x" * 200 + '"}\n{"n": 3}\n')
    first, second, third = read(path)
    assert first == {"n": 1} and third == {"n": 3}
    assert isinstance(second, records.Bad)
    assert "a line of 210 bytes, and at most 100 are read" in second.problem
    path.write_bytes(b"")
    os.truncate(path, 1 << 40)
    with pytest.raises(UnsafeFileError, match="a line of more than"):
        read(path, 4 << 20)


Setup = Callable[[Path], Path]


def text(folder: Path) -> Path:
    return written(folder / "s", {"a": b"text"})


FAILURES: dict[str, tuple[Setup, dict[str, Any], str]] = {
    "missing": (lambda t: t / "nowhere", {}, "nowhere: no such file or folder"),
    "empty folder": (lambda t: written(t / "s", {".x": b"1"}), {}, "contains no text"),
    "empty file": (lambda t: written(t, {"a": b""}) / "a", {}, "contains no text"),
    "device": (lambda t: Path("/dev/null"), {}, "contains no text"),
    "blank lines": (lambda t: written(t / "s", {"a.jsonl": b"\n\n"}), {}, "no line holds text"),
    "one document": (
        lambda t: written(t / "s", {"a.jsonl": jsonl(["one", "one"])}),
        {},
        "a single document",
    ),
    "one byte": (lambda t: written(t, {"a": b"x"}) / "a", {}, "a single document"),
    "tokenizer": (text, {"tokenizer": "words"}, "no tokenizer 'words': give bytes, a folder with"),
    "JSON": (lambda t: written(t, {"a.json": b"[]"}) / "a.json", {}, "is JSON, and records are"),
    "several splits": (
        lambda t: written(t / "s", {"dataset_dict.json": b'{"splits": ["train", "test"]}'}),
        {},
        "several splits: choose one: .*s/train, .*s/test",
    ),
    "fraction": (text, {"val_fraction": 1.0}, r"must be in \[0, 1\)"),
    "no number": (text, {"val_fraction": float("nan")}, r"must be in \[0, 1\)"),
    "policy": (text, {"bad_lines": "ignore"}, '"error" or "skip"'),
    "form": (text, {"form": "chats"}, '"auto", text, chat, completion'),
    "jobs": (text, {"jobs": -1}, "jobs = -1 must be from 1"),
}


def test_each_failure_is_one_error(tmp_path: Path) -> None:
    for number, (make, options, message) in enumerate(FAILURES.values()):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        with pytest.raises((DataError, ConfigError), match=message):
            prepare(make(folder), folder / "out", **options)
        assert not list(folder.glob("out/*.bin*"))


BINARY: dict[str, tuple[bytes, str]] = {
    "t.parquet": (b"PAR1\x15\x04\x15\x20" * 9 + b"PAR1", "cannot be read as parquet"),
    "t.txt.gz": (gzip.compress(b"some text\n" * 9), "compressed by gzip, not text: unpack it"),
    "t.zip": (b"PK\x03\x04" + b"\0" * 40, "a zip archive"),
    "t.db": (b"SQLite format 3\0" + b"\0" * 99, "an SQLite database"),
    "t.txt": (("text\n" * 500).encode("utf-16"), "UTF-16, not text: convert it: iconv"),
    "noise": (random.Random(0).randbytes(5000), "binary"),
    "zeros": (b"text" * 500 + bytes(100), "binary"),
}


def test_a_binary_file_is_refused_by_what_it_is(tmp_path: Path) -> None:
    for number, (name, (raw, message)) in enumerate(BINARY.items()):
        source = written(tmp_path / f"{number}", {name: raw, "a.txt": b"a text\n" * 99})
        for path in (source, source / name):
            with pytest.raises(DataError, match=message) as caught:
                prepare(path, tmp_path / "out")
            assert str(caught.value).startswith(str(source / name))
            assert not list(tmp_path.glob("out/*.bin"))


def test_text_of_any_encoding_is_text(tmp_path: Path) -> None:
    texts = {
        "latin-1": "d\u00e9j\u00e0 vu\n".encode("latin-1") * 500,
        "gbk": "\u4e2d\u6587\n".encode("gbk") * 500,
        "log with colours": b"\x1b[31mred\x1b[0m\r\n" * 500,
        "one zero": b"some text\n" * 500 + b"\0",
        "short": bytes(range(256)),
        "UTF-8 with a mark": b"\xef\xbb\xbftext\n" * 500,
        "PARTS.txt": b"PARTS of speech\n" * 99,
    }
    files = prepare(written(tmp_path / "s", texts), tmp_path / "out", val_fraction=0.0)
    assert tokens(files.train) == b"".join(texts[name] + b"\0" for name in sorted(texts))


def test_a_split_far_from_the_requested_one_is_reported(tmp_path: Path) -> None:
    lines = [f"{i} " * 5000 for i in range(3)]
    source = written(tmp_path / "s", {"a.jsonl": jsonl(lines)})
    files = prepare(source, tmp_path / "out", val_fraction=0.01)
    assert "33 %" in files.remark and "val_fraction = 0.01" in files.remark
    assert prepare(source, tmp_path / "out", val_fraction=0.01).remark == files.remark
    assert not prepare(source, tmp_path / "out", val_fraction=0.3).remark


def test_a_failure_leaves_the_old_files(tmp_path: Path) -> None:
    source = written(tmp_path / "source", {"a": b"a", "b": b"b"})
    with pytest.raises(DataError, match=r"cannot prepare .*source/a"):
        prepare(source, source / "a" / "out")
    before = both(prepare(source, tmp_path / "out"))
    written(source, {"c.jsonl": b"bad"})
    with pytest.raises(DataError, match=r"c\.jsonl:1"):
        prepare(source, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [".prepare.lock", "train.bin", "val.bin"]
    assert (tokens(tmp_path / "out/train.bin"), tokens(tmp_path / "out/val.bin")) == before


def test_a_killed_worker_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PROCESSES_FROM_BYTES", 0)
    monkeypatch.setattr(encode, "FEWEST_PROCESSES", 2)
    monkeypatch.setattr(encode, "_read", _die)
    source = written(tmp_path / "source", {"a.jsonl": jsonl(["a", "b"])})
    with pytest.raises(OffloadTrainError, match="worker process ended early"):
        prepare(source, tmp_path / "out", jobs=2)


def _die(*_: object) -> None:
    os._exit(9)


def test_a_file_that_shrinks_meanwhile_is_an_error(tmp_path: Path) -> None:
    source = written(tmp_path / "source", {"a": b"aaaa"})
    (file,) = find_files(source, excluded=tmp_path / "out")
    (source / "a").write_bytes(b"a")
    reading = encode.Reading(Encoder(tokenizer("bytes"), "text", "text"), 0, keep_going=False)
    with pytest.raises(DataError, match="became shorter"):
        encode.read_pieces(tuple(records.cut(file)), reading)
