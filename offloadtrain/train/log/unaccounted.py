"""Host memory of the process that is not in the engine's Ledger."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from offloadtrain.config.units import format_bytes
from offloadtrain.runtime.arena import Ledger
from offloadtrain.step.layout.tiers import Tier

ALLOWED_BYTES = 4 << 30
"""Growth since training began: libraries that are loaded late, compiled code, batches."""
_NEAR = 0.2
"""Relative difference in size below which an owner is named as a likely cause."""

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)$")
_PRIVATE = re.compile(r"^Anonymous: +(\d+) kB$")


class UnaccountedMemory:
    """Compares the anonymous memory of this process with the Ledger's host memory.

    The Ledger has every byte that the engine maps. Whatever else grows is not planned, and the
    kernel may kill a run for it.
    """

    def __init__(self, ledger: Ledger, read: Callable[[], int | None] | None = None) -> None:
        """`read` returns the anonymous bytes of the process; None: not known."""
        self._ledger = ledger
        self._read = read or anonymous_bytes
        self._before = self._beyond()
        self._is_told = self._was_beyond = False

    def look(self) -> str | None:
        """Return the sentence to warn with, once: memory has grown past the Ledger by more than
        ALLOWED_BYTES in two looks in a row. Memory that is being mapped is in no Ledger yet."""
        beyond = self._beyond()
        if self._is_told or beyond is None or self._before is None:
            return None
        growth = beyond - self._before
        was_beyond, self._was_beyond = self._was_beyond, growth > ALLOWED_BYTES
        if not (was_beyond and self._was_beyond):
            return None
        self._is_told = True
        in_ledger = self._ledger.total(Tier.HOST)
        return (
            f"this process has {format_bytes(in_ledger + beyond)} of host memory, of which the "
            f"engine's Ledger has {format_bytes(in_ledger)}. The rest has grown by "
            f"{format_bytes(growth)} since training began{self._near(growth)}. Largest mappings: "
            f"{_largest_mappings()}. If it keeps growing, the kernel may kill the run: lower "
            "train.micro_batch, or keep less on the host"
        )

    def _beyond(self) -> int | None:
        anonymous = self._read()
        return None if anonymous is None else anonymous - self._ledger.total(Tier.HOST)

    def _near(self, growth: int) -> str:
        """Name the owner of about the same size, of which a copy may exist."""
        rows = [row for row in self._ledger.rows() if row.tier == Tier.HOST.value and row.bytes]
        near = min(rows, key=lambda row: abs(row.bytes - growth), default=None)
        if near is None or abs(near.bytes - growth) > _NEAR * growth:
            return ""
        return f", about the size of '{near.owner}' ({format_bytes(near.bytes)})"


def anonymous_bytes() -> int | None:
    """Return the anonymous resident memory of this process; None: not known. It takes microseconds,
    unlike /proc/self/smaps_rollup, which walks all pages."""
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        if match := re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE):
            return int(match[1]) << 10
    return None


def _largest_mappings(count: int = 2) -> str:
    """Describe where the anonymous memory is, by the names that the kernel gives to mappings."""
    sizes: Counter[str] = Counter()
    name = ""
    with suppress(OSError):
        for line in Path("/proc/self/smaps").read_text(errors="replace").splitlines():
            if mapping := _MAPPING.match(line):
                name = mapping[1] or "mappings without a name"
            elif private := _PRIVATE.match(line):
                sizes[name] += int(private[1]) << 10
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.most_common(count))
