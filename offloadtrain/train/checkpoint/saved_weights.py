"""The weights and moments of a checkpoint, straight from its files: without an engine, one at a
time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from offloadtrain.engine.saved_state import WORKING
from offloadtrain.optim import AnyRule, MatrixRule, Rule
from offloadtrain.runtime import kernels
from offloadtrain.runtime.process_group import UNTRAINED
from offloadtrain.step.layout.formats import FP32, StateFormat, recognise
from offloadtrain.train.checkpoint.checkpoint import Checkpoint
from offloadtrain.train.checkpoint.layout import Entry
from offloadtrain.train.checkpoint.manifest import CheckpointError
from offloadtrain.train.checkpoint.restore import read_whole

_Piece = Mapping[str, Entry]
"""A part of a parameter: kind → its tensor."""
_DECODED = 1 << 18
"""Elements decoded at a time; a multiple of the formats' blocks."""


def saved_weights(
    found: Checkpoint,
    rule: AnyRule,
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
        parts = [_read(found, name, piece, rule, working) for piece in pieces]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        entry = next(iter(pieces[0].values()))
        yield name, weight.as_strided(entry.shape, entry.stride)


def saved_state(found: Checkpoint, rule: AnyRule) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (name, {"master" and the rule's moments}) of every trained parameter: fp32, in its
    shape, on the host, decoded from any state format.

    Raises:
        CheckpointError: the state is of no format that is known here.
    """
    kinds = [field.name for field in FP32.fields(rule.moments)]
    for name, pieces in _pieces_by_name(found).items():
        if pieces[0].keys() == {UNTRAINED}:
            continue
        parts = [_decoded(found, piece, *_format(name, piece, rule), kinds) for piece in pieces]
        tensors = (torch.cat(of_kind) for of_kind in zip(*parts, strict=True))
        entry = next(iter(pieces[0].values()))
        views = (tensor.as_strided(entry.shape, entry.stride) for tensor in tensors)
        yield name, dict(zip(kinds, views, strict=True))


def _pieces_by_name(checkpoint: Checkpoint) -> dict[str, list[_Piece]]:
    """Return name → its pieces, in order."""
    names: dict[str, dict[int, dict[str, Entry]]] = {}
    # Update mode "delayed": the weights of the state are the newer ones.
    for entry in (e for e in checkpoint.manifest.entries if e.kind != WORKING):
        names.setdefault(entry.name, {}).setdefault(entry.lo, {})[entry.kind] = entry
    return {name: [pieces[lo] for lo in sorted(pieces)] for name, pieces in names.items()}


def _read(checkpoint: Checkpoint, name: str, piece: _Piece, rule: AnyRule, working: bool) -> Tensor:
    """Return the weights of a piece as (n,)."""
    if piece.keys() == {UNTRAINED}:
        return _values(checkpoint, piece[UNTRAINED])
    source, piece_rule = _format(name, piece, rule)
    if source is FP32 or (working and source.holds_weight):
        return _values(checkpoint, piece[source.master[0].name])
    return _master(checkpoint, piece, source, piece_rule)


def _format(name: str, piece: _Piece, rule: AnyRule) -> tuple[StateFormat, Rule]:
    """Return the format of a piece, and the rule whose moments it has."""
    dtypes = {kind: entry.dtype for kind, entry in piece.items()}
    kept_by: list[Rule] = [rule, rule.rest] if isinstance(rule, MatrixRule) else [rule]
    for candidate in kept_by:
        if source := recognise(dtypes, candidate.moments, FP32):
            return source, candidate
    raise CheckpointError(f"the state of '{name}' is of no known format: {', '.join(piece)}")


def _values(checkpoint: Checkpoint, entry: Entry) -> Tensor:
    """Read a tensor as (n,), in the order of the parameter's memory."""
    return read_whole(checkpoint, entry).as_strided((entry.count,), (1,))


def _decoded(
    checkpoint: Checkpoint, piece: _Piece, source: StateFormat, rule: Rule, kinds: Sequence[str]
) -> list[Tensor]:
    """Return fields of fp32 state as (n,) each."""
    if source is FP32:
        return [_values(checkpoint, piece[kind]) for kind in kinds]
    fields, wide_fields = source.fields(rule.moments), FP32.fields(rule.moments)
    encoded = [_values(checkpoint, piece[f.name]) for f in fields]
    entry = next(iter(piece.values()))
    numel = entry.hi - entry.lo
    decoded = {kind: torch.empty(numel) for kind in kinds}
    for lo in range(0, numel, _DECODED):
        hi = min(lo + _DECODED, numel)
        wide = tuple(torch.empty(hi - lo) for _ in wide_fields)
        rule.convert(source, kernels.cut(fields, encoded, lo, hi), FP32, wide)
        for field, values in zip(wide_fields, wide, strict=True):
            if field.name in decoded:
                decoded[field.name][lo:hi] = values
    return list(decoded.values())


def _master(checkpoint: Checkpoint, piece: _Piece, source: StateFormat, rule: Rule) -> Tensor:
    """Return the fp32 master weights of narrow state as (n,)."""
    encoded = [_values(checkpoint, piece[f.name]) for f in source.fields(rule.moments)]
    weights = torch.empty(encoded[0].numel())
    kernels.read_master(source, rule.moments, tuple(encoded), weights)
    return weights
