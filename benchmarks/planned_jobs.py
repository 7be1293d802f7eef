"""Measured steps beside the plans of their jobs, each as a user gets it: `plan.make` of a job and a
shipped machine.

`benchmarks.validate_plan` prints them. Measured cells are the results files of `benchmarks.gpu`:
the engine's own steps, and plain torch loops as jobs whose state is on the GPU. Published cells are
the throughputs of calibration.json and check_cells.json whose program a job can be: eager or
compiled, with FlashAttention-2, in bf16, all state on the GPUs. Their code is not ours, and they
wait for collectives that the engine hides.

One constant of a plan is fitted to measured cells: `device_time.STRIDED`, shared by all cards. What
is printed as left out is planned with the constant fitted to the other cells.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import calibration
from benchmarks.gpu.planned import job_of
from benchmarks.gpu.spec import Spec
from offloadtrain.config.job import OFFLOAD, Config
from offloadtrain.config.ranks_options import RanksConfig
from offloadtrain.config.sections import DataConfig, TrainConfig
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan.costs import costs
from offloadtrain.plan.costs.device_time import STRIDED, half_width
from offloadtrain.plan.plan import make
from offloadtrain.runtime.detect_machine import nearest

RESULTS = Path(__file__).with_name("results")
VALUES = tuple(1 + n / 2 for n in range(7))
"""Of `STRIDED`, among which the fit chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A measured or published throughput with its job.

    Attributes:
        machine: name of the machine file.
        right_guesses: share of them, in mode "speculative".
        published: tokens per second of all ranks, as are planned ones.
    """

    name: str
    card: str
    machine: str
    target: Machine
    job: Config
    published: float
    ranks: int = 1
    right_guesses: float = 1.0

    def planned(self, strided: float = STRIDED, machine: Machine | None = None) -> float:
        """Return tokens per second of the plan; `machine`: another than the shipped one."""
        with patch.object(costs, "KERNELS", replace(costs.KERNELS, strided=strided)):
            plan = make(self.job, self.machine, machine or self.target, self.ranks)
            step = plan.prediction
        wrong_s = step.seconds if step.none_right_s is None else step.none_right_s
        mixed_s = self.right_guesses * step.seconds + (1 - self.right_guesses) * wrong_s
        return step.tokens_per_s * step.seconds / mixed_s

    def error(self, strided: float = STRIDED, machine: Machine | None = None) -> float:
        return self.planned(strided, machine) / self.published - 1


# ── cells ──


def measured() -> list[tuple[Cell, Machine]]:
    """Return the engine's steps and the resident ones of every results file of a GPU, each with the
    rates that were measured with it. Names of steps that were measured before end with "again"."""
    cells: list[tuple[Cell, Machine]] = []
    for path in sorted(RESULTS.glob("nvidia-*.json")):
        values = json.loads(path.read_text(encoding="utf-8"))
        rates = Machine(**values["measurements"]["machine"]["machine"])
        width = half_width(rates.bf16_tflops, rates.hbm_gbps)  # as `doctor` has it since
        rates = replace(rates, half_width=max(rates.half_width, width))
        for result in values["measurements"].values():
            spec = result.get("spec", {})
            if spec.get("system") in ("offloadtrain", "resident") and "figures" in result:
                cell = _measured_cell(spec, result["figures"], rates)
                if key_of(cell) in {key_of(earlier) for earlier, _ in cells}:
                    cell = replace(cell, name=f"{cell.name} again")
                cells.append((cell, replace(rates, gpu_memory=cell.target.gpu_memory)))
    return cells


def _measured_cell(values: dict[str, Any], figures: dict[str, Any], rates: Machine) -> Cell:
    spec = Spec(**{key: value for key, value in values.items() if key != "custom"})
    machine, name = nearest(rates.gpu, rates.cores), spec.name
    target = find(machine)[1]
    if spec.gpu_memory:
        target = replace(target, gpu_memory=str(spec.gpu_memory))
    if spec.system == "resident":
        spec = replace(spec, options=spec.options | {"state_on": "device"})
    return Cell(
        name=name,
        card=machine.partition("_")[0],
        machine=machine,
        target=target,
        job=job_of(spec),
        published=figures["tokens_per_s"],
        right_guesses=figures.get("right_guesses") or 0.0,
    )


def published() -> list[Cell]:
    """Return the published throughputs whose program a job of ours can be."""
    cells = calibration.load() + calibration.load(calibration.CHECKS)
    return [_published_cell(cell) for cell in cells if _is_a_job(cell)]


def _is_a_job(cell: calibration.Cell) -> bool:
    kernels, shape = cell.kernels, cell.shape
    usual = kernels.level != "fused" and kernels.attention == "flash" and kernels.flash == 2
    is_of_one_gpu = kernels.split == 1 and not cell.replicated and cell.measure == "tokens_per_s"
    trained = shape.vocab_size > 1000 and not shape.dropout and not kernels.autocast
    return usual and is_of_one_gpu and trained and cell.precision == "bf16" and not cell.host_bound


def _published_cell(cell: calibration.Cell) -> Cell:
    layers, steps = cell.shape.num_layers, cell.micro_steps
    options: dict[str, Any] = {
        "precision": cell.precision,
        "activation": "recompute" if cell.recompute else "keep",
        "state_on": "device",
        "compile_blocks": cell.kernels.level == "compiled",
    }
    if 0 < cell.recompute < 1:
        options["recompute_blocks"] = round(cell.recompute * layers)
    if steps > 1:
        options["sums_on"] = "device"
    ranks = cell.gpus if cell.sharded else 1  # DDP's all-reduce is hidden
    if ranks > 1:
        options["zero_stage"] = 3
    job = Config(
        name=cell.cell,
        model=cell.shape,
        data=DataConfig(train="-", seq_len=cell.seq_len),
        offload=OFFLOAD.replace(**options),
        ranks=RanksConfig(shard=cell.shard),
        train=TrainConfig(steps=1, micro_batch=cell.micro_batch, grad_accum_steps=steps * ranks),
    )
    return Cell(
        name=cell.cell,
        card=cell.card,
        machine=cell.card,
        target=cell.machine,
        job=job,
        published=cell.published * ranks,
        ranks=ranks,
    )


# ── the fit ──


def fitted(errors: Mapping[str, Mapping[float, float]], names: Sequence[str]) -> float:
    """Return the value of `STRIDED` with the least squares of log(planned / measured) over cells.

    Args:
        errors: cell → value → error.
        names: of the cells to fit to.
    """
    return min(
        VALUES,
        key=lambda value: sum(log(1 + errors[name][value]) ** 2 for name in names),
    )


def errors_by_value(cells: Sequence[Cell]) -> dict[str, dict[float, float]]:
    """Return cell → value of `STRIDED` → error; a cell is its card and name."""
    table = {}
    for cell in cells:
        depends = (
            cell.job.model.positions == "rotary" and not cell.job.offload.compute.compile_blocks
        )
        values = VALUES if depends else VALUES[:1]
        errors = {value: cell.error(value) for value in values}
        table[key_of(cell)] = errors if depends else dict.fromkeys(VALUES, errors[VALUES[0]])
    return table


def key_of(cell: Cell) -> str:
    return f"{cell.card} {cell.name}"


# ── printing ──


def lines() -> Iterator[str]:
    """Print every cell, and what the errors are if it, or its card, is left out of the fit."""
    cells = measured()
    errors = errors_by_value([cell for cell, _ in cells])
    cards = {key_of(cell): cell.card for cell, _ in cells}
    yield "Measured steps as jobs: tokens/s planned with the shipped machine, measured, error; the"
    yield "error with the cell, with its card left out of the fit; with the rates measured that day"
    columns: list[list[float]] = [[], [], [], []]
    for cell, rates in cells:
        key = key_of(cell)
        other_keys = [name for name in errors if name != key]
        other_cards = [name for name in errors if cards[name] != cell.card]
        row = (
            cell.error(),
            errors[key][fitted(errors, other_keys)],
            errors[key][fitted(errors, other_cards)],
            cell.error(machine=rates),
        )
        for column, error in zip(columns, row, strict=True):
            column.append(error)
        shown = "".join(f"{100 * error:>+8.1f}" for error in row)
        rate = cell.published * (1 + row[0])
        yield f"  {cell.card:<6}{_short(cell.name):<58}{rate:>8.0f}{cell.published:>8.0f}{shown} %"
    yield f"  fitted to all of them: {fitted(errors, list(errors)):g}; planned with {STRIDED:g}"
    heads = ("planned", "cell left out", "card left out", "rates of that day")
    for head, column in zip(heads, columns, strict=True):
        yield _summary(head, column)
    yield ""
    yield "Published throughputs as jobs of ours, nothing fitted to their plans: tokens/s, error"
    cells_with_errors = [(cell, cell.error()) for cell in published()]
    for cell, error in cells_with_errors:
        rate = cell.published * (1 + error)
        yield (
            f"  {cell.card:<9}{cell.name:<38}{cell.ranks:>4} GPUs{rate:>9.0f}"
            f"{cell.published:>9.0f}{100 * error:>+8.1f} %"
        )
    yield _summary("all", [error for _, error in cells_with_errors])
    yield ""


def _short(name: str) -> str:
    return name.replace("offloadtrain ", "").replace(" bf16", "")


def _summary(what: str, errors: Sequence[float]) -> str:
    median = statistics.median(map(abs, errors))
    worst = max(errors, key=abs)
    return (
        f"  {what:<20}{len(errors):>3} cells  median {100 * median:4.1f} %, largest "
        f"{100 * worst:+.1f} %"
    )
