"""The step is a program, and the program has no race: recorded from real steps and proved, run in
legal orders that nobody would choose, and each wait of it shown to be needed.

The recorded programs of `tests/oracle` are proved where they are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import offloadtrain as ot
from offloadtrain.runtime.lanes import Buffer, Lane, LaneError, Lanes, SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.runtime.lanes.seeded import SeededLanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.step.layout import step_spec as spec
from offloadtrain.step.program import modes
from offloadtrain.step.program.dependencies import Dependencies
from offloadtrain.step.program.operations import Allocate, Ref
from offloadtrain.step.proof.prove import order, prove
from offloadtrain.step.proof.recording import Entry, Recorded, Waited
from tests import levels
from tests.numerics.models import MODELS, STREAMED, batches, loss_of

CASES = [
    ("fp32", "bf16"),
    ("fp32", "fp32"),
    ("split16", "bf16"),
    ("int8", "bf16"),
    ("int8", "fp16"),
]
MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "early": {"clip_norm": None, "skip_nonfinite": False},
    "speculative, right": {"update": "speculative", "clip_norm": 1e9},
    "speculative, wrong": {"update": "speculative"},
    "delayed": {"update": "delayed", "warmup_steps": 1},
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "on the device": {},
    "streamed": {"working": "host"},
    "streamed, 3 slots": {"working": "host", "device_slots": 3},
    "partly streamed": {"working": "host", "resident_blocks": 1},
    "half of the state on the device": {"state_on": {"device": 0.5}},
    "all of the state on the device": {"state_on": "device"},
    "streamed, recomputed": {"working": "host", "activation": "recompute"},
    "streamed, inputs offloaded": {"working": "host", "activation": "offload"},
    "streamed, what is saved offloaded": {
        "working": "host",
        "activation": "offload_saved",
        "offload_saved_above": 0,
    },
}
ADAMW = ot.AdamW(lr=1e-2)
each_mode = pytest.mark.parametrize("mode", MODES)


def options_of(mode: str, precision: str) -> dict[str, Any]:
    """Of `offload`; with fp16, which must be able to skip, "early" is "exact"."""
    return {} if mode == "early" and precision == "fp16" else MODES[mode]


def run(
    lanes: Lanes,
    name: str,
    state: str = "fp32",
    precision: str = "bf16",
    *,
    accum: int = 1,
    steps: int = 3,
    rule: Any = ADAMW,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Train on these lanes; returns state and weights."""
    torch.manual_seed(0)
    model: nn.Module = MODELS[name]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modes.SpeculationPolicy, "should_speculate", lambda policy: True)
        with on_lanes(lanes):
            optimizer = ot.offload(
                model,
                rule,
                device="cpu",
                precision=precision,
                state=state,
                grad_accum_steps=accum,
                **{"clip_norm": 0.5, **options},
            )
        stream = batches(steps * accum)
        for step in range(steps):
            for tokens in stream[step * accum : (step + 1) * accum]:
                optimizer.backward(loss_of(model, tokens))
            optimizer.step()
        optimizer.synchronize()
        found = {n: p.detach().clone() for n, p in model.named_parameters()}
        for param, tensors in optimizer.named_state():
            found |= {f"{param}/{key}": value.clone() for key, value in tensors.items()}
    optimizer.close()
    return found


def program(name: str, *args: str, **kwargs: Any) -> list[Entry]:
    lanes = RecordingLanes(SequentialLanes())
    run(lanes, name, *args, **kwargs)
    return lanes.program


@pytest.mark.parametrize("options", [{"working": "host"}, {"activation": "recompute"}], ids=str)
def test_what_the_stream_sanitizer_cannot_see(options: dict[str, Any]) -> None:
    """The training thread waits for the norm in step(), which comes down behind the gradients. If
    it is there, a query of its event says so, and torch's stream sanitizer does not follow queries.
    Without this order the program has the race on device memory that the sanitizer reported, and no
    other."""
    whole = program("chain", **options)
    without = [
        entry
        for entry in whole
        if not (isinstance(entry, Waited) and entry.why == "the gradient norm")
    ]
    assert len(without) < len(whole) and prove(whole) == []
    on_device = {fault.message for fault in prove(without) if "gradient staging" in fault.message}
    assert on_device == {
        f"'gather {bucket}' on compute is not ordered after 'd2h {before}': "
        f"both touch gradient staging[{slot}]"
        for bucket, before, slot in (("head", "layers.0", 0), ("norm", "embed", 1))
    }


@pytest.mark.cover(1, 2)
@pytest.mark.parametrize("accum", [1, 2])
@each_mode
def test_no_race_in_pieces(mode: str, accum: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets larger than a staging slot."""
    monkeypatch.setattr(spec, "STAGING_BYTES", 1000)
    assert prove(program("unusual", accum=accum, steps=4, **MODES[mode])) == []


@levels.examples(60)
@given(
    name=st.sampled_from(sorted(MODELS)),
    case=st.sampled_from(CASES),
    mode=st.sampled_from(sorted(MODES)),
    placement=st.sampled_from(sorted(PLACEMENTS)),
    accum=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    late=st.booleans(),
    deterministic=st.booleans(),
)
def test_any_legal_order_has_the_same_bits(
    name: str,
    case: tuple[str, str],
    mode: str,
    placement: str,
    accum: int,
    seed: int,
    late: bool,
    deterministic: bool,
) -> None:
    options = options_of(mode, case[1]) | (PLACEMENTS[placement] if name in STREAMED else {})
    with deterministic_mode(deterministic):
        expected = run(SequentialLanes(), name, *case, accum=accum, steps=4, **options)
        found = run(SeededLanes(seed, late=late), name, *case, accum=accum, steps=4, **options)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_late_lanes_show_a_wait_that_the_default_lanes_hide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = run(SequentialLanes(), "chain")
    monkeypatch.setattr(Dependencies, "needs", lambda *_: None)
    on_default, late = (
        run(lanes, "chain") for lanes in (SequentialLanes(), SeededLanes(1, late=True))
    )
    assert all(torch.equal(on_default[key], value) for key, value in expected.items())
    assert not all(torch.equal(late[key], value) for key, value in expected.items())


@contextmanager
def deterministic_mode(on: bool = True) -> Iterator[None]:
    """torch fills memory that it allocates."""
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("activation", "late"), [("offload", False), ("offload", True), ("offload_saved", False)]
)
def test_memory_that_deterministic_mode_fills(
    activation: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fill of what comes back in backward is ordered before its copy. It was not: gradients
    were NaN on a GPU, and every step was skipped."""
    options: dict[str, Any] = {"working": "host", "activation": activation, "clip_norm": 0.5}
    if activation == "offload_saved":
        options["offload_saved_above"] = 0
    with deterministic_mode():
        expected = run(SequentialLanes(), "skipping", **options)
        found = run(SeededLanes(5, late=late), "skipping", **options)
        monkeypatch.setattr(Dependencies, "allocate", allocate_after_the_event)
        wrong = run(SeededLanes(5, late=late), "skipping", **options)
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert not all(torch.equal(wrong[key], value) for key, value in expected.items())


def allocate_after_the_event(order: Dependencies, ref: Ref) -> None:
    order.was_read([ref], order.record(Lane.COMPUTE, "compute so far"))
    order.operations.append(Allocate(ref))


@levels.examples(24)
@given(
    name=st.sampled_from(sorted(MODELS)),
    case=st.sampled_from(CASES),
    mode=st.sampled_from(sorted(MODES)),
    placement=st.sampled_from(sorted(PLACEMENTS)),
    accum=st.integers(1, 2),
    seed=st.integers(0, 2**32),
)
def test_lanes_on_threads_with_delays_have_the_same_bits(
    name: str, case: tuple[str, str], mode: str, placement: str, accum: int, seed: int
) -> None:
    options = options_of(mode, case[1]) | (PLACEMENTS[placement] if name in STREAMED else {})
    lanes = ThreadLanes(seed=seed, longest_delay_ms=1.0)
    expected = run(SequentialLanes(), name, *case, accum=accum, **options)
    found = run(lanes, name, *case, accum=accum, **options)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_a_failure_on_a_lane_is_raised_and_close_does_not_hang() -> None:
    lanes, buffer = ThreadLanes(), Buffer("b", torch.zeros(4))

    def fails(*_: torch.Tensor) -> None:
        raise ZeroDivisionError("planted")

    lanes.launch(Lane.HOST, "fails", fails, [], [buffer.whole])
    with pytest.raises(LaneError, match="planted"):
        lanes.synchronize()
    lanes.wait(Lane.H2D, lanes.record(Lane.HOST), "after the failure")
    lanes.close()
    lanes.close()


@pytest.mark.cover(0)
@pytest.mark.parametrize(("state", "accum"), [("fp32", 1), ("split16", 2)])
@pytest.mark.parametrize("placement", ["on the device", "streamed"])
@each_mode
@pytest.mark.parametrize("name", ["unusual", "tied"])
def test_every_wait_is_needed_or_follows_from_others(
    name: str, mode: str, placement: str, state: str, accum: int
) -> None:
    whole = program(name, state, accum=accum, **MODES[mode], **PLACEMENTS[placement])
    before, needed = order(whole), 0
    for index, entry in enumerate(whole):
        if not isinstance(entry, Waited):
            continue
        without = whole[:index] + whole[index + 1 :]
        if prove(without):
            assert order(without) != before
            needed += 1
    assert needed > 20


def waits(program: list[Entry], waiter: Lane, awaited: Lane) -> set[int]:
    """Where one lane waits for another."""
    of = {e.event: e.lane for e in program if isinstance(e, Recorded)}
    return {
        number
        for number, e in enumerate(program)
        if isinstance(e, Waited) and e.lane is waiter and of[e.event] is awaited
    }


@pytest.mark.parametrize(
    ("name", "state", "working", "waiter", "awaited"),
    [
        ("unusual", "fp32", "device", Lane.D2H, Lane.COMPUTE),
        ("unusual", "fp32", "device", Lane.H2D, Lane.HOST),
        ("unusual", "fp32", "device", Lane.COMPUTE, Lane.H2D),
        ("unusual", "fp32", "device", Lane.COMPUTE, Lane.D2H),
        ("unusual", "split16", "device", Lane.HOST, Lane.H2D),
        ("chain", "fp32", "host", Lane.LOAD, Lane.COMPUTE),
        ("chain", "fp32", "host", Lane.LOAD, Lane.HOST),
        ("chain", "fp32", "host", Lane.COMPUTE, Lane.LOAD),
        ("skipping", "fp32", "host", Lane.HOST, Lane.LOAD),
    ],
)
def test_a_kind_of_wait_left_out_is_a_race(
    name: str, state: str, working: str, waiter: Lane, awaited: Lane
) -> None:
    refutes_without(program(name, state, steps=4, working=working), waiter, awaited)


def test_a_sum_that_does_not_wait_for_its_copy_down_is_a_race() -> None:
    """Of one microbatch the thread waits for the last copy: Adam waits for none."""
    refutes_without(program("unusual", steps=4, accum=2), Lane.HOST, Lane.D2H)


def refutes_without(whole: list[Entry], waiter: Lane, awaited: Lane) -> None:
    left_out = waits(whole, waiter, awaited)
    assert left_out
    faults = prove([entry for i, entry in enumerate(whole) if i not in left_out])
    assert any(fault.kind == "race" for fault in faults)
