"""Preparing text: the same tokens for any number of jobs, held-out documents, clear errors."""

import gzip
import json
import os
import random
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.config.errors import ConfigError
from offloadtrain.data import encode, records
from offloadtrain.data.encode import Encoder
from offloadtrain.data.prepare import PreparedFiles, prepare
from offloadtrain.data.source import find_files
from offloadtrain.data.tokenizer import tokenizer
from offloadtrain.data.tokens import DataError, TokenFile
from tests import levels

READING = encode.Reading(Encoder(tokenizer("bytes"), "text", "text"), 0, keep_going=False)


def tokens(path: Path | None) -> bytes:
    return TokenFile(path, scan=True).tokens.tobytes() if path else b""


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
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PIECE_BYTES", 100)
    monkeypatch.setattr(encode, "PIECE_BYTES", 100)


@pytest.fixture(params=["threads", "processes"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "processes":
        monkeypatch.setattr(encode, "PROCESSES_FROM_BYTES", 0)
        monkeypatch.setattr(encode, "FEWEST_PROCESSES", 2)
    return str(request.param)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Text files in folders, a long one, every byte value, and two JSONL files."""
    texts = {f"notes/{i:02}.txt": bytes([65 + i]) * (7 * i + 1) for i in range(20)}
    texts["long.md"] = b"0123456789" * 55
    texts["bytes"] = bytes(range(256))
    texts["a.jsonl"] = jsonl([f"line {i} \u00e9\u4e2d " * (i % 9) for i in range(60)])
    texts["b/c.JSONL"] = b"\xef\xbb\xbf" + jsonl(["first", "x" * 300, "last"])[:-1]
    return written(tmp_path / "source", texts)


def test_text_files_become_documents_that_end_with_a_zero(tmp_path: Path) -> None:
    source = written(
        tmp_path / "source",
        {"b.txt": b"bee", "a/z.txt": b"\xff\xfe", "a.txt": b"ay", "empty": b"", ".hidden": b"no"},
    )
    files = prepare(source, tmp_path / "out", val_fraction=0.0)
    assert tokens(files.train) == b"ay\0\xff\xfe\0bee\0"
    assert (files.val, files.val_tokens, files.val_documents) == (None, 0, 0)
    assert (files.train_tokens, files.train_documents) == (10, 3)
    assert not (tmp_path / "out" / "val.bin").exists()


def test_jsonl_lines_become_documents(tmp_path: Path) -> None:
    raw = b'{"text": "one"}\r\n\n  \n{"id": 2, "text": "tw\\u00f6\\ud800"}\n'
    raw += b'{"text": ""}\n{"text": "3"}'
    source = written(tmp_path, {"a.jsonl": raw}) / "a.jsonl"
    files = prepare(source, tmp_path / "out", val_fraction=0.0)
    assert tokens(files.train) == b"one\0tw\xc3\xb6\xed\xa0\x80\0" + b"3\0"
    assert files.train_documents == 3


def test_another_field_can_hold_the_text(tmp_path: Path) -> None:
    source = written(tmp_path, {"a.jsonl": b'{"text": 1, "content": "yes"}\n'}) / "a.jsonl"
    files = prepare(source, tmp_path / "out", val_fraction=0.0, field="content")
    assert tokens(files.train) == b"yes\0"


@pytest.mark.usefixtures("small_pieces")
def test_parallel_equals_serial(mixed: Path, tmp_path: Path, pool: str) -> None:
    serial = prepare(mixed, tmp_path / "serial", val_fraction=0.3, jobs=1)
    parallel = prepare(mixed, tmp_path / "parallel", val_fraction=0.3, jobs=3)
    assert both(parallel) == both(serial)
    assert serial.train_documents + serial.val_documents == 22 + 53 + 3
    assert serial.train_tokens > serial.val_tokens > 0


@pytest.mark.usefixtures("small_pieces")
def test_pieces_do_not_show_in_the_result(mixed: Path, tmp_path: Path) -> None:
    in_pieces = prepare(mixed, tmp_path / "pieces", val_fraction=0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "PIECE_BYTES", 1 << 20)
        patch.setattr(encode, "PIECE_BYTES", 1 << 20)
        whole = prepare(mixed, tmp_path / "whole", val_fraction=0.3)
    assert both(whole) == both(in_pieces)


@levels.examples(60)
@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=20), piece=st.integers(1, 60))
def test_jsonl_cut_anywhere_gives_each_line_once(
    texts: list[str], piece: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = written(tmp_path_factory.mktemp("jsonl"), {"a.jsonl": jsonl(texts)})
    expected = b"".join(t.encode("utf-8", "surrogatepass") + b"\0" for t in texts if t)
    (file,) = find_files(folder / "a.jsonl", excluded=folder / "out")
    reading = READING
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "PIECE_BYTES", piece)
        results = [encode.read_pieces((p,), reading) for p in records.cut(file)]
    parts = (part for result in results for part in result.train.parts)
    assert b"".join(part.tobytes() for part in parts) == expected
    assert sum(result.lines for result in results) == len(texts)


def test_held_out_documents_follow_their_name_not_their_place(tmp_path: Path) -> None:
    names = [f"{i:03}.txt" for i in range(200)]

    def held_out(root: str, count: int) -> set[bytes]:
        source = written(tmp_path / root, {name: name.encode() for name in names[:count]})
        files = prepare(source, tmp_path / f"{root}-out", val_fraction=0.2)
        return set(tokens(files.val).split(b"\0")) - {b""}

    all_of_them, fewer = held_out("one", 200), held_out("two", 150)
    assert 20 < len(all_of_them) < 60
    assert fewer == {name for name in all_of_them if name < b"150.txt"}


def test_equal_lines_are_on_the_same_side(tmp_path: Path) -> None:
    lines = [f"document {i % 50}" for i in range(300)]
    source = written(tmp_path, {"a.jsonl": jsonl(lines)}) / "a.jsonl"
    files = prepare(source, tmp_path / "out", val_fraction=0.3)
    train, val = (set(raw.split(b"\0")) - {b""} for raw in both(files))
    assert train and val and not train & val
    assert len(train | val) == 50


@pytest.mark.parametrize("val_fraction", [1e-30, 1e-6, 0.999999])
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_no_side_is_left_without_a_document(tmp_path: Path, val_fraction: float, kind: str) -> None:
    texts = [f"document {i}" for i in range(5)]
    if kind == "text":
        source = written(tmp_path / "s", {f"{i}.txt": t.encode() for i, t in enumerate(texts)})
    else:
        source = written(tmp_path / "s", {"a.jsonl": jsonl(texts)})
    files = prepare(source, tmp_path / "out", val_fraction=val_fraction)
    assert {files.train_documents, files.val_documents} == {1, 4}
    assert (files.val_documents == 1) == (val_fraction < 0.5)
    assert prepare(source, tmp_path / "out", val_fraction=val_fraction).reused


@pytest.mark.usefixtures("small_pieces")
def test_the_end_of_an_only_text_file_is_held_out(tmp_path: Path) -> None:
    raw = bytes(range(1, 251)) * 4
    source = written(tmp_path, {"book.txt": raw}) / "book.txt"
    train, val = both(prepare(source, tmp_path / "out", val_fraction=0.1))
    assert (train, val) == (raw[:900] + b"\0", raw[900:] + b"\0")


def test_files_are_reused_until_something_changes(tmp_path: Path) -> None:
    source = written(tmp_path / "source", {f"{i}.txt": b"text %d" % i for i in range(9)})

    def again(**changes: object) -> PreparedFiles:
        options: dict[str, object] = {"val_fraction": 0.2} | changes
        return prepare(source, tmp_path / "out", **options)  # type: ignore[arg-type]

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


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "other"])
def test_damaged_files_are_made_again(tmp_path: Path, name: str, damage: str) -> None:
    source = written(tmp_path / "source", {f"{i}.txt": b"text %d" % i for i in range(9)})
    first = prepare(source, tmp_path / "out")
    before, path = both(first), tmp_path / "out" / name
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        other = prepare(written(tmp_path / "b", {"1": b"1", "2": b"2"}), tmp_path / "out2")
        os.replace(other.train.with_name(name), path)
    second = prepare(source, tmp_path / "out")
    assert not second.reused
    assert both(second) == before


def test_an_old_validation_file_goes_when_nothing_is_held_out(tmp_path: Path) -> None:
    source = written(tmp_path / "source", {"a": b"a", "b": b"b"})
    assert prepare(source, tmp_path / "out", val_fraction=0.5).val
    assert prepare(source, tmp_path / "out", val_fraction=0.0).val is None
    assert not (tmp_path / "out" / "val.bin").exists()


def test_the_output_folder_may_lie_in_the_source(tmp_path: Path) -> None:
    source = written(tmp_path / "source", {"a": b"aa", "b": b"bb"})
    first = prepare(source, source / "out")
    assert prepare(source, source / "out").reused
    assert first.train_tokens + first.val_tokens == 6


def test_links_pipes_and_loops_do_no_harm(tmp_path: Path) -> None:
    source = written(tmp_path / "source", {"a": b"aa"})
    (source / "linked").symlink_to(source / "a")
    (source / "broken").symlink_to(source / "nowhere")
    (source / "loop").symlink_to(source)
    os.mkfifo(source / "pipe")
    files = prepare(source, tmp_path / "out", val_fraction=0.0)
    assert tokens(files.train) == b"aa\0aa\0"


@pytest.mark.usefixtures("small_pieces")
def test_progress_goes_from_nothing_to_all(mixed: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    prepare(mixed, tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    total = sum(path.stat().st_size for path in mixed.rglob("*") if path.is_file())
    assert {all_bytes for _, all_bytes in seen} == {total}
    done = [bytes_done for bytes_done, _ in seen]
    assert done == sorted(done) and done[-1] == total and len(done) > 10


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


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_with_file_and_number(tmp_path: Path, name: str) -> None:
    line, reason = BAD_LINES[name]
    raw = jsonl(["one", "two"]) + line + b"\n" + jsonl(["three"])
    source = written(tmp_path, {"a.jsonl": raw}) / "a.jsonl"
    with pytest.raises(DataError, match=rf"a\.jsonl:3: {reason}") as caught:
        prepare(source, tmp_path / "out")
    first, second = str(caught.value).split("\n")
    assert first.isprintable() and len(first) < len(str(source)) + 180
    assert "skip" in second
    files = prepare(source, tmp_path / "out", val_fraction=0.0, bad_lines="skip")
    assert tokens(files.train) == b"one\0two\0three\0"
    assert files.skipped_lines == 1
    assert files.skipped == (first,)


@pytest.mark.usefixtures("small_pieces")
def test_bad_lines_are_numbered_through_all_pieces(tmp_path: Path, pool: str) -> None:
    lines = jsonl([f"line {i}" for i in range(100)]).splitlines(keepends=True)
    for bad in (6, 49, 98):
        lines[bad] = b"?" * (bad + 1) + b"\n"
    source = written(tmp_path / "s", {"a.jsonl": b"".join(lines), "b.jsonl": b"?\n" * 20})
    with pytest.raises(DataError, match=r"a\.jsonl:7: "):
        prepare(source, tmp_path / "out", jobs=3)
    files = prepare(source, tmp_path / "out", jobs=3, bad_lines="skip")
    places = [line.split(": ")[0].rsplit("/")[-1] for line in files.skipped]
    assert places[:4] == ["a.jsonl:7", "a.jsonl:50", "a.jsonl:99", "b.jsonl:1"]
    assert len(places) == 10
    assert files.skipped_lines == 23
    assert files.train_documents + files.val_documents == 97


Setup = Callable[[Path], Path]
FAILURES: dict[str, tuple[Setup, dict[str, object], str]] = {
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
    "tokenizer": (
        lambda t: written(t / "s", {"a": b"text"}),
        {"tokenizer": "words"},
        "no tokenizer 'words': give bytes, a folder with",
    ),
    "JSON": (lambda t: written(t, {"a.json": b"[]"}) / "a.json", {}, "is JSON, and records are"),
    "several splits": (
        lambda t: written(t / "s", {"dataset_dict.json": b'{"splits": ["train", "test"]}'}),
        {},
        "several splits: choose one: .*s/train, .*s/test",
    ),
}
WITHOUT_MEANING: dict[str, tuple[dict[str, Any], str]] = {
    "fraction": ({"val_fraction": 1.0}, r"must be in \[0, 1\)"),
    "no number": ({"val_fraction": float("nan")}, r"must be in \[0, 1\)"),
    "policy": ({"bad_lines": "ignore"}, '"error" or "skip"'),
    "form": ({"form": "chats"}, '"auto", text, chat, completion'),
    "jobs": ({"jobs": -1}, "jobs = -1 must be from 1"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_each_failure_is_one_error(tmp_path: Path, name: str) -> None:
    make, options, message = FAILURES[name]
    source = make(tmp_path)
    with pytest.raises(DataError, match=message):
        prepare(source, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not list(tmp_path.glob("out/*.bin*"))


BINARY: dict[str, tuple[bytes, str]] = {
    "t.parquet": (b"PAR1\x15\x04\x15\x20" * 9 + b"PAR1", "cannot be read as parquet"),
    "t.txt.gz": (gzip.compress(b"some text\n" * 9), "compressed by gzip, not text: unpack it"),
    "t.zip": (b"PK\x03\x04" + b"\0" * 40, "a zip archive"),
    "t.db": (b"SQLite format 3\0" + b"\0" * 99, "an SQLite database"),
    "t.txt": (("text\n" * 500).encode("utf-16"), "UTF-16, not text: convert it: iconv"),
    "noise": (random.Random(0).randbytes(5000), "binary"),
    "zeros": (b"text" * 500 + bytes(100), "binary"),
}


@pytest.mark.parametrize("name", BINARY)
def test_a_binary_file_is_refused_by_what_it_is(tmp_path: Path, name: str) -> None:
    raw, message = BINARY[name]
    source = written(tmp_path / "s", {name: raw, "a.txt": b"a text\n" * 99})
    for one in (source, source / name):
        with pytest.raises(DataError, match=message) as caught:
            prepare(one, tmp_path / "out")
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


@pytest.mark.parametrize(
    ("sizes", "fraction"),
    [([100_000, 106_000], 0.05), ([900_000, 3_000, 3_000], 0.1), ([50_000] * 3, 0.9)],
)
def test_few_files_are_split_as_asked(tmp_path: Path, sizes: list[int], fraction: float) -> None:
    texts = {f"{i}.txt": b"%d" % i * size for i, size in enumerate(sizes)}
    files = prepare(written(tmp_path / "s", texts), tmp_path / "out", val_fraction=fraction)
    share = files.val_tokens / (files.val_tokens + files.train_tokens)
    assert share == pytest.approx(fraction, rel=0.02) and not files.remark
    train, val = both(files)
    for i, size in enumerate(sizes):  # of every file its end
        assert val.count(b"%d" % i) == pytest.approx(size * fraction, abs=1)
        assert train.count(b"%d" % i) + val.count(b"%d" % i) == size


def test_a_split_far_from_the_one_asked_for_is_said(tmp_path: Path) -> None:
    lines = [f"{i} " * 5000 for i in range(3)]
    source = written(tmp_path / "s", {"a.jsonl": jsonl(lines)})
    files = prepare(source, tmp_path / "out", val_fraction=0.01)
    assert "33 %" in files.remark and "val_fraction = 0.01" in files.remark
    assert prepare(source, tmp_path / "out", val_fraction=0.01).remark == files.remark
    assert not prepare(source, tmp_path / "out", val_fraction=0.3).remark


@pytest.mark.parametrize("name", WITHOUT_MEANING)
def test_an_argument_without_a_meaning_is_refused(tmp_path: Path, name: str) -> None:
    options, message = WITHOUT_MEANING[name]
    with pytest.raises(ConfigError, match=message):
        prepare(written(tmp_path / "s", {"a": b"text"}), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_failure_leaves_the_old_files(tmp_path: Path) -> None:
    source = written(tmp_path / "source", {"a": b"a", "b": b"b"})
    before = both(prepare(source, tmp_path / "out"))
    written(source, {"c.jsonl": b"bad"})
    with pytest.raises(DataError, match=r"c\.jsonl:1"):
        prepare(source, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [".prepare.lock", "train.bin", "val.bin"]
    assert (tokens(tmp_path / "out/train.bin"), tokens(tmp_path / "out/val.bin")) == before


def test_an_unusable_output_folder_is_one_error(tmp_path: Path) -> None:
    source = written(tmp_path / "source", {"a": b"a", "b": b"b"})
    with pytest.raises(DataError, match=r"cannot prepare .*source/a"):
        prepare(source, source / "a" / "out")


def test_a_file_that_shrinks_meanwhile_is_an_error(tmp_path: Path) -> None:
    source = written(tmp_path / "source", {"a": b"aaaa"})
    (file,) = find_files(source, excluded=tmp_path / "out")
    (source / "a").write_bytes(b"a")
    reading = READING
    with pytest.raises(DataError, match="became shorter"):
        encode.read_pieces(tuple(records.cut(file)), reading)


def test_processes_are_started_where_they_pay(tmp_path: Path) -> None:
    """Bytes of records not by two, which were slower than one thread; text never."""
    table = written(tmp_path / "a", {"a.jsonl": jsonl(["a", "b"])})
    text = written(tmp_path / "b", {"a.txt": b"a"})
    enough = encode.PROCESSES_FROM_BYTES
    other: Any = object()
    words = replace(READING, encoder=replace(READING.encoder, tokenizer=other))
    for source, reading, num_bytes, fewest in (
        (table, READING, enough, encode.FEWEST_PROCESSES),
        (table, READING, enough - 1, None),
        (text, READING, 16 * enough, None),
        (table, words, enough // 16, 2),
        (text, words, enough // 16, 2),
        (text, words, enough // 16 - 1, None),
    ):
        (file,) = find_files(source, excluded=tmp_path / "out")
        pieces = [replace(next(iter(records.cut(file))), num_bytes=num_bytes)]
        found = [jobs for jobs in (1, 2, 3, 9) if encode._processes_pay(pieces, reading, jobs)]
        assert found == ([] if fewest is None else [n for n in (2, 3, 9) if n >= fewest])


def test_a_killed_worker_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PROCESSES_FROM_BYTES", 0)
    monkeypatch.setattr(encode, "FEWEST_PROCESSES", 2)
    monkeypatch.setattr(encode, "_read", _die)
    source = written(tmp_path / "source", {"a.jsonl": jsonl(["a", "b"])})
    with pytest.raises(DataError, match="worker process ended early"):
        prepare(source, tmp_path / "out", jobs=2)


def test_a_script_without_a_main_guard_is_told_so_instead_of_hanging(tmp_path: Path) -> None:
    source = written(tmp_path / "source", {"a.jsonl": jsonl(["a", "b"])})
    script = tmp_path / "script.py"
    script.write_text(
        "from offloadtrain.data import encode, prepare\n"
        "encode.PROCESSES_FROM_BYTES = 0\n"
        "encode.FEWEST_PROCESSES = 2\n"
        f"prepare.prepare({str(source)!r}, {str(tmp_path / 'out')!r}, jobs=2)\n"
    )
    search = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, script], env=os.environ | search, capture_output=True, timeout=300
    )
    assert done.returncode == 1
    assert b"DataError: a worker process ended early" in done.stderr


def _die(*_: object) -> None:
    os._exit(9)


def test_a_python_library_gives_its_sources_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = written(
        tmp_path / "lib",
        {
            "os.py": b"import sys",
            "test/test_os.py": b"import os",
            "os.pyc": b"no",
            "site-packages/torch.py": b"no",
            "dist-packages/numpy.py": b"no",
            "__pycache__/os.py": b"no",
        },
    )
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(library)}.get)
    files = prepare("python-stdlib", tmp_path / "out", val_fraction=0.0)
    assert tokens(files.train) == b"import sys\0import os\0"


def test_the_library_of_this_python_is_real_text() -> None:
    files = find_files("python-stdlib", excluded=Path("/nowhere"))
    assert sum(file.num_bytes for file in files) > 5e6
    assert {"ast.py", "json/decoder.py"} <= {file.name for file in files}
    assert not any("site-packages" in file.path for file in files)
