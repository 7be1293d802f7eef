"""A part of a long list of cases: `--part 2/4` is every fourth one, from the second on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")


class Part(NamedTuple):
    number: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> Part:
        number, _, parts = text.partition("/")
        if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
            raise argparse.ArgumentTypeError(f"{text}: give, for example, 2/4")
        return cls(int(number), int(parts))

    def of(self, cases: Sequence[_T]) -> Sequence[_T]:
        return cases[self.number - 1 :: self.parts]


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--part", type=Part.parse, default=Part(1, 1), help="of the cases: 2/4, the second fourth"
    )
