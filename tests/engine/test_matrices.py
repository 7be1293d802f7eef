"""The program of a rule that needs whole matrices: proved, in any order, driven without a model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from offloadtrain.engine.salvage import SalvageError, UpdateJournal
from offloadtrain.runtime.lanes import HostProgress, Lane, SequentialLanes
from offloadtrain.runtime.lanes.seeded import SeededLanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.step.program.operations import Kind, Launch, Update
from offloadtrain.step.proof.prove import prove
from offloadtrain.step.proof.recording import Entry, Launched
from tests.engine.test_proof import MODES, PLACEMENTS, program, run, waits
from tests.numerics.models import batches
from tests.numerics.muon import RULE
from tests.step.test_drive import PLACES, STEPS, compared

POSSIBLE = {key: value for key, value in MODES.items() if "speculative" not in key}
ORDERS = {
    "seed 7": lambda: SeededLanes(7),
    "seed 8, late": lambda: SeededLanes(8, late=True),
    "threads": lambda: ThreadLanes(seed=3, longest_delay_ms=1.0),
}


@cache
def recorded() -> tuple[Entry, ...]:
    return tuple(program("chain", steps=3, rule=RULE))


def test_an_exact_step_has_no_race() -> None:
    assert prove(recorded()) == []


@pytest.mark.slow
@pytest.mark.cover(1, 1)
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mode", POSSIBLE)
@pytest.mark.parametrize("name", ["chain", "partly used"])
def test_no_race(name: str, mode: str, placement: str, accum: int) -> None:
    options = POSSIBLE[mode] | PLACEMENTS[placement]
    assert prove(program(name, accum=accum, steps=4, rule=RULE, **options)) == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "early"])
def test_no_race_where_the_state_is_on_the_device(mode: str) -> None:
    options = POSSIBLE[mode] | {"state_on": "device"}
    assert prove(program("chain", accum=2, steps=4, rule=RULE, **options)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("waiter", "awaited"),
    [(Lane.ORTHO, Lane.HOST), (Lane.HOST, Lane.ORTHO), (Lane.H2D, Lane.HOST)],
)
def test_a_kind_of_wait_left_out_is_a_race(waiter: Lane, awaited: Lane) -> None:
    left_out = waits(list(recorded()), waiter, awaited)
    assert left_out
    faults = prove([entry for i, entry in enumerate(recorded()) if i not in left_out])
    assert any(fault.kind == "race" for fault in faults)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "options",
    [{}, {"working": "host", "accum": 2}, {**MODES["delayed"]}, {"state_on": "device"}],
    ids=["exact", "streamed", "delayed", "on the device"],
)
def test_any_legal_order_has_the_same_bits(order: str, options: dict[str, Any]) -> None:
    lanes = ORDERS[order]()
    lanes.poison = True
    expected = run(SequentialLanes(), "chain", rule=RULE, steps=4, **options)
    found = run(lanes, "chain", rule=RULE, steps=4, **options)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_the_device_has_the_next_block_while_the_host_updates_one() -> None:
    """The direction of a block stands in front of Adam of the block before, on the host lane."""
    host = [e.name for e in recorded() if isinstance(e, Launched) and e.lane is Lane.HOST]
    direction, adam = Kind.DIRECTION.value, Kind.ADAM.value
    last = len(host) - 1 - host[::-1].index(f"{direction} layers.0/1")
    layers = [name for name in host[last:] if "layers" in name and "/1" in name]
    assert layers == [
        f"{direction} layers.0/1",
        f"{direction} layers.1/1",
        f"{adam} layers.0/1",
        f"{direction} layers.2/1",
        f"{adam} layers.1/1",
        f"{adam} layers.2/1",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["on the device", "2 slots, inputs offloaded"])
@pytest.mark.parametrize("mode", ["exact", "early", "delayed"])
def test_driven_without_a_model_it_is_the_same(mode: str, place: str) -> None:
    assert compared(mode, 2, PLACES[place], batches(2 * STEPS), RULE) == ""


def test_matrices_that_the_device_has_not_done_are_not_salvaged() -> None:
    journal, ran = UpdateJournal(), []
    update = Update(1, 1.0, out_of_place=False)
    for bucket, matrices in (("a", False), ("b", True)):
        op = Launch(Kind.ADAM, Lane.HOST, bucket, update=update)
        if matrices:
            journal.needs_device(bucket)
        launched = HostProgress(launched=int(matrices), begun=0, ended=0)
        journal.launches(op, lambda bucket=bucket: ran.append(bucket), launched, decided=True)
    with pytest.raises(SalvageError, match="the update of 1 buckets of matrices was decided"):
        journal.finish(HostProgress(launched=2, begun=0, ended=0), lambda op: list, print)
    assert ran == []
