"""Every architecture in every placement, as a table.

    python -m benchmarks.architectures
    python -m benchmarks.architectures --only llama t5 --cells fp32 host --steps 4 --json found.json
    python -m benchmarks.architectures --json found.json --resume   # without the rows it has

What each cell holds and must show: docs/architectures.md. Exit status 1: a cell failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from offloadtrain.hardware.telemetry import probe

if TYPE_CHECKING:
    from benchmarks.architectures.cells import Cell

STEPS, LONGEST_REASON = 12, 400


def main(argv: list[str] | None = None) -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all is built here; nothing is to be fetched
    try:
        import diffusers  # noqa: F401  # missing is said before anything is trained
        import transformers

        from benchmarks.architectures.cells import CELLS, Case, Cell
        from benchmarks.architectures.models import ARCHITECTURES
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "diffusers"):
            raise
        return _fail(f"{error.name} is not installed: pip install -c constraints.txt -e '.[hf]'")
    transformers.logging.set_verbosity_error()  # it remarks on small shapes and missing kernels
    torch.set_num_threads(1)  # small shapes gain nothing
    asked = _parse(argv, list(ARCHITECTURES), list(CELLS))
    columns = asked.cells
    print(f"| architecture | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}", flush=True)
    cells = _known(asked, Cell) if asked.resume else []
    for name in asked.only:
        row = [cell for cell in cells if cell.architecture == name]
        if not row:
            architecture = ARCHITECTURES[name]
            if asked.defaults:
                architecture = replace(architecture, options={})
            case = Case(name, asked.steps, architecture)
            row = [case.fill(cell) for cell in columns]
            cells += row
        print(f"| {name} | {' | '.join(map(_shown, row))} |", flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(_record(cells, asked), indent=1) + "\n")
    shown = [cell for cell in cells if cell.architecture in asked.only]
    _explain(shown)
    return 0 if all(cell.passed for cell in shown) else 1


def _parse(argv: list[str] | None, names: list[str], cells: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--cells", nargs="+", choices=cells, default=cells, metavar="CELL")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps, {STEPS}")
    parser.add_argument(
        "--defaults", action="store_true", help="without the options that docs name for a row"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    parser.add_argument(
        "--resume", action="store_true", help="take the rows that FILE has from there"
    )
    asked = parser.parse_args(argv)
    if asked.steps < 1:
        parser.error(f"--steps {asked.steps}: at least one step must be trained")
    if asked.resume:
        _check_resume(parser, asked)
    return asked


def _check_resume(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    if asked.json is None:
        parser.error("--resume needs --json FILE: the rows are taken from there")
    if asked.json.exists():
        there, now = json.loads(asked.json.read_text())["run"], _run(asked)
        for key in (key for key in now if there.get(key) != now[key]):
            parser.error(f"--resume: {asked.json} has {key} {there.get(key)}; asked is {now[key]}")


def _known(asked: argparse.Namespace, made: type[Cell]) -> list[Cell]:
    """Return the cells of the record of a run that ended early."""
    if not asked.json.exists():
        return []
    return [made(**cell) for cell in json.loads(asked.json.read_text())["cells"]]


def _shown(cell: Cell) -> str:
    return cell.shown if cell.passed else f"**{cell.shown}**"


def _explain(cells: list[Cell]) -> None:
    """Below the table: how many passed, and why the others did not."""
    failed = [cell for cell in cells if not cell.passed]
    refused = [cell for cell in cells if cell.passed and cell.why]
    passed = len(cells) - len(failed)
    print(f"\n{passed} of {len(cells)} cells pass, {len(refused)} of them refused.")
    for cell in [*refused, *failed]:
        why = " ".join(cell.why.split())
        print(f"{cell.architecture} {cell.cell}: {cell.shown}: {why[:LONGEST_REASON]}")


def _record(cells: list[Cell], asked: argparse.Namespace) -> dict[str, object]:
    return {"run": _run(asked), "cells": [asdict(cell) for cell in cells]}


def _run(asked: argparse.Namespace) -> dict[str, object]:
    """What rows of one table have in common."""
    packages = ("torch", "transformers", "diffusers", "offloadtrain")
    return {
        "machine": {"cpu": probe().cpu, "system": platform.platform()},
        "versions": {name: version(name) for name in packages},
        "steps": asked.steps,
        "defaults": asked.defaults,
        "columns": list(asked.cells),
    }


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
