"""Runs a case and returns its program. Everything that reaches into the engine is here."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import offloadtrain as ot
from offloadtrain.config.offload import OffloadConfig
from offloadtrain.model.transformer import Transformer
from offloadtrain.runtime.lanes import Lane, Operation, Range, SequentialLanes, Span, on_lanes
from offloadtrain.step.layout import step_spec as spec
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.program import updates
from offloadtrain.step.proof.prove import prove
from tests.numerics import skipping
from tests.numerics.models import MODELS, Chain, Experts, Layer, MixedReentrant, batches
from tests.oracle.canonical import canonical
from tests.oracle.cases import MESHES, Case
from tests.oracle.scripts import Loop
from tests.recording_lanes import RecordingLanes

PIECE_BYTES = 4000
"""Of a staging slot: a layer goes through it in two pieces or more."""
LIMIT = "host_memory_limit "
SCALE = 1024.0
"""Of fp16 losses: no gradient of these models overflows."""
ROOM = 1 << 30
"""Host memory for all that speculation asks for, whatever the machine has."""


class LayerBehindHooks(Layer):
    """Its forward runs again in backward, and no hook fires then."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class BehindHooks(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LayerBehindHooks() for _ in range(3))


class DividedExperts(Experts):
    """A model with four experts, divided between two groups of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = Transformer(replace(self.gpt.shape, num_experts=4))


def _llama() -> nn.Module:
    from tests.parallel.models import Llama

    return Llama()


def _divide(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the matrices of each layer."""
    # Imported on use, as in `offloaded`: every rank would import these modules for seconds.
    from torch.distributed.tensor.parallel import parallelize_module

    from tests.parallel.models import columns_and_rows

    for layer in model.get_submodule("layers").children():
        parallelize_module(layer, mesh["tp"], columns_and_rows())


def _grouped(model: nn.Module) -> dict[str, Any]:
    """Two buckets per block."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return {"params": [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]}


_MODELS: dict[str, Callable[[], nn.Module]] = {
    **MODELS,
    "mixed reentrant": MixedReentrant,
    "behind the hooks": BehindHooks,
    "groups": Chain,
    "fp32 norms": Chain,
    "experts to skip": skipping.Routed,
    "divided experts": DividedExperts,
    "divided": lambda: _llama(),
}
_OPTIONS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "groups": _grouped,
    "fp32 norms": lambda model: {"keep_fp32": ("*norm*",)},
    "experts to skip": lambda model: {"skip_unused": skipping.PATTERNS},
}
_RULES = {
    "adamw": ot.AdamW(lr=1e-3),
    "lamb": ot.LAMB(lr=1e-3),
    "lion": ot.Lion(lr=1e-4),
    "muon": ot.Muon(lr=0.02, rest=ot.AdamW(lr=1e-3)),
}
_SAME_BATCHES = ("tp",)
"""Axes whose ranks have the same batches."""


class KeepingLanes(RecordingLanes):
    """No memory that a program has named is given out again: an address means one thing."""

    def __init__(self) -> None:
        super().__init__(SequentialLanes())
        self._buffers: list[Tensor] = []

    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        self._buffers += [range_.buffer.flat for range_ in (*reads, *writes)]
        super().launch(lane, name, fn, reads, writes)

    def open_span(self, name: str, reads: Sequence[Range], writes: Sequence[Range] = ()) -> Span:
        self._buffers += [range_.buffer.flat for range_ in (*reads, *writes)]
        return super().open_span(name, reads, writes)

    def undefine(self, range_: Range, lane: Lane) -> None:
        self._buffers.append(range_.buffer.flat)
        super().undefine(range_, lane)


class RaceError(AssertionError):
    """A recorded program has races, or reads what nobody has written."""


def recorded(case: Case, limit: int | None = None) -> str:
    """Return the program of this rank as text; those of several stages follow each other.

    Args:
        limit: of host memory, where only a part of the blocks is guessed on; None: so that it is
            more than half of them.

    Raises:
        RaceError: `prove` has found faults.
    """
    with _as_asked(case), tempfile.TemporaryDirectory() as folder:
        if case.mode == "speculative, partly" and limit is None:
            limit = _limit_for_some(case)
        made: list[KeepingLanes] = []

        def lanes() -> KeepingLanes:
            made.append(KeepingLanes())
            return made[-1]

        loop = offloaded(case, lanes, limit or ROOM, folder)
        loop.run()
        programs = [each.program for each in made]
        loop.close()
    if faults := [fault for program in programs for fault in prove(program)]:
        raise RaceError(f"{case.name}: {len(faults)} faults, the first ones {faults[:5]}")
    texts = [canonical(program) for program in programs]
    for text in texts[:-1]:
        text.append("another stage of this rank")
    header = [f"{LIMIT}{limit}"] if limit else []
    return "\n".join([*header, *loop.reports, *(line for text in texts for line in text)])


def limit_of(text: str) -> int | None:
    """That a text was recorded with."""
    first = text.split("\n", 1)[0]
    return int(first.removeprefix(LIMIT)) if first.startswith(LIMIT) else None


@contextmanager
def _as_asked(case: Case) -> Iterator[None]:
    """Without the collector of garbage, which would end graphs at any moment."""
    with pytest.MonkeyPatch.context() as patch:
        if case.script != "the odds decide":
            patch.setattr(updates.SpeculationPolicy, "should_speculate", lambda policy: True)
        if case.staging == "pieces":
            patch.setattr(spec, "STAGING_BYTES", PIECE_BYTES)
        gc.disable()
        try:
            yield
        finally:
            gc.enable()


def _limit_for_some(case: Case) -> int:
    """Of the blocks: between what is needed and what all of them would take."""
    loop = offloaded(case, KeepingLanes)
    needed = loop.optimizer.ledger.total(Tier.HOST)
    loop.optimizer.close()
    return needed * 5 // 6


def offloaded(
    case: Case,
    lanes: Callable[[], KeepingLanes],
    limit: int = ROOM,
    folder: str | None = None,
) -> Loop:
    """Not trained yet.

    Args:
        lanes: makes those of each engine.
        folder: for the files of the disk tier.
    """
    torch.manual_seed(0)
    mesh = _mesh(case)
    state, precision = case.format.split("/")
    options: dict[str, Any] = {
        "device": "cpu",
        "state": state,
        "precision": precision,
        "host_memory_limit": limit,
        "reduction": case.reduction,
        **case.options,
    }
    if OffloadConfig(**case.options).uses_disk:
        options |= {"scratch_dir": folder, "scratch_in_memory": True}
    if case.schedule:
        from tests.oracle.stages import StagedLoop, staged

        assert mesh is not None
        with on_lanes(lanes):
            pipeline = staged(case, mesh, _RULES[case.rule], options)
        return StagedLoop(case, pipeline)
    model = _MODELS[case.model]()
    if case.model == "divided":
        assert mesh is not None
        _divide(model, mesh)
    if isinstance(model, DividedExperts):
        assert mesh is not None
        ot.expert_parallel(model.gpt, mesh)
    # In stage 3 it says so that it reads weights without calling their modules.
    read = {"keep_whole": ("*",)} if case.model == "unusual" and "stage 3" in case.placement else {}
    with on_lanes(lanes):
        optimizer = ot.offload(
            model,
            _RULES[case.rule],
            grad_accum_steps=case.accum,
            mesh=mesh,
            **options,
            **_OPTIONS.get(case.model, lambda model: {})(model),
            **read,
        )
    if optimizer._engine.counter.scaler is not None:
        optimizer._engine.counter.scaler.scale = SCALE
    stream = skipping.batches(60) if case.model == "experts to skip" else batches(60)
    first, step = _share(case)
    return Loop(case, model, optimizer, iter(stream[first::step]))


def _mesh(case: Case) -> DeviceMesh | None:
    if not case.mesh:
        return None
    axes = MESHES[case.mesh]
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def _share(case: Case) -> tuple[int, int]:
    """Return the number of this rank's first batch, and the step to its next one."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    axes = MESHES.get(case.mesh, {})
    same = prod(size for axis, size in axes.items() if axis in _SAME_BATCHES)
    return rank // same, case.ranks // same
