"""The errors that are meant to be read by a person, as one sentence and without a traceback."""


class OffloadTrainError(Exception):
    """What was asked, what is there, and which key to change; the base of all our errors."""


class ConfigError(OffloadTrainError):
    """A job that breaks a rule.

    Attributes:
        problems: one sentence per broken rule, each beginning with the file (or `--set`) and the
            dotted key; the message is these sentences, one per line.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class HostMemoryError(OffloadTrainError):
    """The host has not the memory that was asked for."""


class DeviceMemoryError(OffloadTrainError):
    """The device memory limit is below what the engine needs."""
