"""Masked language modelling: which tokens of a sample are predicted, and what takes their place.

As in BERT (arXiv:1810.04805, section 3.1): of the chosen tokens most become the mask token, some a
random token, and some stay. Draws are new in every epoch, as in RoBERTa (arXiv:1907.11692). They
are a function of the seed, the sample and the place in it, see [Note: global sample order] in
`batches.py`: the same on any number of ranks, and after a resume.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offloadtrain.data.permutation import UInt64s, mix

CHOSEN = 0.15
"""Share of the tokens that are predicted."""
MASKED, RANDOM = 0.8, 0.1
"""Shares of the chosen ones; the rest stays."""

_BITS = np.uint64(24)

# Shape suffixes: N samples, T seq_len.


@dataclass(frozen=True, slots=True)
class Masking:
    """Attributes:
    mask_token: stands for a hidden token; no token of the data.
    vocab_size: above every token of the data; random tokens are below it.
    """

    mask_token: int
    vocab_size: int

    def __post_init__(self) -> None:
        if not 0 < self.vocab_size <= self.mask_token:
            raise ValueError(
                f"mask_token = {self.mask_token} is one of the {self.vocab_size} tokens of the data"
            )

    def chosen(
        self, seed: int, samples_N: npt.NDArray[np.int64], seq_len: int
    ) -> npt.NDArray[np.bool_]:
        """Return which tokens are predicted, (N, T)."""
        return _share(self._drawn("chosen", seed, samples_N, seq_len)) < CHOSEN

    def hidden(
        self, tokens_NT: npt.NDArray[np.int64], seed: int, samples_N: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the replacement of each token if it is chosen, (N, T)."""
        how_NT = _share(self._drawn("how", seed, samples_N, tokens_NT.shape[1]))
        other_NT = self._drawn("other", seed, samples_N, tokens_NT.shape[1])
        random_NT = (other_NT % np.uint64(self.vocab_size)).astype(np.int64)
        changed_NT = np.where(how_NT < MASKED + RANDOM, random_NT, tokens_NT)
        return np.where(how_NT < MASKED, self.mask_token, changed_NT)

    def _drawn(
        self, what: str, seed: int, samples_N: npt.NDArray[np.int64], seq_len: int
    ) -> UInt64s:
        """Return 64 random bits for each place of each sample, (N, T)."""
        digest = hashlib.blake2b(f"masks {what} {seed}".encode(), digest_size=8).digest()
        rows_N = mix(samples_N.astype(np.uint64), np.uint64(int.from_bytes(digest, "little")))
        return mix(np.arange(seq_len, dtype=np.uint64)[None], rows_N[:, None])


def _share(drawn: UInt64s) -> npt.NDArray[np.float64]:
    """Uniform in [0, 1), of the highest bits."""
    return (drawn >> (np.uint64(64) - _BITS)) / float(1 << int(_BITS))
