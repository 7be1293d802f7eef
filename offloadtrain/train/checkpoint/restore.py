"""A checkpoint's tensors, back into a model and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from offloadtrain.engine.saved_state import WORKING, OwnState
from offloadtrain.runtime.dtypes import name_of
from offloadtrain.runtime.process_group import ALONE, UNTRAINED, Ranks
from offloadtrain.train.checkpoint.checkpoint import Checkpoint, agreed
from offloadtrain.train.checkpoint.layout import DTYPES, Entry
from offloadtrain.train.checkpoint.manifest import CheckpointError
from offloadtrain.train.checkpoint.reader import Reading, read
from offloadtrain.train.checkpoint.save import OffloadedState, untrained

_Pieces = Mapping[str, Sequence[Entry]]
"""Name → its entries, of every kind."""


def restore(
    found: Checkpoint,
    model: torch.nn.Module,
    optimizer: OffloadedState,
    ranks: Ranks = ALONE,
) -> bool:
    """Load the tensors of a checkpoint; each byte is read once and verified.

    Every rank calls this; the caller then calls the optimizer's `finish_load`.

    Returns:
        its argument `delayed`. False for a checkpoint of another update mode, and in another one:
        there the newest weights, those of the state, are used at once.

    Raises:
        CheckpointError: the checkpoint is of another model; nothing was loaded.
        DamagedCheckpointError: bytes of a tensor have changed. Values are undefined until another
            checkpoint is restored.
    """
    states, extra = optimizer.own_states(), untrained(model, optimizer)
    shapes = {name: tuple(x.shape) for name, x in extra.items()}
    _check_same_model(found, states, shapes, optimizer, ranks)
    in_use = [entry for entry in found.manifest.entries if entry.kind == WORKING]
    pieces = _by_name(entry for entry in found.manifest.entries if entry.kind != WORKING)
    weights = optimizer.own_weights() if in_use else {}

    def load() -> None:
        _load(found, pieces, states, optimizer)
        _load(found, _by_name(in_use), weights, optimizer)
        with torch.no_grad():
            for name, tensor in extra.items():
                (entry,) = pieces[name]
                tensor.copy_(read_whole(found, entry))

    agreed(ranks, load)
    return bool(weights)


def read_whole(found: Checkpoint, entry: Entry) -> torch.Tensor:
    """Read and verify one tensor, to the host.

    Returns:
        of the parameter's shape and strides; or 1-D, of the values that are there.

    Raises:
        DamagedCheckpointError: its bytes have changed.
    """
    values = torch.empty(entry.count, dtype=DTYPES[entry.dtype], device="cpu")
    read(found.path, [Reading.whole(entry, _bytes(values))])
    is_whole = (entry.lo, entry.hi) == (0, entry.count) == (0, math.prod(entry.shape))
    return values.as_strided(entry.shape, entry.stride) if is_whole else values


def _by_name(entries: Iterable[Entry]) -> _Pieces:
    pieces: dict[str, list[Entry]] = {}
    for entry in entries:
        pieces.setdefault(entry.name, []).append(entry)
    return pieces


def _load(
    checkpoint: Checkpoint,
    pieces: _Pieces,
    states: Mapping[str, Sequence[OwnState]],
    optimizer: OffloadedState,
) -> None:
    """Load this rank's parts of every parameter in `states`."""
    alike = {name for name, shards in states.items() if _is_alike(pieces[name], shards[0])}
    names = ((name, state) for name in sorted(alike) for state in states[name])
    readings = [reading for name, state in names for reading in _direct(pieces[name], state)]
    read(checkpoint.path, readings)
    for name in sorted(states.keys() - alike):
        _convert(checkpoint, pieces[name], states[name], optimizer)


def _is_alike(entries: Iterable[Entry], state: OwnState) -> bool:
    """Return True if the saved bytes have the layout of this optimizer's memory."""
    dtypes = {kind: name_of(view.dtype) for kind, (view, _) in state.fields.items()}
    entries = list(entries)
    same = all(dtypes.get(e.kind) == e.dtype and e.stride == state.stride for e in entries)
    return same and {entry.kind for entry in entries} == dtypes.keys()


def _direct(entries: Iterable[Entry], state: OwnState) -> Iterator[Reading]:
    """Read what this rank holds straight into its memory."""
    for entry in entries:
        view, per = state.fields[entry.kind]
        lo, hi = max(entry.lo, state.lo), min(entry.hi, state.hi)
        if lo >= hi:
            continue
        # Pieces start on multiples of `per`, which the last one may end within.
        size, last = view.element_size(), -(-hi // per)
        target = _bytes(view)[(lo - state.lo) // per * size : (last - state.lo // per) * size]
        first = (lo - entry.lo) // per * size
        yield Reading(entry, first, first + target.numel(), target)


def _convert(
    checkpoint: Checkpoint,
    entries: Sequence[Entry],
    states: Sequence[OwnState],
    optimizer: OffloadedState,
) -> None:
    """Load one parameter from another state format or memory order."""
    if entries[0].stride != states[0].stride:
        optimizer.load_named_state(
            entries[0].name, _turned(checkpoint, entries, states[0].stride), lo=0
        )
        return
    pieces: dict[tuple[int, int], list[Entry]] = {}
    for entry in entries:
        if any(entry.lo < state.hi and state.lo < entry.hi for state in states):
            pieces.setdefault((entry.lo, entry.hi), []).append(entry)
    for (lo, hi), kinds in pieces.items():
        loaded = {entry.kind: read_whole(checkpoint, entry) for entry in kinds}
        is_whole = (lo, hi) == (0, math.prod(kinds[0].shape))
        optimizer.load_named_state(kinds[0].name, loaded, lo=None if is_whole else lo)


def _turned(
    checkpoint: Checkpoint, entries: Iterable[Entry], stride: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Read all of one parameter's state, and bring it into another order of memory: 1-D, on the
    host. Tensor parallel keeps some matrices column by column.

    Raises:
        CheckpointError: its scales stand for blocks of elements in the order that was saved.
    """
    of_kinds: dict[str, list[Entry]] = {}
    for entry in entries:
        of_kinds.setdefault(entry.kind, []).append(entry)
        if entry.count != entry.hi - entry.lo:
            raise CheckpointError(
                f"{checkpoint.path}: {entry.kind} of '{entry.name}' was saved in the memory order "
                f"{entry.stride}, in which each value stands for several elements, and the order "
                f'here is {tuple(stride)}. Load it as it was saved, with offload.state = "fp32", '
                "and save it"
            )
    turned = {}
    for kind, parts in of_kinds.items():
        flats = [read_whole(checkpoint, part) for part in sorted(parts, key=lambda part: part.lo)]
        saved = torch.cat([flat.as_strided((flat.numel(),), (1,)) for flat in flats])
        turned[kind] = torch.empty_like(saved)
        shaped = saved.as_strided(parts[0].shape, parts[0].stride)
        turned[kind].as_strided(parts[0].shape, stride).copy_(shaped)
    return turned


def _check_same_model(
    checkpoint: Checkpoint,
    states: Mapping[str, Sequence[OwnState]],
    extra: Mapping[str, tuple[int, ...]],
    optimizer: OffloadedState,
    ranks: Ranks,
) -> None:
    """Raises CheckpointError if names, shapes or what is trained differ; every rank calls this, as
    the model may be divided among them."""
    local_shapes = {name: tuple(extent.shape) for name, extent in optimizer.extents().items()}
    local_shapes |= extra
    trained_own = [name for name, state in states.items() if UNTRAINED not in state[0].fields]
    of_ranks = ranks.gather((list(local_shapes.items()), trained_own))
    current = {name: tuple(shape) for shapes, _ in of_ranks for name, shape in shapes}
    saved = checkpoint.manifest.shapes()
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


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """View a 1-D tensor as (n,) uint8."""
    return values.view(torch.uint8)
