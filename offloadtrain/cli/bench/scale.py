"""Scaling of a step with ranks: `offloadtrain bench scale`.

Two measurements with the same work per rank (weak scaling); the ideal is the same step time on any
number of ranks:
* *paced* ([Note: Paced lanes] in `bench.step`): real processes, real Gloo collectives, and a fixed
  time for every operation: copies and Adam take 1/N of their time alone, collectives (N-1)/N of
  theirs. The remainder is the engine's overhead and waits between ranks.
* *demo*: the demo model on the available devices, one rank each; on a CPU one thread each.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from offloadtrain.cli.bench.rounds import Row
from offloadtrain.cli.bench.step import (
    MILLISECONDS,
    median_step_s,
    paced_step_s,
    spec_of_layers,
)
from offloadtrain.config.model_shape import SIZES
from offloadtrain.engine import offload
from offloadtrain.model.transformer import Transformer
from offloadtrain.optim import AdamW
from offloadtrain.runtime.rendezvous import join_through
from offloadtrain.step.program.operations import Kind
from offloadtrain.step.proof.simulate import steady

CASES: dict[str, dict[str, Any]] = {
    "paced, exact": {"clip_norm": 1.0},
    "paced, speculative": {"update": "speculative", "clip_norm": 1e9},
    "paced, stage 3 from the host": {"clip_norm": 1.0, "working": "host"},
    "demo": {"clip_norm": 1.0},
}
HOST_NORM_MS = 1.0
"""Time of the norm of a block's gradient on the host; a single rank computes it on the device."""

SHARED = (Kind.GRAD_DOWN, Kind.WEIGHTS_UP, Kind.LOAD, Kind.ADAM, Kind.NORM, Kind.PUBLISH)
"""Operations whose time is divided by the number of ranks."""
COLLECTIVE_MS = 4.0
"""Time of a block's collective if a rank sent all of it; it sends (N-1)/N."""
BATCH, LENGTH = 4, 128


def run(
    counts: Sequence[int], *, layers: int, steps: int, rounds: int, say: Callable[[str], None]
) -> list[Row]:
    """Run every case on every number of ranks, alternating; `counts` must begin with 1.

    Returns:
        One row per case and number of `ranks`: `step_ms`, the median over rounds of the slowest
        rank's median step; `efficiency`, the step of one rank over this one; `predicted`, the
        efficiency of the simulated schedule with free launches, None if operations are not paced.
    """
    step_times: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds):
        for count in counts:
            say(f"round {number + 1} of {rounds}, {count} ranks")
            for case, step_ms in _measured(count, layers, steps).items():
                step_times.setdefault((case, count), []).append(step_ms)
    return [_row(case, count, step_times, layers) for case in CASES for count in counts]


def table(rows: Sequence[Row]) -> str:
    """Return all rows as a text table."""
    lines = [
        f"{row['case']:30} {row['ranks']:5}  {row['step_ms']:8.1f} ms  {row['efficiency']:10.3f}  "
        + ("-" if row["predicted"] is None else f"{row['predicted']:.3f}")
        for row in rows
    ]
    return "\n".join([f"{'case':30} {'ranks':>5}  {'step':>11}  efficiency  predicted", *lines])


def predicted(case: str, count: int, layers: int) -> float | None:
    """Return the efficiency of the simulated schedule with the paced times; None for "demo"."""
    if case == "demo":
        return None

    def scheduled_s(ranks: int) -> float:
        spec = spec_of_layers(layers, ranks, **CASES[case])
        return steady(spec, lambda op: _pace(op.kind, ranks) / 1e3).seconds

    return scheduled_s(1) / scheduled_s(count)


def _pace(kind: Kind, count: int) -> float:
    """Return the paced time of an operation in milliseconds."""
    if kind in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER):
        return COLLECTIVE_MS * (count - 1) / count
    if kind is Kind.NORM and count > 1:
        return HOST_NORM_MS / count
    return MILLISECONDS.get(kind, 0.0) / (count if kind in SHARED else 1)


def _row(case: str, count: int, step_times: dict[tuple[str, int], list[float]], layers: int) -> Row:
    alone, here = step_times[case, 1], step_times[case, count]
    ratios = [single / scaled for single, scaled in zip(alone, here, strict=True)]
    return {
        "case": case,
        "ranks": count,
        "step_ms": statistics.median(here),
        "efficiency": statistics.median(ratios),
        "predicted": predicted(case, count, layers),
    }


def _measured(count: int, layers: int, steps: int) -> dict[str, float]:
    """Return case → median step of the slowest rank, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (count, folder, layers, steps)
        multiprocessing.spawn(_rank, args=arguments, nprocs=count)  # type: ignore
        of_ranks = [torch.load(path, weights_only=True) for path in Path(folder).glob("medians*")]
    return {case: max(medians[case] for medians in of_ranks) for case in CASES}


def _rank(rank: int, count: int, folder: str, layers: int, steps: int) -> None:
    on_gpu = torch.cuda.is_available()
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    join_through(Path(folder, "store"), rank, count, on_gpu=on_gpu)
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    medians = {
        case: _demo(options, device, steps)
        if case == "demo"
        else paced_step_s(layers, steps, lambda kind: _pace(kind, count), **options)
        for case, options in CASES.items()
    }
    torch.save(
        {case: 1e3 * median_s for case, median_s in medians.items()}, Path(folder, f"medians{rank}")
    )


def _demo(options: dict[str, Any], device: torch.device, steps: int) -> float:
    shape = SIZES["demo"]
    model = Transformer(shape)
    optimizer = offload(model, AdamW(), device=device, precision="fp32", **options)
    tokens_BT = torch.randint(shape.vocab_size, (BATCH, LENGTH), device=device)
    try:
        return median_step_s(optimizer, lambda: model(tokens_BT, tokens_BT), steps)
    finally:
        optimizer.close()
