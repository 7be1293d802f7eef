"""Optimizer state in a scratch file: mapped for readers while the lanes are idle; in a step, moved
without the page cache.

[Note: The scratch file]
The file has no name: it is unlinked as soon as it is open, so it ends with its process in any
case, and no later run can open it. Its space is reserved before the first weight is read. Each
tensor of the state is a view of a shared mapping of the file. Its address also *identifies* its
range of the file: operations of a step get such a view and a slot of host memory, and move the
bytes between file and slot with O_DIRECT, several requests at once, without accessing the mapping.
Views may be accessed only while the lanes are idle: the kernel writes dirty pages before a direct
read, and drops cached pages after a direct write.

[Note: Checksums of the scratch file]
State stays in the file for days, and a checkpoint of corrupt bytes would pass verification. So each
window of a buffer, which is one request, has a checksum in host memory (xxh3-64), computed while it
is written and compared after it was read. A read that returns other bytes ends the run. A window
without a checksum gets one when it is read: frozen weights are never written.

Writes through the mapping cannot be detected, so all checksums are dropped (`drop_checksums`)
whenever the engine has drained the lanes for code that may use the views. Until a window is moved
again, its bytes are not checked; neither are reads through the mapping. Views that the user keeps
may also be written at any other time: torch counts writes to a tensor (`_version`), and if the
count of a buffer's views has changed since its checksum, different bytes are accepted.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from offloadtrain.config.errors import ConfigError, DiskError
from offloadtrain.config.offload import OptionError
from offloadtrain.config.units import format_bytes
from offloadtrain.hardware.direct_io import (
    BLOCK,
    THREADS,
    DirectFile,
    aligned_buffer,
    padded,
    windows,
)
from offloadtrain.hardware.file_system import IN_MEMORY, free_bytes, kind_of
from offloadtrain.runtime.arena import Ledger
from offloadtrain.runtime.dtypes import DTYPES
from offloadtrain.runtime.thread_pools import started_pool
from offloadtrain.step.layout.buffers import BufferKey, BufferSpec, Rows, by_owner, largest_owners
from offloadtrain.step.layout.tiers import Tier

_Move = Callable[[memoryview, int], None]
"""(memory, offset in the file) → moves all of the memory's bytes."""


class DiskArena:
    """A rank's scratch file. Its owner closes it after draining the lanes."""

    def __init__(self, ledger: Ledger, folder: str | None, *, in_memory: bool = False) -> None:
        """`folder`: None: `map` rejects all rows. `in_memory`: the file system may be in host
        memory."""
        self._ledger = ledger
        self._has_folder, self._folder = bool(folder), Path(folder or "")
        self._in_memory = in_memory
        self._booked: list[tuple[BufferKey, BufferSpec]] = []
        self._offsets: list[int] = []
        """Offset in the file of the buffer of each booked row."""
        self._checksums: dict[int, tuple[int, int]] = {}
        """Offset of a window → xxh3-64 of its bytes, and the number of writes to its buffer's views
        until then. Buffers are always moved completely, so that their windows never change."""
        self._views: dict[int, dict[int, Tensor]] = {}
        """Number of a row → the user's views of its buffer, by address."""
        self._base = 0
        """The address at which the file is mapped."""

    def map(self, rows: Rows) -> list[Tensor]:
        """Create the file; return zeroed 1-D tensors, views of it, in the order of the rows.

        Raises:
            OptionError, ConfigError: no folder was set, or it does not exist.
            DiskError: the folder is in memory, has too little space, or cannot be written.
        """
        if not rows:
            return []
        sizes = [padded(row.nbytes) for row in rows.values()]
        *self._offsets, total = accumulate(sizes, initial=0)
        self._check(rows, total)
        try:
            self._file = DirectFile.scratch(self._folder, total)
        except OSError as error:
            raise self._refused(rows, total, str(error.strerror)) from error
        self._threads, self._pid = started_pool("disk", 2 * THREADS), os.getpid()
        # In addition to the threads that move windows: a checksum takes a tenth of the time of its
        # write, and is ready before it.
        self._hashing = started_pool("hash", 2)
        # The memoryview keeps the mapping alive as long as a tensor refers to it.
        mapped = torch.frombuffer(self._file.mapped(), dtype=torch.uint8)
        self._base = mapped.data_ptr()
        self._book(rows, 1)
        return [
            mapped[offset : offset + row.nbytes].view(DTYPES[row.dtype])
            for offset, row in zip(self._offsets, rows.values(), strict=True)
        ]

    def read(self, *views: Tensor) -> None:
        """Read file ranges into host memory. `views`: first half, views of the file; second half,
        host memory to fill.

        Raises:
            DiskError: the disk fails, or returns other bytes than were written.
        """
        half = len(views) // 2
        self._move("reading", self._read, views[:half], views[half:])

    def write(self, *views: Tensor) -> None:
        """Write host memory to file ranges. `views`: first half, host memory; second half, views of
        the file.

        Raises:
            DiskError: the disk is full or fails.
        """
        half = len(views) // 2
        self._move("writing", self._write, views[half:], views[:half])

    def hand_out(self, views: Iterable[Tensor]) -> None:
        """The user gets these views of the file."""
        for view in views:
            if view.numel() and not view.is_inference():  # torch does not count writes to these
                number = self._number_at(view.data_ptr() - self._base)
                self._views.setdefault(number, {})[view.data_ptr()] = view

    def drop_checksums(self) -> None:
        """The lanes are idle, and user code may write to the views: the bytes in the file are
        unknown from here on."""
        self._checksums.clear()

    def close(self) -> None:
        """Close the file. Its space is freed with its last view. Idempotent."""
        if self._booked:
            self._threads.shutdown()
            self._hashing.shutdown()
            self._file.close()
            self._views.clear()
            self._book(dict(self._booked), -1)
            self._booked = []

    def _move(
        self, verb: str, move: _Move, files: Sequence[Tensor], slots: Sequence[Tensor]
    ) -> None:
        pieces = [
            piece
            for file, slot in zip(files, slots, strict=True)
            for piece in _pieces(slot, file.data_ptr() - self._base)
        ]
        if os.getpid() != self._pid:
            raise DiskError(
                f"{verb} the scratch file in scratch_dir = '{self._folder}': this process was "
                "forked from the one that trains, and only that one has the threads that do it. "
                "Evaluate there, or fork with a copy.deepcopy(model)"
            )
        # This lane's thread waits for all requests: a later event covers all of the bucket.
        try:
            list(self._threads.map(lambda piece: move(*piece), pieces))
        except OSError as error:
            nbytes = sum(slot.nbytes for slot in slots)
            name = errno.errorcode.get(error.errno or 0, "")
            raise DiskError(
                f"{verb} {format_bytes(nbytes)} of optimizer state in scratch_dir = "
                f"'{self._folder}' failed: {error.strerror} ({name}); "
                f"{format_bytes(free_bytes(self._folder))} is free there. The state of this run is "
                "lost, its checkpoints are intact: resume from the last one, with scratch_dir on "
                "another drive or with state_on = 'host'"
            ) from error

    def _write(self, data: memoryview, offset: int) -> None:
        self._checksums.pop(offset, None)  # a failed write leaves unknown bytes
        checksum = self._hashing.submit(xxhash.xxh3_64_intdigest, data)
        aligned = len(data) // BLOCK * BLOCK
        self._file.write(data[:aligned], offset)
        # The last, incomplete block is not aligned: it is written with padding.
        if rest := data[aligned:]:
            page = aligned_buffer(BLOCK)
            page[: len(rest)] = rest
            self._file.write(page, offset + aligned)
        self._checksums[offset] = checksum.result(), self._view_writes(offset)

    def _read(self, into: memoryview, offset: int) -> None:
        aligned = len(into) // BLOCK * BLOCK
        page = aligned_buffer(BLOCK) if len(into) > aligned else memoryview(b"")
        memories = [part for part in (into[:aligned], page) if part]
        if self._file.read(memories, offset) != aligned + len(page):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        into[aligned:] = page[: len(into) - aligned]
        current = xxhash.xxh3_64_intdigest(into), self._view_writes(offset)
        checksum, view_writes = self._checksums.setdefault(offset, current)
        if checksum != current[0]:
            if view_writes == current[1]:
                raise self._damaged(offset, len(into))
            self._checksums[offset] = current

    def _number_at(self, offset: int) -> int:
        """Return the number of the row whose buffer has this byte of the file."""
        return bisect_right(self._offsets, offset) - 1

    def _view_writes(self, offset: int) -> int:
        views = self._views.get(self._number_at(offset), {})
        return sum(view._version for view in views.values())

    def _damaged(self, offset: int, num_bytes: int) -> DiskError:
        key, row = self._booked[self._number_at(offset)]
        return DiskError(
            f"{row.owner} of bucket '{key.bucket}': {format_bytes(num_bytes)} read from the "
            f"scratch file in scratch_dir = '{self._folder}', from byte {offset} on, are not those "
            "that were written (xxh3-64): the drive or memory has changed them. The state of this "
            "run is lost, its checkpoints are intact: resume from the last one (--resume), with "
            "scratch_dir on another drive or with state_on = 'host'"
        )

    def _check(self, rows: Rows, num_bytes: int) -> None:
        if not self._has_folder:
            owners = ", ".join(by_owner(rows.values()))
            raise OptionError(
                f"{owners} on the disk (state_on or working = 'disk') without scratch_dir: set it "
                "to a folder on a local drive, best an NVMe one, which holds them while the run "
                "lasts"
            )
        if not self._folder.is_dir():  # a mistyped mount point would fill another disk
            raise ConfigError(
                f"scratch_dir = '{self._folder}' is not there: make it on the drive that is to "
                "hold the state, or correct the path"
            )
        try:
            free = free_bytes(self._folder)
        except OSError as error:
            raise self._refused(rows, num_bytes, str(error.strerror)) from error
        if (kind := kind_of(self._folder)) in IN_MEMORY and not self._in_memory:
            raise DiskError(
                f"scratch_dir = '{self._folder}' is on {kind}, which is host memory: state on it "
                "saves none. Set scratch_dir to a folder on a drive, or scratch_in_memory = true "
                "for a test"
            )
        if free < num_bytes:
            raise self._refused(rows, num_bytes, f"{format_bytes(free)} is free")

    def _refused(self, rows: Rows, num_bytes: int, why: str) -> DiskError:
        return DiskError(
            f"what is on the disk needs {format_bytes(num_bytes)} in scratch_dir = "
            f"'{self._folder}': {why}. Largest: {largest_owners(rows.values())}. Set scratch_dir "
            "to a folder on a larger drive, or take a narrower state ('split16', 'int8')"
        )

    def _book(self, rows: Rows, sign: int) -> None:
        for row in rows.values():
            self._ledger.add(row.owner, Tier.DISK, sign * row.nbytes)
        self._booked = list(rows.items())


class MetaDiskArena(DiskArena):
    """Records requests without a file: tensors are on the meta device."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger, None)

    def map(self, rows: Rows) -> list[Tensor]:
        self._book(rows, 1)
        return [
            torch.empty(row.numel, dtype=DTYPES[row.dtype], device="meta") for row in rows.values()
        ]


def _pieces(slot: Tensor, offset: int) -> Iterator[tuple[memoryview, int]]:
    """Cut memory into requests, each with its offset in the file."""
    data = slot.view(torch.uint8).numpy().data
    for lo, hi in windows(offset, offset + len(data)):
        yield data[lo - offset : hi - offset], lo
