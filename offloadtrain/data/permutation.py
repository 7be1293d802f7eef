"""A computed shuffle of [0, n): any element in constant time, nothing stored."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]

_ROUNDS = 6


class Permutation:
    """A pseudo-random bijection of [0, size), a function of (size, seed, epoch) alone.

    A Feistel network over the bits of size - 1, in two parts that may differ by one bit, permutes
    [0, 2^bits); values outside [0, size) are permuted again until they fall inside
    ("cycle walking", Black and Rogaway, CT-RSA 2002), less than twice on average. It is good enough
    to shuffle data, not for cryptography. Runs depend on the order: do not change it.

    Attributes:
        noise: 64 bits from the same seed and epoch, for uses besides the order.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} elements")
        self.size = size
        digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * (_ROUNDS + 1))
        keys = np.frombuffer(digest.digest(), dtype="<u8").astype(np.uint64)
        self.noise = int(keys[_ROUNDS])
        self._keys = keys[:_ROUNDS]
        bits = (size - 1).bit_length()
        self._low_bits = np.uint64((bits + 1) // 2)
        self._high_bits = np.uint64(bits // 2)

    def __call__(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the image of each of `indices`, all in [0, size)."""
        walking = self._network(indices.astype(np.uint64))
        outside = walking >= self.size
        while outside.any():
            walking[outside] = self._network(walking[outside])
            outside = walking >= self.size
        return walking.astype(np.int64)

    def _network(self, x: UInt64s) -> UInt64s:
        """Change the low part by a hash of the high part, then the reverse, by turns."""
        low_mask = (np.uint64(1) << self._low_bits) - np.uint64(1)
        high_mask = (np.uint64(1) << self._high_bits) - np.uint64(1)
        low, high = x & low_mask, x >> self._low_bits
        for turn, key in enumerate(self._keys):
            if turn % 2:
                high = high ^ (mix(low, key) & high_mask)
            else:
                low = low ^ (mix(high, key) & low_mask)
        return (high << self._low_bits) | low


def mix(x: UInt64s, key: np.uint64 | UInt64s) -> UInt64s:
    """Hash to 64 bits: the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = x ^ key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
