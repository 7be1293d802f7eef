"""The index of a folder of torch.distributed.checkpoint, which is a pickle, without running it.

The unpickler resolves no name: every class of the index stands for a record that keeps what it is
given, and any other name is refused. It is the one place that reads a pickle.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from offloadtrain.boundary.safe_open import open_regular
from offloadtrain.integrations.foreign.found import ForeignError

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


class Record:
    """Keeps the arguments and the state of an object, and does nothing.

    Attributes:
        args: of its construction.
        state: attribute → value; or a tuple, as the object has pickled it.
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
    """A part of a tensor, or an object: where its bytes are."""

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
    paths: key → where it was in the saved dictionary.
    tensors: key → what it is made of.
    pieces: (key, offsets) → its bytes; of objects the offsets are None.
    """

    paths: dict[str, tuple[str | int, ...]]
    tensors: dict[str, IndexedTensor]
    pieces: dict[tuple[str, tuple[int, ...] | None], Piece]


def read_index(path: Path) -> Index:
    """Read `.metadata`.

    Raises:
        ForeignError: it is damaged, or is no index.
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
    except Exception as error:  # whatever damaged bytes lead to
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
    # Its properties are pickled as a tuple, of which the dtype is the first.
    dtype = state["properties"].state[0]
    if dtype not in _DTYPES:
        raise ForeignError(f"a tensor is of the unknown dtype {ascii(dtype)[:40]}")
    return IndexedTensor(dtype, _size(state["size"]), tuple(chunks))


def _key(state: dict[str, Any]) -> tuple[str, tuple[int, ...] | None]:
    offset = state.get("offset")  # absent where it is None
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
