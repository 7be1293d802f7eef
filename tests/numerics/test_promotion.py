"""State moves to the device when its free memory is known, and back when it was too little: the
bits are those of a run that keeps it on the host, as a plain loop has them.

Devices are simulated: `Device` says what torch's allocator and the driver would.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.config.offload import OptionError
from offloadtrain.engine import promotion
from offloadtrain.runtime import device_memory
from offloadtrain.runtime.device_memory import MemoryUse
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.step.layout.placement import second_copy_bytes
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.proof.prove import prove
from tests import levels
from tests.harsh_lanes import poisoned
from tests.numerics.comparison import (
    ADAMW,
    assert_equal,
    assert_same,
    contents,
    follow,
    pair,
    train,
)
from tests.numerics.models import Chain, batches, loss_of
from tests.numerics.test_changes_between_steps import booked, planned
from tests.recording_lanes import RecordingLanes
from tests.seeded_lanes import SeededLanes

CHECK_STEPS = 3
"""Between two checks here; `tests/gpu` and `tests/distributed` train as many as users do."""
TOTAL = 32 << 30
CHECK_STEPS = 4
"""In place of the engine's, so that a test takes fewer steps."""
LARGE = 1 << 30
"""Room for all state of the models here."""


class Device:
    """A GPU on which `room` bytes are free beside torch's peak and the reserve."""

    room = LARGE
    failures = 0

    def use(self, device: torch.device) -> MemoryUse:
        others = 1 << 30
        return MemoryUse(TOTAL, others, TOTAL - others - int(0.1 * TOTAL) - self.room)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Stand for the device of every model, until the patch is undone."""
        patch.setattr(promotion, "memory_use", self.use)
        patch.setattr(promotion, "failed_allocations", lambda device: self.failures)
        patch.setattr(promotion, "_reason_against", lambda config, rules, device: None)


@pytest.fixture(autouse=True)
def few_steps_between_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "CHECK_STEPS", CHECK_STEPS)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    simulated = Device()
    simulated.install(monkeypatch)
    monkeypatch.setattr(promotion, "CHECK_STEPS", CHECK_STEPS)
    return simulated


def share_of(optimizer: ot.OffloadOptimizer) -> float:
    """The share of the state on the device, as the last step reports it."""
    assert optimizer.last_step is not None
    return optimizer.last_step.state_on_device


PLACEMENTS: dict[str, dict[str, Any]] = {
    "clipped, fp32": {"precision": "fp32", "clip": 0.3},
    "two microbatches": {"accum": 2, "clip": 0.3},
    "some sums on the device": {"accum": 2, "clip": 0.3, "sums_on": {"device": 0.5}},
    "recompute": {"activation": "recompute"},
    "streamed": {"working": "host", "device_slots": 1, "activation": "offload"},
    "early": {"skip_nonfinite": False},
    "speculative, right": {"update": "speculative", "clip": 1e9},
    "speculative, wrong": {"update": "speculative", "clip": 0.1},
    "delayed": {"update": "delayed", "warmup_steps": 1},
    "delayed, streamed": {"update": "delayed", "working": "host", "clip": 0.3},
    "delayed, fp16": {"update": "delayed", "precision": "fp16"},
    "split16": {"state": "split16"},
    "int8": {"state": "int8", "update": "delayed"},
}


QUICK = ("clipped, fp32", "some sums on the device", "streamed", "speculative, wrong", "int8")


@pytest.mark.cover(1, levels.ALL)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLACEMENTS],
)
@pytest.mark.parametrize("late", [False, True], ids=["drawn", "late"])
def test_promoted_and_moved_back(name: str, late: bool, device: Device) -> None:
    """Three epochs: all state on the host, some on the device, all on the host again."""
    options = dict(PLACEMENTS[name])
    torch.manual_seed(0)
    lanes = poisoned(SeededLanes(3, late=late))
    with on_lanes(lanes):
        run, optimizer, model = pair(Chain(3), state_on="auto", **options)
    device.room = 30_000
    accum, steps = options.get("accum", 1), 2 * CHECK_STEPS + 4
    stream, shares = batches((steps + 4) * accum), []
    for number in range(steps + 4):
        follow(run, optimizer, model, stream[number * accum : (number + 1) * accum], accum)
        shares.append(share_of(optimizer))
        if number == steps:
            device.failures += 1
            optimizer.zero_grad()
        if number in (steps - 1, steps):
            if "offload" not in str(options) and (accum == 1 or "sums_on" in options):
                assert booked(optimizer) == planned(optimizer)
    promoted = 2 * CHECK_STEPS
    assert shares[:promoted] == [0.0] * promoted and shares[-3:] == [0.0] * 3
    assert 0 < shares[promoted] < 1 and shares[promoted : steps + 1] == [shares[promoted]] * 5
    assert_same(run, optimizer, model)
    optimizer.close()
    assert optimizer.ledger.total(Tier.HOST) == 0


COPIES: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "two microbatches": {"accum": 2},
    "int8": {"state": "int8"},
    "streamed": {"working": "host", "device_slots": 1},
    "part on the device": {"state_on": {"device": 0.3}},
}


@pytest.mark.cover(1, levels.ALL)
@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("late", [False, True], ids=["drawn", "late"])
def test_second_copies_are_given_back(name: str, late: bool) -> None:
    """After steps that guessed, which left the newer state in either copy."""
    options = COPIES[name]
    accum = options.get("accum", 1)
    with on_lanes(poisoned(SeededLanes(3, late=late))):
        run, optimizer, model = pair(Chain(3), update="speculative", clip=1e9, **options)
    state_on, stream = optimizer.config.state.tier, batches(7 * accum)
    follow(run, optimizer, model, stream[: 4 * accum], accum)
    spec, before = optimizer._engine.program.spec, booked(optimizer)
    copies = sum(second_copy_bytes(spec, b) for b in spec.buckets_on(Tier.HOST))
    assert copies
    optimizer.keep_exact()
    follow(run, optimizer, model, stream[4 * accum :], accum)
    assert booked(optimizer) == planned(optimizer)
    assert booked(optimizer)[Tier.HOST] <= before[Tier.HOST] - copies
    assert optimizer.config.update == "exact" and optimizer.config.state.tier == state_on
    assert_same(run, optimizer, model)
    optimizer.keep_exact()  # there is nothing more to give back
    optimizer.close()
    assert optimizer.ledger.total(Tier.HOST) == 0


def test_state_moves_to_the_device_after_its_second_copies_are_given_back(device: Device) -> None:
    optimizer, model = trained(CHECK_STEPS, state_on="auto", update="speculative", clip_norm=1e9)
    optimizer.keep_exact()
    for tokens in batches(2 * CHECK_STEPS + 1):
        train(optimizer, model, [tokens])
    assert share_of(optimizer) == 1 and optimizer.config.update == "exact"


class Dropping(Chain):
    """Draws in every forward: a move must not draw, nor count as a forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.dropout(self.embed(tokens), 0.2, self.training)
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.2, self.training)
        return self.head(self.norm(x))


def trained(steps: int, **options: Any) -> tuple[ot.OffloadOptimizer, nn.Module]:
    """Train from the same start, in any placement."""
    torch.manual_seed(0)
    model = Dropping(3)
    optimizer = ot.offload(model, ADAMW, device="cpu", **{"clip_norm": 0.5} | options)
    for tokens in batches(steps):
        train(optimizer, model, [tokens])
    return optimizer, model


STEPS = 2 * CHECK_STEPS + 3


def test_the_programs_of_all_epochs_are_proved(device: Device) -> None:
    """One recording over both moves."""
    device.room = 30_000
    recorder = RecordingLanes(SequentialLanes())
    with on_lanes(recorder):
        optimizer, model = trained(STEPS, state_on="auto")
    assert 0 < share_of(optimizer) < 1
    device.failures += 1
    optimizer.zero_grad()
    train(optimizer, model, batches(1))
    assert share_of(optimizer) == 0
    optimizer.close()
    assert prove(recorder.program) == []


def test_a_peak_that_rises_is_waited_for(device: Device) -> None:
    """An evaluation or a longer batch between two checks; and a graph that reads old weights."""
    optimizer, model = trained(CHECK_STEPS - 1, state_on="auto")
    shares = []
    for check in range(6):
        device.room -= 5_000 * (check in (1, 2))
        graph = loss_of(model, batches(1)[0]) if check == 3 else None
        for tokens in batches(CHECK_STEPS):
            train(optimizer, model, [tokens])
        del graph
        shares.append(share_of(optimizer))
    assert shares == [0, 0, 0, 0, 1, 1]


def saved_after(steps: int, **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The weights and the optimizer's state after so many steps, and what more steps make of it."""
    optimizer, model = trained(steps, **options)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return *saved, contents_after(3, optimizer, model)


def contents_after(steps: int, optimizer: ot.OffloadOptimizer, model: nn.Module) -> Any:
    torch.manual_seed(1)
    for tokens in batches(steps):
        train(optimizer, model, [tokens])
    return contents(optimizer, model)


@pytest.mark.cover(1, levels.ALL)
@pytest.mark.parametrize("update", ["exact", "delayed"])
@pytest.mark.parametrize("at", [CHECK_STEPS, STEPS], ids=["before", "after"])
@pytest.mark.parametrize("into", [3, STEPS], ids=["new", "promoted"])
def test_a_state_dict_of_either_side_goes_on(
    at: int, into: int, update: str, device: Device
) -> None:
    """At once with the share that it was saved with."""
    options = {"state_on": "auto", "update": update, "precision": "fp32"}
    weights, state, expected = saved_after(at, **options)
    share = state["state_on_device"]
    assert share == float(at == STEPS)
    optimizer, model = trained(into, **options)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert_equal(contents_after(3, optimizer, model), expected)
    assert share_of(optimizer) == max(share, float(into == STEPS))
    assert booked(optimizer) == planned(optimizer)


def test_a_share_that_the_device_has_no_room_for_is_measured_anew(device: Device) -> None:
    weights, state, _ = saved_after(STEPS, state_on="auto")
    optimizer, model = trained(0, state_on="auto")
    device.room = 30_000
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    shares = []
    for tokens in batches(STEPS):
        train(optimizer, model, [tokens])
        shares.append(share_of(optimizer))
    assert shares[0] == 0 and 0 < shares[-1] < 1


def test_the_highest_peak_counts(device: Device) -> None:
    """Also if somebody resets the allocator's statistics."""
    optimizer, model = trained(CHECK_STEPS - 1, state_on="auto")
    device.room = 30_000
    train(optimizer, model, batches(1))
    device.room = LARGE
    for tokens in batches(STEPS):
        train(optimizer, model, [tokens])
    assert 0 < share_of(optimizer) < 1


def refuse(*args: Any, **kwargs: Any) -> None:
    raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("fragmented", [False, True])
def test_no_room_is_said_once(
    fragmented: bool, device: Device, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    """None by the counters, or none in one piece: the state stays where it is."""
    optimizer, model = trained(STEPS - 4, state_on="auto")
    if fragmented:
        monkeypatch.setattr(promotion.torch, "empty", refuse)
    else:
        device.room = 100
    for tokens in batches(STEPS):
        train(optimizer, model, [tokens])
    assert share_of(optimizer) == 0
    assert [r.message for r in caplog.records] == [
        "state_on = 'auto': the optimizer state stays on the host: beside a reserve of 10 % (at "
        "least 1.0 GiB) the device has no room for a block of it"
    ]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_reaches_the_caller_and_is_the_last(
    where: str, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop skips the batch, as loops do."""
    optimizer, model = trained(STEPS, state_on="auto")
    before, layer = contents(optimizer, model), model.layers[1].up
    register = layer.register_forward_hook if where == "forward" else layer.weight.register_hook
    handle, raised = register(refuse), None
    try:
        device.failures += 1
        loss_of(model, batches(1)[0]).backward()
    except torch.OutOfMemoryError as error:
        optimizer.zero_grad()
        raised = error
    handle.remove()
    assert raised is not None
    assert optimizer.ledger.total(Tier.DEVICE) == planned(optimizer)[Tier.DEVICE]
    assert not optimizer._engine.program.spec.has_state_on(Tier.DEVICE)
    assert_equal(contents(optimizer, model), before)
    for tokens in batches(STEPS):
        train(optimizer, model, [tokens])
    assert share_of(optimizer) == 0
    (record,) = caplog.records
    assert "with 1 of the optimizer state there" in record.message


def test_a_host_without_room_is_said_once_for_each_failure(
    device: Device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state stays on the device, and later calls of zero_grad() ask for nothing."""
    optimizer, model = trained(STEPS, state_on="auto")
    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr(promotion, "available_bytes", lambda: 0)
        device.failures += 1
        for _ in range(3):
            optimizer.zero_grad()
    (record,) = caplog.records
    assert "the state stays there, as the host has no room: the change needs" in record.message
    before = contents(optimizer, model)
    device.failures += 1
    optimizer.zero_grad()
    assert not optimizer._engine.program.spec.has_state_on(Tier.DEVICE)
    assert_equal(contents(optimizer, model), before)


def test_a_graph_that_waits_for_its_backward_keeps_its_weights(device: Device) -> None:
    """Most loops call zero_grad() between a forward and its backward; an allocation has failed
    before, and somebody has handled it."""
    optimizer, model = trained(STEPS, state_on="auto")
    loss = loss_of(model, batches(1)[0])
    device.failures += 1
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert share_of(optimizer) == 1
    train(optimizer, model, batches(1))
    assert share_of(optimizer) == 0


def test_a_limit_places_state_at_once(device: Device) -> None:
    """And it goes back if the device has less; nothing is measured."""
    device.room = 0
    on_host, _ = trained(0)
    limit = on_host.ledger.total(Tier.DEVICE) + 40_000
    optimizer, model = trained(1, state_on="auto", device_memory_limit=limit)
    assert 0 < share_of(optimizer) < 1
    assert optimizer.ledger.total(Tier.DEVICE) <= limit
    device.failures += 1
    optimizer.zero_grad()
    model.layers[0].requires_grad_(False)
    for tokens in batches(STEPS):
        train(optimizer, model, [tokens])
    assert share_of(optimizer) == 0


def test_where_nothing_can_move_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, _ = trained(STEPS, state_on="auto")
    assert share_of(optimizer) == 0
    assert [record.message for record in caplog.records] == [
        "state_on = 'auto': the optimizer state stays on the host, as the device is the CPU"
    ]
    with pytest.raises(OptionError, match=r"^state_on = 'auto' .* skip_unused, nor with a mesh"):
        trained(0, state_on="auto", skip_unused=["layers.*"])


def test_what_driver_and_allocator_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that torch has reserved is not that of others, its peak counts, and so does a limit of
    what this process may reserve."""
    stats = {"reserved_bytes": {"all": {"current": 6 << 30, "peak": 9 << 30}}, "num_ooms": 2}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (23 << 30, 32 << 30))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    device, fractions = torch.device("cuda", 0), iter((1.0, 0.5))
    monkeypatch.setattr(
        torch.cuda, "get_per_process_memory_fraction", lambda device: next(fractions)
    )
    assert device_memory.memory_use(device) == (32 << 30, 3 << 30, 9 << 30)
    assert device_memory.memory_use(device) == ((3 + 16) << 30, 3 << 30, 9 << 30)
    assert device_memory.failed_allocations(device) == 2
    assert device_memory.failed_allocations(torch.device("cpu")) == 0
    assert promotion.reserve_bytes(4 << 30) == 1 << 30 and promotion.reserve_bytes(10**11) == 10**10
