"""Checkpoints that somebody else has made: each may be read by any command."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.boundary.hostile import TEXTS
from tests.train.test_checkpoint import EDITS, FILES, change

Change = Callable[[Path], object]
"""Of the folder of one checkpoint."""
OTHERS = (None, [], {}, "x", -1, True, 1e308, 10**400, [[]], {"x": TEXTS[0]}, TEXTS[0])


def edit_state(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the state, with hashes that fit."""
    content = json.loads((path / "state.json").read_text())
    edit(content)
    rewrite_state(path, json.dumps(content).encode())


def rewrite_state(path: Path, text: bytes) -> None:
    (path / "state.json").write_bytes(text)
    described = {"bytes": len(text), "sha256": sha256(text).hexdigest()}
    change(path / "manifest.json", lambda m: m["files"].update({"state.json": described}))


KEYS = (
    *("optimizer", "progress", "data", "spikes", "held_out", "tokenizer", "rng", "param_groups"),
    *("precision", "threads", "config", "tokenizer_name", "hf_config"),
)
INNER = (
    *(("optimizer", "step"), ("optimizer", "scaler"), ("progress", "step"), ("progress", "tokens")),
    *(("data", "epoch"), ("data", "sample"), ("spikes", "losses"), ("spikes", "rollbacks")),
    *(("config", "model"), ("config", "train"), ("config", "data"), ("config", "offload")),
)


def _states() -> dict[str, Change]:
    result: dict[str, Change] = {}
    for key in KEYS:
        result[f"state without {key}"] = partial(edit_state, edit=lambda s, k=key: s.pop(k))
    for number, (key, *rest) in enumerate([*((key,) for key in KEYS), *INNER]):
        value = OTHERS[number % len(OTHERS)]
        what = f"state whose {'.'.join((key, *rest))} is {ascii(value)[:12]}"
        result[what] = partial(edit_state, edit=partial(_put, (key, *rest), value))
    for number in range(4):
        edit = partial(_random_numbers, number)
        result[f"state with random numbers that are none, {number}"] = partial(
            edit_state, edit=edit
        )
    return result


def _put(keys: tuple[str, ...], value: Any, state: dict[str, Any]) -> None:
    *outer, last = keys
    for key in outer:
        state = state[key]
    state[last] = value


def _random_numbers(number: int, state: dict[str, Any]) -> None:
    item = state["rng"][0]
    item["python"] = ([3, [1, 2], None], [3, "x", None], [3, [2**40] * 625, None], [3])[number]
    item["torch"] = ("zz", "00", [], "")[number]


# ---- folders and files


def _instead(path: Path, make: Callable[[Path], object]) -> None:
    """The folder itself is something else."""
    path.rename(path.parent.parent / "elsewhere")
    make(path)


def _many(path: Path) -> None:
    for number in range(2000):
        (path.parent / f"step-{90000000 + number}").touch()


def _names(path: Path) -> None:
    """Beside it, as leftovers and as checkpoints."""
    for number, text in enumerate(TEXTS):
        name = text.replace("/", "_").replace("\0", "_").encode("utf-8", "surrogatepass")
        os.mkdir(os.fsencode(path.parent) + b"/step-00000009.tmp-%d" % number + name)
    os.mkdir(os.fsencode(path.parent) + b"/step-00000009\xff\x1b[2J")
    (path.parent / "step-٠٠٠٠٠٠٩٩").mkdir()


def _unlisted(path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (path / f"{number}{text.replace('/', '_').replace(chr(0), '_')}").touch()


def _given_away(path: Path, name: str) -> None:
    os.chown(path / name, 12345, 12345)


def _edited(edit: Callable[[dict[str, Any]], object], path: Path) -> None:
    change(path / "manifest.json", edit)


def _replaced(make: Callable[[Path], object], name: str, path: Path) -> None:
    make(path / name)


def _tensor_named(path: Path, text: str) -> None:
    """Its bytes are damaged, too: a message would quote the name."""

    def edit(manifest: dict[str, Any]) -> None:
        old = manifest["tensors"][0]["name"]
        for item in manifest["tensors"]:
            item["name"] = text if item["name"] == old else item["name"]
            item["xxh3_128"] = ["0" * 32 for _ in item["xxh3_128"]]

    change(path / "manifest.json", edit)


FOLDERS: dict[str, Change] = {
    "a FIFO in its place": partial(_instead, make=os.mkfifo),
    "a file in its place": partial(_instead, make=Path.touch),
    "a link to itself in its place": partial(_instead, make=lambda p: p.symlink_to(p.name)),
    "a link to a device in its place": partial(_instead, make=lambda p: p.symlink_to("/dev/zero")),
    "a link elsewhere in its place": partial(_instead, make=lambda p: p.symlink_to("/proc/self")),
    "an empty folder in its place": partial(_instead, make=Path.mkdir),
    "2,000 files named like checkpoints": _many,
    "names with escapes beside it": _names,
    "files with escapes in their names": _unlisted,
    "another step's folder": lambda p: shutil.copytree(p, p.with_name("step-00000077")),
    **{
        f"tensors named {ascii(text)[:24]}": partial(_tensor_named, text=text)
        for text in (TEXTS[0], TEXTS[17], TEXTS[25], TEXTS[30], "", "x" * 5000)
    },
    "a manifest of a million digits": lambda p: (p / "manifest.json").write_text("9" * 1_000_000),
    "a manifest of 60 MiB": lambda p: (p / "manifest.json").write_text(" " * (60 << 20)),
    "a manifest that is a list": lambda p: (p / "manifest.json").write_text("[]"),
    "a deep state": lambda p: rewrite_state(p, b"[" * 200_000),
    "a state that is a list": lambda p: rewrite_state(p, b"[]"),
    "a state of a number": lambda p: rewrite_state(p, b'{"x":' + b"9" * 100_000 + b"}"),
}
IF_ROOT: dict[str, Change] = {
    f"another user's {name}": partial(_given_away, name=name)
    for name in ("rank-000.bin", "state.json", "manifest.json", ".")
}
CHECKPOINTS: dict[str, Change] = {
    **{f"a manifest with {name}": partial(_edited, edit) for name, edit in EDITS.items()},
    **{
        f"{name} is {kind}": partial(_replaced, make, name)
        for kind, make in FILES.items()
        for name in ("rank-000.bin", "state.json", "manifest.json")
    },
    **_states(),
    **FOLDERS,
    **(IF_ROOT if os.geteuid() == 0 else {}),
}
