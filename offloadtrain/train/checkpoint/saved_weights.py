"""The weights of a checkpoint, straight from its files: without an engine, one at a time.

Of parameters in contiguous memory, as language models have them: shards are in memory order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from offloadtrain.optim import UpdateRule
from offloadtrain.runtime.dtypes import name_of
from offloadtrain.runtime.kernels import cut
from offloadtrain.runtime.process_group import UNTRAINED
from offloadtrain.step.formats import FP32, StateFormat, recognise
from offloadtrain.train.checkpoint.checkpoint import Checkpoint
from offloadtrain.train.checkpoint.manifest import CheckpointError
from offloadtrain.train.checkpoint.tensor_file import DTYPE_NAMES

_DECODED = 1 << 18
"""Elements decoded at a time; a multiple of the formats' blocks."""

_TORCH_NAMES = {name: name_of(dtype) for dtype, name in DTYPE_NAMES.items()}


@dataclass(slots=True)
class _Piece:
    """What one file holds of a parameter of this shape: its elements from `lo` on."""

    path: Path
    shape: tuple[int, ...]
    lo: int
    dtypes: dict[str, str] = field(default_factory=dict)
    """Kind of tensor → dtype, by torch's name."""


def saved_weights(
    found: Checkpoint,
    rule: UpdateRule,
    *,
    working: bool = False,
    wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every parameter and persistent buffer, in its shape, on the host.

    What was trained comes as its fp32 master weights, decoded from any state format; the rest as
    it was saved. Holds one tensor and the state beside it.

    Args:
        rule: the one that trained them: its moments lie beside them.
        working: where the state holds the working weight itself, yield that: it is not always the
            master rounded to nearest.
        wanted: whether to read the one of this name.

    Raises:
        CheckpointError: the state is of no format that is known here.
    """
    chosen = ((name, of) for name, of in _pieces_by_name(found).items() if wanted(name))
    for name, pieces in chosen:
        parts = [_read(name, piece, rule, working) for piece in pieces]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        yield name, whole.view(pieces[0].shape)


def _pieces_by_name(found: Checkpoint) -> dict[str, list[_Piece]]:
    by_file: dict[tuple[str, str], _Piece] = {}
    names: dict[str, list[_Piece]] = {}
    for entry in found.manifest["tensors"]:
        name, key = entry["name"], (entry["name"], entry["file"])
        if key not in by_file:
            # The first of a parameter's tensors is its weight.
            shape = tuple(entry.get("of", entry["shape"]))
            lo, _ = entry.get("range", (0, None))
            by_file[key] = _Piece(found.path / entry["file"], shape, lo)
            names.setdefault(name, []).append(by_file[key])
        by_file[key].dtypes[entry["kind"]] = _TORCH_NAMES[entry["dtype"]]
    return {name: sorted(pieces, key=lambda piece: piece.lo) for name, pieces in names.items()}


def _read(name: str, piece: _Piece, rule: UpdateRule, working: bool) -> Tensor:
    """Return the weights of a piece as (n,)."""
    if piece.dtypes.keys() == {UNTRAINED}:
        return _tensors(name, piece, [UNTRAINED])[0]
    source = recognise(piece.dtypes, rule.moments, FP32)
    if source is None:
        kinds = ", ".join(piece.dtypes)
        raise CheckpointError(f"the state of '{name}' is of no known format: {kinds}")
    if source is FP32 or (working and source.holds_weight):
        return _tensors(name, piece, [source.master[0].name])[0]
    return _decoded(name, piece, source, rule)


def _tensors(name: str, piece: _Piece, kinds: Sequence[str]) -> list[Tensor]:
    # Opened for each: its pages leave the process with it.
    with safe_open(piece.path, framework="pt") as file:
        return [file.get_tensor(f"{kind}/{name}").reshape(-1) for kind in kinds]


def _decoded(name: str, piece: _Piece, source: StateFormat, rule: UpdateRule) -> Tensor:
    fields = source.fields(rule.moments)
    given = _tensors(name, piece, [one.name for one in fields])
    whole = torch.empty(given[0].numel())
    for lo in range(0, whole.numel(), _DECODED):
        hi = min(lo + _DECODED, whole.numel())
        wide = tuple(torch.empty(hi - lo) for _ in FP32.fields(rule.moments))
        rule.convert(source, cut(fields, given, lo, hi), FP32, wide)
        whole[lo:hi] = wide[0]
    return whole
