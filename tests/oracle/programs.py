"""The recorded programs: one compressed file of JSON, case → text."""

from __future__ import annotations

import difflib
import json
import lzma
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("programs.json.xz")


@cache
def known() -> dict[str, str]:
    """What was recorded."""
    return json.loads(lzma.decompress(FILE.read_bytes())) if FILE.exists() else {}


def save(programs: dict[str, str]) -> None:
    text = json.dumps(programs, indent=0)
    FILE.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def difference(before: str, now: str) -> list[str]:
    """Lines of a unified diff, without its two headlines."""
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), lineterm="", n=2)
    return list(lines)[2:]
