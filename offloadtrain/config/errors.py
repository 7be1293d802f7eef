"""The errors that are printed as one message without a traceback."""

import os
from pathlib import Path


class OffloadTrainError(Exception):
    """The base of all our errors; messages name the request, the available amount, and the key to
    change."""


class InputError(OffloadTrainError):
    """What the user gave is wrong: an argument, a job, a model, data. Whoever finds it, the command
    ends with exit code 2."""


class ConfigError(InputError):
    """A job that breaks a rule.

    Attributes:
        problems: one sentence per broken rule, each beginning with the file (or `--set`) and the
            dotted key; the message is these sentences, one per line.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def require_path(path: str | Path) -> None:
    """Raises ConfigError if there is nothing at this path."""
    if not os.path.exists(path):  # Path.exists raises for some names
        raise ConfigError(f"{path} is not there")


def broken(*rules: tuple[object, str]) -> list[str]:
    """Return the sentences of those rules that are broken.

    Args:
        rules: (true if the rule is broken, the sentence that says so).
    """
    return [sentence for is_broken, sentence in rules if is_broken]


class ModelError(InputError):
    """A model that cannot be offloaded, or that was changed after it was."""


class HostMemoryError(OffloadTrainError):
    """The host does not have the requested memory."""


class DiskError(OffloadTrainError):
    """The disk with the optimizer state has too little space, or fails."""


class DeviceMemoryError(OffloadTrainError):
    """The device memory limit is below what the engine needs."""


class PipelineError(InputError):
    """A model that cannot be cut into stages, or a schedule that cannot run it."""
