"""Every torch call of real steps, looked at: what touches working weights lies inside a span that
declares them, or is the engine's own operation on views that it declared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import offloadtrain as ot
from offloadtrain.engine.block import Residency
from offloadtrain.runtime.lanes import Lane, Range, SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.base import Operation, Span
from tests.numerics.comparison import make
from tests.numerics.models import MODELS, batches, loss_of
from tests.numerics.test_rerun import RECOMPUTES, Several


class WatchedLanes(SequentialLanes):
    """Knows which spans are open, and whether an operation of the engine is running."""

    def __init__(self) -> None:
        super().__init__()
        self.open: dict[int, Span] = {}
        self.running = 0

    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        self.running += 1
        super().launch(lane, name, fn, reads, writes)
        self.running -= 1

    def open_span(self, name: str, reads: Sequence[Range], writes: Sequence[Range] = ()) -> Span:
        span = super().open_span(name, reads, writes)
        self.open[id(span)] = span
        return span

    def close_span(self, span: Span) -> None:
        super().close_span(span)
        self.open.pop(id(span), None)

    def declares(self, lo: int, hi: int) -> bool:
        """Whether an open span reads all of these addresses."""
        ranges = [range_ for span in self.open.values() for range_ in span.reads]
        return any(_lo(r) <= lo and hi <= _lo(r) + r.nbytes for r in ranges)


def _lo(range_: Range) -> int:
    return range_.view.data_ptr()


class Watch(TorchDispatchMode):
    """Notes every call whose arguments lie in working weights that no span declares."""

    def __init__(self, lanes: WatchedLanes, optimizer: ot.OffloadOptimizer) -> None:
        super().__init__()
        self.lanes = lanes
        self.undeclared: list[str] = []
        self.accesses = 0
        buckets = [b for block in optimizer._blocks for b in block.buckets]
        flats = [bucket.working.flat for bucket in buckets]
        self.storages = {flat.untyped_storage().data_ptr() for flat in flats}
        self.storages |= {slot.data_ptr() for slot in optimizer._engine.residency.memory.slots}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self.lanes.running and not func.is_view and "detach" not in func.name():
            for leaf in tree_leaves((args, kwargs or {})):
                if isinstance(leaf, Tensor) and leaf.numel():
                    self._look(func, leaf)
        return func(*args, **(kwargs or {}))

    def _look(self, func: Any, tensor: Tensor) -> None:
        if tensor.untyped_storage().data_ptr() not in self.storages:
            return
        self.accesses += 1
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        lo = tensor.data_ptr()
        if not self.lanes.declares(lo, lo + reach * tensor.element_size()):
            self.undeclared.append(func.name())


@contextmanager
def watched(model: nn.Module, **options: Any) -> Iterator[tuple[ot.OffloadOptimizer, Watch]]:
    lanes = WatchedLanes()
    with on_lanes(lanes):
        optimizer = ot.offload(model, device="cpu", clip_norm=0.5, **options)
    first = batches(1)[0]
    optimizer.backward(loss_of(model, first))  # the first forward learns what is read where
    optimizer.step()
    yield optimizer, Watch(lanes, optimizer)
    optimizer.close()


def steps(optimizer: ot.OffloadOptimizer, model: nn.Module) -> None:
    for tokens in batches(2):
        optimizer.backward(loss_of(model, tokens))
        optimizer.step()


PLACEMENTS: list[dict[str, Any]] = [
    {"activation": "recompute"},
    {"working": "host", "device_slots": 1},
    {"working": "host", "activation": "offload"},
    {"activation": "offload_saved", "offload_saved_above": 0},
    {"working": "host", "update": "delayed"},
]
WITHOUT_A_CALL = {"unusual", "partly used", "detached"}
"""Models that read weights without calling their modules: the parameters ask for them, and uploads
wait for all that compute was given before."""
CASES = [
    *((name, {"working": "host"}) for name in MODELS if name not in WITHOUT_A_CALL),
    *((name, {}) for name in list(MODELS)[::3] if name not in WITHOUT_A_CALL),
    *(
        pytest.param(name, options, marks=pytest.mark.slow)
        for options in PLACEMENTS
        for name in ("tied", "shared", "experts")
    ),
]
RERUN = RECOMPUTES | {
    "several": lambda: Several(False),
    "several, reentrant": lambda: Several(True),
}


@pytest.mark.cover(0, 1)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_nothing_touches_weights_undeclared(name: str, options: dict[str, Any]) -> None:
    check(MODELS[name], **options)


@pytest.mark.parametrize("name", RERUN)
def test_layers_that_a_user_runs_again(name: str) -> None:
    check(RERUN[name], working="host")


def check(made: Callable[[], nn.Module], **options: Any) -> None:
    model = make(made)
    with watched(model, **options) as (optimizer, watch):
        with watch:
            steps(optimizer, model)
        assert watch.undeclared == []
        assert watch.accesses > 20


def test_a_block_evicted_in_use_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residency, "pinned", lambda self, block: False)
    torch.manual_seed(0)
    model = Several(False)
    with watched(model, working="host", device_slots=2) as (optimizer, watch):
        with watch:
            steps(optimizer, model)
        assert watch.undeclared
