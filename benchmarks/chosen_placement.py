"""What a job chooses by itself against the best of a grid, for drawn cells; all of it is planned.

    python -m benchmarks.chosen_placement --seed 0 --cells 20 --results cells.jsonl

A call with a file of results goes on after the last cell in it.

A cell is a Llama shape, a machine with one GPU, a state format, a microbatch and a number of them.
`chosen` is its plan with everything "auto" that changes no bit: placement, recomputed layers, share
of the state on the GPU, sums and update mode. `best` is the fastest plan that fits of a grid over
the same keys. `loop` is the chosen plan with the share that `offload(state_on="auto")` would move:
what the GPU has room for, by the peak that the plan expects and the reserve of `engine.promotion`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.config.job import Config, load
from offloadtrain.engine.promotion import reserve_bytes
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan.automatic import with_state_on
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.search.suggest import settled
from offloadtrain.step.layout.buffer_table import device_bytes
from offloadtrain.step.layout.state_tiers import device_share, filled

JOB = Path(__file__).parent.parent / "offloadtrain" / "cli" / "jobs" / "llama_1b.toml"
MACHINES = ("rtx3090", "rtx4090", "rtx5090", "l40s", "a100_40gb", "a100_80gb", "h100", "h200")
SIZES = ("llama-1.3b", "llama-3b", "llama-7b")
AUTO = (
    *("device.placement=auto", "offload.recompute_blocks=auto", "offload.activation=recompute"),
    *("offload.state_on=auto", "offload.sums_on=auto", "offload.update=auto"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A job that leaves its placement open."""

    size: str
    machine: str
    state: str
    micro_batch: int
    accum: int

    @classmethod
    def drawn(cls, draw: random.Random) -> Cell:
        state = draw.choice(("fp32", "split16", "int8"))
        batch = draw.choice((1, 2, 4, 8, 16)), draw.choice((1, 1, 2, 4))
        return cls(draw.choice(SIZES), draw.choice(MACHINES), state, *batch)

    def job(self, *keys: str) -> Config:
        cell_keys = (
            *(f"model.size={self.size}", f"offload.state={self.state}"),
            *(f"train.micro_batch={self.micro_batch}", f"train.grad_accum_steps={self.accum}"),
        )
        return load(JOB, ["train.global_batch_tokens=0", *cell_keys, *keys])

    @property
    def target(self) -> tuple[str, Machine]:
        return self.machine, replace(find(self.machine)[1], gpus=1)


def rate(plan: Plan | None) -> float:
    """Return tokens per second; 0 without a plan."""
    return 0.0 if plan is None else plan.prediction.tokens_per_s


def planned(cell: Cell, *keys: str) -> Plan | None:
    """Return the plan of a cell's job with these keys; see `plan_of`."""
    try:
        return plan_of(cell.job(*keys), cell)
    except OffloadTrainError:
        return None


def plan_of(job: Config, cell: Cell) -> Plan | None:
    """Return a job's plan; None: it does not fit, or contradicts itself."""
    try:
        plan = make(job, *cell.target)
    except (OffloadTrainError, ValueError):
        return None
    return plan if plan.fits else None


def grid(cell: Cell) -> list[Plan]:
    """Return the plans that fit; speculative ones with the keys of the three fastest others."""
    layers = cell.job().model.num_layers
    counted = [f"recompute_blocks={count}" for count in (layers, layers // 2)]
    activations: list[tuple[str, ...]] = [("activation=keep",), ("activation=selective",)]
    activations += [(f"activation={kind}", n) for kind in ("recompute", "offload") for n in counted]
    sums = ("host", "device") if cell.accum > 1 else ("host",)
    plans: list[Plan] = []
    for tier, activation, where in product(("device", "host"), activations, sums):
        keys = [f"working={tier}", f"sums_on={where}", *activation]
        if (on_host := planned(cell, *(f"offload.{key}" for key in keys))) is not None:
            plans += with_shares(on_host, cell)
    for exact in sorted(plans, key=rate)[-3:]:
        job = replace(exact.job, offload=exact.job.offload.replace(update="speculative"))
        plans += filter(None, [plan_of(job, cell)])
    return plans


def with_shares(on_host: Plan, cell: Cell) -> Iterator[Plan]:
    """Yield the plan with no state on the GPU, with half of what fits there, and with all."""
    yield on_host
    most = on_host.share_that_fits
    for share in (most / 2, most) if most else ():
        if (plan := plan_of(with_state_on(on_host.job, round(share, 4)), cell)) is not None:
            yield plan


def chosen(cell: Cell) -> Plan | None:
    """Return the plan with every key decided."""
    try:
        return plan_of(settled(cell.job(*AUTO), *cell.target, 1), cell)
    except OffloadTrainError:
        return None


def in_a_loop(plan: Plan, cell: Cell) -> Plan | None:
    """Return the plan with the share that a loop's engine would move."""
    on_host = plan_of(with_state_on(plan.job, 0.0), cell)
    if on_host is None:
        return None
    total = on_host.machine.gpu_memory_bytes
    used = sum(on_host.device.values()) + on_host.machine.gpu_reserved_bytes
    room = total - used - reserve_bytes(total)
    spec = on_host.placed.spec
    share = device_share(filled(spec, device_bytes(spec) + room, device_bytes))
    return plan_of(with_state_on(plan.job, share), cell)


Row = tuple[float, float, float, str]


def row(cell: Cell) -> Row:
    """Return the rates of `chosen`, `best` and `loop`, and the keys of the best."""
    by_itself = chosen(cell)
    best = max(grid(cell), key=rate, default=None)
    loop = None if by_itself is None else in_a_loop(by_itself, cell)
    keys = "" if best is None else ", ".join(text(best.job.offload.options(changed=True)))
    return rate(by_itself), rate(best), rate(loop), keys


KEYS = ("working", "activation", "recompute_blocks", "state_on", "sums_on", "update")


def text(options: dict[str, Any]) -> list[str]:
    return [f"{key} = {options[key]}" for key in KEYS if key in options]


def rows(draw: random.Random, results: Path | None) -> Iterator[tuple[Cell, Row]]:
    """Yield cells and their rows, without end; those that the file has are not planned again."""
    lines = results.read_text(encoding="utf-8").splitlines() if results and results.exists() else []
    saved: dict[str, Row] = dict(map(json.loads, lines))
    while True:
        cell = Cell.drawn(draw)
        if str(cell) not in saved:
            saved[str(cell)] = row(cell)
            if results:
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([str(cell), saved[str(cell)]]) + "\n")
        yield cell, saved[str(cell)]


def main() -> None:
    """Print the table, and how many cells are within 5 %."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cells", type=int, default=20, help="with a placement that fits")
    parser.add_argument("--results", type=Path, help="JSON lines, one per cell")
    arguments = parser.parse_args()
    near, done = [0, 0], 0
    drawn = rows(random.Random(arguments.seed), arguments.results)
    print("| cell | chosen | loop | best of the grid | its keys |")
    print("|---|---|---|---|---|")
    while done < arguments.cells:
        cell, (by_itself, best, loop, keys) = next(drawn)
        if not best:
            continue
        done += 1
        shares = [value / best for value in (by_itself, loop)]
        near = [count + (share >= 0.95) for count, share in zip(near, shares, strict=True)]
        named = f"{cell.size}, {cell.machine}, {cell.state}, {cell.micro_batch} x {cell.accum}"
        of_best = " | ".join(f"{100 * share:.1f} %" for share in shares)
        print(f"| {named} | {of_best} | {best:,.0f} tokens/s | {keys} |", flush=True)
    print(f"\nWithin 5 % of the best: chosen {near[0]}, loop {near[1]} of {done} cells.")


if __name__ == "__main__":
    main()
