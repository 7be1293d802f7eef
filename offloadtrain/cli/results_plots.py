"""Results files as SVG. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offloadtrain.cli.results_tables import NOTHING, ResultsError, ResultsFile, Steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW_INCHES = 0.36
_WIDTH_INCHES = 9.0


def plot(files: Sequence[ResultsFile], folder: Path) -> list[Path]:
    """Write the plots with data: ratios.svg, rates.svg, exposed.svg.

    Raises:
        ResultsError: matplotlib is not installed, or nothing was measured.
    """
    if not files:
        raise ResultsError(f"--plot {folder}: {NOTHING}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ResultsError(
            f"--plot {folder} needs matplotlib: pip install 'offloadtrain[plots]'"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    plots = (_ratios, _rates, _exposed)
    return [path for draw in plots if (path := draw(files, folder)) is not None]


def _ratios(files: Sequence[ResultsFile], folder: Path) -> Path | None:
    """Plot bars of each system's rate over the rate of the resident run."""
    bars = [
        (f"{file.device}\n{result.name}", ratio)
        for file in files
        for result in file.steps
        if (ratio := file.rate_over_resident(result)) is not None
    ]

    def draw(axes: Axes) -> None:
        names, ratios = zip(*bars, strict=True)
        axes.barh(range(len(bars)), ratios)
        axes.set_yticks(range(len(bars)), names, fontsize=7)
        axes.margins(x=0.1)
        axes.axvline(1.0, color="black", linewidth=0.8)
        for number, ratio in enumerate(ratios):
            axes.text(ratio, number, f" {ratio:.2f}", va="center", fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("tokens per second over those of the resident run")

    return _write(draw, bars, folder / "ratios.svg", 1.2 * len(bars))


def _rates(files: Sequence[ResultsFile], folder: Path) -> Path | None:
    """Plot tokens per second over tokens per step, by model, length, format and mode."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for file, result in _offloaded(files):
        key = [
            str(result.spec["size"]),
            f"seq {result.spec['seq_len']}",
            result.option("state", "fp32"),
        ]
        key += [result.option("update", "exact"), result.option("working", "device")]
        name = " ".join([file.device, *key])
        lines.setdefault(name, []).append((result.tokens, result.figures["tokens_per_s"]))

    def draw(axes: Axes) -> None:
        for name, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens per step")
        axes.set_ylabel("tokens per second")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=6)

    return _write(draw, lines, folder / "rates.svg", 14)


def _exposed(files: Sequence[ResultsFile], folder: Path) -> Path | None:
    """Plot stacked bars of the exposed share of a step, by lane."""
    steps = [
        (file, result) for file, result in _offloaded(files) if "exposed_by_lane" in result.figures
    ]
    lanes = list(
        dict.fromkeys(lane for _, result in steps for lane in result.figures["exposed_by_lane"])
    )

    def draw(axes: Axes) -> None:
        below = [0.0] * len(steps)
        for lane in lanes:
            shares = [
                result.figures["exposed_by_lane"].get(lane, 0.0) / result.figures["step_s"] / 10
                for _, result in steps
            ]
            axes.barh(range(len(steps)), shares, left=below, label=lane)
            below = [left + share for left, share in zip(below, shares, strict=True)]
        names = [
            f"{file.device}: {result.name.removeprefix('offloadtrain ')}" for file, result in steps
        ]
        axes.set_yticks(range(len(steps)), names, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("percent of the step in which compute waited")
        axes.legend(fontsize=8)

    return _write(draw, steps, folder / "exposed.svg", len(steps))


def _offloaded(files: Sequence[ResultsFile]) -> Iterable[tuple[ResultsFile, Steps]]:
    return (
        (file, result) for file in files for result in file.steps if result.system == "offloadtrain"
    )


def _write(
    draw: Callable[[Axes], None], shown: Iterable[object], path: Path, rows: float
) -> Path | None:
    """Return None if there is nothing to show. `rows`: rows of text to leave space for."""
    from matplotlib.figure import Figure

    if not list(shown):
        return None
    figure = Figure(figsize=(_WIDTH_INCHES, 1.2 + _ROW_INCHES * rows), layout="constrained")
    draw(figure.add_subplot())
    figure.savefig(path)
    return path
