"""One checkpoint being written, and its commit.

[Note: Shards in a checkpoint]
Each rank writes its shards into its own file, all in one folder that the hosts share. Rank 0
writes the rest, and commits once every rank has reported its tensors. A tensor is identified by the
name of its parameter and, for a shard, by its range of elements in memory order. Any number of
ranks can read what any number wrote.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from offloadtrain.engine.saved_state import FlatState, OwnState, StateWriter
from offloadtrain.hardware import atomic_io
from offloadtrain.runtime.process_group import ALONE, Extent, Ranks
from offloadtrain.step.program.operations import Written
from offloadtrain.train.checkpoint import checkpoint, disk_space
from offloadtrain.train.checkpoint.layout import Entry, Region, lay_out
from offloadtrain.train.checkpoint.manifest import (
    MANIFEST,
    STATE,
    CheckpointError,
    NotFiniteError,
    decoded_entry,
    encoded_entry,
    write_manifest,
)
from offloadtrain.train.checkpoint.writer import Part, TensorWriter

Tensors = dict[str, torch.Tensor]


class OffloadedState(Protocol):
    """The interface of an optimizer for checkpoints."""

    param_groups: list[dict[str, Any]]

    @property
    def ranks(self) -> Ranks:
        """Those that share its state."""
        ...

    @property
    def saves_untrained(self) -> bool: ...

    def extents(self) -> Mapping[str, Extent]: ...
    def flat_states(self) -> Sequence[FlatState]: ...
    def write_state(self, writer: StateWriter) -> None: ...
    def finish_writing(self) -> None: ...
    def own_states(self) -> Mapping[str, Sequence[OwnState]]: ...
    def own_weights(self) -> Mapping[str, Sequence[OwnState]]: ...
    def load_named_state(
        self, name: str, tensors: Mapping[str, torch.Tensor], *, lo: int | None = None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed checkpoint.

    Attributes:
        num_bytes: of the tensors of all ranks.
        seconds: from its beginning to its commit.
        direct: it was written past the page cache.
    """

    path: Path
    num_bytes: int
    seconds: float
    direct: bool


class Save:
    """A checkpoint being written; see [Note: Commit protocol]. It is the optimizer's `StateWriter`.

    Every rank makes one, goes on with its steps, and then calls `commit`: all of them succeed, or
    all fail. The optimizer's next updates wait for the writes of what they change. What no bucket
    holds and may change (buffers) is written before this returns.

    Attributes:
        written: this rank has written its part, or failed.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        model: torch.nn.Module,
        optimizer: OffloadedState,
        state: Mapping[str, Any],
        ranks: Ranks = ALONE,
    ) -> None:
        """
        Args:
            state: all state outside tensors, as JSON values; rank 0's is saved.

        Raises:
            CheckpointError: the disk is full or failing. The partial checkpoint is removed.
        """
        self.step = step
        self.written = False
        self._optimizer = optimizer
        self._started = time.perf_counter()
        self._ranks = ranks
        self._state = json.dumps(state, indent=1).encode()
        self._final = folder / f"step-{step:08d}"
        name = f"{self._final.name}.tmp-{secrets.token_hex(4)}"
        self._unfinished = folder / ranks.broadcast_object(name)
        self._file = f"rank-{ranks.rank:03d}.bin"
        extra = untrained(model, optimizer) if optimizer.saves_untrained else {}
        params = dict(model.named_parameters())
        self._frozen = {name: tensor for name, tensor in extra.items() if name in params}
        self._regions = lay_out(self._file, optimizer.flat_states(), extra)
        self._writer: TensorWriter | None = None
        try:
            with _together(ranks, self._final):
                if ranks.rank == 0:
                    _make(self._unfinished)
            with _together(ranks, self._final):
                disk_space.require(folder, self._own_bytes, ranks)
                self._writer = TensorWriter(self._unfinished / self._file, self._regions)
            self._write_others({name: x for name, x in extra.items() if name not in params})
            optimizer.write_state(self)
        except BaseException:
            self.give_up()
            raise

    @property
    def _own_bytes(self) -> int:
        return self._regions[-1].end if self._regions else 0

    def write(self, bucket: str, parts: Sequence[tuple[Written, torch.Tensor]]) -> None:
        """Write parts of the buffers of a bucket."""
        assert self._writer is not None
        regions = [region for region in self._regions if region.owner == bucket]
        # A shard that is all padding has no region.
        if regions:
            self._writer.write(
                Part(regions[written.buffer], tensor, written.lo, written.hi)
                for written, tensor in parts
            )

    def finish(self) -> None:
        """Write the parameters that are never trained, and end the file."""
        assert self._writer is not None
        self._write_others(self._frozen)
        self._writer.finish()
        self.written = True

    def _write_others(self, tensors: Tensors) -> None:
        assert self._writer is not None
        regions = {region.owner: region for region in self._regions}
        self._writer.write(
            Part(regions[name], tensor, 0, tensor.numel()) for name, tensor in tensors.items()
        )

    def commit(self) -> Saved:
        """Wait until every rank has written its part, and publish the checkpoint.

        Raises:
            NotFiniteError: a weight is not finite.
            CheckpointError: the disk is full or failing, or the step was saved before. In all cases
                the partial checkpoint is removed, and older ones are untouched.
        """
        assert self._writer is not None
        # This rank's part is on the disk, or has failed; the exchange below says so of all.
        self._optimizer.finish_writing()
        try:
            with _together(self._ranks, self._final):
                entries = self._writer.entries()
            own_entries = [encoded_entry(entry) for entry in entries]
            of_ranks = self._ranks.gather(
                (self._file, self._own_bytes, own_entries, self._writer.direct)
            )
            with _together(self._ranks, self._final):
                if self._ranks.rank == 0:
                    sizes = {file: size for file, size, _, _ in of_ranks}
                    all_entries = [
                        decoded_entry(entry) for _, _, encoded, _ in of_ranks for entry in encoded
                    ]
                    self._publish(sizes, all_entries)
        except BaseException:
            self.give_up()
            raise
        num_bytes = sum(size for _, size, _, _ in of_ranks)
        direct, seconds = all(row[3] for row in of_ranks), time.perf_counter() - self._started
        return Saved(self._final, num_bytes, seconds, direct)

    def _publish(self, sizes: Mapping[str, int], entries: Sequence[Entry]) -> None:
        """Write state and manifest, and rename the folder."""
        folder, state = self._unfinished, self._state
        atomic_io.write_file(folder / STATE, state)
        atomic_io.write_file(folder / MANIFEST, write_manifest(self.step, sizes, state, entries))
        atomic_io.sync_folder(folder)
        atomic_io.rename_folder(folder, self._final)

    def give_up(self) -> None:
        """Remove what was written of it. Idempotent."""
        if self._writer is not None:
            with suppress(OSError):  # of a file that nobody wants any more
                self._writer.close()
        if self._ranks.rank == 0:
            with suppress(OSError):  # else `clean` does it, before the next save
                atomic_io.remove_folder(self._unfinished)


def save(
    folder: Path,
    step: int,
    model: torch.nn.Module,
    optimizer: OffloadedState,
    state: Mapping[str, Any],
    *,
    ranks: Ranks = ALONE,
) -> Saved:
    """Write a checkpoint and wait for it; raises what `Save` and `commit` raise."""
    return Save(folder, step, model, optimizer, state, ranks).commit()


def untrained(model: torch.nn.Module, optimizer: OffloadedState) -> Tensors:
    """Return the parameters that the optimizer does not hold, and the persistent buffers."""
    extents = optimizer.extents()
    tensors: Tensors = {name: p for name, p in model.named_parameters() if name not in extents}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def num_bytes(model: torch.nn.Module, optimizer: OffloadedState, ranks: Ranks) -> int:
    """Return the bytes that this rank writes into a checkpoint."""
    extra = untrained(model, optimizer) if optimizer.saves_untrained else {}
    regions: Sequence[Region] = lay_out("", optimizer.flat_states(), extra)
    return regions[-1].end if regions else 0


@contextmanager
def _together(ranks: Ranks, final: Path) -> Iterator[None]:
    """Make a failure of one rank fail on all ranks."""
    failed: Exception | None = None
    message = None
    try:
        yield
    except CheckpointError as error:
        failed, message = error, str(error)
    except OSError as error:
        failed, message = error, _failure(final, error)
    of_ranks = ranks.gather((message, isinstance(failed, NotFiniteError)))
    for rank, (other, not_finite) in enumerate(of_ranks):
        if other is not None:
            where = "" if ranks.is_single else f"rank {rank}: "
            raise (NotFiniteError if not_finite else CheckpointError)(where + other) from failed


def _make(unfinished: Path) -> None:
    atomic_io.make_folder(unfinished.parent)
    checkpoint.clean(unfinished.parent)
    os.mkdir(unfinished, 0o700)


def _failure(final: Path, error: OSError) -> str:
    if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
        return f"{final} exists already; a checkpoint is never overwritten"
    reason = error.strerror or str(error)
    return f"{final.name} could not be saved in {final.parent}: {reason}. Older ones are intact."
