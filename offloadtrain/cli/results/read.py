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

    @property
    def work(self) -> tuple[object, ...]:
        """The work of a step: the same for all systems that are compared."""
        keys = ("size", "micro_batch", "seq_len", "grad_accum_steps", "precision")
        return tuple(self.spec[key] for key in keys)

    def option(self, key: str, default: str) -> str:
        """Options of `offload`."""
        return str(self.spec["options"].get(key, default))


@dataclass(frozen=True, slots=True)
class ResultsFile:
    """One file, for one GPU.

    Attributes:
        note: what the person who committed the file says of the machine and the program.
        steps: of every system, in the order of the file.
        machine: measured rates; empty if there are none.
        missing: failed measurement → reason.
    """

    path: Path
    device: str
    note: str
    steps: tuple[Steps, ...]
    machine: Mapping[str, Any]
    missing: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.path.name

    def resident(self, steps: Steps) -> Steps | None:
        """Return the resident run of the same model on the same tokens, on a whole card."""
        resident = (other for other in self.steps if other.system == "resident")
        return next((other for other in resident if other.work == steps.work), None)

    def rate_over_resident(self, steps: Steps) -> float | None:
        """Return tokens per second over those of `resident`; None: that was not measured."""
        resident = self.resident(steps)
        if resident is None:
            return None
        return float(resident.figures["step_s"]) / float(steps.figures["step_s"])


def read(folder: Path) -> list[ResultsFile]:
    """Return the files measured on GPUs, by name.

    Raises:
        ResultsError: a file is not JSON, or not in the format of `benchmarks.gpu`.
    """
    files = []
    for path in sorted(folder.glob("*.json")):
        values = _load(path)
        if values.get("schema") != SCHEMA or not values.get("machine", {}).get("gpu"):
            continue
        try:
            files.append(_file(path, values))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ResultsError(f"{path}: not as make gpu writes it: {error!r}") from None
    return files


def _load(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path, max_bytes=_MOST_BYTES, follow_link=True)
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read as results: {error}") from None
    return values if isinstance(values, dict) else {}


def _file(path: Path, values: Mapping[str, Any]) -> ResultsFile:
    measured: dict[str, dict[str, Any]] = values["measurements"]
    return ResultsFile(
        path=path,
        device=values["device"],
        note=str(values.get("note", "")),
        steps=tuple(
            _steps(name, measurement)
            for name, measurement in measured.items()
            if "spec" in measurement
        ),
        machine=measured.get("machine", {}),
        missing={
            name: str(why)
            for name, measurement in measured.items()
            if (why := measurement.get("missing") or measurement.get("error"))
        },
    )


def _steps(name: str, measurement: Mapping[str, Any]) -> Steps:
    return Steps(
        name,
        measurement["group"],
        measurement["spec"],
        measurement["figures"],
        measurement.get("planned", {}),
    )
