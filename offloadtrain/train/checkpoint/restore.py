"""Loads a checkpoint's tensors into a model and its optimizer, or decodes them without an engine.

`restore` loads all of them into an optimizer. `saved_weights` and `saved_state` read weights and
moments directly from the files, one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from offloadtrain.engine.saved_state import WORKING, OwnState
from offloadtrain.optim import AnyRule, MatrixRule, Rule
from offloadtrain.runtime import kernels
from offloadtrain.runtime.dtypes import name_of
from offloadtrain.runtime.process_group import ALONE, UNTRAINED, Ranks
from offloadtrain.step.layout.formats import FP32, StateFormat, recognise
from offloadtrain.train.checkpoint.checkpoint import Checkpoint, together
from offloadtrain.train.checkpoint.manifest import DTYPES, CheckpointError, Entry
from offloadtrain.train.checkpoint.reader import Reading, read
from offloadtrain.train.checkpoint.save import OffloadedState, untrained

_Piece = Mapping[str, Entry]
"""A part of a parameter: kind → its entry."""


def restore(
    source: Checkpoint,
    model: torch.nn.Module,
    optimizer: OffloadedState,
    ranks: Ranks = ALONE,
) -> bool:
    """Load the tensors of a checkpoint; each byte is read once and verified.

    Every rank calls this; the caller then calls the optimizer's `finish_load`.

    Returns:
        The value for the `delayed` argument of `finish_load`: True if the weights in use were
        loaded separately. False if the checkpoint or the optimizer has another update mode; the
        newest weights, those of the state, are then used at once.

    Raises:
        CheckpointError: the checkpoint is of another model; nothing was loaded.
        DamagedCheckpointError: bytes of a tensor have changed. Values are undefined until another
            checkpoint is restored.
    """
    states, extra = optimizer.own_states(), untrained(model, optimizer)
    shapes = {name: tuple(x.shape) for name, x in extra.items()}
    _check_same_model(source, states, shapes, optimizer, ranks)
    in_use, pieces = _pieces(source, working=True), _pieces(source)
    weights = optimizer.own_weights() if in_use else {}
    with together(ranks), torch.no_grad():
        _load(source, pieces, states, optimizer)
        _load(source, in_use, weights, optimizer)
        for name, tensor in extra.items():
            (piece,) = pieces[name]
            tensor.copy_(read_whole(source, piece[UNTRAINED]))
    return bool(weights)


def read_whole(source: Checkpoint, entry: Entry) -> torch.Tensor:
    """Read and verify one tensor into host memory.

    Returns:
        A tensor with the parameter's shape and strides; 1-D if the entry is only a part of it.

    Raises:
        DamagedCheckpointError: its bytes have changed.
    """
    values = torch.empty(entry.count, dtype=DTYPES[entry.dtype], device="cpu")
    read(source.path, [Reading.all_of(entry, values.view(torch.uint8))])
    is_whole = (entry.lo, entry.hi) == (0, entry.count) == (0, math.prod(entry.shape))
    return values.as_strided(entry.shape, entry.stride) if is_whole else values


def _pieces(checkpoint: Checkpoint, *, working: bool = False) -> dict[str, list[_Piece]]:
    """Return name → its pieces in order, either of the state or of the weights in use.

    They differ in update mode "delayed": the weights of the state are one step newer.
    """
    names: dict[str, dict[tuple[int, int], dict[str, Entry]]] = {}
    for entry in (e for e in checkpoint.manifest.entries if (e.kind == WORKING) == working):
        of_name = names.setdefault(entry.name, {})
        of_name.setdefault((entry.lo, entry.hi), {})[entry.kind] = entry
    return {name: [piece for _, piece in sorted(parts.items())] for name, parts in names.items()}


def _entries(pieces: Iterable[_Piece]) -> list[Entry]:
    return [entry for piece in pieces for entry in piece.values()]


def _load(
    checkpoint: Checkpoint,
    pieces: Mapping[str, Sequence[_Piece]],
    states: Mapping[str, Sequence[OwnState]],
    optimizer: OffloadedState,
) -> None:
    """Load this rank's parts of every parameter in `states`."""
    saved = {name: _entries(pieces[name]) for name in states}
    alike = {name for name, shards in states.items() if _is_alike(saved[name], shards[0])}
    names = ((name, state) for name in sorted(alike) for state in states[name])
    readings = [reading for name, state in names for reading in _direct(saved[name], state)]
    read(checkpoint.path, readings)
    for name in sorted(states.keys() - alike):
        _convert(checkpoint, pieces[name], states[name], optimizer)


def _is_alike(entries: Sequence[Entry], state: OwnState) -> bool:
    """Return True if the saved bytes have the layout of this optimizer's memory."""
    dtypes = {kind: name_of(view.dtype) for kind, (view, _) in state.fields.items()}
    same = all(dtypes.get(e.kind) == e.dtype and e.stride == state.stride for e in entries)
    return same and {entry.kind for entry in entries} == dtypes.keys()


def _direct(entries: Iterable[Entry], state: OwnState) -> Iterator[Reading]:
    """Yield reads of this rank's parts directly into its memory."""
    for entry in entries:
        view, per = state.fields[entry.kind]
        lo, hi = max(entry.lo, state.lo), min(entry.hi, state.hi)
        if lo >= hi:
            continue
        # Pieces start at multiples of `per`, but the last one may end within a group.
        size, last = view.element_size(), -(-hi // per)
        first_byte, end = (lo - state.lo) // per * size, (last - state.lo // per) * size
        target = view.view(torch.uint8)[first_byte:end]
        first = (lo - entry.lo) // per * size
        yield Reading(entry, first, first + target.numel(), target)


def _convert(
    checkpoint: Checkpoint,
    pieces: Sequence[_Piece],
    states: Sequence[OwnState],
    optimizer: OffloadedState,
) -> None:
    """Load one parameter from another state format or memory order."""
    first = _entries(pieces)[0]
    if first.stride != states[0].stride:
        optimizer.load_named_state(first.name, _turned(checkpoint, pieces, states[0].stride), lo=0)
        return
    for piece in pieces:
        lo, hi = next((entry.lo, entry.hi) for entry in piece.values())
        if any(lo < state.hi and state.lo < hi for state in states):
            loaded = {kind: read_whole(checkpoint, entry) for kind, entry in piece.items()}
            is_whole = (lo, hi) == (0, math.prod(first.shape))
            optimizer.load_named_state(first.name, loaded, lo=None if is_whole else lo)


def _turned(
    checkpoint: Checkpoint, pieces: Sequence[_Piece], stride: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Read the complete state of one parameter and bring it into another memory order: 1-D, on the
    host. Tensor parallel stores some matrices column by column.

    Raises:
        CheckpointError: scales cover blocks of elements in the saved order.
    """
    for entry in _entries(pieces):
        if entry.count != entry.hi - entry.lo:
            raise CheckpointError(
                f"{checkpoint.path}: {entry.kind} of '{entry.name}' was saved in the memory order "
                f"{entry.stride}, in which each value stands for several elements, and the order "
                f'here is {tuple(stride)}. Load it as it was saved, with offload.state = "fp32", '
                "and save it"
            )
    turned = {}
    for kind, first in pieces[0].items():
        saved = torch.cat([_values(checkpoint, piece[kind]) for piece in pieces])
        turned[kind] = torch.empty_like(saved)
        shaped = saved.as_strided(first.shape, first.stride)
        turned[kind].as_strided(first.shape, stride).copy_(shaped)
    return turned


def _check_same_model(
    checkpoint: Checkpoint,
    states: Mapping[str, Sequence[OwnState]],
    extra: Mapping[str, tuple[int, ...]],
    optimizer: OffloadedState,
    ranks: Ranks,
) -> None:
    """Raise CheckpointError if names, shapes or the trained parameters differ. Every rank calls
    this, since ranks may hold different parts of the model."""
    local_shapes = {name: tuple(extent.shape) for name, extent in optimizer.extents().items()}
    local_shapes |= extra
    trained_own = [name for name, state in states.items() if UNTRAINED not in state[0].fields]
    of_ranks = ranks.gather((list(local_shapes.items()), trained_own))
    current = {name: tuple(shape) for shapes, _ in of_ranks for name, shape in shapes}
    saved = {entry.name: entry.shape for entry in checkpoint.manifest.entries}
    names = [name for name in {**saved, **current} if saved.get(name) != current.get(name)]
    if names:
        shown = [f"  {n}: {_of(saved, n)} in the checkpoint, {_of(current, n)} here" for n in names]
        more = [f"  and {len(names) - 5} more"] if len(names) > 5 else []
        raise CheckpointError(
            f"{checkpoint.path} is of another model: {len(names)} names or shapes differ.\n"
            + "\n".join(shown[:5] + more)
        )
    trained = {entry.name for entry in checkpoint.manifest.entries if entry.kind != UNTRAINED}
    trained_here = {name for _, names in of_ranks for name in names}
    for name in sorted(trained ^ trained_here):
        before, now = ("is", "was not") if name in trained_here else ("is not", "was")
        raise CheckpointError(
            f"{checkpoint.path}: '{name}' {before} trained here, and {now} when it was saved. "
            "Train the same parameters, or start a new run"
        )


def _of(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return "x".join(map(str, shapes[name])) or "scalar" if name in shapes else "absent"


_DECODED = 1 << 18
"""Elements decoded at a time; a multiple of every format's block size."""


def saved_weights(
    source: Checkpoint,
    rule: AnyRule,
    *,
    working: bool = False,
    wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every parameter and persistent buffer, in its shape, on the host.

    Trained parameters are yielded as fp32 master weights, decoded from any state format; other
    tensors as they were saved. Only one tensor and its state are in memory at a time.

    Args:
        rule: the update rule of the run, which determines the saved moments.
        working: yield the working weight itself if the state holds it: it is not always the
            master rounded to nearest.
        wanted: predicate on names; tensors for which it returns False are not read.

    Raises:
        CheckpointError: the state has an unknown format.
    """
    chosen = ((name, of) for name, of in _pieces(source).items() if wanted(name))
    for name, pieces in chosen:
        parts = [_read(source, name, piece, rule, working) for piece in pieces]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        entry = next(iter(pieces[0].values()))
        yield name, weight.as_strided(entry.shape, entry.stride)


def saved_state(source: Checkpoint, rule: AnyRule) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (name, {"master" and the rule's moments}) of every trained parameter: fp32, in its
    shape, on the host, decoded from any state format.

    Raises:
        CheckpointError: the state has an unknown format.
    """
    kinds = [field.name for field in FP32.fields(rule.moments)]
    for name, pieces in _pieces(source).items():
        if pieces[0].keys() == {UNTRAINED}:
            continue
        parts = [_decoded(source, piece, *_format(name, piece, rule), kinds) for piece in pieces]
        tensors = (torch.cat(of_kind) for of_kind in zip(*parts, strict=True))
        entry = next(iter(pieces[0].values()))
        views = (tensor.as_strided(entry.shape, entry.stride) for tensor in tensors)
        yield name, dict(zip(kinds, views, strict=True))


def _read(checkpoint: Checkpoint, name: str, piece: _Piece, rule: AnyRule, working: bool) -> Tensor:
    """Return the weights of a piece as (n,)."""
    if piece.keys() == {UNTRAINED}:
        return _values(checkpoint, piece[UNTRAINED])
    source, piece_rule = _format(name, piece, rule)
    if working and source.holds_weight:
        return _values(checkpoint, piece[source.master[0].name])
    (weights,) = _decoded(checkpoint, piece, source, piece_rule, ["master"])
    return weights


def _format(name: str, piece: _Piece, rule: AnyRule) -> tuple[StateFormat, Rule]:
    """Return the state format of a piece, and the rule whose moments it has."""
    dtypes = {kind: entry.dtype for kind, entry in piece.items()}
    kept_by: list[Rule] = [rule, rule.rest] if isinstance(rule, MatrixRule) else [rule]
    for candidate in kept_by:
        if source := recognise(dtypes, candidate.moments, FP32):
            return source, candidate
    raise CheckpointError(f"the state of '{name}' is of no known format: {', '.join(piece)}")


def _values(checkpoint: Checkpoint, entry: Entry) -> Tensor:
    """Read a tensor as (n,), in the parameter's memory order."""
    return read_whole(checkpoint, entry).as_strided((entry.count,), (1,))


def _decoded(
    checkpoint: Checkpoint, piece: _Piece, source: StateFormat, rule: Rule, kinds: Sequence[str]
) -> list[Tensor]:
    """Return the given fields, decoded to fp32, as (n,) each."""
    if source is FP32:
        return [_values(checkpoint, piece[kind]) for kind in kinds]
    fields, wide_fields = source.fields(rule.moments), FP32.fields(rule.moments)
    encoded = [_values(checkpoint, piece[f.name]) for f in fields]
    entry = next(iter(piece.values()))
    numel = entry.hi - entry.lo
    decoded = {kind: torch.empty(numel, dtype=torch.float32) for kind in kinds}
    for lo in range(0, numel, _DECODED):
        hi = min(lo + _DECODED, numel)
        wide = tuple(torch.empty(hi - lo, dtype=torch.float32) for _ in wide_fields)
        rule.convert(source, kernels.cut(fields, encoded, lo, hi), FP32, wide)
        for field, values in zip(wide_fields, wide, strict=True):
            if field.name in decoded:
                decoded[field.name][lo:hi] = values
    return list(decoded.values())
