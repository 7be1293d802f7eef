"""The Ledger says what is there: held against mappings and against living tensors."""

from __future__ import annotations

import gc
import mmap
from typing import Any, ClassVar

import pytest
import torch

import offloadtrain as ot
from offloadtrain.step.layout.tiers import Tier
from tests.numerics.models import Chain, batches, loss_of

OPTIONS: list[dict[str, Any]] = [
    {},
    {"state": "int8", "precision": "bf16", "grad_accum_steps": 2},
    {"update": "speculative", "clip_norm": 1.0},
    {"working": "host", "update": "delayed", "resident_blocks": 1},
    {"working": "host", "activation": "offload", "state": "split16", "precision": "bf16"},
]


class CountedMap(mmap.mmap):
    """What the arena asks the kernel for."""

    lengths: ClassVar[list[int]] = []

    def __new__(cls, fileno: int, length: int, **options: Any) -> CountedMap:
        cls.lengths.append(length)
        return super().__new__(cls, fileno, length, **options)


def storages() -> dict[int, int]:
    """Address → bytes of the storages that living tensors have."""
    gc.collect()
    alive = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    result = [x.untyped_storage() for x in alive if x.layout is torch.strided and not x.is_meta]
    return {storage.data_ptr(): storage.nbytes() for storage in result}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())) or "all")
def test_the_ledger_is_what_is_allocated(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offloadtrain.runtime.arena.mmap.mmap", CountedMap)
    CountedMap.lengths = []
    torch.manual_seed(0)
    model, tokens = Chain(6), batches(2)
    before = storages()
    optimizer = ot.offload(model, device="cpu", **options)
    for _ in range(2):
        for batch in tokens[: options.get("grad_accum_steps", 1)]:
            optimizer.backward(loss_of(model, batch))
        optimizer.step()
    optimizer.synchronize()
    assert optimizer.ledger.total(Tier.HOST) == sum(CountedMap.lengths)

    slabs = [slab._bytes for slab in optimizer._release.resources.arena._slabs]
    arena = [range(x.data_ptr(), x.data_ptr() + x.nbytes) for x in slabs]
    # State tensors have storages of their own over the arena's memory.
    made = {
        at: size
        for at, size in storages().items()
        if at not in before and not any(at in extent for extent in arena)
    }
    booked = optimizer.ledger.total(Tier.DEVICE)
    # The step count, NaN placeholders, the loss: smaller than any buffer, which has 256 bytes.
    small = [size for size in made.values() if size < 256]
    assert sum(made.values()) - sum(small) == booked
    assert len(small) < 60
    optimizer.close()
    assert optimizer.ledger.total(Tier.HOST) == 0
