"""Fit of a GPU's rates to published throughputs, and its residuals.

`benchmarks.validate_plan` prints it. The cells and their sources are in calibration.json; what is
fitted to what, docs/validation.md explains. The fit minimizes the squares of log(planned /
published), a cell that is far off counting less (Huber).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from offloadtrain.config.model_shape import ModelShape, block_flops_per_token, num_params
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan.costs.device_time import Kernels, block_seconds, head_seconds

CALIBRATION = Path(__file__).with_name("calibration.json")
CHECKS = Path(__file__).with_name("check_cells.json")
B200 = Path(__file__).with_name("b200_cells.json")
"""To which one rate of one card is fitted: that of the B200's memory."""

GEFORCE_SHARE = 1.0
"""Rule for a card of GeForce without cells: the data sheet. Its tensor cores run at half their rate
with fp32 sums, so neither power nor operands limit them."""

GEFORCE = frozenset({"rtx4090"})
SHARED = ("width",)
START = {"width": 2.0}

BOUNDS = (0.05, 20.0)
HUBER = 0.1
ROUNDS, CONVERGED = 30, 1e-7

ADAM_BYTES = 28 + 12
"""Per parameter: Adam in fp32 as one kernel, and the pass over the gradients before it."""

SUM_BYTES = 6
"""Per parameter, of a microbatch's 16-bit gradient that is added to those before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One published throughput of a model that is whole on its GPUs.

    Attributes:
        measure: of one GPU, as `published`; Tflop/s count the recompute.
        recompute: forwards of the blocks in backward.
        replicated: data parallel with one all-reduce of 16-bit gradients per step, between hosts.
        sharded: ZeRO-3: the weights are gathered twice, gradients reduced.
        shard: GPUs of one host that share a copy of the state (HSDP); 0: all share one.
        update_bytes: per parameter, that an update reads and writes.
        sum_bytes: per parameter, that each microbatch of several moves for its gradient.
        half: of check cells that were divided at random: what errors in the first half showed was
            mended, the second judges it; later ones were planned as the model stood.
        batch: of check cells: those of one search, divided before any of them was planned.
        host_bound: the step takes as long with shorter sequences: the host takes longer to launch
            it than the GPU to compute it.
    """

    cell: str
    card: str
    machine: Machine
    precision: Literal["bf16", "fp16"]
    measure: Literal["tokens_per_s", "tflops"]
    kernels: Kernels
    shape: ModelShape
    seq_len: int
    micro_batch: int
    micro_steps: int
    published: float
    recompute: float = 0.0
    gpus: int = 1
    replicated: bool = False
    sharded: bool = False
    shard: int = 0
    update_bytes: float = ADAM_BYTES
    sum_bytes: float = SUM_BYTES
    half: Literal["", "study", "held out", "later"] = ""
    batch: int = 1
    host_bound: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.micro_batch * self.seq_len


@dataclass(frozen=True, slots=True)
class Residual:
    """A cell with its planned value."""

    cell: Cell
    planned: float

    @property
    def error(self) -> float:
        return self.planned / self.cell.published - 1


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted parameters.

    Attributes:
        values: card → share of the data sheet's rate that large products reach; "width":
            `half_width` over FLOPs per byte of the card.
    """

    values: Mapping[str, float]

    def machine(self, cell: Cell) -> Machine:
        """Return the cell's machine with the fitted rates; as shipped if its card has none."""
        if cell.card not in self.values:
            return cell.machine
        tflops = self.values[cell.card] * cell.machine.peak_tflops
        half_width = self.values["width"] * 1e3 * tflops / cell.machine.hbm_gbps
        return replace(cell.machine, bf16_tflops=tflops, fp16_tflops=tflops, half_width=half_width)


def load(path: Path = CALIBRATION) -> tuple[Cell, ...]:
    """Return every cell of a file."""
    series = json.loads(path.read_text(encoding="utf-8"))["series"]
    return tuple(_cell(each, cell) for each in series for cell in each["cells"])


def _cell(series: Mapping[str, Any], cell: Mapping[str, Any]) -> Cell:
    own_keys = ("cells", "source", "limits")
    common = {key: value for key, value in series.items() if key not in own_keys}
    split = cell.get("split", 1)
    own = {key: value for key, value in cell.items() if key != "split"}
    shape = ModelShape(max_seq_len=cell["seq_len"], norm="layernorm", **cell["shape"])
    merged = (
        common
        | own
        | {
            "machine": replace(find(series["machine"])[1], **series.get("limits", {})),
            "kernels": _kernels(series["kernels"], shape, split),
            "shape": shape,
        }
    )
    return Cell(**merged)


def _kernels(keys: Mapping[str, Any], shape: ModelShape, split: int) -> Kernels:
    """Return a program's kernels. An eager one pads no vocabulary, and with rotary positions it is
    a Llama, whose RMSNorm was a chain of operations, unless its keys say otherwise."""
    eager = keys["level"] == "eager"
    usual = {"norm_fp32": eager and shape.positions == "rotary", "padded_head": not eager}
    return Kernels(**{**usual, **keys}, split=split)


def planned(cell: Cell, fit: Fit) -> float:
    """Return what the cell publishes, from the fitted rates."""
    seconds = step_seconds(cell, fit)
    tokens = cell.tokens * cell.micro_steps / cell.kernels.split
    if cell.measure == "tokens_per_s":
        return tokens / seconds
    return tokens * _flops_per_token(cell) / seconds / 1e12


def step_seconds(cell: Cell, fit: Fit) -> float:
    """Return the seconds of an optimizer step."""
    machine = fit.machine(cell)
    where = cell.tokens, machine, cell.precision, cell.kernels
    block = block_seconds(cell.shape, cell.seq_len, *where)
    head = head_seconds(cell.shape, *where)
    layer = block.forward * (1 + cell.recompute) + block.backward
    compute = cell.shape.num_layers * (layer + _split_s(cell, machine))
    micro_step = compute + head.forward + head.backward + _gather_s(cell)
    return cell.micro_steps * micro_step + _update_s(cell, machine)


def _flops_per_token(cell: Cell) -> float:
    passes = 3 + cell.recompute
    blocks = cell.shape.num_layers * block_flops_per_token(cell.shape, cell.seq_len)
    return passes * blocks + 6.0 * cell.shape.vocab_size * cell.shape.d_model


def _split_s(cell: Cell, machine: Machine) -> float:
    """Return the seconds of a layer's all-reduces: two per pass, of 16-bit activations."""
    split, moved = cell.kernels.split, 2.0 * cell.tokens * cell.shape.d_model
    passes = 2 * (2 + cell.recompute)
    return passes * 2 * moved * (split - 1) / split / (1e9 * machine.gpu_link_gbps)


def _gather_s(cell: Cell) -> float:
    """Return the seconds of ZeRO-3's collectives of a microbatch: weights twice, gradients once.

    All of them: a share that compute waits for would be fitted to 1. Among hosts each of them takes
    in all of it, over its link; copies of the state also sum the gradients of their shards.
    """
    if not cell.sharded:
        return 0.0
    machine, count = cell.machine, cell.shard or cell.gpus
    nbytes = 2.0 * num_params(cell.shape)
    link = machine.gpu_link_gbps
    if count > machine.gpus:
        link = min(link, machine.node_link_gbps)
    gathered_s = 3 * nbytes * (count - 1) / count / (1e9 * link)
    if (copies := cell.gpus // count) == 1:
        return gathered_s
    # The GPUs of a host sum their shards with those of the other copies at once, over its link.
    return gathered_s + 2 * nbytes * (copies - 1) / copies / (1e9 * machine.node_link_gbps)


def _update_s(cell: Cell, machine: Machine) -> float:
    """Return the seconds of Adam on the GPU, and of the all-reduce between hosts."""
    params = num_params(cell.shape) / cell.kernels.split
    owned = params / (cell.shard or cell.gpus) if cell.sharded else params
    sums = cell.sum_bytes * cell.micro_steps if cell.micro_steps > 1 else 0.0
    update = (cell.update_bytes + sums) * owned / (1e9 * machine.hbm_gbps)
    if not cell.replicated:
        return update
    share = machine.node_link_gbps / machine.gpus
    return update + 2 * 2 * params / (1e9 * share)


# ---- the fit


@cache
def fit(cells: tuple[Cell, ...]) -> Fit:
    """Fit the parameters to these cells by Gauss-Newton in their logarithms."""
    names = (*sorted({cell.card for cell in cells}), *SHARED)
    log = np.log([START.get(name, 0.8) for name in names])
    for _ in range(ROUNDS):
        errors = _errors(cells, names, log)
        slopes = np.stack(
            [_errors(cells, names, log + 1e-4 * unit) - errors for unit in np.eye(len(names))], 1
        )
        weights = np.sqrt(np.minimum(1.0, HUBER / np.maximum(np.abs(errors), 1e-12)))
        step = np.linalg.lstsq(slopes / 1e-4 * weights[:, None], -errors * weights, rcond=1e-6)[0]
        log = np.clip(log + np.clip(step, -0.3, 0.3), *np.log(BOUNDS))
        if np.abs(step).max() < CONVERGED:
            break
    return _named(names, log)


def _named(names: Sequence[str], log: NDArray[np.float64]) -> Fit:
    return Fit(dict(zip(names, map(float, np.exp(log)), strict=True)))


def _errors(
    cells: Sequence[Cell], names: Sequence[str], log: NDArray[np.float64]
) -> NDArray[np.float64]:
    found = _named(names, log)
    return cast(
        NDArray[np.float64],
        np.log([planned(cell, found) / cell.published for cell in cells]),
    )


SHIPPED = Fit({})
"""Every card has the rates of its machine file."""


def residuals(cells: Sequence[Cell], fitted: Fit) -> list[Residual]:
    return [Residual(cell, planned(cell, fitted)) for cell in cells]


def left_out(cells: tuple[Cell, ...], card: str) -> list[Residual]:
    """Plan a card's cells with a fit to the other cards, its own share by the rule."""
    kept = tuple(cell for cell in cells if cell.card != card)
    fitted = fit(kept)
    rule = {card: without_cells(card, fitted)}
    return residuals([cell for cell in cells if cell.card == card], Fit({**fitted.values, **rule}))


def without_cells(card: str, fitted: Fit) -> float:
    """Return the share of the data sheet of a card without cells: of GeForce all of it, of others
    the mean of the fitted ones."""
    if card in GEFORCE:
        return GEFORCE_SHARE
    return statistics.mean(
        share for name, share in fitted.values.items() if name not in (*GEFORCE, *SHARED)
    )


# ---- printing


def median(found: Sequence[Residual]) -> float:
    return statistics.median(abs(each.error) for each in found)


def worst(found: Sequence[Residual]) -> Residual:
    return max(found, key=lambda each: abs(each.error))


def lines(cells: tuple[Cell, ...]) -> Iterator[str]:
    """Print the fit, its residuals and the errors of cards left out."""
    fitted = fit(cells)
    yield "Fit of a GPU's time: planned, published, error"
    yield from _residual_lines(residuals(cells, fitted))
    yield f"  parameters: {', '.join(f'{k} {v:.3g}' for k, v in fitted.values.items())}"
    yield _summary("  residual", residuals(cells, fitted))
    without: list[Residual] = []
    for card in sorted({cell.card for cell in cells}):
        found = left_out(cells, card)
        without += found
        yield _summary(f"  without {card}, its cells", found)
    yield _summary("  left out, all", without)
    yield ""


def check_lines(cells: tuple[Cell, ...]) -> Iterator[str]:
    """Print cells that nothing was fitted to, planned with the shipped rates."""
    found = residuals(cells, SHIPPED)
    yield "Planned with the shipped rates, published, error"
    yield from _residual_lines(found)
    for half in ("study", "held out", "later"):
        part = [each for each in found if each.cell.half == half]
        if part:
            yield _summary(f"  error, {half}", part)
        for batch in sorted({each.cell.batch for each in part}):
            own = [each for each in part if each.cell.batch == batch]
            yield _summary(f"    of them, batch {batch}", own)
    yield _summary("  error", found)


def _residual_lines(found: Sequence[Residual]) -> Iterator[str]:
    for each in found:
        unit = "" if each.cell.measure == "tflops" else " tokens/s"
        yield (
            f"  {each.cell.card:<11}{each.cell.cell:<34}{_digits(each.planned):>9}"
            f"{_digits(each.cell.published):>9}{100 * each.error:>+8.1f} %{unit}"
        )


def _digits(value: float) -> str:
    return f"{float(f'{value:.4g}'):.0f}" if value >= 1000 else f"{value:.3g}"


def _summary(what: str, found: Sequence[Residual]) -> str:
    largest = worst(found)
    return (
        f"{what:<28}{len(found):>3} cells  median {100 * median(found):4.1f} %, "
        f"largest {100 * largest.error:+.1f} %: {largest.cell.cell}"
    )
