"""A folder of torch.distributed.checkpoint, as FSDP writes it, read without a process group."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offloadtrain.boundary.safe_open import open_regular
from offloadtrain.integrations.foreign.dcp_metadata import Index, IndexedTensor, Piece, read_index
from offloadtrain.integrations.foreign.found import MOMENTS, ForeignError, Lazy
from offloadtrain.integrations.foreign.safe_load import load_bytes

INDEX = ".metadata"

_USED_OF_GROUPS = {
    *("lr", "betas", "eps", "weight_decay", "params", "param_names"),
    *("amsgrad", "maximize", "decoupled_weight_decay"),
}


def read_folder(folder: Path) -> dict[str, Any]:
    """Return what was saved, nested as it was, with a `Lazy` for each tensor.

    Raises:
        ForeignError: index or files are damaged.
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
    """Split a key of `get_state_dict` with flattened optimizer state: "state.NAME.exp_avg"."""
    kind, _, rest = str(path[-1]).partition(".")
    name, _, what = rest.rpartition(".")
    known = {"state": {*MOMENTS, "step", "max_exp_avg_sq"}, "param_groups": _USED_OF_GROUPS}
    return (kind, name, what) if name and what in known.get(kind, ()) else None


def _put(tree: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})  # type: ignore[arg-type]  # lists have numbers
    tree[path[-1]] = value  # type: ignore[index]


def _lazy(folder: Path, index: Index, key: str) -> Lazy:
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
    return Lazy(tensor.shape, dtype, lambda: _assembled(folder, index, key, tensor, dtype))


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
