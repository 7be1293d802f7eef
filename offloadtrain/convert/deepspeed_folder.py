"""Reads a folder of DeepSpeed's ZeRO stages 1, 2 and 3: reassembles each parameter from all ranks'
parts of flat fp32 state.

[Note: DeepSpeed's partitions]
Stages 1 and 2 concatenate the parameters of a group, pad the end to a multiple of twice the number
of ranks, and divide the result into one partition per rank. Stage 3 divides each parameter: every
rank has ceil(numel / ranks) elements of it, the last padded, one parameter after the other over all
sub-groups. `param_shapes` lists names and shapes in that order (runtime/zero/stage_1_and_2.py,
stage3.py and utils/zero_to_fp32.py of DeepSpeed).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offloadtrain.boundary.safe_open import UnsafeFileError, read_text
from offloadtrain.convert.checkpoint import (
    MOMENTS,
    ForeignCheckpoint,
    ForeignError,
    Group,
    LazyTensor,
    ModelTensor,
    unwrapper,
)
from offloadtrain.convert.nested_state import (
    Moments,
    hyperparameters,
    number,
    one_step,
    values_of,
)
from offloadtrain.convert.safe_load import load

LATEST = "latest"
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_KINDS = ("master", *MOMENTS)

Shapes = Mapping[str, tuple[int, ...]]


def checkpoint_in(folder: Path) -> Path | None:
    """Return the folder of a checkpoint: this folder, or the one named in its file `latest`."""
    if folder.is_dir() and any(_OPTIMIZER.fullmatch(path.name) for path in folder.iterdir()):
        return folder
    try:
        tag = read_text(folder / LATEST, max_bytes=1000).strip()
    except (OSError, UnsafeFileError):
        return None
    if not tag.isprintable() or Path(tag).name != tag:
        raise ForeignError(
            f"{folder / LATEST} names {ascii(tag)[:80]}, which is not a folder in it"
        )
    return folder / tag


def read_folder(folder: Path, wanted: Sequence[ModelTensor]) -> ForeignCheckpoint:
    """Return masters, moments, buffers and frozen parameters.

    Raises:
        ForeignError: files are missing or damaged, or the layout is not that of a ZeRO stage.
    """
    ranks = [
        _table(path, _table(path, load(path)).get("optimizer_state_dict"))
        for path in _files(folder, _OPTIMIZER)
    ]
    models = [_table(path, load(path)) for path in _files(folder, _MODEL)]
    model, first = models[0], ranks[0]
    stage = int(number(first.get("zero_stage", 1)))
    _check_count(folder, first, len(ranks))
    if stage == 3 and len(models) != len(ranks):
        raise ForeignError(f"{folder} has {len(models)} *_model_states.pt for {len(ranks)} ranks")
    if not isinstance(listed := model.get("param_shapes"), list):
        raise ForeignError(f"{folder}: the model's file has no list 'param_shapes'")
    shapes = [
        {str(name): tuple(map(int, shape)) for name, shape in _table(folder, group).items()}
        for group in listed
    ]
    read = _stage_3 if stage == 3 else _stages_1_and_2
    states = [_state(part, stage) for part in ranks]
    of_kinds = read(folder, shapes, states)
    frozen = _frozen(models, stage)
    unwrap = unwrapper([*of_kinds, *frozen], wanted)
    weights = {name: kinds["master"] for name, kinds in of_kinds.items()} | frozen
    moments: Moments = {
        unwrap(name): {kind: kinds[kind] for kind in MOMENTS} for name, kinds in of_kinds.items()
    }
    groups = _groups(states[0], shapes, unwrap)
    steps = {
        f"group {group} of rank {rank}": step
        for rank, state in enumerate(states)
        for group, step in enumerate(state.steps)
    }
    renamed = {unwrap(name): lazy for name, lazy in weights.items()}
    scaled = first.get("dynamic_loss_scale")
    notes = ["its loss scale is not taken over: the job's begins anew"] if scaled else []
    return ForeignCheckpoint(renamed, moments, one_step(steps), groups, notes)


def _files(folder: Path, form: re.Pattern[str]) -> list[Path]:
    """Return the files of all ranks, in rank order."""
    matches = [(form.fullmatch(path.name), path) for path in folder.iterdir()]
    known = sorted((int(m[1] or 0), int(m[2]), path) for m, path in matches if m)
    if not known:
        raise ForeignError(f"{folder} has no file like {form.pattern}")
    if any(mp for _, mp, _ in known):
        raise ForeignError(f"{folder} is of a model in tensor-parallel parts, which is not read")
    if [rank for rank, _, _ in known] != list(range(len(known))):
        raise ForeignError(f"{folder}: files of ranks are missing, or there twice: {known[-1][2]}")
    return [path for _, _, path in known]


def _table(path: Path, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ForeignError(f"{path} was not written by DeepSpeed")
    return value


def _check_count(folder: Path, part: Mapping[str, Any], num_files: int) -> None:
    count = part.get("partition_count", num_files)
    counts = {int(number(item)) for item in (count if isinstance(count, list) else [count])}
    if counts != {num_files}:
        raise ForeignError(
            f"{folder} was written by {max(counts)} ranks, and has {num_files} *_optim_states.pt"
        )


class _State(NamedTuple):
    """One rank's flat tensors: kind → one per group, or per sub-group in stage 3."""

    flats: Mapping[str, list[Tensor]]
    steps: list[float]
    groups: Any


def _state(part: Mapping[str, Any], stage: int) -> _State:
    key, base = "single_partition_of_fp32_groups", "base_optimizer_state"
    if stage == 3:
        key, base = "fp32_flat_groups", "optimizer_state_dict"
    masters, adam = part.get(key), part.get(base)
    groups: Any = None
    if isinstance(adam, Mapping):
        groups = adam.get("param_groups")
        table = adam.get("state", {})
        entries = [table[index] for index in sorted(table)]
    else:  # an elastic checkpoint has one entry per group
        entries = adam if isinstance(adam, list) else []
    if not isinstance(masters, list) or len(entries) != len(masters):
        raise ForeignError(f"a rank has no '{key}', or other groups in '{base}'")
    flats = {"master": masters} | {kind: [e.get(kind) for e in entries] for kind in MOMENTS}
    for kind, tensors in flats.items():
        if not all(isinstance(tensor, Tensor) and tensor.ndim == 1 for tensor in tensors):
            raise ForeignError(f"a rank has no {kind}: the state is not Adam's")
    for kind in MOMENTS:
        _check_flats(kind, flats[kind], masters)
    first = groups[0].get("step") if groups else part.get("base_optimizer_state_step")
    return _State(flats, [number(e.get("step", first)) for e in entries], groups)


def _check_flats(kind: str, flats: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Check moments, which may be longer than masters: the last ranks' ends are padded."""
    for flat, master in zip(flats, masters, strict=True):
        wide = flat.dtype == master.dtype == torch.float32
        if flat.numel() < master.numel() or not wide:
            raise ForeignError(
                f"{kind} of a rank has {flat.numel()} values of {flat.dtype}, and its master "
                f"{master.numel()} of {master.dtype}; as many of fp32 are read"
            )


class _Flat:
    """Several 1-D tensors, read as if they were concatenated."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.numel() for part in parts))

    @property
    def numel(self) -> int:
        return self._ends[-1] if self._ends else 0

    def within(self, lo: int, hi: int) -> list[Tensor]:
        pieces = []
        for part, end in zip(self._parts, self._ends, strict=True):
            begin = end - part.numel()
            if begin < hi and lo < end:
                pieces.append(part[max(lo - begin, 0) : hi - begin])
        return pieces


def _stages_1_and_2(
    folder: Path, shapes: Sequence[Shapes], states: Sequence[_State]
) -> dict[str, dict[str, LazyTensor]]:
    lazies: dict[str, dict[str, LazyTensor]] = {}
    if any(len(state.flats["master"]) != len(shapes) for state in states):
        raise ForeignError(f"{folder}: ranks have other groups than the model's {len(shapes)}")
    for number_, group in enumerate(shapes):
        flats = {k: _Flat([state.flats[k][number_] for state in states]) for k in _KINDS}
        lo = 0
        for name, shape in group.items():
            hi = lo + math.prod(shape)
            lazies[name] = {kind: _gathered([flats[kind]], lo, hi, shape) for kind in _KINDS}
            lo = hi
        _check_used(folder, lo, flats["master"].numel, 2 * len(states))
    return lazies


def _stage_3(
    folder: Path, shapes: Sequence[Shapes], states: Sequence[_State]
) -> dict[str, dict[str, LazyTensor]]:
    lazies: dict[str, dict[str, LazyTensor]] = {}
    flats = {kind: [_Flat(state.flats[kind]) for state in states] for kind in _KINDS}
    lo = 0
    for group in shapes:
        for name, shape in group.items():
            hi = lo - (-math.prod(shape) // len(states))
            lazies[name] = {kind: _gathered(flats[kind], lo, hi, shape) for kind in _KINDS}
            lo = hi
    for flat in flats["master"]:
        _check_used(folder, lo, flat.numel, 1)
    return lazies


def _check_used(folder: Path, used: int, there: int, align: int) -> None:
    if not used <= there < used + align:
        raise ForeignError(
            f"{folder}: the parameters have {used:,} elements, and the ranks' parts {there:,}"
        )


def _gathered(flats: Sequence[_Flat], lo: int, hi: int, shape: tuple[int, ...]) -> LazyTensor:
    return _lazy([part for flat in flats for part in flat.within(lo, hi)], shape)


def _lazy(parts: list[Tensor], shape: tuple[int, ...]) -> LazyTensor:
    """Concatenate views on reading; elements after the last one are padding."""

    def read() -> Tensor:
        flat = torch.cat(parts) if parts else torch.empty(0)
        return flat[: math.prod(shape)].view(shape)

    return LazyTensor(shape, torch.float32, read)


def _frozen(models: Sequence[Mapping[str, Any]], stage: int) -> dict[str, LazyTensor]:
    """Return buffers, and parameters that were not trained."""
    model = models[0]
    module = model.get("module") or {}
    buffers = {name: module.get(name) for name in model.get("buffer_names") or ()}
    lazies = {
        name: LazyTensor.of(value) for name, value in buffers.items() if isinstance(value, Tensor)
    }
    for name, size in (model.get("frozen_param_shapes") or {}).items():
        sources = models if stage == 3 else models[:1]
        pieces = [(source.get("frozen_param_fragments") or {}).get(name) for source in sources]
        parts = [piece.reshape(-1) for piece in pieces if isinstance(piece, Tensor)]
        shape = tuple(map(int, size))
        if not parts or sum(part.numel() for part in parts) < math.prod(shape):
            raise ForeignError(f"'{name}' was frozen, and not all of its values were saved")
        lazies[name] = LazyTensor(shape, parts[0].dtype, _lazy(parts, shape).read)
    return lazies


def _groups(state: _State, shapes: Sequence[Shapes], unwrap: Callable[[str], str]) -> list[Group]:
    """Return the hyperparameters of rank 0; stage 3 also has one group per model group."""
    if not state.groups or len(state.groups) != len(shapes):
        return []
    pairs = zip(shapes, hyperparameters(state.groups), strict=True)
    return [Group(tuple(map(unwrap, group)), values_of(values)) for group, values in pairs]
