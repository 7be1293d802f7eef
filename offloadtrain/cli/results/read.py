"""Reader of results files of `python -m benchmarks.gpu`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offloadtrain.boundary.safe_open import read_json
from offloadtrain.config.errors import OffloadTrainError

SCHEMA = 1
_MOST_BYTES = 16 << 20


class ResultsError(OffloadTrainError):
    """A results file cannot be read."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one system.

    Attributes:
        spec: fields of `benchmarks.gpu.spec.Spec`.
        group: group of the suite.
        figures: values by name.
        planned: the planned figures; empty if there are none.
    """

    name: str
    group: str
    spec: Mapping[str, Any]
    figures: Mapping[str, Any]
    planned: Mapping[str, Any]

    @property
    def system(self) -> str:
        return str(self.spec["system"])

    @property
    def tokens(self) -> int:
        """Figures of a step."""
        return int(self.figures["step_tokens"])

    def option(self, key: str, default: str) -> str:
        """Options of `offload`."""
        return str(self.spec["options"].get(key, default))


@dataclass(frozen=True, slots=True)
class Pair:
    """Two systems measured alternately.

    Attributes:
        ratio: the median over rounds of their step over ours.
    """

    ours: Steps
    theirs: Steps
    ratio: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Mean losses of every `every` steps."""

    case: str
    every: int
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ResultsFile:
    """One file, for one GPU.

    Attributes:
        steps: our and resident steps, including those of pairs.
        largest: the suite's name ("largest 32 GiB") → its steps.
        machine: measured rates; empty if there are none.
        missing: failed measurement → reason.
    """

    path: Path
    device: str
    steps: tuple[Steps, ...]
    pairs: tuple[Pair, ...]
    largest: Mapping[str, Steps]
    curves: tuple[Curve, ...]
    machine: Mapping[str, Any]
    missing: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.path.name


def read(folder: Path) -> list[ResultsFile]:
    """Return the files measured on GPUs, by name.

    Raises:
        ResultsError: a file is not JSON, or not in the format of `benchmarks.gpu`.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        values = _load(path)
        if values.get("schema") != SCHEMA or not values.get("machine", {}).get("gpu"):
            continue
        try:
            found.append(_file(path, values))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ResultsError(f"{path}: not as make gpu writes it: {error!r}") from None
    return found


def _load(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path, max_bytes=_MOST_BYTES, follow_link=True)
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read as results: {error}") from None
    return values if isinstance(values, dict) else {}


def _file(path: Path, values: Mapping[str, Any]) -> ResultsFile:
    measured: dict[str, dict[str, Any]] = values["measurements"]
    alone = {name: one for name, one in measured.items() if "spec" in one}
    largest = {name: _steps(name, one) for name, one in alone.items() if one["group"] == "largest"}
    pairs = tuple(_pair(one) for one in measured.values() if "systems" in one)
    steps = [_steps(name, one) for name, one in alone.items() if name not in largest]
    steps += [side for pair in pairs for side in (pair.ours, pair.theirs)]
    return ResultsFile(
        path=path,
        device=values["device"],
        steps=tuple(steps),
        pairs=pairs,
        largest=largest,
        curves=tuple(_curve(name, one) for name, one in measured.items() if "every" in one),
        machine=measured.get("machine", {}),
        missing={
            name: str(why)
            for name, one in measured.items()
            if (why := one.get("missing") or one.get("error"))
        },
    )


def _steps(name: str, one: Mapping[str, Any], group: str = "") -> Steps:
    planned = one.get("planned", {})
    return Steps(name, group or one["group"], one["spec"], one["figures"], planned)


def _pair(one: Mapping[str, Any]) -> Pair:
    ours, theirs = (_steps(name, side, one["group"]) for name, side in one["systems"].items())
    return Pair(ours, theirs, float(one["ratio"]))


def _curve(name: str, one: Mapping[str, Any]) -> Curve:
    return Curve(name.removeprefix("convergence "), int(one["every"]), tuple(one["losses"]))
