"""A checkpoint's tensors, back into a model and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from offloadtrain.engine.state.saved_state import WORKING, OwnState
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
    own, others = optimizer.own_states(), untrained(model, optimizer)
    shapes = {name: tuple(x.shape) for name, x in others.items()}
    _check_same_model(found, own, shapes, optimizer, ranks)
    in_use = [entry for entry in found.manifest.entries if entry.kind == WORKING]
    pieces = _by_name(entry for entry in found.manifest.entries if entry.kind != WORKING)
    weights = optimizer.own_weights() if in_use else {}

    def load() -> None:
        _load(found, pieces, own, optimizer)
        _load(found, _by_name(in_use), weights, optimizer)
        with torch.no_grad():
            for name, tensor in others.items():
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
    whole = (entry.lo, entry.hi) == (0, entry.count) == (0, math.prod(entry.shape))
    return values.as_strided(entry.shape, entry.stride) if whole else values


def _by_name(entries: Iterable[Entry]) -> _Pieces:
    pieces: dict[str, list[Entry]] = {}
    for entry in entries:
        pieces.setdefault(entry.name, []).append(entry)
    return pieces


def _load(
    found: Checkpoint,
    pieces: _Pieces,
    own: Mapping[str, Sequence[OwnState]],
    optimizer: OffloadedState,
) -> None:
    """Load what this rank holds of every parameter of `own`."""
    alike = {name for name, mine in own.items() if _is_alike(pieces[name], mine[0])}
    names = ((name, mine) for name in sorted(alike) for mine in own[name])
    readings = [one for name, mine in names for one in _direct(pieces[name], mine)]
    read(found.path, readings)
    for name in sorted(own.keys() - alike):
        _convert(found, pieces[name], own[name], optimizer)


def _is_alike(entries: Iterable[Entry], own: OwnState) -> bool:
    """Tell whether the saved bytes are those of this optimizer's memory."""
    dtypes = {kind: name_of(view.dtype) for kind, (view, _) in own.fields.items()}
    entries = list(entries)
    same = all(dtypes.get(e.kind) == e.dtype and e.stride == own.stride for e in entries)
    return same and {entry.kind for entry in entries} == dtypes.keys()


def _direct(entries: Iterable[Entry], own: OwnState) -> Iterator[Reading]:
    """Read what this rank holds straight into its memory."""
    for entry in entries:
        view, per = own.fields[entry.kind]
        lo, hi = max(entry.lo, own.lo), min(entry.hi, own.hi)
        if lo >= hi:
            continue
        # Pieces start on multiples of `per`, which the last one may end within.
        size, last = view.element_size(), -(-hi // per)
        target = _bytes(view)[(lo - own.lo) // per * size : (last - own.lo // per) * size]
        first = (lo - entry.lo) // per * size
        yield Reading(entry, first, first + target.numel(), target)


def _convert(
    found: Checkpoint,
    entries: Sequence[Entry],
    own: Sequence[OwnState],
    optimizer: OffloadedState,
) -> None:
    """Load one parameter from another state format or memory order."""
    if entries[0].stride != own[0].stride:
        optimizer.load_named_state(entries[0].name, _turned(found, entries, own[0].stride), lo=0)
        return
    pieces: dict[tuple[int, int], list[Entry]] = {}
    for entry in entries:
        if any(entry.lo < mine.hi and mine.lo < entry.hi for mine in own):
            pieces.setdefault((entry.lo, entry.hi), []).append(entry)
    for (lo, hi), kinds in pieces.items():
        loaded = {entry.kind: read_whole(found, entry) for entry in kinds}
        whole = (lo, hi) == (0, math.prod(kinds[0].shape))
        optimizer.load_named_state(kinds[0].name, loaded, lo=None if whole else lo)


def _turned(
    found: Checkpoint, entries: Iterable[Entry], stride: Sequence[int]
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
                f"{found.path}: {entry.kind} of '{entry.name}' was saved in the memory order "
                f"{entry.stride}, in which each value stands for several elements, and the order "
                f'here is {tuple(stride)}. Load it as it was saved, with offload.state = "fp32", '
                "and save it"
            )
    turned = {}
    for kind, parts in of_kinds.items():
        flats = [read_whole(found, one) for one in sorted(parts, key=lambda one: one.lo)]
        saved = torch.cat([one.as_strided((one.numel(),), (1,)) for one in flats])
        turned[kind] = torch.empty_like(saved)
        whole = saved.as_strided(parts[0].shape, parts[0].stride)
        turned[kind].as_strided(parts[0].shape, stride).copy_(whole)
    return turned


def _check_same_model(
    found: Checkpoint,
    own: Mapping[str, Sequence[OwnState]],
    others: Mapping[str, tuple[int, ...]],
    optimizer: OffloadedState,
    ranks: Ranks,
) -> None:
    """Raises CheckpointError if names, shapes or what is trained differ; every rank calls this, as
    the model may be divided among them."""
    held = {name: tuple(extent.shape) for name, extent in optimizer.extents().items()}
    held |= others
    trained_own = [name for name, state in own.items() if UNTRAINED not in state[0].fields]
    of_ranks = ranks.gather((list(held.items()), trained_own))
    mine = {name: tuple(shape) for shapes, _ in of_ranks for name, shape in shapes}
    saved = found.manifest.shapes()
    names = [name for name in {**saved, **mine} if saved.get(name) != mine.get(name)]
    if names:
        shown = [f"  {n}: {_of(saved, n)} in the checkpoint, {_of(mine, n)} here" for n in names]
        more = [f"  and {len(names) - 5} more"] if len(names) > 5 else []
        raise CheckpointError(
            f"{found.path} is of another model: {len(names)} names or shapes differ.\n"
            + "\n".join(shown[:5] + more)
        )
    trained = {entry.name for entry in found.manifest.entries if entry.kind != UNTRAINED}
    trained_here = {name for _, names in of_ranks for name in names}
    for name in sorted(trained ^ trained_here):
        before, now = ("is", "was not") if name in trained_here else ("is not", "was")
        raise CheckpointError(
            f"{found.path}: '{name}' {before} trained here, and {now} when it was saved. Train the "
            "same parameters, or start a new run"
        )


def _of(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return "x".join(map(str, shapes[name])) or "scalar" if name in shapes else "absent"


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """View a 1-D tensor as (n,) uint8."""
    return values.view(torch.uint8)
