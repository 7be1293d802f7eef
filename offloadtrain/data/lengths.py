"""Lengths of documents, and the tokens that packing "padded" cuts at each sequence length."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from offloadtrain.config.units import format_count

_BAR = 24


def cut_at(seq_len: int, lengths: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Return the number of documents that packing "padded" cuts, and the number of tokens it omits.

    Args:
        lengths: number of tokens of each document; `seq_len` inputs and a last target fit.
    """
    beyond = lengths - (seq_len + 1)
    return int((beyond > 0).sum()), int(beyond[beyond > 0].sum())


def length_table(lengths: npt.NDArray[np.int64]) -> str:
    """Return a histogram over powers of two, with the cut tokens at each power as data.seq_len."""
    total, powers = int(lengths.sum()), (1 << power for power in range(1, 63))
    bounds = [bound for bound in powers if lengths.min() <= bound < 2 * lengths.max()]
    counts = np.diff([0, *np.searchsorted(np.sort(lengths), bounds, side="right")])
    lines = [
        f"{'tokens':>10}  {'documents':<{_BAR + 8}}  cut by packing padded at this data.seq_len"
    ]
    for bound, count in zip(bounds, counts, strict=True):
        bar = "█" * -(-_BAR * int(count) // int(counts.max()))
        documents, tokens = cut_at(bound, lengths)
        cut = f"{documents} lose {format_count(tokens)} tokens ({100 * tokens / total:.2g} %)"
        row = f"{'≤ ' + str(bound):>10}  {f'{bar} {count}'.strip():<{_BAR + 8}}  "
        lines.append(row + (cut if documents else "none"))
    return "\n".join(lines)
