"""Checkpoints whose files have changed: bytes, lengths, places, names, and manifests that lie."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.runtime.process_group import Ranks
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.manifest import DamagedCheckpointError, Entry, digest_of
from offloadtrain.train.checkpoint.restore import restore
from offloadtrain.train.checkpoint.save import save
from tests.train.storage.linked_ranks import on_threads
from tests.train.storage.saves import Case, one_thread
from tests.train.toy_state import filled, same

COUNT = 2400
SEED = 1
RANKS = 2
OLD, NEWER = 1, 5
Damage = Callable[[Path, random.Random], str]
"""Changes the newer checkpoint; returns what must be named: a file, or parts of a tensor's file as
`rank-000.bin:lo:hi`; "" for any."""


def cases(scratch: Path) -> list[Case]:
    """Every kind of damage in turn, at places that are drawn."""
    good = scratch / "good"
    for step in (OLD, NEWER):
        _save(good, step)
    kinds = list(DAMAGES)
    made = []
    for number in range(COUNT):
        name = kinds[number % len(kinds)]
        made.append(Case(f"{name}: {number}", partial(_damaged, good, name, f"{SEED} {number}")))
    return made


def _save(folder: Path, step: int) -> None:
    def on_rank(ranks: Ranks) -> None:
        state = filled(step, rank=ranks.rank, num_ranks=ranks.size)
        save(folder, step, *state, {"step": step}, ranks=ranks)

    assert on_threads(RANKS, on_rank) == [None] * RANKS


def _damaged(good: Path, name: str, seed: str, root: Path) -> str:
    folder = Path(shutil.copytree(good, root / "checkpoints"))
    path, draw = folder / f"step-{NEWER:08d}", random.Random(seed)
    entries = checkpoint.open_checkpoint(path).manifest.entries
    named = DAMAGES[name](path, draw)
    with one_thread():
        message = (
            _met_while_loading(folder) if draw.random() < 0.5 else _met_while_verifying(folder)
        )
    assert message.isprintable() and str(path) in message, message
    _check_named(named, message, entries)
    return "tensor named" if " of '" in message else "file named"


def _met_while_verifying(folder: Path) -> str:
    reported: list[str] = []
    newest = checkpoint.newest_good(folder, lambda _, error: reported.append(str(error)))
    assert newest is not None and newest.step == OLD, "the damage is not noticed"
    _loads(newest)
    (message,) = reported
    return message


def _met_while_loading(folder: Path) -> str:
    """As `--resume` does: tensors are verified while they are loaded."""
    reported: list[str] = []
    newest = checkpoint.newest_good(folder, lambda _, e: reported.append(str(e)), verified=False)
    assert newest is not None
    if newest.step == NEWER:
        with pytest.raises(DamagedCheckpointError) as caught:
            restore(newest, *filled(99))
        reported.append(str(caught.value))
        newest = checkpoint.newest_good(folder, _never, verified=False, before=NEWER)
        assert newest is not None
    _loads(newest)
    (message,) = reported
    return message


def _never(path: Path, damage: DamagedCheckpointError) -> None:
    raise AssertionError(f"{path}: {damage}")


def _loads(opened: checkpoint.Checkpoint) -> None:
    model, state = filled(99)
    restore(opened, model, state)
    assert opened.step == OLD and same(state, filled(OLD)[1])


def _check_named(named: str, message: str, entries: tuple[Entry, ...]) -> None:
    file, *span = named.split(":")
    assert file in message, (file, message)
    if span:
        lo, hi = map(int, span)
        hit = [e for e in entries if e.file == file and e.span[0] < hi and lo < e.span[1]]
        assert any(f"{e.kind} of '{e.name}'" in message for e in hit), (named, message)


# ---- accidents


def _any_file(path: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(path.iterdir()))


def _tensors(path: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(path.glob("rank-*.bin")))


def _place(path: Path, lo: int, hi: int) -> str:
    return f"{path.name}:{lo}:{hi}" if path.suffix == ".bin" else path.name


def flip(path: Path, draw: random.Random, bits: int = 1) -> str:
    """Of one byte, in padding too."""
    file = _any_file(path, draw)
    content = bytearray(file.read_bytes())
    at = draw.randrange(len(content))
    for bit in draw.sample(range(8), bits):
        content[at] ^= 1 << bit
    file.write_bytes(content)
    return _place(file, at, at + 1)


def flip_tensor(path: Path, draw: random.Random) -> str:
    """Of the largest files mostly: a checkpoint is nearly all tensors."""
    file = _tensors(path, draw)
    content = bytearray(file.read_bytes())
    at = draw.randrange(len(content))
    content[at] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return _place(file, at, at + 1)


def overwrite(path: Path, draw: random.Random, size: int) -> str:
    """A block reads as zeros, or as what was there before."""
    file = _tensors(path, draw)
    content = bytearray(file.read_bytes())
    at = draw.randrange(0, len(content), size)
    while not any(content[at : at + size]):  # it would stay as it is
        at = draw.randrange(0, len(content), size)
    content[at : at + size] = draw.choice((bytes(size), b"\xa5" * size))
    file.write_bytes(content)
    return _place(file, at, at + size)


def cut(path: Path, draw: random.Random) -> str:
    file = _any_file(path, draw)
    content = file.read_bytes()
    left = draw.randrange(len(content))
    file.write_bytes(content[:left])
    return _place(file, left, len(content))


def lengthen(path: Path, draw: random.Random) -> str:
    file = _any_file(path, draw)
    with file.open("ab") as at_end:
        at_end.write(draw.choice((b"\0", b"\0" * 4096, b"{}")))
    return file.name


def lose(path: Path, draw: random.Random) -> str:
    file = _any_file(path, draw)
    size = file.stat().st_size
    file.unlink()
    return _place(file, 0, size)


def exchange_files(path: Path, draw: random.Random) -> str:
    """The tensors of two ranks, or the state and the manifest."""
    first, second = draw.choice(
        (
            (path / "rank-000.bin", path / "rank-001.bin"),
            (path / "state.json", path / "manifest.json"),
        )
    )
    content, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(content)
    return ""


def exchange_blocks(path: Path, draw: random.Random) -> str:
    """Of one file."""
    file, size = _tensors(path, draw), draw.choice((512, 4096))
    content = bytearray(file.read_bytes())
    places = range(0, len(content), size)
    while True:
        a, b = draw.sample(places, 2)
        block, other = content[a : a + size], content[b : b + size]
        if block != other:
            break
    content[a : a + size], content[b : b + size] = other, block
    file.write_bytes(content)
    return file.name


def older_file(path: Path, draw: random.Random) -> str:
    """One of the checkpoint before it, of the same name and often of the same size."""
    file = _any_file(path, draw)
    shutil.copy(path.with_name(f"step-{OLD:08d}") / file.name, file)
    return "" if file.name == "manifest.json" else file.name


def older_folder(path: Path, draw: random.Random) -> str:
    """All of its files."""
    shutil.rmtree(path)
    shutil.copytree(path.with_name(f"step-{OLD:08d}"), path)
    return "step"


# ---- manifests that lie, with a hash that fits


def lie(path: Path, draw: random.Random, edit: Callable[[list[Any], random.Random], object]) -> str:
    file = path / "manifest.json"
    content = json.loads(file.read_text())
    edit(content["tensors"], draw)
    content["sha256"] = digest_of(content)
    file.write_text(json.dumps(content))
    return ""


def _pair(tensors: list[Any], draw: random.Random) -> tuple[Any, Any]:
    """Two tensors with bytes of their own, of one file."""
    filled_ = [entry for entry in tensors if entry["xxh3_128"]]
    while True:
        first, second = draw.sample(filled_, 2)
        if first["file"] == second["file"] and first["xxh3_128"] != second["xxh3_128"]:
            return first, second


def repeat(tensors: list[Any], draw: random.Random) -> None:
    """A range of a tensor twice."""
    tensors.insert(draw.randrange(len(tensors)), draw.choice(tensors))


def leave_out(tensors: list[Any], draw: random.Random) -> None:
    tensors.remove(draw.choice([entry for entry in tensors if entry["count"]]))


def overlap_bytes(tensors: list[Any], draw: random.Random) -> None:
    """Two tensors at the same bytes."""
    first, second = _pair(tensors, draw)
    for key in ("span", "offset", "xxh3_128"):
        second[key] = first[key]


def overlap_ranges(tensors: list[Any], draw: random.Random) -> None:
    """A piece that reaches into the piece of the other rank, or leaves a gap before it."""
    entry = draw.choice([entry for entry in tensors if entry["range"][1] - entry["range"][0] > 1])
    lo, hi = entry["range"]
    entry["range"] = draw.choice(([lo, hi - 1], [lo + 1, hi], [max(0, lo - 1), hi], [lo, hi + 1]))
    if entry["range"] == [lo, hi]:
        entry["range"] = [lo, hi - 1]


def exchange_hashes(tensors: list[Any], draw: random.Random) -> None:
    first, second = _pair(tensors, draw)
    first["xxh3_128"], second["xxh3_128"] = second["xxh3_128"], first["xxh3_128"]


def exchange_order(tensors: list[Any], draw: random.Random) -> None:
    first, second = _pair(tensors, draw)
    a, b = tensors.index(first), tensors.index(second)
    tensors[a], tensors[b] = second, first


def move(tensors: list[Any], draw: random.Random) -> None:
    """A tensor is said to begin elsewhere."""
    entry = draw.choice([entry for entry in tensors if entry["xxh3_128"]])
    entry["offset"] = entry["span"][1] - draw.randrange(4)


LIES = (
    *(repeat, leave_out, overlap_bytes, overlap_ranges),
    *(exchange_hashes, exchange_order, move),
)
DAMAGES: dict[str, Damage] = {
    "a bit": flip,
    "a bit of a tensor": flip_tensor,
    "three bits of a byte": partial(flip, bits=3),
    "a sector": partial(overwrite, size=512),
    "a block": partial(overwrite, size=4096),
    "cut": cut,
    "longer": lengthen,
    "missing": lose,
    "files exchanged": exchange_files,
    "blocks exchanged": exchange_blocks,
    "a file of the one before": older_file,
    "the folder of the one before": older_folder,
    **{f"a lie ({edit.__name__.replace('_', ' ')})": partial(lie, edit=edit) for edit in LIES},
}
