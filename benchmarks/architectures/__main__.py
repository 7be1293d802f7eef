"""Every architecture in every placement, as a table.

    python -m benchmarks.architectures
    python -m benchmarks.architectures --only llama t5 --cells fp32 host --steps 4 --json found.json

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

        from benchmarks.architectures.cells import CELLS, Case
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
    cells: list[Cell] = []
    for name in asked.only:
        architecture = ARCHITECTURES[name]
        if asked.defaults:
            architecture = replace(architecture, options={})
        case = Case(name, asked.steps, architecture)
        row = [case.fill(cell) for cell in columns]
        print(f"| {name} | {' | '.join(map(_shown, row))} |", flush=True)
        cells += row
    _explain(cells)
    if asked.json:
        asked.json.write_text(json.dumps(_record(cells, asked.steps), indent=1) + "\n")
    return 0 if all(cell.passed for cell in cells) else 1


def _parse(argv: list[str] | None, names: list[str], cells: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--cells", nargs="+", choices=cells, default=cells, metavar="CELL")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps, {STEPS}")
    parser.add_argument(
        "--defaults", action="store_true", help="without the options that docs name for a row"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    asked = parser.parse_args(argv)
    if asked.steps < 1:
        parser.error(f"--steps {asked.steps}: at least one step must be trained")
    return asked


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


def _record(cells: list[Cell], steps: int) -> dict[str, object]:
    packages = ("torch", "transformers", "diffusers", "offloadtrain")
    return {
        "machine": {"cpu": probe().cpu, "system": platform.platform()},
        "versions": {name: version(name) for name in packages},
        "steps": steps,
        "cells": [asdict(cell) for cell in cells],
    }


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
