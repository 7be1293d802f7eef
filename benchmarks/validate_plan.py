"""Measured and published throughputs beside the plans of their jobs, then published measurements
beside what the plan's formulas give for them, and the error.

    python -m benchmarks.validate_plan [--json | --cells FILE]

The published numbers, their sources, and which cells are not asserted and why are in
published.json of offloadtrain/plan/baselines. Exit status 1: a bound is broken. docs/validation.md
explains.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import calibration, planned_jobs
from benchmarks.papers import PUBLISHED, SOFTWARE, largest_model, run_of, tflops, trained
from offloadtrain.config.model_shape import SIZES, ModelShape
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan.baselines.published import (
    SCHEDULES,
    Pipeline,
    Run,
    Schedule,
    pipeline_row,
    step_times,
    too_large_for,
    zero_bytes,
)

GPUS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One published number. `published` keeps its digits where it must be met exactly."""

    cell: str
    planned: float
    published: float | str
    not_asserted: str

    @property
    def error(self) -> float:
        return self.planned / float(self.published) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One published table or figure.

    Attributes:
        bounds: "exact": to the printed digits; "cell" and "median": largest absolute error.
    """

    figure: str
    title: str
    source: str
    bounds: Mapping[str, Any]
    cells: tuple[Cell, ...]

    @property
    def asserted(self) -> list[Cell]:
        return [cell for cell in self.cells if not cell.not_asserted]

    @property
    def median(self) -> float:
        return statistics.median(abs(cell.error) for cell in self.asserted)

    @property
    def worst(self) -> Cell:
        return max(self.asserted, key=lambda cell: abs(cell.error))


def load(path: Path = PUBLISHED) -> tuple[list[Figure], Machine]:
    """Every published figure with its planned values, and the machine they are for."""
    data = json.loads(path.read_text(encoding="utf-8"))
    _, machine = find(data["machine"])
    figures = [
        Figure(
            figure=each["figure"],
            title=each["title"],
            source=each["source"],
            bounds=each["bounds"],
            cells=tuple(_cell(each["measure"], cell, machine) for cell in each["cells"]),
        )
        for each in data["figures"]
    ]
    return figures, machine


def printed_as(planned: float, digits: str) -> bool:
    """Whether `digits` is `planned` at so many decimals: rounded or cut off, as ZeRO does both."""
    decimals = len(digits.partition(".")[2])
    scaled = round(planned * 10**decimals, 6)
    return round(float(digits) * 10**decimals) in (int(scaled), int(scaled + 0.5))


def broken(figure: Figure) -> Iterator[str]:
    """One line per bound that does not hold."""
    bounds = figure.bounds
    for cell in figure.asserted:
        if "exact" in bounds and not printed_as(cell.planned, str(cell.published)):
            yield f"{figure.title}: {cell.cell}: {cell.planned:.5g}, published {cell.published}"
        if abs(cell.error) > bounds.get("cell", float("inf")):
            yield f"{figure.title}: {cell.cell}: {cell.error:+.1%}, bound {bounds['cell']:.0%}"
    if figure.median > bounds.get("median", float("inf")):
        yield f"{figure.title}: median {figure.median:.1%}, bound {bounds['median']:.0%}"


def _cell(measure: str, cell: Mapping[str, Any], machine: Machine) -> Cell:
    return Cell(
        cell=cell["cell"],
        planned=_planned(measure, cell, machine),
        published=cell["published"],
        not_asserted=cell.get("not_asserted", ""),
    )


def gpipe_seconds(stages: int, micro_batches: int) -> float:
    """Return a step's time relative to one device, including the flush only."""
    return (micro_batches + stages - 1) / (micro_batches * stages)


def _planned(measure: str, cell: Mapping[str, Any], machine: Machine) -> float:
    if measure == "state_gb":
        return zero_bytes(cell["params"], cell["ranks"], cell["stage"]) / 1e9
    if measure == "gpipe_speedup":
        return gpipe_seconds(2, 1) / gpipe_seconds(cell["stages"], cell["micro_batches"])
    if measure == "mean_tflops":
        runs = (run_of({**cell, "size": size}, machine) for size in cell["sizes"])
        return statistics.mean(tflops(run, machine, SOFTWARE) for run in runs)
    run = run_of(cell, machine)
    if measure == "largest":
        return largest_model(run, machine, SOFTWARE) / 1e9
    if measure == "seconds":
        times = asdict(step_times(run, machine, SOFTWARE))
        return float(sum(times[part] for part in cell["of"]))
    if measure == "dpu_gain":
        delayed = tflops(replace(run, dpu=True), machine, SOFTWARE)
        return delayed / tflops(run, machine, SOFTWARE)
    if measure == "tflops":
        return tflops(run, machine, SOFTWARE)
    raise ValueError(f"{PUBLISHED.name}: no such measure: {measure}")


# ── printing ──


def report(figures: list[Figure], machine: Machine) -> Iterator[str]:
    yield "Calibration cells: the rates of GPUs and the constants of their time are fitted to these"
    yield ""
    yield from calibration.lines(calibration.load())
    yield "Cells of the B200: the rate of its memory is fitted to these"
    yield ""
    yield from calibration.check_lines(calibration.load(calibration.B200))
    yield ""
    yield "Check cells: nothing is fitted to these throughputs"
    yield ""
    yield from calibration.check_lines(calibration.load(calibration.CHECKS))
    yield ""
    yield "Check cells: fitted to nothing but the constants of Software (docs/validation.md)"
    yield ""
    for figure in figures:
        yield from _figure_lines(figure)
    yield from _summary_lines(figures)
    yield from _simulation_lines(trained(SIZES["gpt-10b"]), machine)
    yield from _pipeline_lines(trained(SIZES["gpt-10b"]), machine)


def _figure_lines(figure: Figure) -> Iterator[str]:
    reasons = list(dict.fromkeys(cell.not_asserted for cell in figure.cells if cell.not_asserted))
    yield f"{figure.title}"
    yield f"  {'':<32}{'planned':>9}{'published':>11}{'error':>9}"
    for cell in figure.cells:
        mark = f"  [{reasons.index(cell.not_asserted) + 1}]" if cell.not_asserted else ""
        planned = f"{cell.planned:.4g}" if cell.planned < 1000 else f"{cell.planned:.1f}"
        exact = "exact" in figure.bounds and printed_as(cell.planned, str(cell.published))
        error = "same" if exact else f"{100 * cell.error:+.1f} %"
        yield f"  {cell.cell:<32}{planned:>9}{cell.published:>11}{error:>9}{mark}"
    yield from (f"  [{n}] not asserted: {reason}" for n, reason in enumerate(reasons, 1))
    yield ""


def _summary_lines(figures: list[Figure]) -> Iterator[str]:
    yield "Asserted cells: median and largest error, in brackets the bound"
    for figure in figures:
        bounds = figure.bounds
        if "exact" in bounds:
            found = "as printed, to the digit" if not list(broken(figure)) else "NOT as printed"
        else:
            limit = f" ({bounds['median']:.0%})" if "median" in bounds else ""
            found = (
                f"{100 * figure.median:4.1f} %{limit:<6}  {100 * figure.worst.error:+5.1f} % "
                f"({bounds['cell']:.0%}): {figure.worst.cell}"
            )
        yield f"  {figure.figure:<14}{len(figure.asserted):>3} cells  {found}"
    yield ""


def _simulation_lines(shape: ModelShape, machine: Machine) -> Iterator[str]:
    """ZeRO's stages with and without offload; nothing published to compare with in most cells."""
    yield "10B, batch 10 per GPU, no model parallelism: planned TFLOPS per GPU, by GPUs"
    yield "  " + f"{'':<20}" + "".join(f"{n:>7}" for n in GPUS)
    for stage in range(4):
        for offload in (False, True):
            runs = [
                Run(shape=shape, micro_batch=10, gpus=n, stage=stage, offload=offload) for n in GPUS
            ]
            name = f"stage {stage}{', offload' if offload else ''}"
            yield f"  {name:<20}" + "".join(f"{_speed(run, machine):>7}" for run in runs)
    yield "  GPU, host: whose memory it does not fit"
    yield ""


def _speed(run: Run, machine: Machine) -> str:
    return too_large_for(run, machine, SOFTWARE) or f"{tflops(run, machine, SOFTWARE):.1f}"


def _pipeline_lines(shape: ModelShape, machine: Machine) -> Iterator[str]:
    yield "10B, 16 stages of one GPU, 32 microbatches of 10, recompute: planned, per GPU"
    yield f"  {'':<10}{'weights':>9}{'state':>9}{'activations':>13}{'bubble':>9}{'step':>9}"
    pipe = Pipeline(shape=shape, micro_batch=10, micro_batches=32, stages=16)
    rows: list[tuple[str, Schedule, int]] = [(schedule, schedule, 0) for schedule in SCHEDULES]
    for name, schedule, stage in (*rows, ("2bw, last", "2bw", pipe.stages - 1)):
        each = pipeline_row(schedule, pipe, machine, stage)
        held = (each.weights_bytes, each.state_bytes, each.activation_bytes)
        weights, state, activations = (f"{size / 1e9:.1f} GB" for size in held)
        line = f"  {name:<10}{weights:>9}{state:>9}{activations:>13}"
        stale = "  one version stale" if each.stale else ""
        yield f"{line}{100 * each.bubble:>7.0f} %{each.step_s:>7.1f} s{stale}"


def _as_json(figures: list[Figure]) -> str:
    found = [
        asdict(figure)
        | {"median": figure.median, "broken": list(broken(figure))}
        | {"cells": [asdict(cell) | {"error": cell.error} for cell in figure.cells]}
        for figure in figures
    ]
    return json.dumps({"software": asdict(SOFTWARE), "figures": found}, indent=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--cells", type=Path, help="plan other cells, in a file like calibration.json, and stop"
    )
    arguments = parser.parse_args()
    if arguments.cells:
        print("\n".join(calibration.check_lines(calibration.load(arguments.cells))))
        return 0
    figures, machine = load()
    if arguments.json:
        print(_as_json(figures))
    else:
        print("\n".join([*planned_jobs.lines(), *report(figures, machine)]))
    problems = [line for figure in figures for line in broken(figure)]
    for line in problems:
        print(f"bound broken: {line}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
