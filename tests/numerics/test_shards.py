"""A bucket updated shard by shard is, bit for bit, the bucket updated whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.engine.bucket import pack
from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import Backend, Layout
from tests import levels
from tests.runtime.kernels.format_cases import NARROW, differing, gradient, random_state, stepped
from tests.runtime.kernels.kernel_cases import BACKENDS


class _Ranks:
    """As many as there are, one of them here."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def shard(self, numel: int) -> tuple[int, int]:
        return self.rank * numel // self.size, (self.rank + 1) * numel // self.size


def buckets(numels: list[int], size: int, name: str, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    """The same parameters as each rank holds them."""
    params = [(str(i), torch.nn.Parameter(torch.zeros(n))) for i, n in enumerate(numels)]
    order = {param: index for index, (_, param) in enumerate(params)}
    return [
        pack("b", 0, dtype, params, order, name, _Ranks(rank, size))  # type: ignore[arg-type]
        for rank in range(size)
    ]


COMPILED_SLOWLY = [backend for backend in BACKENDS if backend.name == "numba"]


@pytest.mark.parametrize(
    ("kind", "size", "backend"),
    [
        *levels.array(NARROW, [2, 3, 5], [b for b in BACKENDS if b not in COMPILED_SLOWLY]),
        *(
            pytest.param(kind, 3, backend, marks=pytest.mark.slow)
            for kind in NARROW
            for backend in COMPILED_SLOWLY
        ),
    ],
)
def test_stochastic_rounding_does_not_know_of_shards(
    kind: tuple[str, torch.dtype], size: int, backend: Backend
) -> None:
    name, dtype = kind
    shards = buckets([700, 1, 3000, 129], size, name, dtype)
    numel, layout = (
        shards[0].numel,
        Layout(
            [slot.offset for slot in shards[0].slots],
            [slot.numel for slot in shards[0].slots],
            [slot.index for slot in shards[0].slots],
        ),
    )
    state, grad = random_state(name, numel, dtype), gradient(numel, dtype)
    expected = stepped(state, grad, layout, backend)
    for bucket in shards:
        lo, hi = bucket.lo, bucket.hi
        cuts = [
            (lo // kernels.BLOCK, hi // kernels.BLOCK) if len(x) < numel else (lo, hi)
            for x in state
        ]
        part = type(state)((x[a:b].clone() for x, (a, b) in zip(state, cuts, strict=True)))
        actual = stepped(part, grad[lo:hi].clone(), bucket.layout, backend)
        wanted = type(state)((x[a:b] for x, (a, b) in zip(expected, cuts, strict=True)))
        assert not differing(actual, wanted), bucket.lo


@levels.examples(200)
@given(numels=st.lists(st.integers(1, 2000), min_size=1, max_size=6), size=st.integers(1, 9))
def test_every_element_has_one_owner(numels: list[int], size: int) -> None:
    shards = buckets(numels, size, "fp32", torch.float32)
    assert len({bucket.shard_numel for bucket in shards}) == 1
    for index, numel in enumerate(numels):
        pieces = [bucket.piece(bucket.slots[index]) for bucket in shards]
        owned = [(lo, hi) for lo, hi in pieces if lo < hi]
        assert owned[0][0] == 0 and owned[-1][1] == numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(owned))
        assert all(lo % kernels.BLOCK == 0 for lo, _ in owned)
        covered = sum(row[1] for b in shards for row in b.layout.rows() if row[2] == index)
        assert covered == numel
