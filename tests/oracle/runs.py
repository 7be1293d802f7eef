"""Runs a case and returns its program. Everything that reaches into the engine is here."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offloadtrain as ot
from offloadtrain.runtime.lanes import Lane, Operation, Range, SequentialLanes, Span, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.step.layout import step_spec as spec
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.program import modes
from tests.numerics.models import MODELS, Chain, Layer, MixedReentrant, batches
from tests.oracle.canonical import canonical
from tests.oracle.cases import MODES, MORE_PLACEMENTS, PLACEMENTS, SHARED, Case
from tests.oracle.scripts import SCRIPTS, Loop

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
}
_OPTIONS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "groups": _grouped,
    "fp32 norms": lambda model: {"keep_fp32": ("*norm*",)},
}


class KeepingLanes(RecordingLanes):
    """No memory that a program has named is given out again: an address means one thing."""

    def __init__(self) -> None:
        super().__init__(SequentialLanes())
        self._kept: list[Tensor] = []

    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        self._kept += [range_.buffer.flat for range_ in (*reads, *writes)]
        super().launch(lane, name, fn, reads, writes)

    def open_span(self, name: str, reads: Sequence[Range], writes: Sequence[Range] = ()) -> Span:
        self._kept += [range_.buffer.flat for range_ in (*reads, *writes)]
        return super().open_span(name, reads, writes)

    def alloc(self, range_: Range, lane: Lane) -> Range:
        self._kept.append(range_.buffer.flat)
        return super().alloc(range_, lane)


def recorded(case: Case, limit: int | None = None) -> str:
    """The program of this rank as text.

    Args:
        limit: of host memory, where only a part of the blocks is guessed on; None: so that it is
            more than half of them.
    """
    with _as_asked(case):
        if case.mode == "speculative, partly" and limit is None:
            limit = _limit_for_some(case)
        lanes = KeepingLanes()
        loop = offloaded(case, lanes, limit or ROOM)
        SCRIPTS[case.script](loop)
        loop.optimizer.synchronize()
        text = canonical(lanes.program)
        loop.optimizer.close()
    told = [f"{LIMIT}{limit}"] if limit else []
    return "\n".join([*told, *loop.said, *text])


def limit_of(text: str) -> int | None:
    """That a text was recorded with."""
    first = text.split("\n", 1)[0]
    return int(first.removeprefix(LIMIT)) if first.startswith(LIMIT) else None


@contextmanager
def _as_asked(case: Case) -> Iterator[None]:
    """Without the collector of garbage, which would end graphs at any moment."""
    with pytest.MonkeyPatch.context() as patch:
        if case.script != "the odds decide":
            patch.setattr(modes.SpeculationPolicy, "good", lambda policy: True)
        if case.staging == "pieces":
            patch.setattr(spec, "STAGING_BYTES", PIECE_BYTES)
        gc.disable()
        try:
            yield
        finally:
            gc.enable()


def _limit_for_some(case: Case) -> int:
    """Of the blocks: between what is needed and what all of them would take."""
    loop = offloaded(case, KeepingLanes())
    needed = loop.optimizer.ledger.total(Tier.HOST)
    loop.optimizer.close()
    return needed * 5 // 6


def offloaded(case: Case, lanes: KeepingLanes, limit: int = ROOM) -> Loop:
    """Not trained yet."""
    torch.manual_seed(0)
    model = _MODELS[case.model]()
    # In stage 3 it says so that it reads weights without calling their modules.
    read = {"keep_whole": ("*",)} if case.model == "unusual" and "stage 3" in case.placement else {}
    state, precision = case.kept.split("/")
    with on_lanes(lanes):
        optimizer = ot.offload(
            model,
            ot.AdamW(lr=1e-3),
            device="cpu",
            state=state,
            precision=precision,
            grad_accum_steps=case.accum,
            host_memory_limit=limit,
            reduction=case.reduction,
            **MODES[case.mode],
            **{**PLACEMENTS, **MORE_PLACEMENTS, **SHARED}[case.placement],
            **_OPTIONS.get(case.model, lambda model: {})(model),
            **read,
        )
    if optimizer._engine.counter.scaler is not None:
        optimizer._engine.counter.scaler.scale = SCALE
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Loop(case, model, optimizer, iter(batches(60)[rank :: case.ranks]))
