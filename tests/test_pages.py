"""Every block of code and every command of the documentation is true of what is there.

Python is run: tests/test_page_code.py. So are the commands of README and fine_tune_8b. Everything
else is checked without being run: commands are parsed by the command line itself, modules, files,
targets and extras have to exist, and the keys of a job have to be known.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from cyclopts import CycloptsError
from offloadtrain_tui.settings import Settings

from offloadtrain.cli.main import app
from offloadtrain.config.hf_model import HF_KEYS
from offloadtrain.config.job import Config, as_tables, load
from tests.test_readme import PAGES, ROOT

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?: {4}.*\n)+)")
IN_A_TABLE = re.compile(r"(?<=\| )`(offloadtrain [^`]+)`")
SHOWN = ("text", "json")
"""Output and data: compared where a test names them."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a page."""

    page: str
    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """Fenced blocks by their language; indented ones, and cells of tables, which are commands."""
    text = page.read_text()
    for language, code in FENCE.findall(text):
        yield Block(page.name, language, code)
    for code in INDENTED.findall(FENCE.sub("", text)):
        yield Block(page.name, "sh", code)
    for code in IN_A_TABLE.findall(text):
        yield Block(page.name, "sh", code)


BLOCKS = [block for page in PAGES for block in blocks(page)]


PROGRAMS = ("offloadtrain", "python", "torchrun", "make", "pip", "docker")


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of ours: of alternatives (`a|b`, `[--json]`) the first. Other lines
    of a block are output, or another program's."""
    for line in text.replace("\\\n", " ").splitlines():
        for command in re.split(r" && | · ", re.sub(r"\s#( .*)?$", "", line).replace("…", "")):
            command = re.sub(r"^\s*([A-Z_]+=\S* )*", "", command).partition(" > ")[0]
            if command.partition(" ")[0].rpartition("/")[2] in PROGRAMS:
                yield [_first(word) for word in shlex.split(command)]


def _first(word: str) -> str:
    return re.sub(r"^\[(.*)\]$", r"\1", word).split("|")[0]


def problem(words: list[str]) -> str:
    """What is wrong with a command; "" if nothing is."""
    program, *rest = words
    checks = {
        "offloadtrain": of_command_line,
        "make": of_make,
        "pip": of_pip,
        "docker": of_docker,
    }
    return checks.get(program.rpartition("/")[2], of_python)(rest)


def of_command_line(words: list[str]) -> str:
    try:
        app.parse_args(words, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        return str(error)
    return ""


def of_python(words: list[str]) -> str:
    if "-m" in words:
        module, *rest = words[words.index("-m") + 1 :]
        if module == "offloadtrain":
            return of_command_line(rest)
        return "" if importlib.util.find_spec(module) else f"no module {module}"
    scripts = [word for word in words if word.endswith(".py")]
    own = [script for script in scripts if "/" in script]
    return next((f"no file {one}" for one in own if not (ROOT / one).exists()), "")


def of_make(words: list[str]) -> str:
    makefile = (ROOT / "Makefile").read_text()
    targets = [word for word in words if "=" not in word]
    missing = (one for one in targets if not re.search(rf"^{one}:", makefile, re.MULTILINE))
    return next((f"no target {one}" for one in missing), "")


def of_docker(words: list[str]) -> str:
    """The image's command: ours, or pytest's with a folder of tests."""
    if words[0] == "build":
        return "" if (ROOT / "Dockerfile").exists() else "no Dockerfile"
    command = words[words.index("offloadtrain") + 1 :]
    if "--entrypoint" in words:
        folders = [word for word in command if "/" in word]
        return next((f"no folder {one}" for one in folders if not (ROOT / one).is_dir()), "")
    return of_command_line(command)


def of_pip(words: list[str]) -> str:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = re.findall(r"\[([\w,]+)\]", " ".join(words))
    asked = [extra for one in named for extra in one.split(",")]
    return next((f"no extra {one}" for one in asked if one not in extras), "")


def of_source(source: str) -> str:
    """Whether it compiles, and imports what is there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("offloadtrain"):
            module = importlib.import_module(node.module or "")
            for name in node.names:
                if not hasattr(module, name.name):
                    return f"{node.module} has no {name.name}"
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "ot":
            if not hasattr(importlib.import_module("offloadtrain"), node.attr):
                return f"offloadtrain has no {node.attr}"
    return ""


def of_job(text: str) -> str:
    """Whether a part of a job, or the monitor's settings, names keys that there are."""
    job: Config = load(ROOT / "examples/gpt_13b_32gb.toml")
    known = {name: set(table) for name, table in as_tables(job).items() if isinstance(table, dict)}
    known["model"] |= set(HF_KEYS) | {"size"}
    found = tomllib.loads(text)
    if "keys" in found:
        settings = {field.name for field in fields(Settings)}
        return "" if found.keys() <= settings else f"no setting {found.keys() - settings}"
    for name, table in found.items():
        if isinstance(table, dict) and (wrong := set(table) - known.get(name, set())):
            return f"[{name}] has no {sorted(wrong)}"
    return ""


CHECKS: dict[str, Callable[[str], list[str]]] = {
    "sh": lambda text: [f"{words}: {problem(words)}" for words in commands(text) if problem(words)],
    "python": lambda text: [of_source(text)],
    "toml": lambda text: [of_job(text)],
    **dict.fromkeys(SHOWN, lambda text: []),
}


def test_every_command_and_job_of_every_page() -> None:
    assert len(BLOCKS) > 70
    found = [
        (block.page, one)
        for block in BLOCKS
        if block.language != "python"
        for one in CHECKS[block.language](block.text)
    ]
    assert [one for one in found if one[1]] == []


@pytest.mark.slow
def test_the_python_of_every_page() -> None:
    """Its imports take seconds."""
    sources = [block for block in BLOCKS if block.language == "python"]
    assert len(sources) > 10
    assert [block.page for block in sources if of_source(block.text)] == []


def test_what_is_not_there_is_seen() -> None:
    wrong = (
        "offloadtrain plan JOB --no-such-flag",
        "offloadtrain nothing",
        "python -m benchmarks.nothing",
        "python examples/nothing.py",
        "make nothing",
        "pip install 'offloadtrain[nothing]'",
        "torchrun --nnodes 2 -m offloadtrain trian my.toml",
        "docker run --gpus all offloadtrain trian demo",
        "docker run --entrypoint pytest offloadtrain tests/nothing",
    )
    assert all(list(map(problem, commands(line))) != [""] for line in wrong)


def test_sources_and_jobs_that_are_wrong_are_seen() -> None:
    assert of_source("import offloadtrain as ot\not.nothing()") != ""
    assert of_source("from offloadtrain.optim import Nothing") != ""
    assert of_job("[train]\nnothing = 1") != "" == of_job("[train]\nsteps = 1")
