"""Batches of windows from a token file, in an order defined by a few integers.

[Note: global sample order]
A window is `seq_len + 1` consecutive tokens; neighbours share one token, which is the last target
of one and the first input of the next. An epoch has a fixed number of windows. Each epoch shifts
their grid by a pseudo-random offset, so that windows begin anywhere and the last tokens are used
too, and visits them in a pseudo-random order; both are functions of (seed, epoch) alone
(`permutation.py`). So "sample g", counted over all epochs, is the same whichever rank reads it.
With `world` ranks a call of `next` advances the position by `batch · world` samples: rank r
takes samples position + r, position + r + world, ... Every rank holds the same position; saved by
any rank, it continues on any number of ranks, where exactly the samples not yet taken follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offloadtrain.data.permutation import Permutation
from offloadtrain.data.tokens import DataError, TokenFile

Indices = npt.NDArray[np.int64]

# Shape suffixes: B windows of a batch, T seq_len, S seq_len + 1.


class Batches:
    """An endless iterator over (tokens_BT, targets_BT), both int64 on the CPU.

    Attributes:
        windows: samples in one epoch.
    """

    def __init__(
        self,
        tokens: TokenFile,
        *,
        batch: int,
        seq_len: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        shuffle: bool = True,
    ) -> None:
        """Start at sample 0.

        Args:
            batch: windows per call and rank.
            seq_len: tokens per window that are inputs.
            rank: of `world`, see [Note: global sample order].
            shuffle: False, for evaluation, leaves out seed and offset: each epoch is the same and
                visits the windows in even strides over the whole file, so that the first few
                batches are a fair sample of it.

        Raises:
            DataError: the file is shorter than one window.
        """
        if batch < 1 or seq_len < 1 or not 0 <= rank < world:
            raise ValueError(f"batch={batch}, seq_len={seq_len}, rank={rank}, world={world}")
        if len(tokens) < seq_len + 1:
            raise DataError(
                f"{tokens.path} holds {len(tokens)} tokens, less than one window of "
                f"seq_len + 1 = {seq_len + 1}; shorten seq_len or use more text"
            )
        self._tokens, self._batch, self._seq_len, self._seed = tokens, batch, seq_len, seed
        self._rank, self._world = rank, world
        self._grid = (_Shuffled if shuffle else _Spread)(len(tokens), seq_len)
        self._position = 0

    @property
    def windows(self) -> int:
        return self._grid.windows

    def next(self) -> tuple[Tensor, Tensor]:
        """Return this rank's next inputs and targets, each (B, T) and contiguous."""
        samples = self._position + self._rank + self._world * np.arange(self._batch)
        self._position += self._batch * self._world
        span = np.arange(self._seq_len + 1)
        starts = self._starts(samples)
        window_BS = torch.from_numpy(self._tokens.tokens[starts[:, None] + span].astype(np.int64))
        return window_BS[:, :-1].contiguous(), window_BS[:, 1:].contiguous()

    def __next__(self) -> tuple[Tensor, Tensor]:
        return self.next()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def _starts(self, samples: Indices) -> Indices:
        """Return the first token of each sample's window; samples may lie in several epochs."""
        starts = np.empty_like(samples)
        epochs = samples // self.windows
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            starts[here] = self._grid.starts(samples[here] % self.windows, self._seed, epoch)
        return starts

    def state_dict(self) -> dict[str, Any]:
        """Return the global position, independent of rank and world, and the data it refers to."""
        epoch, sample = divmod(self._position, self.windows)
        return {"seed": self._seed, "epoch": epoch, "sample": sample, "data": self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; its seed replaces the one given here.

        Raises:
            DataError: the state belongs to other tokens, window length or kind of order.
        """
        saved, here = state.get("data", self._identity()), self._identity()
        if saved != here:
            raise DataError(
                f"cannot resume in {self._tokens.path}: the position was saved for "
                f"{_as_text(saved)}, but this run has {_as_text(here)}"
            )
        self._seed = int(state["seed"])
        self._position = int(state["epoch"]) * self.windows + int(state["sample"])

    def _identity(self) -> dict[str, Any]:
        header = self._tokens.header
        return {
            "tokens": header.count,
            "content": header.content,
            "seq_len": self._seq_len,
            "order": self._grid.order,
        }


class _Shuffled:
    """A grid of windows, shifted and shuffled anew in each epoch."""

    order = "shuffled"

    def __init__(self, num_tokens: int, seq_len: int) -> None:
        """Leave room for offsets of at least seq_len if the file is long enough."""
        self._seq_len = seq_len
        self.windows = max(1, (num_tokens - seq_len) // seq_len)
        self._num_offsets = num_tokens - self.windows * seq_len

    def starts(self, samples: Indices, seed: int, epoch: int) -> Indices:
        permutation = Permutation(self.windows, seed, epoch)
        return permutation.noise % self._num_offsets + permutation(samples) * self._seq_len


class _Spread:
    """All windows of the file, in strides of about 0.618 of its length, the same each epoch.

    Multiples of the golden ratio, modulo 1, cover the unit interval evenly from the first few on.
    """

    order = "spread"

    def __init__(self, num_tokens: int, seq_len: int) -> None:
        self._seq_len = seq_len
        self.windows = (num_tokens - 1) // seq_len
        stride = max(1, round(self.windows * (math.sqrt(5) - 1) / 2))
        while math.gcd(stride, self.windows) > 1:
            stride += 1
        self._stride = stride

    def starts(self, samples: Indices, seed: int, epoch: int) -> Indices:
        return samples * self._stride % self.windows * self._seq_len


def _as_text(identity: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in identity.items())
