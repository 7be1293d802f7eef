"""The split of a source into training and validation.

[Note: held-out documents]
Validation text consists of whole documents, chosen by a hash and not by position: of its relative
name for a text file, of its content for a record of a table. So the choice does not depend on the
machine, and hardly changes when the source grows. If the fraction would leave one side empty, the
nearest document moves there.

A few text files, or one among them that is most of the text, cannot be divided like this. If the
bytes of one side were less than half or more than twice the target, the end of every file is held
out instead; for a single file, always. If neither comes close, as with few lines of JSONL,
`PreparedFiles.remark` says so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from offloadtrain.data.cut import Piece, cut, hash64
from offloadtrain.data.source import SourceFile

_LEAST_PART = 256  # bytes of a text file on either side of a cut
_FAR = 2.0  # a side with so many times more or fewer tokens than asked for


def cut_all(files: Sequence[SourceFile], val_fraction: float, at_words: bool) -> list[Piece]:
    """Split all files; if whole files cannot give the fraction, so that their ends can be held
    out."""
    tails = _tails(files, val_fraction)
    return [
        piece for file in files for piece in cut(file, tails.get(file.name, 0), at_words=at_words)
    ]


def _tails(files: Sequence[SourceFile], val_fraction: float) -> dict[str, int]:
    """Return name → bytes at its end to hold out; empty if whole files are held out."""
    if not val_fraction or any(file.is_table for file in files):
        return {}
    ends = {file.name: round(file.num_bytes * val_fraction) for file in files}
    if len(files) == 1:
        size = files[0].num_bytes
        return {name: min(max(end, 1), size - 1) for name, end in ends.items()}
    hashes = {file.name: hash64(os.fsencode(file.name)) for file in files}
    chosen = math.ceil(val_fraction * 2.0**64)
    threshold = divide(chosen, min(hashes.values()), max(hashes.values()))
    total = sum(file.num_bytes for file in files)
    chosen_bytes = sum(file.num_bytes for file in files if hashes[file.name] < threshold)
    if near(chosen_bytes, val_fraction, total):
        return {}
    sizes = {file.name: file.num_bytes for file in files}
    tails = {
        name: end for name, end in ends.items() if _LEAST_PART <= end <= sizes[name] - _LEAST_PART
    }
    return tails if near(sum(tails.values()), val_fraction, total) else {}


def near(size: int, fraction: float, total: int) -> bool:
    """Return whether both sides are near their targets."""
    sides = (size, fraction * total), (total - size, (1 - fraction) * total)
    return all(target / _FAR <= actual <= target * _FAR for actual, target in sides)


def divide(threshold: int, lowest: int, highest: int) -> int:
    """Move the threshold just enough to leave a document on each side, if there are two."""
    return max(min(threshold, highest), lowest + 1)
