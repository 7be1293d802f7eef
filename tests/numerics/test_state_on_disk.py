"""State, gradients and weights on the disk: the same engine, the same bits, and a few slots on the
host."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.config.errors import ConfigError, DiskError
from offloadtrain.runtime import disk_arena
from offloadtrain.runtime.lanes import Lane, LaneError, SequentialLanes, on_lanes
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.program.operations import Kind, Launch
from offloadtrain.step.program.program import Program
from offloadtrain.step.proof.drive import steps
from offloadtrain.step.proof.prove import order
from offloadtrain.step.proof.recording import Launched, trace
from tests.numerics.comparison import train
from tests.numerics.models import Chain, batches
from tests.step.specs import chain

TIERS: dict[str, dict[str, Any]] = {
    "state": {},
    "state, working": {"working": "disk"},
    "state, grad": {"grad_on": "disk"},
    "state, grad, working": {"working": "disk", "grad_on": "disk"},
    "half, grad, working": {"working": "disk", "grad_on": "disk", "state_on": {"disk": 0.5}},
    "three tiers, working": {
        "working": "disk",
        "resident_blocks": 2,
        "state_on": {"device": 0.3, "disk": 0.4},
    },
    "working": {"working": "disk", "state_on": "host"},
}
"""What is on the disk."""


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    """Options of `offload`; the folder of temporary files may be in memory."""
    return {"state_on": "disk", "scratch_dir": str(tmp_path), "scratch_in_memory": True}


SHARES: dict[str, Any] = {
    "half": {"state_on": {"disk": 0.5}},
    "three tiers": {"state_on": {"device": 0.3, "disk": 0.4}},
}


def test_a_share_is_spread_over_the_buckets(disk: dict[str, Any]) -> None:
    optimizer = trained(6, **disk | SHARES["half"])
    spec = optimizer._engine.program.spec
    on_disk = [bucket.is_on_disk for bucket in spec.buckets]
    sizes = [bucket.numel for bucket in spec.buckets]
    result = sum(size for size, there in zip(sizes, on_disk, strict=True) if there)
    assert abs(result / sum(sizes) - 0.5) <= max(sizes) / sum(sizes)
    assert [True, True, True] not in [on_disk[i : i + 3] for i in range(len(on_disk) - 2)]
    assert bytes_of(optimizer, Tier.HOST)["exp_avg"] > 0 < bytes_of(optimizer, Tier.DISK)["exp_avg"]
    optimizer.close()


def test_no_update_waits_for_the_write_of_the_bucket_before() -> None:
    """While the host updates a bucket, the next is read and the one before is written."""
    spec = chain(6, state_on="disk", scratch_dir="x")
    program = trace(spec, steps(Program(spec), 3))
    reads, writes = (list(Lane).index(lane) for lane in (Lane.DISK_READ, Lane.DISK_WRITE))
    clocks = zip((e for e in program if isinstance(e, Launched)), order(program), strict=True)
    updates = [at for e, at in clocks if e.name.startswith(Kind.ADAM)]
    # The n-th update has waited for the n-th read, and for no write but those that free its slot.
    assert [at[reads] for at in updates] == list(range(1, 19))
    assert min(at[reads] - at[writes] for at in updates[1:]) == 2


def test_no_load_of_weights_waits_for_the_update_of_later_blocks() -> None:
    """All reads of an update are launched before the next forward."""
    spec = chain(6, state_on="disk", working="disk", grad_on="disk", state="int8", scratch_dir="x")
    program = trace(spec, steps(Program(spec), 3))
    updates = list(Lane).index(Lane.DISK_WRITE)
    clocks = zip((e for e in program if isinstance(e, Launched)), order(program), strict=True)
    loads = [at for e, at in clocks if e.name.startswith(Kind.READ_WEIGHTS)]
    # Of the last step's forward: each one waits for the write of its own state, and of no other.
    forward = [at[updates] for at in loads[-16:-10]]
    assert forward == sorted(forward) and forward[0] < forward[-1]


def test_updated_at_once_a_gradient_is_not_written() -> None:
    spec = chain(6, "early", state_on="disk", working="disk", grad_on="disk", scratch_dir="x")
    launches = [op for op in steps(Program(spec), 3) if isinstance(op, Launch)]
    first = next(at for at, op in enumerate(launches) if op.kind is Kind.DECIDE)
    kinds = {op.kind for op in launches[:first]}
    assert Kind.WRITE_GRADIENT in kinds, "no update runs inside the first backward"
    later = [op.kind for op in launches[first + 30 :]]
    assert Kind.WRITE_GRADIENT not in later and Kind.READ_GRADIENT not in later


def trained(depth: int, **options: Any) -> ot.OffloadOptimizer:
    torch.manual_seed(0)
    model = Chain(depth)
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", clip_norm=0.5, **options)
    for tokens in batches(3):
        train(optimizer, model, [tokens])
    optimizer.synchronize()
    return optimizer


def bytes_of(optimizer: ot.OffloadOptimizer, tier: Tier) -> dict[str, int]:
    return {row.owner: row.bytes for row in optimizer.ledger.rows() if row.tier == tier}


@pytest.mark.parametrize(
    "state",
    ["int8", *(pytest.param(state, marks=pytest.mark.slow) for state in ("fp32", "split16"))],
)
def test_host_memory_does_not_grow_with_the_model(disk: dict[str, Any], state: str) -> None:
    sizes = []
    there = disk | TIERS["state, grad, working"]
    for depth in (4, 12):
        optimizer = trained(depth, state=state, **there)
        host, on_disk = bytes_of(optimizer, Tier.HOST), bytes_of(optimizer, Tier.DISK)
        slots = sum(size for owner, size in host.items() if owner.endswith("slots"))
        sizes.append((slots, sum(on_disk.values())))
        assert set(host) <= {"state slots", "gradient slots", "weight slots", "norms", "padding"}
        assert {"exp_avg", "gradients"} <= on_disk.keys()
        optimizer.close()
        assert optimizer.ledger.total(Tier.DISK) == optimizer.ledger.total(Tier.HOST) == 0
    (few_slots, few), (many_slots, many) = sizes
    assert many_slots == few_slots and many > 2 * few


@pytest.mark.slow
def test_the_file_has_no_name(disk: dict[str, Any], tmp_path: Path) -> None:
    optimizer = trained(3, **disk)
    assert list(tmp_path.iterdir()) == []
    optimizer.close()


def test_a_forked_child_is_refused_and_does_not_hang(disk: dict[str, Any]) -> None:
    """It has the file, but no thread that moves it; its writes would be to the parent's state."""
    with on_lanes(SequentialLanes()):
        optimizer = trained(3, **disk, working="disk")
    if (child := os.fork()) == 0:
        signal.alarm(30)  # ends a child that hangs
        try:
            optimizer.model(batches(1)[0])
        except DiskError as error:
            os._exit(0 if "was forked from the one that trains" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    train(optimizer, optimizer.model, batches(1))
    optimizer.close()


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("pwrite", errno.ENOSPC),
        pytest.param("pwrite", errno.EIO, marks=pytest.mark.slow),
        ("preadv", errno.EIO),
    ],
)
def test_a_full_or_failing_disk_is_named(
    disk: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    optimizer = trained(3, **disk)
    model = optimizer.model

    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises((DiskError, LaneError)) as raised:
            for tokens in batches(2):
                train(optimizer, model, [tokens])
            optimizer.synchronize()
    message = str(raised.value)
    verb = "reading" if call == "preadv" else "writing"
    assert re.search(
        rf"{verb} [\d.]+ KiB of optimizer state in scratch_dir = '{tmp_path}'", message
    )
    assert errno.errorcode[code] in message and "state_on = 'host'" in message
    optimizer.close()


def test_requests_refused_at_once_go_through_the_page_cache(
    disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with memory that the device does not take: each of them is tried again."""
    optimizer, real, refused = trained(3, **disk), os.pwrite, Barrier(2)

    def pwrite(*inputs: Any) -> int:
        if fcntl.fcntl(inputs[0], fcntl.F_GETFL) & os.O_DIRECT:
            with suppress(BrokenBarrierError):
                refused.wait(0.2)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(*inputs)

    monkeypatch.setattr(os, "pwrite", pwrite)
    train(optimizer, optimizer.model, [batches(1)[0]])
    optimizer.synchronize()
    optimizer.close()


@pytest.mark.slow
@pytest.mark.default_lanes  # the seeded ones go on after a failure
def test_a_short_read_is_a_failure(disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = trained(3, **disk)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises((DiskError, LaneError), match="EIO"):
        train(optimizer, optimizer.model, [batches(1)[0]])
        optimizer.synchronize()
    optimizer.close()


def test_too_little_space_is_told_before_host_memory_is_mapped(
    disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_arena, "free_bytes", lambda folder: 4096)
    monkeypatch.setattr("offloadtrain.runtime.arena._Slab", lambda *_, **__: pytest.fail("mapped"))
    with pytest.raises(DiskError, match=r"needs .* KiB in scratch_dir = .*: 4.0 KiB is free"):
        trained(3, **disk)


def test_a_folder_that_is_not_there_is_refused_and_not_made(
    disk: dict[str, Any], tmp_path: Path
) -> None:
    missing = tmp_path / "not mounted" / "scratch"
    with pytest.raises(ConfigError, match="scratch' is not there: make it on the drive"):
        trained(3, **disk | {"scratch_dir": str(missing)})
    assert not missing.parent.exists()


def test_a_folder_in_memory_is_refused(
    disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_arena, "kind_of", lambda folder: "tmpfs")
    with pytest.raises(DiskError, match="is on tmpfs, which is host memory"):
        trained(3, **disk | {"scratch_in_memory": False})
    trained(3, **disk).close()
