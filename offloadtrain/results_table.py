"""Results files of `python -m benchmarks.gpu` as the README's table and a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offloadtrain.errors import OffloadTrainError
from offloadtrain.units import format_bytes, format_count

SCHEMA = 1
NOTHING = "Nothing has been measured on a GPU yet."
_HEAD = "| device | what | step | tokens/s | MFU | x resident | exposed | device | file |"


class ResultsError(OffloadTrainError):
    """A results file that cannot be read."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement of steps.

    Attributes:
        x_resident: its step over the resident one of the same model and batch, of the same file.
        file: where it is from.
    """

    device: str
    name: str
    figures: dict[str, Any]
    exposed_ms: float | None
    x_resident: float | None
    file: str


def read(folder: Path) -> list[Cell]:
    """All steps measured on GPUs, in the order of files and measurements.

    Raises:
        ResultsError: a file of ours that is no JSON.
    """
    cells: list[Cell] = []
    for path in sorted(folder.glob("*.json")):
        values = _load(path)
        if values.get("schema") == SCHEMA and values.get("machine", {}).get("gpu"):
            cells += _cells(values, path.name)
    return cells


def table(cells: Sequence[Cell]) -> str:
    """Markdown."""
    if not cells:
        return NOTHING
    rule = "|".join(["", *["---"] * (_HEAD.count("|") - 1), ""])
    return "\n".join([_HEAD, rule, *map(_row, cells)])


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Tokens per second of every cell, as bars; SVG.

    Raises:
        ResultsError: matplotlib is not installed, or nothing was measured.
    """
    if not cells:
        raise ResultsError(f"--plot {path}: {NOTHING}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ResultsError(
            f"--plot {path} needs matplotlib: pip install 'offloadtrain[plots]'"
        ) from None
    figure = Figure(figsize=(9.0, 1.0 + 0.32 * len(cells)), layout="constrained")
    axes = figure.add_subplot()
    names = [f"{cell.device}: {cell.name}" for cell in cells]
    axes.barh(names, [cell.figures["tokens_per_s"] for cell in cells])
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second")
    figure.savefig(path)


def _load(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path}: cannot be read as results: {error}") from None
    return values if isinstance(values, dict) else {}


def _cells(values: dict[str, Any], file: str) -> Iterator[Cell]:
    measured = values.get("measurements", {})
    steps = {
        name: one for name, one in measured.items() if "tokens_per_s" in one.get("figures", {})
    }
    for name, one in steps.items():
        yield Cell(
            values["device"],
            name,
            one["figures"],
            _exposed(one),
            _over_resident(name, steps),
            file,
        )


def _exposed(one: dict[str, Any]) -> float | None:
    waits = sorted(report["exposed_ms"] for report in one.get("reports", []) if report)
    return waits[len(waits) // 2] if waits else None


def _over_resident(name: str, steps: dict[str, dict[str, Any]]) -> float | None:
    """Names are system, size, batch, precision, options: the resident one has no options."""
    twin = " ".join(["resident", *name.split(" ")[1:4]])
    if twin not in steps or twin == name:
        return None
    ratio: float = steps[name]["figures"]["step_s"] / steps[twin]["figures"]["step_s"]
    return ratio


def _row(cell: Cell) -> str:
    figures = cell.figures
    mfu = "-" if figures.get("mfu") is None else f"{100 * figures['mfu']:.1f} %"
    ratio = "-" if cell.x_resident is None else f"{cell.x_resident:.2f}"
    exposed = "-" if cell.exposed_ms is None else f"{cell.exposed_ms:.0f} ms"
    peak = figures.get("device_peak_bytes")
    parts = [
        cell.device,
        cell.name,
        f"{figures['step_s']:.3f} s",
        format_count(figures["tokens_per_s"]),
        mfu,
        ratio,
        exposed,
        "-" if peak is None else format_bytes(peak),
        f"`{cell.file}`",
    ]
    return f"| {' | '.join(parts)} |"
