"""The [log] section of a job, and the packages that its values need."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from offloadtrain.config.errors import ConfigError

Destination = Literal["csv", "jsonl", "tensorboard", "wandb"]

PACKAGES = ("tensorboard", "wandb")
"""Destinations that need a package; it and our extra have the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Copies of the scalars of a run's log, made by rank 0 in the run folder.

    Attributes:
        to: "csv": metrics.csv; "jsonl": metrics.jsonl; "tensorboard": the folder tensorboard;
            "wandb": Weights & Biases, and the folder wandb.
        project: of Weights & Biases; empty: as its own settings say.
    """

    to: tuple[Destination, ...] = ()
    project: str = ""


def check_packages(log: LogConfig) -> None:
    """
    Raises:
        ConfigError: a package that `log.to` needs is not installed.
    """
    missing = sorted({to for to in log.to if to in PACKAGES and not _is_installed(to)})
    if missing:
        named = ", ".join(f'"{name}"' for name in missing)
        raise ConfigError(
            f"log.to has {named}, which is not installed: "
            f"pip install 'offloadtrain[{','.join(missing)}]'"
        )


def _is_installed(package: str) -> bool:
    """Return whether it is installed; a folder of the same name in the working directory, such as
    the one W&B makes, is not a package."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
