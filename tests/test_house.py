"""The figures of `tools.house`, counted in examples whose figures are known."""

from __future__ import annotations

import ast

import pytest

from tools import house

EXAMPLE = '''
"""A docstring is no statement."""
import os

class Wide(Base):
    """Nor this."""

    limit: ClassVar[int] = 1
    first: int
    second: int = 2

    def __init__(self, given, *, other=None):
        "Nor this."
        self.first = given
        self.third, self._fourth = given, os.sep
        for self.fifth in given:
            self.sixth += 1
        other.seventh = self.eighth

    def told(me, found):
        me.ninth = found
'''
STATEMENTS = 13
"""import, class, three fields, two functions, and six statements in these."""
ATTRIBUTES = {"first", "second", "third", "_fourth", "fifth", "sixth"}

BRANCHES = """
def choose(bucket, config, step, tensor):
    if bucket.is_on_disk and not (bucket.on_device or config.working == "host"):
        pass
    elif tensor.device.type == "cuda" or bucket.shard_numel:
        pass
    while step.first:
        step = config.sums_on
    names = [each for each in step if each.loads_from_host(bucket)]
    ready = bucket.ready and step.weight_tier(bucket) is not None
    return bucket.on_device if tensor.name else not tier is Tier.DISK
"""
"""Conditions that read placement: the first `if`, the comprehension, `ready`, the last `not`."""


def test_statements_do_not_include_docstrings() -> None:
    assert house.count_statements(ast.parse(EXAMPLE)) == STATEMENTS


def test_attributes_are_those_a_class_declares_or_assigns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = ast.parse(EXAMPLE)
    [node] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert house.attributes_of(node) == ATTRIBUTES
    assert house.large_classes([tree]) == []
    monkeypatch.setattr(house, "MOST_ATTRIBUTES", len(ATTRIBUTES) - 1)
    assert house.large_classes([tree]) == [("Wide", len(ATTRIBUTES))]


def test_vague_names_are_a_share_of_all_that_are_bound() -> None:
    tree = ast.parse(
        "_one = size = 1\nfor one, each in x: self.told = beside\ndef f(found, a): ..."
    )
    names = house.bound_names(tree)
    assert names == {"one": 2, "size": 1, "each": 1, "told": 1, "found": 1, "a": 1}
    assert house.vague_percent([tree]) == pytest.approx(100 * 4 / 7)


def test_branches_on_placement() -> None:
    assert len(house.placement_branches(ast.parse(BRANCHES))) == 4


def test_the_profile_has_figures_and_the_table_has_today_and_goal() -> None:
    calls = [("a", "f", 1), ("a", "g", 2), ("b", "f", 1), ("a", "f", 1)]
    assert house.moves_between_files(calls) == 2
    profiled = house.profile()
    assert all(profiled.values()), profiled
    assert profiled["gradient_moves"] >= profiled["gradient_files"] - 1
    figures = [house.Figure("files", 1234, 12), house.Figure("names", 5.25, 0.3, "%")]
    table = [line.split() for line in house.as_table(figures).splitlines()]
    assert table[1:] == [
        ["files", "1,234", "|", "≤", "12"],
        ["names", "5.2", "%", "|", "≤", "0.3", "%"],
    ]
