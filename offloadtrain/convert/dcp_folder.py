"""Reads a folder of torch.distributed.checkpoint, as FSDP writes it, without a process group.

Its index is a pickle, which is read without executing it: the unpickler imports nothing, represents
every class of the index by a record of its arguments, and refuses any other name. No other
module reads a pickle.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offloadtrain.boundary.safe_open import open_regular
from offloadtrain.convert.checkpoint import MOMENTS, ForeignError, LazyTensor
from offloadtrain.convert.safe_load import load_bytes

INDEX = ".metadata"

_USED_OF_GROUPS = {
    *("lr", "betas", "eps", "weight_decay", "params", "param_names"),
    *("amsgrad", "maximize", "decoupled_weight_decay"),
}

_MOST_BYTES = 256 << 20
_CHECKPOINT = "torch.distributed.checkpoint"
_RECORDS = {
    (f"{_CHECKPOINT}.metadata", "Metadata"),
    (f"{_CHECKPOINT}.metadata", "MetadataIndex"),
    (f"{_CHECKPOINT}.metadata", "TensorStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "BytesStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "ChunkStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "TensorProperties"),
    (f"{_CHECKPOINT}.metadata", "StorageMeta"),
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "WindowsPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "PurePosixPath", "WindowsPath")),
}
_DTYPES = {
    *("float64", "float32", "float16", "bfloat16"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
}


def read_folder(folder: Path) -> dict[str, Any]:
    """Return the saved nested dictionary, with a `LazyTensor` for each tensor.

    Raises:
        ForeignError: the index or a file is damaged.
    """
    index = read_index(folder / INDEX)
    tree: dict[str, Any] = {}
    flat: dict[str, dict[str, Any]] = {}
    for key, path in index.paths.items():
        named = _flattened(path)
        if key in index.tensors:
            value: Any = _lazy(folder, index, key)
        elif path[-1] in _USED_OF_GROUPS or (named and named[2] in _USED_OF_GROUPS):
            value = _object(folder, index, key)
        else:
            continue
        if named is None:
            _put(tree, path, value)
        elif named[0] == "state":
            _put(tree, (*path[:-1], *named), value)
        else:
            flat.setdefault(named[1], {"params": [named[1]]})[named[2]] = value
            _put(tree, (*path[:-1], "param_groups"), list(flat.values()))
    return tree


def _flattened(path: tuple[str | int, ...]) -> tuple[str, str, str] | None:
    """Split a key of `get_state_dict` with flattened optimizer state, such as
    "state.NAME.exp_avg"."""
    kind, _, rest = str(path[-1]).partition(".")
    name, _, what = rest.rpartition(".")
    known = {"state": {*MOMENTS, "step", "max_exp_avg_sq"}, "param_groups": _USED_OF_GROUPS}
    return (kind, name, what) if name and what in known.get(kind, ()) else None


def _put(tree: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})  # type: ignore[arg-type]  # lists have numbers
    tree[path[-1]] = value  # type: ignore[index]


def _lazy(folder: Path, index: Index, key: str) -> LazyTensor:
    tensor = index.tensors[key]
    chunks = tensor.chunks
    inside = all(
        len(offsets) == len(sizes) == len(tensor.shape)
        and all(o + s <= n for o, s, n in zip(offsets, sizes, tensor.shape, strict=True))
        for offsets, sizes in chunks
    )
    if not inside or sum(math.prod(sizes) for _, sizes in chunks) != math.prod(tensor.shape):
        raise ForeignError(f"{folder / INDEX}: '{key}' is not whole, or parts of it overlap")
    for offsets, _ in chunks:
        if (key, offsets) not in index.pieces:
            raise ForeignError(f"{folder / INDEX}: '{key}' has no bytes for its part at {offsets}")
    dtype = getattr(torch, tensor.dtype)
    return LazyTensor(tensor.shape, dtype, lambda: _assembled(folder, index, key, tensor, dtype))


def _assembled(
    folder: Path, index: Index, key: str, tensor: IndexedTensor, dtype: torch.dtype
) -> Tensor:
    assembled = torch.zeros(tensor.shape, dtype=dtype)
    for offsets, sizes in tensor.chunks:
        piece = index.pieces[key, offsets]
        part = load_bytes(f"{folder / piece.file}, '{key}'", _bytes(folder, piece))
        fits = isinstance(part, Tensor) and tuple(part.shape) == sizes and part.dtype == dtype
        if not fits:
            raise ForeignError(f"{folder / piece.file}: '{key}' is not what the index says")
        places = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        assembled[places] = part
    return assembled


def _object(folder: Path, index: Index, key: str) -> Any:
    piece = index.pieces.get((key, None))
    if piece is None:
        raise ForeignError(f"{folder / INDEX}: '{key}' has no bytes")
    return load_bytes(f"{folder / piece.file}, '{key}'", _bytes(folder, piece))


def _bytes(folder: Path, piece: Piece) -> bytes:
    path = folder / piece.file
    try:
        with open_regular(path) as file:
            last = file.seek(0, 2)
            if piece.offset < 0 or piece.length < 0 or piece.offset + piece.length > last:
                raise ForeignError(
                    f"{path}: the index wants {piece.length:,} bytes from byte {piece.offset:,} "
                    f"on, and the file has {last:,}"
                )
            file.seek(piece.offset)
            return file.read(piece.length)
    except OSError as error:
        raise ForeignError(f"{path}: {error.strerror}") from None


class Record:
    """Stores the arguments and the state of a pickled object.

    Attributes:
        args: arguments of its construction.
        state: attribute → value; or a tuple, if the object was pickled so.
    """

    args: tuple[Any, ...] = ()
    state: Any = MappingProxyType({})

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Inert(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return Record
        if module == "torch" and name in _DTYPES:
            return name
        raise ForeignError(f"it needs {module}.{name}, which no index of a checkpoint does")


class Piece(NamedTuple):
    """Location of a part of a tensor, or of an object."""

    file: str
    offset: int
    length: int


class IndexedTensor(NamedTuple):
    """Attributes:
    chunks: (offsets, sizes) of each part.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class Index(NamedTuple):
    """Attributes:
    paths: key → path in the saved dictionary.
    tensors: key → dtype, shape and chunks.
    pieces: (key, offsets) → location of the bytes; offsets are None for objects.
    """

    paths: dict[str, tuple[str | int, ...]]
    tensors: dict[str, IndexedTensor]
    pieces: dict[tuple[str, tuple[int, ...] | None], Piece]


def read_index(path: Path) -> Index:
    """Read `.metadata`.

    Raises:
        ForeignError: it is damaged, or is not an index.
    """
    try:
        with open_regular(path, max_bytes=_MOST_BYTES, follow_link=True) as file:
            return _index(_Inert(file).load().state)
    except ForeignError as error:
        raise ForeignError(f"{path}: {error}") from None
    except MemoryError:
        raise
    except OSError as error:
        raise ForeignError(f"{path}: {error.strerror}") from None
    except Exception as error:  # damaged bytes may raise any class
        raise ForeignError(
            f"{path}: it is no index of a checkpoint: {type(error).__name__} {error}"[:300]
        ) from None


def _index(state: dict[str, Any]) -> Index:
    entries = state["state_dict_metadata"]
    paths = state["planner_data"] or {key: (key,) for key in entries}
    tensors = {
        key: _tensor(entry.state) for key, entry in entries.items() if "chunks" in entry.state
    }
    pieces = {_key(at.state): _piece(info.state) for at, info in state["storage_data"].items()}
    return Index({key: tuple(at) for key, at in paths.items()}, tensors, pieces)


def _tensor(state: dict[str, Any]) -> IndexedTensor:
    chunks = (
        (_size(chunk.state["offsets"]), _size(chunk.state["sizes"])) for chunk in state["chunks"]
    )
    # Properties are pickled as a tuple that begins with the dtype.
    dtype = state["properties"].state[0]
    if dtype not in _DTYPES:
        raise ForeignError(f"a tensor is of the unknown dtype {ascii(dtype)[:40]}")
    return IndexedTensor(dtype, _size(state["size"]), tuple(chunks))


def _key(state: dict[str, Any]) -> tuple[str, tuple[int, ...] | None]:
    offset = state.get("offset")  # absent if it is None
    return str(state["fqn"]), None if offset is None else _size(offset)


def _piece(state: dict[str, Any]) -> Piece:
    if state.get("transform_descriptors"):
        raise ForeignError("its tensors are compressed, which is not read")
    name = str(state["relative_path"])
    if Path(name).name != name:
        raise ForeignError(f"it names {ascii(name)[:80]}, which is outside of its folder")
    return Piece(name, int(state["offset"]), int(state["length"]))


def _size(record: Record) -> tuple[int, ...]:
    """Return the numbers of a `torch.Size`."""
    size = tuple(int(number) for number in (record.args[0] if record.args else ()))
    if any(number < 0 for number in size):
        raise ForeignError(f"a tensor has the size {size}")
    return size
