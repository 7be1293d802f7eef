"""Rows, the table and the verdict on the goals of `offloadtrain bench adam`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from offloadtrain.cli.bench.peers import (
    DEEPSPEED_PATH,
    DEEPSPEED_STEP,
    DEEPSPEED_ZERO2,
    TORCH_PATH,
)
from offloadtrain.cli.bench.rounds import Seconds, ratio

LIMIT = "traffic limit"
ONE_PASS = "one pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case on one number of threads.

    Attributes:
        x_limit: time relative to moving the 28 bytes of fp32 Adam.
        x_deepspeed_zero2, x_deepspeed_path, x_deepspeed_step, x_torch_path: speedups over these.
    """

    case: str
    backend: str
    state: str
    n: int
    threads: int
    ns_per_param: float
    bytes_per_param: float | None
    x_limit: float | None
    x_deepspeed_zero2: float | None
    x_deepspeed_path: float | None
    x_deepspeed_step: float | None
    x_torch_path: float | None

    @property
    def gb_per_s(self) -> float | None:
        return self.bytes_per_param and self.bytes_per_param / self.ns_per_param

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"gb_per_s": self.gb_per_s}


@dataclass(frozen=True, slots=True)
class Label:
    """The identity of a case."""

    case: str
    backend: str
    state: str
    bytes_per_param: float | None

    @property
    def key(self) -> str:
        return f"{self.case}|{self.backend}|{self.state}"


def rows_of(labels: Sequence[Label], seconds: Seconds, n: int, threads: int) -> list[Row]:
    """Compare every case with the limit and the peers of the same run."""
    by_case = {label.case: seconds[label.key] for label in labels}

    def row(label: Label) -> Row:
        times = seconds[label.key]
        return Row(
            case=label.case,
            backend=label.backend,
            state=label.state,
            n=n,
            threads=threads,
            ns_per_param=statistics.median(times) / n * 1e9,
            bytes_per_param=label.bytes_per_param,
            x_limit=ratio(times, by_case.get(LIMIT)),
            x_deepspeed_zero2=ratio(by_case.get(DEEPSPEED_ZERO2), times),
            x_deepspeed_path=ratio(by_case.get(DEEPSPEED_PATH), times),
            x_deepspeed_step=ratio(by_case.get(DEEPSPEED_STEP), times),
            x_torch_path=ratio(by_case.get(TORCH_PATH), times),
        )

    return [row(label) for label in labels]


def table(rows: Sequence[Row]) -> str:
    """Return all rows as a text table."""
    head = (
        f"{'case':30} {'backend':14} {'state':8} thr ns/param B/param   GB/s  x limit"
        "  x ZeRO-2  x DS path  x DS step  x torch path"
    )
    return "\n".join([head, *map(_line, rows)])


def _line(row: Row) -> str:
    size = "-" if row.bytes_per_param is None else f"{row.bytes_per_param:.2f}"
    return (
        f"{row.case:30} {row.backend:14} {row.state:8} {row.threads:3} {row.ns_per_param:8.3f} "
        f"{size:>7} {_figure(row.gb_per_s):>6} {_figure(row.x_limit):>8} "
        f"{_figure(row.x_deepspeed_zero2):>9} {_figure(row.x_deepspeed_path):>10} "
        f"{_figure(row.x_deepspeed_step):>10} {_figure(row.x_torch_path):>13}"
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal: `measured` is at most or at least `bound`; None: not measured."""

    what: str
    measured: float | None
    bound: float
    at_most: bool

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        if self.measured is None:
            return f"{self.what:48} {sign} {self.bound:5.2f}      -  not measured"
        reached = self.measured <= self.bound if self.at_most else self.measured >= self.bound
        verdict = "reached" if reached else "not reached"
        return f"{self.what:48} {sign} {self.bound:5.2f} {self.measured:6.2f}  {verdict}"


def goals(rows: Sequence[Row], dispatch_us: float) -> list[Goal]:
    """Return the goals of the kernels, for every measured number of threads."""
    result: list[Goal] = []
    counts = sorted({row.threads for row in rows})
    for threads in counts:
        fp32 = _best(rows, "fp32", threads)
        suffix = f", {threads} thread{'s' if threads > 1 else ''}"
        if fp32 is not None:
            result += [
                Goal(f"fp32 against the traffic limit{suffix}", fp32.x_limit, 1.1, True),
                Goal(f"fp32, times ZeRO-2's path{suffix}", fp32.x_deepspeed_zero2, 1.7, False),
                Goal(f"fp32, times torch's path{suffix}", fp32.x_torch_path, 1.8, False),
            ]
        result.append(
            Goal(
                f"Numba against native, fp32{suffix}", _numba_over_native(rows, threads), 1.3, True
            )
        )
    for state, bound in (("split16", 2.2), ("int8", 2.0)):
        best = _best(rows, state, counts[-1])
        if best is not None:
            what = f"{state}, times ZeRO-2's path, {counts[-1]} threads"
            result.append(Goal(what, best.x_deepspeed_zero2, bound, False))
    return [*result, Goal("dispatch of one bucket, us", dispatch_us, 10.0, True)]


def _best(rows: Sequence[Row], state: str, threads: int, backend: str = "native") -> Row | None:
    """Return the first such row: backends are in order of preference."""
    for row in rows:
        same = (row.case, row.state, row.threads) == (ONE_PASS, state, threads)
        if same and row.backend.startswith(backend):
            return row
    return None


def _numba_over_native(rows: Sequence[Row], threads: int) -> float | None:
    native, numba = (_best(rows, "fp32", threads, name) for name in ("native", "numba"))
    if native is None or numba is None or native.x_limit is None or numba.x_limit is None:
        return None
    return numba.x_limit / native.x_limit
