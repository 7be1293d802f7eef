"""The files of a checkpoint: the layout of their tensors, and the manifest that lists everything.

Nothing in a manifest is trusted before it is checked.

[Note: The tensor files]
A rank's file holds the flat buffers of its state as they lie in memory, one *region* each, and on
rank 0 the other tensors of the model. Regions start on blocks of 4096 bytes, so that they are
written and read directly from the arena, without the page cache. An *entry* is one tensor, or this
rank's part of it. The *spans* of entries tile the file: padding belongs to the entry before
it. A *chunk* is the part of a span in one window of 8 MiB. Each chunk has a hash, so that a changed
byte anywhere names its tensor. xxh3-128 protects against accidents, not against malice.
"""

from __future__ import annotations

import json
import math
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offloadtrain.boundary import safe_open
from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine.saved_state import WORKING, FlatState, Piece
from offloadtrain.hardware.direct_io import padded, windows
from offloadtrain.runtime.dtypes import name_of
from offloadtrain.runtime.process_group import UNTRAINED

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}
"""The dtypes that a checkpoint can hold, by torch's names."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file.

    Attributes:
        name: name of the parameter or buffer.
        kind: field of the state, such as "exp_avg", or `UNTRAINED`.
        shape, stride: shape and strides of the complete parameter.
        lo, hi: range of its elements, in memory order.
        count: stored values for this range; fewer than elements for scales and packed codes.
        offset: first byte of the values in the file.
        span: byte range [first, last) of the file that the hashes cover.
        digests: hash of each chunk; empty until known.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    lo: int
    hi: int
    count: int
    file: str
    offset: int
    span: tuple[int, int]
    digests: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.count * DTYPES[self.dtype].itemsize

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def chunks(self) -> list[tuple[int, int]]:
        """Return [lo, hi) of each chunk in the file."""
        return list(windows(*self.span))


class Chunk(NamedTuple):
    lo: int
    hi: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class Region:
    """One flat buffer in the file.

    Attributes:
        owner: the bucket that writes it; for other tensors, their name.
        nbytes: size without the padding at its end.
    """

    owner: str
    kind: str
    offset: int
    nbytes: int
    chunks: tuple[Chunk, ...]

    @property
    def end(self) -> int:
        """The offset after its padding."""
        return self.offset + padded(self.nbytes)

    def within(self, lo: int, hi: int) -> Sequence[Chunk]:
        """Return the chunks that begin in [lo, hi) of the file."""
        first = bisect_left(self.chunks, lo, key=lambda chunk: chunk.lo)
        return self.chunks[first : bisect_left(self.chunks, hi, key=lambda chunk: chunk.lo)]


def lay_out(
    file: str, states: Iterable[FlatState], extra: Mapping[str, torch.Tensor]
) -> list[Region]:
    """Lay out a rank's file.

    Raises:
        TypeError: a dtype that a checkpoint cannot hold.
    """
    regions: list[Region] = []
    flats = list(states)
    for name, tensor in extra.items():  # outside all buckets: saved as a contiguous tensor
        shape, numel = tuple(tensor.shape), tensor.numel()
        piece = Piece(name, shape, dense(shape), 0, numel, 0, numel)
        flats.append(FlatState(name, UNTRAINED, name_of(tensor.dtype), numel, (piece,)))
    for flat in flats:
        if flat.pieces:
            regions.append(_region(file, flat, regions[-1].end if regions else 0))
    return regions


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _region(file: str, flat: FlatState, start: int) -> Region:
    if flat.dtype not in DTYPES:
        first = f"{flat.kind}/{flat.pieces[0].name}"
        raise TypeError(f"{first} is torch.{flat.dtype}; a checkpoint can hold {', '.join(DTYPES)}")
    size = DTYPES[flat.dtype].itemsize
    nbytes = flat.numel * size
    begins = [start + piece.start * size for piece in flat.pieces]
    # A shard may begin with padding, which belongs to the first span.
    cuts = [start, *begins[1:], start + padded(nbytes)]
    chunks: list[Chunk] = []
    for at, piece in enumerate(flat.pieces):
        entry = Entry(
            *(piece.name, flat.kind, flat.dtype, piece.shape, piece.stride, piece.lo, piece.hi),
            *(piece.count, file, begins[at], (cuts[at], cuts[at + 1])),
        )
        # An entry with an empty span still needs a chunk that refers to it.
        spans = entry.chunks() or [(cuts[at], cuts[at])]
        chunks += [Chunk(lo, hi, entry) for lo, hi in spans]
    return Region(flat.bucket, flat.kind, start, nbytes, tuple(chunks))


FORMAT = "offloadtrain-checkpoint"
VERSION = 2
MANIFEST, STATE = "manifest.json", "state.json"
MOST_JSON_BYTES = 64 << 20
"""Limit on JSON files; a manifest of 10 TB of state is smaller."""

_TENSOR_FILE = re.compile(r"rank-\d{3,6}\.bin")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_MOST = 1 << 62


class CheckpointError(OffloadTrainError):
    """A checkpoint cannot be written, or does not belong to this model or version."""


class NotFiniteError(CheckpointError):
    """The state must not be saved: some weights are not finite."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, cut short or changed; an older one may be valid."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A verified manifest.

    Attributes:
        sizes: name of a tensor file → its bytes.
        state: (bytes, sha256) of the state file.
        entries: all tensors, in file order.
    """

    step: int
    sizes: Mapping[str, int]
    state: tuple[int, str]
    entries: tuple[Entry, ...]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())

    def tensors_behind(self, file: str, num_bytes: int) -> str:
        """Return the end of an error message that names the tensors beyond the first `num_bytes`
        bytes of a file; "" if there are none."""
        lost = [entry for entry in self.entries if entry.file == file and entry.span[1] > num_bytes]
        if not lost:
            return ""
        more = f" and {len(lost) - 1} more tensors" if len(lost) > 1 else ""
        return f"; it lacks {lost[0].kind} of '{lost[0].name}'{more}"


def write_manifest(
    step: int, sizes: Mapping[str, int], state: bytes, entries: Iterable[Entry]
) -> bytes:
    """Return the text of a manifest.

    Args:
        state: content of the state file.
    """
    described = {"bytes": len(state), "sha256": sha256(state).hexdigest()}
    content = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "files": {name: {"bytes": size} for name, size in sizes.items()} | {STATE: described},
        "tensors": [encoded_entry(entry) for entry in entries],
    }
    return json.dumps(content | {"sha256": digest_of(content)}, indent=1).encode()


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Return the hash of a manifest without its own "sha256", independent of its text layout."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of the checkpoint in `folder`, and the kind and size of every
    file there.

    Raises:
        DamagedCheckpointError: it cannot be read, does not match its own hash, has an unknown
            version, or contradicts itself or the folder.
        CheckpointError: its format version is newer.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(safe_open.read_regular(path, max_bytes=MOST_JSON_BYTES))
        if content["sha256"] != digest_of(content) or content["format"] != FORMAT:
            raise DamagedCheckpointError(f"{path} does not match its own hash")
        version = content.get("version")
        if type(version) is not int or version < VERSION:
            shown = "no version" if version is None else f"the unknown version {version!a:.40}"
            raise DamagedCheckpointError(f"{path} names {shown} of the checkpoint format")
        if version > VERSION:
            raise CheckpointError(
                f"{folder} has checkpoint format version {version}; this offloadtrain reads "
                f"version {VERSION}. Use the version of offloadtrain that wrote it, or newer."
            )
        manifest = _decoded(content)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}") from error
    # JSON may hold anything in place of the expected value: deep nesting, wrong types, no keys.
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise DamagedCheckpointError(f"{path} cannot be read: {ascii(reason)[1:-1]}") from error
    _check_files(folder, manifest)
    return manifest


def read_state(folder: Path, manifest: Manifest) -> Mapping[str, Any]:
    """Read the state file: all state other than tensors.

    Raises:
        DamagedCheckpointError: the file is missing, too large, or changed.
    """
    path, (num_bytes, digest) = folder / STATE, manifest.state
    try:
        text = safe_open.read_regular(path, max_bytes=min(num_bytes, MOST_JSON_BYTES))
        if sha256(text).hexdigest() != digest:
            raise DamagedCheckpointError(f"{path} has changed since it was written (sha256)")
        state = json.loads(text)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} cannot be read: it is not JSON") from error
    if not isinstance(state, dict):
        raise DamagedCheckpointError(f"{path} is not a table of values")
    return state


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Compare names, kinds, sizes and owners of the files; only regular files are opened."""
    expected = {**manifest.sizes, STATE: manifest.state[0]}
    try:
        present, owner = set(os.listdir(folder)), os.stat(folder).st_uid
    except OSError as error:
        raise DamagedCheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    for name in sorted(present - expected.keys() - {MANIFEST}):
        raise DamagedCheckpointError(f"{folder} holds {name!a}, which its manifest does not list")
    for name, num_bytes in expected.items():
        path = folder / name
        try:
            with open(safe_open.open_descriptor(path), "rb") as file:
                status = os.fstat(file.fileno())
        except OSError as error:
            why = f"{error.strerror}{manifest.tensors_behind(name, 0)}"
            raise DamagedCheckpointError(f"{path} cannot be read: {why}") from error
        if status.st_size != num_bytes:
            lost = manifest.tensors_behind(name, status.st_size)
            raise DamagedCheckpointError(
                f"{path} has {status.st_size} bytes, the manifest says {num_bytes}{lost}"
            )
        if status.st_uid != owner:
            raise DamagedCheckpointError(
                f"{path} belongs to user {status.st_uid}, its folder to user {owner}"
            )


def encoded_entry(entry: Entry) -> dict[str, Any]:
    encoded: dict[str, Any] = {
        "name": entry.name,
        "kind": entry.kind,
        "dtype": entry.dtype,
        "shape": [*entry.shape],
        "range": [entry.lo, entry.hi],
        "count": entry.count,
        "file": entry.file,
        "offset": entry.offset,
        "span": [*entry.span],
        "xxh3_128": [*entry.digests],
    }
    if entry.stride != dense(entry.shape):
        encoded["stride"] = [*entry.stride]
    return encoded


def _decoded(content: Mapping[str, Any]) -> Manifest:
    """Decode and check a manifest; raises ValueError, LookupError, TypeError or AttributeError."""
    files = dict(content["files"])
    state = files.pop(STATE)
    for name in files:
        _require(_TENSOR_FILE.fullmatch(name), f"a file is called {ascii(name)[:80]}")
    sizes = {name: _count(file["bytes"]) for name, file in files.items()}
    entries = tuple(decoded_entry(item) for item in _list(content["tensors"]))
    _check_tiling(sizes, entries)
    _check_pieces(entries)
    state_file = (_count(state["bytes"]), str(state["sha256"]))
    return Manifest(_count(content["step"]), sizes, state_file, entries)


def decoded_entry(encoded: Mapping[str, Any]) -> Entry:
    shape = tuple(map(_count, _list(encoded["shape"])))
    lo, hi = map(_count, _list(encoded["range"]))
    first, last = map(_count, _list(encoded["span"]))
    stride = tuple(map(_count, _list(encoded["stride"]))) if "stride" in encoded else dense(shape)
    digests = tuple(_list(encoded["xxh3_128"]))
    entry = Entry(
        *(_name(encoded["name"]), _name(encoded["kind"]), encoded["dtype"], shape, stride, lo, hi),
        *(_count(encoded["count"]), encoded["file"], _count(encoded["offset"])),
        *((first, last), digests),
    )
    _require(entry.dtype in DTYPES, f"{entry.name} is of no known dtype")
    _require(lo <= hi <= math.prod(shape), f"{entry.name} has elements {lo} to {hi} of {shape}")
    _require(entry.count <= hi - lo, f"{entry.name} has more values than elements")
    last_element = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    fills = last_element + 1 == math.prod(shape) or 0 in shape
    _require(fills, f"{entry.name} has strides {stride} for shape {shape}")
    inside = first <= entry.offset and entry.end <= last
    _require(inside, f"{entry.name} is outside of its own bytes")
    hashed = len(digests) == len(entry.chunks()) and all(map(_DIGEST.fullmatch, digests))
    _require(hashed, f"{entry.name} has not one hash for each chunk")
    return entry


def _check_tiling(sizes: Mapping[str, int], entries: Sequence[Entry]) -> None:
    """Check that every byte of every file belongs to one tensor."""
    ends = dict.fromkeys(sizes, 0)
    for entry in entries:
        _require(entry.span[0] == ends[entry.file], f"{entry.name} overlaps, or leaves a gap")
        ends[entry.file] = entry.span[1]
    for file, end in ends.items():
        _require(end == sizes[file], f"{file} has bytes that belong to no tensor")


def _check_pieces(entries: Iterable[Entry]) -> None:
    """Check that every tensor is complete, and that all its kinds are cut at the same elements."""
    pieces: dict[str, dict[str, list[tuple[int, int]]]] = {}
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for entry in entries:
        shape = (entry.shape, entry.stride)
        _require(shapes.setdefault(entry.name, shape) == shape, f"{entry.name} has two shapes")
        pieces.setdefault(entry.name, {}).setdefault(entry.kind, []).append((entry.lo, entry.hi))
    for name, kinds in pieces.items():
        first, *rest = (sorted(spans) for spans in kinds.values())
        _require(all(other == first for other in rest), f"kinds of {name} differ in their pieces")
        bounds = [0, *(bound for piece in first for bound in piece), math.prod(shapes[name][0])]
        complete = all(a == b for a, b in zip(bounds[::2], bounds[1::2], strict=True))
        _require(complete, f"{name} is not whole, or parts of it overlap")
    trained = {name for name, kinds in pieces.items() if kinds.keys() - {UNTRAINED, WORKING}}
    in_use = {name for name, kinds in pieces.items() if WORKING in kinds}
    _require(in_use in (set(), trained), "it holds the weights in use of some parameters only")


def _require(holds: object, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{ascii(value)[:40]} is not a count")
    return value


def _name(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) < 1000:
        raise ValueError(f"{ascii(value)[:80]} is not a name")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{ascii(value)[:40]} is not a list")
    return value
