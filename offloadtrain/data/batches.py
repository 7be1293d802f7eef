"""Batches of windows from a token file, in an order defined by a few integers.

[Note: global sample order]
A window is `seq_len + 1` consecutive tokens. Adjacent windows share one token, which is the last
target of the first window and the first input of the second. An epoch has a fixed number of
windows. Each epoch shifts their grid by a pseudo-random offset, so that windows begin at any token
and the last tokens are also used, and visits them in a pseudo-random order. Both depend only on
(seed, epoch), see `Permutation`. Therefore "sample g", counted over all epochs, is the same on
every rank. With `world` ranks a call of `next` advances the position by `batch · world` samples:
rank r takes samples position + r, position + r + world, ... Every rank has the same position. A
position saved by any rank continues on any number of ranks, with exactly the samples that are not
yet taken.

[Note: packing]
`packing` defines a sample:

    stream      a window of the file; attention crosses the ends of documents in it
    isolated    the same window; positions and attention restart at each document, and the
                first token of a document is not predicted from the token before it
    padded      one document, cut or padded to seq_len + 1 tokens

The loss does not count a token that the file's mask excludes, a padding token, or a token without
context before it: its target is IGNORED. Batches have different numbers of counted tokens, so the
loss of a step must be divided by the number in all its batches on all ranks. `counted` returns this
number before the first batch, without communication, because every rank knows every sample.

With `masking` a target is not the next token but the original token at the same position, and only
the chosen positions count. This does not support "padded", because bidirectional attention would
attend to padding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offloadtrain.config.sections import IGNORED, Packing
from offloadtrain.data.lengths import cut_at
from offloadtrain.data.tokens import DataError, TokenFile

UInt64s = npt.NDArray[np.uint64]

_ROUNDS = 6


class Permutation:
    """A pseudo-random bijection of [0, size), size at least 1: a function of (size, seed, epoch)
    alone.

    A Feistel network over the bits of size - 1, in two parts that may differ by one bit, permutes
    [0, 2^bits). Values outside [0, size) are permuted again until they are inside ("cycle walking",
    Black and Rogaway, CT-RSA 2002), less than twice on average. It is good enough to shuffle data,
    but not for cryptography. Runs depend on the order: do not change it.

    Attributes:
        noise: 64 bits from the same seed and epoch, for other uses than the order.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
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
        """Change the low part by a hash of the high part, then the high part by the low part, in
        turns."""
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


CHOSEN = 0.15
"""Share of the tokens that are predicted."""
MASKED, RANDOM = 0.8, 0.1
"""Shares of the predicted tokens; the remaining tokens do not change."""

_BITS = np.uint64(24)

# Shape suffixes: N samples, T seq_len.


@dataclass(frozen=True, slots=True)
class Masking:
    """Masked language modelling: the choice and the replacement of hidden tokens.

    Attributes:
        mask_token: replaces a hidden token; not a token of the data.
        vocab_size: larger than every token of the data; random tokens are smaller.
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
        """Return True for predicted tokens, (N, T)."""
        return _share(self._drawn("chosen", seed, samples_N, seq_len)) < CHOSEN

    def hidden(
        self, tokens_NT: npt.NDArray[np.int64], seed: int, samples_N: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the replacement of each token in case it is chosen, (N, T)."""
        how_NT = _share(self._drawn("how", seed, samples_N, tokens_NT.shape[1]))
        other_NT = self._drawn("other", seed, samples_N, tokens_NT.shape[1])
        random_NT = (other_NT % np.uint64(self.vocab_size)).astype(np.int64)
        changed_NT = np.where(how_NT < MASKED + RANDOM, random_NT, tokens_NT)
        return np.where(how_NT < MASKED, self.mask_token, changed_NT)

    def _drawn(
        self, what: str, seed: int, samples_N: npt.NDArray[np.int64], seq_len: int
    ) -> UInt64s:
        """Return 64 random bits for each position of each sample, (N, T)."""
        digest = hashlib.blake2b(f"masks {what} {seed}".encode(), digest_size=8).digest()
        rows_N = mix(samples_N.astype(np.uint64), np.uint64(int.from_bytes(digest, "little")))
        return mix(np.arange(seq_len, dtype=np.uint64)[None], rows_N[:, None])


def _share(drawn: UInt64s) -> npt.NDArray[np.float64]:
    """Return numbers that are uniform in [0, 1), from the highest bits."""
    return (drawn >> (np.uint64(64) - _BITS)) / float(1 << int(_BITS))


Indices = npt.NDArray[np.int64]

Mask = npt.NDArray[np.bool_]

# Shape suffixes: B windows of a batch, T seq_len, S seq_len + 1, N samples of all ranks.
_COUNTED_AT_ONCE = 1 << 22


class Batch(NamedTuple):
    """A batch of windows. All tensors are int64 on the CPU, (B, T), contiguous.

    Attributes:
        targets_BT: the next token, or with masking the original token at the same position, or
            IGNORED.
        positions_BT: position of each token in its document, which starts from 0 at the start of
            the document or the window; None: attention is over the whole window.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    positions_BT: Tensor | None = None


class Batches:
    """An endless iterator over batches.

    Attributes:
        windows: samples in one epoch.
        all_count: True if no target is ever IGNORED.
    """

    def __init__(
        self,
        tokens: TokenFile,
        *,
        batch: int,
        seq_len: int,
        packing: Packing = "stream",
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        shuffle: bool = True,
        masking: Masking | None = None,
    ) -> None:
        """Start at sample 0.

        Args:
            batch: windows per call and rank, at least 1.
            seq_len: tokens per window that are inputs, at least 1.
            packing: see [Note: packing]; all but "stream" hold 8 bytes of memory per document.
            rank: of `world`, see [Note: global sample order].
            shuffle: False, for evaluation, leaves out seed and offset: each epoch is the same and
                visits the windows in even strides over the whole file, so that the first few
                batches are a fair sample of the file.
            masking: hides tokens, which are predicted from all other tokens; None: each token is
                predicted from the tokens before it. Not with "padded".

        Raises:
            DataError: if the file is shorter than one window, or lacks data that `packing` needs.
        """
        if packing == "padded" and masking is not None:
            raise ValueError("packing = 'padded' and masking: what pads would be seen")
        if packing != "padded" and len(tokens) < seq_len + 1:
            raise DataError(
                f"{tokens.path} holds {len(tokens)} tokens, less than one window of "
                f"seq_len + 1 = {seq_len + 1}; shorten seq_len or use more text"
            )
        self._tokens, self._batch, self._seq_len, self._seed = tokens, batch, seq_len, seed
        self._rank, self._world, self._packing = rank, world, packing
        self._masking = masking
        self._ends = None if packing == "stream" else tokens.document_ends()
        windows, width, num_offsets = (len(tokens) - 1) // seq_len, seq_len, 1
        if packing == "padded":
            windows, width = len(tokens.document_ends()), 1
        elif shuffle:  # leave an offset range of at least seq_len if the file is long enough
            windows = max(1, (len(tokens) - seq_len) // seq_len)
            num_offsets = len(tokens) - windows * seq_len
        self._grid = _Grid(windows, width, num_offsets, shuffle=shuffle)
        self.all_count = packing == "stream" and tokens.counted is None and masking is None
        self._position = 0

    @property
    def windows(self) -> int:
        return self._grid.windows

    def skip(self, calls: int) -> None:
        """Skip the batches of the next `calls` calls on every rank."""
        self._position += calls * self._batch * self._world

    def cut_documents(self) -> tuple[int, int]:
        """Return the number of documents that packing "padded" cuts, and the number of tokens it
        omits."""
        if self._packing != "padded" or self._ends is None:
            return 0, 0
        return cut_at(self._seq_len, np.diff(self._ends, prepend=0))

    @property
    def position(self) -> int:
        """Number of samples that all ranks have taken so far."""
        return self._position

    def next(self) -> Batch:
        """Return this rank's next batch."""
        batch = self.at(self._position)
        self.skip(1)
        return batch

    def at(self, position: int) -> Batch:
        """Return this rank's batch at a position, without a change of the position; from any
        thread.

        Raises:
            DataError: if the file has been written since it was opened.
        """
        self._tokens.require_size()
        samples = position + self._rank + self._world * np.arange(self._batch)
        index_BS = self._indices(samples)
        window_BS = self._tokens.tokens[index_BS].astype(np.int64)
        tokens_BT, targets_BT = window_BS[:, :-1].copy(), window_BS[:, 1:].copy()
        if self._masking is not None:
            chosen_BT, targets_BT = self._counted(index_BS, samples), tokens_BT.copy()
            hidden_BT = self._masking.hidden(tokens_BT, self._seed, samples)
            tokens_BT[chosen_BT], targets_BT[~chosen_BT] = hidden_BT[chosen_BT], IGNORED
        elif not self.all_count:
            targets_BT[~self._counted(index_BS, samples)] = IGNORED
        positions_BT = None
        if self._packing == "isolated":
            index_BT = index_BS[:, :-1]
            begins_BT = np.maximum(self._begins(index_BT), index_BT[:, :1])
            positions_BT = torch.from_numpy(index_BT - begins_BT)
        return Batch(torch.from_numpy(tokens_BT), torch.from_numpy(targets_BT), positions_BT)

    def counted(self, calls: int) -> int:
        """Return the number of counted targets in the next `calls` calls of all ranks together."""
        total = calls * self._batch * self._world
        if self.all_count or not total:
            return total * self._seq_len
        samples = self._position + np.arange(total)
        pieces = np.array_split(samples, -(-total * self._seq_len // _COUNTED_AT_ONCE))
        return sum(int(self._counted(self._indices(piece), piece).sum()) for piece in pieces)

    def _indices(self, samples: Indices) -> Indices:
        """Return the file index of each token of each window, (N, S). Padding has the index of the
        document's last token."""
        # The first token of each sample's window, or the number of its document. Samples may belong
        # to several epochs.
        starts_N = np.empty_like(samples)
        epochs = samples // self.windows
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            starts_N[here] = self._grid.starts(samples[here] % self.windows, self._seed, epoch)
        if self._packing != "padded":
            return starts_N[:, None] + np.arange(self._seq_len + 1)
        assert self._ends is not None
        begins_N = np.where(starts_N > 0, self._ends[starts_N - 1], 0)
        index_NS = begins_N[:, None] + np.arange(self._seq_len + 1)
        return np.minimum(index_NS, self._ends[starts_N][:, None] - 1)

    def _counted(self, index_NS: Indices, samples: Indices) -> Mask:
        """Return True for the targets of these samples that the loss counts, (N, T)."""
        if self._masking is not None:
            chosen_NT = self._masking.chosen(self._seed, samples, self._seq_len)
            # Omit the tokens that the file's mask excludes.
            if self._tokens.counted is not None:
                chosen_NT &= self._tokens.counted[index_NS[:, :-1]].astype(bool)
            return chosen_NT
        index_NT = index_NS[:, 1:]
        counted_NT = np.ones(index_NT.shape, dtype=bool)
        if self._tokens.counted is not None:
            counted_NT = self._tokens.counted[index_NT].astype(bool)
        if self._packing == "padded":
            counted_NT &= index_NT > index_NS[:, :-1]
        elif self._packing == "isolated":
            counted_NT &= index_NT > self._begins(index_NT)
        return counted_NT

    def _begins(self, index_NT: Indices) -> Indices:
        """Return the index at which the document of each token begins."""
        assert self._ends is not None
        documents_NT = np.searchsorted(self._ends, index_NT, side="right")
        return np.where(documents_NT > 0, self._ends[documents_NT - 1], 0)

    __next__ = next

    def __iter__(self) -> Iterator[Batch]:
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return the global position, independent of rank and world, and the identity of its
        data."""
        epoch, sample = divmod(self._position, self.windows)
        return {"seed": self._seed, "epoch": epoch, "sample": sample, "data": self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; its seed replaces the seed of this object.

        Raises:
            DataError: if the state belongs to other tokens, window length or kind of order.
        """
        saved, here = state.get("data", self._identity()), self._identity()
        if saved != here:
            raise DataError(
                f"{self._tokens.path} is not the data that the checkpoint was trained on "
                f"({_differences(saved, here)}): resume with that data, or start a new run"
            )
        self._seed = int(state["seed"])
        self._position = int(state["epoch"]) * self.windows + int(state["sample"])

    def _identity(self) -> dict[str, Any]:
        header = self._tokens.header
        masked = {"masked": CHOSEN} if self._masking is not None else {}
        return masked | {
            "tokens": header.count,
            "content": header.content,
            "seq_len": self._seq_len,
            "order": self._grid.order,
            "packing": self._packing,
        }


class _Grid:
    """The samples of an epoch, `width` tokens or documents apart, with an order for each epoch.

    Shuffled samples are shifted by an offset below `num_offsets` and permuted. Other samples are
    visited in strides of about 0.618 of their number, the same in each epoch: multiples of the
    golden ratio, modulo 1, cover the unit interval evenly from the first few on.
    """

    def __init__(self, windows: int, width: int, num_offsets: int, *, shuffle: bool) -> None:
        self.windows, self._width, self._num_offsets = windows, width, num_offsets
        self.order = "shuffled" if shuffle else "spread"
        self._stride = max(1, round(windows * (math.sqrt(5) - 1) / 2))
        while math.gcd(self._stride, windows) > 1:
            self._stride += 1

    def starts(self, samples: Indices, seed: int, epoch: int) -> Indices:
        if self.order == "spread":
            return samples * self._stride % self.windows * self._width
        permutation = Permutation(self.windows, seed, epoch)
        return permutation.noise % self._num_offsets + permutation(samples) * self._width


def _differences(saved: dict[str, Any], here: dict[str, Any]) -> str:
    different = [key for key in {**saved, **here} if saved.get(key) != here.get(key)]
    return ", ".join(
        "other tokens" if key == "content" else f"{key} {saved.get(key)} -> {here.get(key)}"
        for key in different
    )


class Prefetch:
    """Makes one batch in advance, on its own thread.

    The batches still decide the order: the prefetched batch is used only if their position is the
    expected position. Therefore they can be skipped, restored and saved between two calls.
    """

    def __init__(
        self,
        batches: Batches,
        ready: Callable[[Batch], Batch],
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        """
        Args:
            ready: prepares each batch on the thread, for example with a copy to pinned memory.
            thread: default: a new thread.
        """
        self._batches = batches
        self._ready = ready
        self._thread = thread or ThreadPoolExecutor(1, "offloadtrain-batches")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def next(self) -> Batch:
        """Return the next batch; the batches advance by one call, without the prefetched batch."""
        position = self._batches.position
        if self._ahead is not None and self._ahead[0] == position:
            # Usually done after a whole microbatch. Errors of the thread are raised here.
            batch = self._ahead[1].result()
        else:
            batch = self._make(position)
        self._batches.skip(1)
        following = self._batches.position
        self._ahead = following, self._thread.submit(self._make, following)
        return batch

    def close(self) -> None:
        """Wait for the prefetched batch and drop it."""
        if self._ahead is not None:
            wait([self._ahead[1]])
        self._ahead = None

    def _make(self, position: int) -> Batch:
        return self._ready(self._batches.at(position))
