"""Renamed operations and buffers are compared with the recorded ones."""

from __future__ import annotations

import pytest

from offloadtrain.runtime.lanes import Lane
from offloadtrain.step.proof.recording import Bytes, Closed, Launched, Opened, Undefined
from tests.oracle.canonical import canonical
from tests.oracle.renamed import RenameError, as_recorded
from tests.oracle.test_canonical import EXAMPLES, program

PROGRAM = [
    Undefined(Bytes("grad staging[1]", 0, 8)),
    Launched(Lane.COMPUTE, "collect a", (), (Bytes("grad staging[1]", 0, 8),)),
    Launched(Lane.D2H, "grad down a", (Bytes("grad staging[1]", 0, 8),), (Bytes("grad a", 8, 16),)),
    Opened(1, "forward a", (Bytes("slot 0: grad a", 16, 24),), ()),
    Closed(1),
]
OPERATIONS = {"collect": "gather", "grad down": "d2h"}
BUFFERS = {"grad": "gradient", "grad staging": "staging", "slot 0: grad": "disk slot 0"}


def test_a_renamed_program_is_the_recorded_one() -> None:
    """The longest entry that fits counts; the rest of the name stays."""
    assert canonical(as_recorded(PROGRAM, OPERATIONS, BUFFERS)) == [
        "compute gather a | writes staging[1][0:8] | undefined staging[1][0:8]",
        "compute forward a | reads disk slot 0 a[0:8]",
        "compute end forward a",
        "compute the program ends",
        "d2h d2h a | reads staging[1][0:8] | writes gradient a[0:8]",
    ]


def test_a_part_of_a_word_is_not_renamed() -> None:
    programs = [Launched(Lane.HOST, "adamw a", (), (Bytes("gradients a", 0, 8),))]
    assert as_recorded(programs, {"adam": "update"}, {"gradient": "grad"}) == programs


@pytest.mark.parametrize(
    ("operations", "buffers"),
    [({"collect": "grad down"}, {}), ({}, {"grad": "slot 0: grad"})],
    ids=["operations", "buffers"],
)
def test_two_names_do_not_become_one(operations: dict[str, str], buffers: dict[str, str]) -> None:
    with pytest.raises(RenameError, match="were both recorded as"):
        as_recorded(PROGRAM, operations, buffers)


def test_without_new_names_nothing_changes() -> None:
    assert as_recorded(program(EXAMPLES[0]), {}, {}) == list(program(EXAMPLES[0]))
