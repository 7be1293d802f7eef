"""`situations.toml`: each situation names a test and a message that are there."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITUATIONS = tomllib.loads((ROOT / "tests" / "situations.toml").read_text())["situation"]


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def functions_in(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(text_of(path)))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@cache
def strings_of_the_source() -> str:
    """All strings, put together as the compiler does."""
    parts = []
    for path in sorted((ROOT / "offloadtrain").rglob("*.py")):
        for node in ast.walk(ast.parse(text_of(path))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(node.value)
    return "\n".join(parts)


def test_each_situation_has_a_test() -> None:
    for each in SITUATIONS:
        assert each.keys() <= {"about", "test", "case", "refused"}, each
        file, _, name = each["test"].partition("::")
        assert name in functions_in(ROOT / file), each
        text = text_of(ROOT / file)
        assert each.get("case", "") in text + text.replace("_", " "), each
        assert each.get("refused", "") in strings_of_the_source(), each
