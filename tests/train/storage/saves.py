"""Kinds of saves that faults are put into, and what must hold behind each fault."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

import torch

import offloadtrain as ot
from offloadtrain.runtime.lanes import on_lanes
from offloadtrain.runtime.process_group import ALONE, Ranks
from offloadtrain.step.layout.step_spec import SPILL_BLOCK
from offloadtrain.train.checkpoint import checkpoint, reader
from offloadtrain.train.checkpoint.manifest import DamagedCheckpointError
from offloadtrain.train.checkpoint.restore import restore
from offloadtrain.train.checkpoint.save import Save, save
from tests.harsh_lanes import PausingLanes
from tests.numerics.models import Chain, batches, loss_of
from tests.train.toy_state import filled, same

NEW = 5
"""The step that is saved under a fault."""
HANGS_S = 120
SPILL = 14 * SPILL_BLOCK
"""Bytes: buckets of `ASYNC`, and a part of a field."""


class Case(NamedTuple):
    """One fault.

    Attributes:
        run: makes it happen in a new empty folder, and checks what is left; returns what came of it
            in a word or two.
    """

    name: str
    run: Callable[[Path], str]


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors are read by one thread: where only what is read matters, threads take most time."""
    with ThreadPoolExecutor(1) as pool, patch.object(reader, "shared_pool", lambda name: pool):
        yield


@dataclass(frozen=True, slots=True)
class Kind:
    """A save of `NEW`, of small tensors made up for it.

    Attributes:
        there: steps that are saved before.
        stale: the remains of a save that was killed lie there, too.
    """

    name: str
    there: tuple[int, ...] = ()
    keep_every: int = 0
    ranks: int = 1
    stale: bool = False

    @property
    def newest(self) -> int | None:
        return self.there[-1] if self.there else None

    def prepare(self, root: Path) -> Path:
        """Return the folder of the checkpoints, with those that are there."""
        folder = root / "run" / "checkpoints"
        for step in self.there:
            save(folder, step, *filled(step), {"step": step})
        if self.stale:
            (folder / f"step-{NEW:08d}.tmp-dead").mkdir()
            (folder / f"step-{NEW:08d}.tmp-dead" / "rank-000.bin").write_bytes(b"half")
        return folder

    def perform(self, folder: Path, ranks: Ranks = ALONE) -> None:
        """Save, and prune, as a run does; on each rank."""
        self.save(folder, ranks)
        if ranks.rank == 0:
            self.prune(folder)

    def save(self, folder: Path, ranks: Ranks = ALONE) -> None:
        state = filled(NEW, rank=ranks.rank, num_ranks=ranks.size)
        save(folder, NEW, *state, {"step": NEW}, ranks=ranks)

    def prune(self, folder: Path) -> None:
        checkpoint.prune(folder, 2, self.keep_every)

    def check(self, folder: Path, allowed: set[int | None]) -> int | None:
        """Return the newest step, which was compared to the bit; then save another one."""
        newest = self.check_newest(folder, allowed)
        save(folder, NEW + 1, *filled(NEW + 1), {"step": NEW + 1})
        assert loaded_step(folder) == NEW + 1
        none_unfinished(folder)
        return newest

    def check_newest(self, folder: Path, allowed: set[int | None]) -> int | None:
        newest = loaded_step(folder)
        assert newest in allowed, f"step {newest} is the newest, not one of {allowed}"
        return newest


KINDS = (
    Kind("first"),
    Kind("steady", there=(1,)),
    Kind("prune", there=(1, 2), stale=True),
    Kind("prune, keep_every", there=(1, 2, 3, 4), keep_every=2),
    Kind("2 ranks, first", ranks=2),
    Kind("2 ranks, prune", there=(1, 2), ranks=2),
    Kind("4 ranks, prune", there=(1, 2), ranks=4),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncKind(Kind):
    """A save that is written while two more steps are trained, by the engine and its lanes.

    Attributes:
        options: of `ot.offload`. `scratch_dir` is the folder's parent where state is on the disk.
    """

    there: tuple[int, ...] = (1, 2, 3)
    options: Mapping[str, Any] = field(default_factory=dict)

    def prepare(self, root: Path) -> Path:
        folder = root / "run" / "checkpoints"
        shutil.copytree(self._reference(root.parent), folder)
        shutil.rmtree(folder / f"step-{NEW:08d}")
        return folder

    def save(self, folder: Path, ranks: Ranks = ALONE) -> None:
        self._train(folder, [NEW], spill=SPILL)

    def check(self, folder: Path, allowed: set[int | None]) -> int | None:
        reference = self._reference(folder.parents[2])
        good = _as_reference(folder, reference)
        assert good in allowed, f"step {good} is the newest, not one of {allowed}"
        shutil.rmtree(folder / f"step-{NEW:08d}", ignore_errors=True)
        self._train(folder, [NEW], spill=SPILL)
        assert _as_reference(folder, reference) == NEW
        none_unfinished(folder)
        return good

    def make_reference(self, scratch: Path) -> None:
        """Save what it compares with: every step of a run that nothing happens to."""
        if not (reference := self._reference(scratch)).exists():
            self._train(reference, [*self.there, NEW])

    def _reference(self, scratch: Path) -> Path:
        return scratch / f"reference, {self.name}"

    def _train(self, folder: Path, saved: list[int], *, spill: int = 0) -> None:
        """Train, and save some steps while later ones are trained; the spill changes no byte."""
        torch.manual_seed(0)
        model = Chain()
        options = {"clip_norm": 0.5, "checkpoint_spill": spill, **self.options}
        if "state_on" in options:
            options["scratch_dir"] = str(folder.parent)
        with on_lanes(PausingLanes(0.5)):
            rule = ot.AdamW(lr=1e-2)
            optimizer = ot.offload(model, rule, device="cpu", precision="bf16", **options)
        _save_while_training(folder, saved, model, optimizer)


ASYNC = AsyncKind("asynchronous")
MODES = (
    AsyncKind("asynchronous, delayed", options={"update": "delayed"}),
    AsyncKind("asynchronous, speculative", options={"update": "speculative"}),
    AsyncKind("asynchronous, partly on the disk", options={"state_on": {"host": 0.5, "disk": 0.5}}),
    AsyncKind("asynchronous, int8", options={"state": "int8"}),
)


def _save_while_training(
    folder: Path, saved: list[int], model: Chain, optimizer: ot.OffloadOptimizer
) -> None:
    writing: Save | None = None
    try:
        for step, tokens in enumerate(batches(NEW + 2), 1):
            optimizer.backward(loss_of(model, tokens))
            optimizer.step()
            if step in saved:
                if writing is not None:
                    writing.commit()
                writing = Save(folder, step, model, optimizer, {"step": step})
        assert writing is not None
        writing.commit()
    finally:
        optimizer.close()


def _as_reference(folder: Path, reference: Path) -> int | None:
    """Return the newest step, after comparing its files with those of the reference."""
    newest = checkpoint.newest_good(folder, refuse_damage)
    if newest is None:
        return None
    for name in ("rank-000.bin", "state.json", "manifest.json"):
        expected = (reference / newest.path.name / name).read_bytes()
        assert (newest.path / name).read_bytes() == expected, name
    return newest.step


def refuse_damage(path: Path, damage: DamagedCheckpointError) -> None:
    raise AssertionError(f"a completely named checkpoint is damaged: {damage}")


def loaded_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint, after comparing all its values with those of that
    step; none of the others may be damaged."""
    newest = checkpoint.newest_good(folder, refuse_damage)
    if newest is None:
        return None
    for path in checkpoint.find(folder)[1:]:
        checkpoint.verify(path)
    model, state = filled(99)
    restore(newest, model, state)
    assert same(state, filled(newest.step)[1]) and model.seen == newest.step
    assert newest.state == {"step": newest.step}
    return newest.step


def none_unfinished(folder: Path) -> None:
    """Nothing but checkpoints is there."""
    left = [name for name in os.listdir(folder) if not name[5:].isdecimal()]
    assert not left, left


def in_fork(call: Callable[[], object]) -> NoReturn:
    """End a forked process as the call ends: exit code 0, 1, or by SIGALRM where it hangs."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(HANGS_S)
    code = 1
    try:
        call()
        code = 0
    finally:
        os._exit(code)
