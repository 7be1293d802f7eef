"""What others may put where a run is expected: escape sequences, files that never end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from tests.tui.recordings import plain, write

TEXTS = (
    "\x1b]52;c;SE9TVElMRQ==\x07clipboard",
    "\x1b]52;c;SE9TVElMRQ==\x1b\\clipboard",
    "\x1b]0;title\x07",
    "\x1b]2;title\x1b\\",
    "\x1b]8;;http://evil.example\x07link\x1b]8;;\x07",
    "\x1b]1337;File=name=YQ==:AAAA\x07",
    "\x1b[2Jcleared",
    "\x1b[3J\x1b[H",
    "\x1b[31mred\x1b[0m",
    "\x1b[?1049h",
    "\x1b[?1000h",
    "\x1b[6n",
    "\x1b[c",
    "\x1bc reset",
    "\x1bP+q544e\x1b\\",
    "\x1b_Gf=100;AAAA\x1b\\",
    "\x9b2J",
    "\x9d52;c;SE9TVElMRQ==\x9c",
    "\x90q\x9c",
    "a\rb",
    "a\x08\x08b",
    "a\x00b",
    "a\x7fb",
    "a\x0bb\x0cc",
    "a\x07b",
    "\u202egnp.exe",
    "\u2066hidden\u2069",
    "a\u200bb\u200dc\ufeff",
    "a\u2028b\u2029c",
    "\U000e0041\U000e0042tags",
    "[red]markup[/red]",
    "[/bold] closes what is not open",
    "[@click=app.quit]quit[/]",
    "[link=http://evil.example]link[/link]",
    "[bold",
    "{0} %s %n \\x1b[2J",
)
"""OSC, CSI, DCS, APC and C1; controls; directions and zero width; Rich's and Textual's markup."""


def obeyed(text: str) -> list[str]:
    """What a terminal would obey, or would show otherwise than it is."""
    return [item for item in text if not item.isprintable() and item not in "\n\t"]


def hostile_lines(lines: list[bytes], first: int) -> Iterator[bytes]:
    """The records with every other string replaced, so that some of them still mean something."""
    texts = cycle(TEXTS[first:] + TEXTS[:first])
    for number, line in enumerate(lines):
        values = json.loads(line)
        kind = values.pop("k")
        changed = _changed(values, texts, turn=number % 2)
        yield json.dumps({"k": kind, **changed}).encode() + b"\n"


def _changed(value: Any, texts: Iterator[str], turn: int) -> Any:
    if isinstance(value, str):
        return next(texts) + value if turn else value
    if isinstance(value, dict):
        return {
            key: _changed(item, texts, (turn + place) % 2)
            for place, (key, item) in enumerate(value.items())
        }
    if isinstance(value, list):
        return [_changed(item, texts, (turn + place) % 2) for place, item in enumerate(value)]
    return value


# ---- run folders


def _replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = run / name
        path.parent.mkdir(exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            path.rename(run / "elsewhere")
        else:
            path.unlink(missing_ok=True)
        make(path)

    return change


def _bytes(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 36)


def _to(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


LOG = "events/rank000.jsonl"
KINDS: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a link to a device": _to("/dev/zero"),
    "a link to itself": _to("run.json"),
    "a link to nothing": _to("nothing"),
    "a folder": Path.mkdir,
    "64 GiB": _sparse,
}
NUMBERS = b'{"k":"step","v":1,"t":1e9,"r":0,"m":0,"step":%s,"loss":%s,"lr":1,"tokens":1}\n'
LOGS = {
    "deep": b"[" * 200_000 + b"\n",
    "a long line": b"x" * (9 << 20),
    "no text": bytes(range(256)) * 64,
    "zeros": b"\0" * 100_000,
    "UTF-16": '{"k":"step"}\n'.encode("utf-16"),
    "numbers": b"".join(
        NUMBERS % (step, loss)
        for step in (b"1", b"-1", b"1e999", b"9" * 400, b"9" * 5000, b"true", b'"x"', b"NaN")
        for loss in (b"1.0", b"NaN", b"1e999", b"-Infinity", b"null", b"{}", b"9" * 400)
    ),
    "foreign": b'{"k":"step"}\n[]\n1\n"k"\n{"k":[]}\n{"k":{}}\n{}\nnull\n',
    "time": NUMBERS.replace(b"1e9", b"1e300") % (b"1", b"1"),
    "values in dicts": b"".join(
        b'{"k":"set_up","v":1,"t":1e9,"r":0,"m":0,"duration_s":1,"parts_s":{"preparing":%s}}\n'
        % bad
        for bad in (b'"x"', b"{}", b"null", b"[1]", b"1e999", b"2")
    ),
    "empty": b"",
}
RUN_JSON = {
    "deep": b"[" * 200_000,
    "digits": b'{"pid":' + b"9" * 5000 + b"}",
    "types": json.dumps(
        {"pid": "x", "host": [], "pid_start_ticks": {}, "oom_kills": {"/proc/vmstat": "x"}}
    ).encode(),
    "pids": json.dumps({"pid": 10**300, "pid_start_ticks": 10**300}).encode(),
    "links": json.dumps({"oom_kills": {"/proc/vmstat\0": 0, "/sys/fs/cgroup/../..": 0}}).encode(),
    "a list": b"[]",
    "no JSON": b"\xff\xfe\x00",
    "1 MiB": b" " * (1 << 21),
}

FOLDERS: dict[str, Callable[[Path], None]] = {
    **{
        f"{name} is {kind}": _replaced(name, make)
        for name in ("run.json", LOG, "lock", "job.toml", "resolved.toml")
        for kind, make in KINDS.items()
    },
    **{
        f"{name} is {kind}": _replaced(name, make)
        for name in ("events", "control", "checkpoints")
        for kind, make in KINDS.items()
        if kind != "a folder"
    },
    **{f"the log is {kind}": _replaced(LOG, _bytes(text)) for kind, text in LOGS.items()},
    **{f"run.json is {kind}": _replaced("run.json", _bytes(b)) for kind, b in RUN_JSON.items()},
    "a log of an absurd rank": _replaced(f"events/rank{'9' * 200}.jsonl", _bytes(b"{}\n")),
    "trace.json is a link": _replaced("trace.json", _to("secret")),
}


def hostile_run(folder: Path, kind: str) -> Path:
    """A run that was killed, of which one part is hostile; `secret` beside it is the user's."""
    run = write(folder, plain(12))
    log = run / LOG
    lines = [
        line for line in log.read_bytes().splitlines(keepends=True) if b"run_ended" not in line
    ]
    log.write_bytes(b"".join(lines))
    (run / "run.json").write_text("{}")
    (run / "lock").touch()
    (run / "secret").write_text("secret")
    FOLDERS[kind](run)
    return run
