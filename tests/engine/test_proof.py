"""The step is a program, and the program has no race: recorded from real steps and proved, run in
legal orders that nobody would choose, and each wait of it shown to be needed.

The recorded programs of `tests/oracle` are proved where they are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offloadtrain as ot
from offloadtrain.runtime.lanes import Lane, Lanes, SequentialLanes, on_lanes
from offloadtrain.step.program import updates
from offloadtrain.step.program.operations import Allocate, Dependencies, Ref
from offloadtrain.step.proof.prove import order, prove
from offloadtrain.step.proof.recording import Entry, Waited
from tests import levels
from tests.harsh_lanes import PausingLanes, poisoned
from tests.numerics.comparison import assert_equal, contents, make, pair, train
from tests.numerics.configurations import Configuration, any_valid, placed
from tests.numerics.models import batches
from tests.recording_lanes import RecordingLanes
from tests.seeded_lanes import SeededLanes

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
    """Train on these lanes; return weights and state."""
    model = make(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates.SpeculationPolicy, "should_speculate", lambda policy: True)
        chosen = {"device": "cpu", "precision": precision, "state": state, "clip_norm": 0.5}
        with on_lanes(lanes):
            optimizer = ot.offload(model, rule, **chosen | {"grad_accum_steps": accum} | options)
        stream = batches(steps * accum)
        for start in range(0, len(stream), accum):
            train(optimizer, model, stream[start : start + accum])
        tensors = contents(optimizer, model)
    optimizer.close()
    return tensors


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
    every = program("chain", **options)
    without = [
        entry
        for entry in every
        if not (isinstance(entry, Waited) and entry.why == "the gradient norm")
    ]
    assert len(without) < len(every) and prove(every) == []
    on_device = {fault.message for fault in prove(without) if "gradient staging" in fault.message}
    assert on_device == {
        f"'gather {bucket}' on compute is not ordered after 'd2h {before}': "
        f"both touch gradient staging[{slot}]"
        for bucket, before, slot in (("head", "layers.0", 0), ("norm", "embed", 1))
    }


LANES: dict[str, Callable[[int], Lanes]] = {
    "seeded": SeededLanes,
    "late": lambda seed: SeededLanes(seed, late=True),
    "threads": lambda seed: PausingLanes(1.0, seed=seed),
}


def trained(configuration: Configuration, lanes: Lanes, folder: Path) -> dict[str, torch.Tensor]:
    """Train on these lanes; return weights and state."""
    with placed(configuration, folder) as options, pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates.SpeculationPolicy, "should_speculate", lambda policy: True)
        with on_lanes(lanes):
            _, optimizer, model = pair(
                make(configuration.model),
                configuration.precision,
                accum=configuration.accum,
                clip=configuration.clip,
                **options,
            )
        stream = batches(4 * configuration.accum)
        for start in range(0, len(stream), configuration.accum):
            micro = stream[start : start + configuration.accum]
            explicit, clips = configuration.explicit, configuration.clips
            train(optimizer, model, micro, explicit=explicit, clips=clips)
        tensors = contents(optimizer, model)
    optimizer.close()
    return tensors


@levels.examples(30)
@given(
    configuration=any_valid(),
    kind=st.sampled_from(sorted(LANES)),
    seed=st.integers(0, 2**32),
    deterministic=st.booleans(),
)
def test_no_drawn_run_races_and_any_legal_order_of_it_has_the_same_bits(
    configuration: Configuration,
    kind: str,
    seed: int,
    deterministic: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Memory that is given out again holds NaN."""
    folder = tmp_path_factory.getbasetemp()
    recorder, lanes = RecordingLanes(SequentialLanes()), poisoned(LANES[kind](seed))
    with deterministic_mode(deterministic):
        expected = trained(configuration, recorder, folder)
        actual = trained(configuration, lanes, folder)
    assert prove(recorder.program) == []
    assert_equal(actual, expected)


def test_late_lanes_show_a_wait_that_the_default_lanes_hide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = run(SequentialLanes(), "chain")
    monkeypatch.setattr(Dependencies, "needs", lambda *_: None)
    on_default, late = (
        run(lanes, "chain") for lanes in (SequentialLanes(), SeededLanes(1, late=True))
    )
    assert_equal(on_default, expected)
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
        actual = run(SeededLanes(5, late=late), "skipping", **options)
        monkeypatch.setattr(Dependencies, "allocate", allocate_after_the_event)
        wrong = run(SeededLanes(5, late=late), "skipping", **options)
    assert_equal(actual, expected)
    assert not all(torch.equal(wrong[key], value) for key, value in expected.items())


def allocate_after_the_event(order: Dependencies, ref: Ref) -> None:
    order.was_read([ref], order.record(Lane.COMPUTE, "compute so far"))
    order.operations.append(Allocate(ref))


DISK: dict[str, Any] = {"state_on": "disk", "working": "disk", "grad_on": "disk"}


@pytest.mark.parametrize(
    ("name", "state", "accum", "options"),
    [
        ("unusual", "fp32", 1, MODES["exact"]),
        ("tied", "split16", 2, MODES["early"] | PLACEMENTS["streamed"]),
        ("unusual", "split16", 1, MODES["speculative, wrong"] | PLACEMENTS["streamed"]),
        ("tied", "fp32", 2, MODES["delayed"]),
        ("chain", "split16", 1, MODES["exact"] | DISK),
    ],
    ids=["exact", "early, streamed", "speculative, streamed", "delayed", "on the disk"],
)
def test_every_wait_is_needed_or_follows_from_others(
    name: str, state: str, accum: int, options: dict[str, Any], tmp_path: Path
) -> None:
    if "state_on" in options:
        options = options | {"scratch_dir": str(tmp_path), "scratch_in_memory": True}
    every = program(name, state, accum=accum, steps=2, **options)
    before, needed = order(every), 0
    assert prove(every) == []
    for index, entry in enumerate(every):
        if isinstance(entry, Waited):
            without = every[:index] + every[index + 1 :]
            if prove(without):
                assert order(without) != before
                needed += 1
    assert needed > 20
