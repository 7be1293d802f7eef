"""The sequential lanes, rings and the arena."""

from __future__ import annotations

import pytest
import torch

from offloadtrain.config.errors import HostMemoryError, InputError
from offloadtrain.hardware import host_memory, telemetry
from offloadtrain.runtime.arena import Arena, Ledger
from offloadtrain.runtime.lanes import Buffer, Lane, LaneEvent, SequentialLanes, copy
from offloadtrain.step.layout.buffers import BufferSpec
from offloadtrain.step.layout.tiers import Tier


def test_transfers_are_counted_and_keep_the_dtype() -> None:
    lanes = SequentialLanes()
    source, target = Buffer("s", torch.ones(8)), Buffer("t", torch.zeros(8))
    lanes.launch(Lane.D2H, "down", copy, [source.whole], [target.whole])
    lanes.launch(Lane.H2D, "up", copy, [target.first(2)], [source.first(2)])
    assert (lanes.totals.d2h_bytes, lanes.totals.h2d_bytes) == (32, 8)
    half = Buffer("h", torch.zeros(8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="keeps the dtype"):
        lanes.launch(Lane.D2H, "cast", copy, [source.whole], [half.whole])


def test_foreign_events_are_refused() -> None:
    with pytest.raises(TypeError, match="not recorded by these lanes"):
        SequentialLanes().wait(Lane.HOST, LaneEvent(), "nothing")


def test_the_arena_books_exact_sizes_and_gives_them_back() -> None:
    ledger = Ledger()
    arena = Arena(ledger, pin=False)
    sizes = [1, 0, 7, 4096, 100_003]
    tensors = arena.map([BufferSpec(f"o{n}", n, "bfloat16") for n in sizes])
    assert [t.numel() for t in tensors] == sizes
    bytes_of = {row.owner: row.bytes for row in ledger.rows()}
    assert bytes_of.pop("padding") > 0
    assert bytes_of == {f"o{n}": 2 * n for n in sizes}
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
    assert all(bool((t == i).all()) for i, t in enumerate(tensors))
    assert all(t.data_ptr() % 64 == 0 for t in tensors if t.numel())
    arena.close()
    assert ledger.total(Tier.HOST) == 0
    assert bool((tensors[3] == 3).all()), "memory lives as long as a view of it"


def test_streams_are_staggered() -> None:
    arena = Arena(Ledger(), pin=False)
    a, b = arena.map([BufferSpec("a", 1 << 20, "float32"), BufferSpec("b", 1 << 20, "float32")])
    assert (b.data_ptr() - a.data_ptr()) % (1 << 20) >= 4096


def test_slabs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offloadtrain.runtime.arena.SLAB_BYTES", 1 << 20)
    arena = Arena(Ledger(), pin=False)
    arena.map([BufferSpec("x", 200_000, "float32") for _ in range(4)])
    assert len(arena._slabs) == 4


def test_too_little_memory_is_said_before_anything_is_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = host_memory.Room(1 << 20, "MemAvailable")
    monkeypatch.setattr("offloadtrain.runtime.arena.least_room", lambda: room)
    arena = Arena(Ledger(), pin=False)
    with pytest.raises(HostMemoryError, match=r"needs 4\.0 MiB .* 1\.0 MiB is .*master"):
        arena.map([BufferSpec("master weights", 1 << 20, "float32")])
    assert not arena._slabs


def test_memory_that_grows_as_it_is_used_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine may have a tenth of its memory yet: the kernel tells what is there now."""
    monkeypatch.setattr(host_memory, "_meminfo_available", lambda: 1 << 20)
    monkeypatch.setattr(host_memory, "_cgroups", list)
    monkeypatch.delenv("OFFLOADTRAIN_HOST_MEMORY", raising=False)
    arena, requests = Arena(Ledger(), pin=False), [BufferSpec("master", 1 << 20, "float32")]
    with pytest.raises(HostMemoryError, match="OFFLOADTRAIN_HOST_MEMORY=128GiB"):
        arena.map(requests)
    monkeypatch.setenv("OFFLOADTRAIN_HOST_MEMORY", "128GiB")
    assert telemetry.host_memory_bytes() == 128 << 30
    used_bytes = (128 << 30) - host_memory.available_bytes()
    assert used_bytes == pytest.approx(host_memory.resident_bytes(), rel=0.05)
    arena.map(requests)
    monkeypatch.setattr(host_memory, "_cgroups", lambda: [host_memory.Room(1 << 20, "memory.max")])
    assert host_memory.available_bytes() == 1 << 20
    monkeypatch.setenv("OFFLOADTRAIN_HOST_MEMORY", "much")
    with pytest.raises(InputError, match="OFFLOADTRAIN_HOST_MEMORY: 'much' is not a size"):
        host_memory.available_bytes()
