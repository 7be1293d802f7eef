"""Writes one checkpoint: checks the disk space, writes a tensor file per rank, and commits.

[Note: Shards in a checkpoint]
Each rank writes its shards into its own file, all in one folder that the hosts share. Rank 0
writes everything else, and commits after every rank has reported its tensors. A tensor is
identified by the name of its parameter and, for a shard, by its range of elements in memory order.
Any number of ranks can read what any number of ranks wrote.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import xxhash

from offloadtrain.config.units import format_bytes
from offloadtrain.engine.saved_state import FlatState, OwnState, StateWriter
from offloadtrain.hardware import atomic_io
from offloadtrain.hardware.direct_io import (
    MEMORY_ALIGN,
    DirectFile,
    aligned_buffer,
    windows,
)
from offloadtrain.hardware.file_system import free_bytes
from offloadtrain.runtime.process_group import ALONE, Extent, Ranks
from offloadtrain.runtime.thread_pools import shared_pool
from offloadtrain.step.program.operations import Written
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.manifest import (
    MANIFEST,
    STATE,
    CheckpointError,
    Chunk,
    Entry,
    NotFiniteError,
    Region,
    decoded_entry,
    encoded_entry,
    lay_out,
    write_manifest,
)

_WEIGHTS = ("master", "weight")
"""Kinds of tensors that hold a trained weight, or its upper half."""

_EXPONENTS = {
    "float32": (np.uint32, 0x7F800000),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
}
"""dtype → (unsigned type, exponent bits, which are all set in values that are not finite)."""

_CHECKED = 1 << 17
"""Bytes checked at a time; they stay in the cache."""


class Part(NamedTuple):
    """Values [lo, hi) of a region. It covers the windows of the file that begin in this range.

    Attributes:
        tensor: any shape and device. Begins with value `lo` and contains the last window entirely.
    """

    region: Region
    tensor: torch.Tensor
    lo: int
    hi: int

    def windows(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield [lo, hi) of each window in the file; `size` is the bytes of a value."""
        start = self.region.offset
        for lo, hi in windows(start, self.region.end):
            if self.lo * size <= lo - start < self.hi * size:
                yield lo, hi


class TensorWriter:
    """Writes and hashes regions; uses one window of scratch memory per thread, not a copy of the
    state.

    Attributes:
        failure: the first error; after it nothing more is written.
    """

    def __init__(self, path: Path, regions: Sequence[Region]) -> None:
        """
        Raises:
            OSError: the file cannot be made, or its disk is full.
        """
        self._regions = regions
        self.failure: Exception | None = None
        self._digests: dict[int, str] = {}
        """First byte of a chunk in the file → its hash."""
        self._scratch = threading.local()
        self._file = DirectFile.create(path, size_of(regions))
        self._pool = shared_pool("checkpoint")

    @property
    def direct(self) -> bool:
        """True if the file is written without the page cache."""
        return self._file.direct

    def write(self, parts: Iterable[Part]) -> None:
        """Write parts of regions; returns after the memory of their tensors was read.

        An error is stored in `failure`.
        """
        writes = [
            self._pool.submit(
                self._write, part.region, flat[lo - start : hi - start], lo, hi, stream
            )
            for part in parts
            for size in [part.tensor.itemsize]
            # (n,) uint8; a copy if the tensor is not contiguous.
            for flat in [part.tensor.detach().contiguous().reshape(-1).view(torch.uint8)]
            # The launching thread's stream: the pool threads' current stream would be compute's.
            for stream in [torch.cuda.current_stream(flat.device) if flat.is_cuda else None]
            for start in [part.region.offset + part.lo * size]
            for lo, hi in part.windows(size)
        ]
        try:
            for future in writes:
                future.result()
        finally:
            wait(writes)  # they read the tensors and write the file

    def finish(self) -> None:
        """Make the written regions durable and close the file; an error is stored in `failure`."""
        try:
            if self.failure is None:
                self._file.sync()
            # Some file systems report a full disk only here.
            self.close()
        except OSError as error:
            self.failure = self.failure or error

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def entries(self) -> list[Entry]:
        """Return the entries of the finished file, with their hashes.

        Raises:
            OSError, NotFiniteError: the error in `failure`.
        """
        if self.failure is not None:
            raise self.failure
        digests_of: dict[Entry, list[str]] = {}
        for region in self._regions:
            for chunk in region.chunks:
                digests = digests_of.setdefault(chunk.entry, [])
                if chunk.lo < chunk.hi:
                    digests.append(self._digests[chunk.lo])
        return [replace(entry, digests=tuple(digests)) for entry, digests in digests_of.items()]

    def _write(
        self,
        region: Region,
        values: torch.Tensor,
        lo: int,
        hi: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        if self.failure is not None:
            return
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                memory = self._aligned(values, hi - lo)
            for chunk in region.within(lo, hi):
                data = memory[chunk.lo - lo : chunk.hi - lo]
                self._digests[chunk.lo] = xxhash.xxh3_128_hexdigest(data)
                if region.kind in _WEIGHTS:
                    _require_finite(chunk, data)
            self._file.write(memory, lo)
        except (OSError, NotFiniteError) as error:
            self.failure = self.failure or error

    def _aligned(self, part: torch.Tensor, num_bytes: int) -> memoryview:
        """Return memory aligned for direct I/O: the tensor's own, or a copy with its padding."""
        on_host = part.device.type == "cpu"
        if on_host and part.numel() == num_bytes and part.data_ptr() % MEMORY_ALIGN == 0:
            return part.numpy().data
        if not hasattr(self._scratch, "window"):
            self._scratch.window = aligned_buffer()
        window: memoryview = self._scratch.window[:num_bytes]
        target = torch.frombuffer(window, dtype=torch.uint8)
        # Synchronous: a copy from a device into pageable memory returns after it is done.
        target[: part.numel()].copy_(part)
        target[part.numel() :].zero_()
        return window


def _require_finite(chunk: Chunk, data: memoryview) -> None:
    """Raise NotFiniteError if a weight in the chunk is not finite."""
    entry = chunk.entry
    if entry.dtype not in _EXPONENTS:
        return
    dtype, mask = _EXPONENTS[entry.dtype]
    values = np.frombuffer(data[: max(0, entry.end - chunk.lo)], dtype)
    step = _CHECKED // values.itemsize
    for at in range(0, len(values), step):
        if ((values[at : at + step] & dtype(mask)) == mask).any():
            raise NotFiniteError(f"the weights of {entry.name} are not finite")


def require_space(
    folder: Path, num_bytes: int, ranks: Ranks, unfinished: Iterable[Path] = ()
) -> tuple[int, int]:
    """Compare the free space in `folder`, which need not exist yet, with the size of a checkpoint.
    Every rank calls this, since all write to one disk.

    Args:
        num_bytes: bytes of this rank's tensors.
        unfinished: folders that the save removes first; their space counts as free.

    Returns:
        (bytes that a checkpoint of all ranks needs, bytes that are free).

    Raises:
        CheckpointError: there is too little free space.
    """
    needed = int(int(ranks.all_gather_host([num_bytes]).sum()) * 1.05) + (1 << 20)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    # Count allocated blocks: an unfinished file may have a larger size than its blocks.
    folders = (path for path in unfinished if path.is_dir() and not path.is_symlink())
    removable = sum(512 * file.lstat().st_blocks for path in folders for file in path.iterdir())
    free = free_bytes(there) + removable
    if free < needed:
        raise CheckpointError(
            f"a checkpoint needs {format_bytes(needed)} and {format_bytes(free)} is free in "
            f"{folder}. {older_ones(folder)} Free some space, or set runs_dir to a larger disk."
        )
    return needed, free


def older_ones(folder: Path) -> str:
    """Return a sentence for error messages: whether the folder has older checkpoints."""
    there = any(folder.glob("step-????????"))
    return "Older ones are intact." if there else "There is no older one."


Tensors = dict[str, torch.Tensor]


class OffloadedState(Protocol):
    """Attributes and methods of an optimizer that checkpoints use."""

    param_groups: list[dict[str, Any]]

    @property
    def ranks(self) -> Ranks:
        """The ranks that share its state."""
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
        num_bytes: bytes of the tensors of all ranks.
        seconds: from the start of the save to its commit.
        direct: all files were written without the page cache.
    """

    path: Path
    num_bytes: int
    seconds: float
    direct: bool


class Save:
    """A checkpoint that is being written; see [Note: Commit protocol]. The optimizer's
    `StateWriter`.

    Every rank creates a `Save`, continues with its steps, and then calls `commit`, which succeeds
    on all ranks or fails on all. The optimizer's next updates wait for the writes of the buffers
    they change. The constructor itself writes tensors outside the buckets that may change
    (buffers).

    Attributes:
        written: this rank has written its part, or has failed.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        model: torch.nn.Module,
        optimizer: OffloadedState,
        state: Mapping[str, Any],
        ranks: Ranks = ALONE,
        *,
        changing: Collection[str] = (),
    ) -> None:
        """
        Args:
            state: all state other than tensors, as JSON values; rank 0's is saved.
            changing: parameters outside the optimizer that steps may change; like buffers, the
                constructor writes them.

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
        self._regions, extra = lay_out_state(self._file, model, optimizer)
        params = dict(model.named_parameters())
        steady = params.keys() - changing
        self._frozen = {name: tensor for name, tensor in extra.items() if name in steady}
        self._versions = {name: tensor._version for name, tensor in self._frozen.items()}
        self._writer: TensorWriter
        self._open = ExitStack()  # closes the writer, once there is one
        try:
            with checkpoint.together(ranks, self._failure):
                if ranks.rank == 0:
                    atomic_io.make_folder(folder)
                    checkpoint.clean(folder)
                    os.mkdir(self._unfinished, 0o700)
            with checkpoint.together(ranks, self._failure):
                require_space(folder, size_of(self._regions), ranks)
                self._writer = TensorWriter(self._unfinished / self._file, self._regions)
                self._open.callback(self._writer.close)
            self._write_others({name: x for name, x in extra.items() if name not in steady})
            optimizer.write_state(self)
        except BaseException:
            self.give_up()
            raise

    def write(self, bucket: str, parts: Sequence[tuple[Written, torch.Tensor]]) -> None:
        """Write parts of the buffers of a bucket."""
        regions = [region for region in self._regions if region.owner == bucket]
        # A shard that consists of padding has no region.
        if regions:
            self._writer.write(
                Part(regions[written.buffer], tensor, written.lo, written.hi)
                for written, tensor in parts
            )

    def finish(self) -> None:
        """Write the parameters that are never trained, and end the file."""
        self._write_others(self._frozen)
        self._writer.finish()
        self.written = True

    def _write_others(self, tensors: Tensors) -> None:
        regions = {region.owner: region for region in self._regions}
        self._writer.write(
            Part(regions[name], tensor, 0, tensor.numel()) for name, tensor in tensors.items()
        )

    def commit(self) -> Saved:
        """Wait until every rank has written its part, and publish the checkpoint.

        Raises:
            NotFiniteError: a weight is not finite.
            CheckpointError: the disk is full or failing, the step was saved before, or a frozen
                parameter was changed during the save. In all cases the partial checkpoint is
                removed, and older ones stay untouched.
        """
        # Wait for this rank's writes; the exchange below then reports failures of all ranks.
        self._optimizer.finish_writing()
        try:
            with checkpoint.together(self._ranks, self._failure):
                self._require_unchanged()
                entries = self._writer.entries()
            own_entries = [encoded_entry(entry) for entry in entries]
            of_ranks = self._ranks.gather(
                (self._file, size_of(self._regions), own_entries, self._writer.direct)
            )
            with checkpoint.together(self._ranks, self._failure):
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

    def _require_unchanged(self) -> None:
        """Raise CheckpointError if a frozen tensor changed, so that its file may mix two steps."""
        for name, tensor in self._frozen.items():
            if tensor._version != self._versions[name]:
                raise CheckpointError(
                    f"{self._final.name} was not saved: parameter '{name}', which is not trained, "
                    "was changed while it was written. Later checkpoints write it before training "
                    f"goes on. {older_ones(self._final.parent)}"
                )

    def _publish(self, sizes: Mapping[str, int], entries: Sequence[Entry]) -> None:
        """Write state and manifest, and rename the folder."""
        folder, state = self._unfinished, self._state
        atomic_io.write_file(folder / STATE, state)
        atomic_io.write_file(folder / MANIFEST, write_manifest(self.step, sizes, state, entries))
        atomic_io.sync_folder(folder)
        atomic_io.rename_folder(folder, self._final)

    def _failure(self, error: OSError) -> str:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return f"{self._final} exists already; a checkpoint is never overwritten"
        where = f"{self._final.name} could not be saved in {self._final.parent}"
        return f"{where}: {error.strerror or error}. {older_ones(self._final.parent)}"

    def give_up(self) -> None:
        """Remove the partial checkpoint. Idempotent."""
        with suppress(OSError):  # the file is discarded anyway
            self._open.close()
        if self._ranks.rank == 0:
            with suppress(OSError):  # `clean` retries before the next save
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
    """Return the parameters outside the optimizer, and the persistent buffers."""
    extents = optimizer.extents()
    tensors: Tensors = {name: p for name, p in model.named_parameters() if name not in extents}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def lay_out_state(
    file: str, model: torch.nn.Module, optimizer: OffloadedState
) -> tuple[list[Region], Tensors]:
    """Lay out this rank's file; return its regions and the untrained tensors among them."""
    extra = untrained(model, optimizer) if optimizer.saves_untrained else {}
    return lay_out(file, optimizer.flat_states(), extra), extra


def size_of(regions: Sequence[Region]) -> int:
    """Return the bytes of a file with these regions."""
    return regions[-1].end if regions else 0
