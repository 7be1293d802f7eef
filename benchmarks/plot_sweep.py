"""Plots what `offloadtrain plan JOB --sweep gpus=1,2,4 --json` prints: docs/plan.svg.

    offloadtrain plan JOB --sweep gpus=1,2,4,8 --json | python -m benchmarks.plot_sweep FILE.svg

Needs the extra "plots".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def plot(planned: Mapping[str, Any], path: str) -> None:
    """Plot Tflop/s per GPU over the number of GPUs, as SVG or PNG by the path's suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    points = [point for point in planned["points"] if not point["problem"]]
    lines: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for point in points:
        lines.setdefault((point["system"], point["stage"]), []).append(point)
    for (system, stage), line in lines.items():
        style = {"offloadtrain": "-", "resident": "--"}.get(system, ":")
        counts, rates = [p["gpus"] for p in line], [p["tflops"] for p in line]
        label = f"{system}, stage {stage}" if system in ("offloadtrain", "resident") else system
        axes.plot(counts, rates, style, marker="o", ms=3, label=label)
    title = f"{planned['job']} on {planned['machine']}"
    axes.set(xscale="log", xlabel="GPUs", ylabel="Tflop/s of each GPU", title=title)
    ticks = sorted({point["gpus"] for point in points})
    axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=3, loc="lower right")
    axes.set_ylim(bottom=0)
    figure.savefig(path)


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit(__doc__)
    plot(json.load(sys.stdin), arguments[0])


if __name__ == "__main__":
    main(sys.argv[1:])
