"""Errors that are printed as one message without a traceback."""

import os
from pathlib import Path


class OffloadTrainError(Exception):
    """The base of all errors of offloadtrain. Messages name the request, the available amount, and
    the key to change."""


class InputError(OffloadTrainError):
    """Input of the user is wrong: an argument, a job, a model, or data. The command ends with exit
    code 2."""


class ConfigError(InputError):
    """A job that breaks a rule.

    Attributes:
        problems: one sentence per broken rule, which begins with the file (or `--set`) and the
            dotted key. The message has one of these sentences per line.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def require_path(path: str | Path) -> None:
    """Raises ConfigError if there is nothing at this path."""
    if not os.path.exists(path):  # Path.exists raises for some names
        raise ConfigError(f"{path} is not there")


def broken(*rules: tuple[object, str]) -> list[str]:
    """Return the sentences of the broken rules.

    Args:
        rules: pairs of a condition, true if the rule is broken, and the sentence to report.
    """
    return [sentence for is_broken, sentence in rules if is_broken]


class ModelError(InputError):
    """A model that cannot be offloaded, or that changed after `offload`."""


class HostMemoryError(OffloadTrainError):
    """The host does not have the requested memory."""


class DiskError(OffloadTrainError):
    """The disk with the optimizer state has too little space, or fails."""


class DeviceMemoryError(OffloadTrainError):
    """The device memory limit is below what the engine needs."""


class PipelineError(InputError):
    """A model that cannot be divided into stages, or a schedule that cannot run it."""
