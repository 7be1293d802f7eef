"""Exit codes of a process; help texts and docs use the same numbers."""

DONE = 0
FAILED = 1
"""Errors, including a non-finite loss or weight without skipping, and a second signal."""
USAGE = 2
"""Bad usage or configuration."""
DOES_NOT_FIT = 4
"""The job does not fit in memory."""
HUNG = 70
"""A rank made no progress for `train.hang_timeout_s`: EX_SOFTWARE of sysexits.h."""
DEVICE_LOST = 74
"""The device failed; an emergency checkpoint holds the last step: EX_IOERR of sysexits.h."""
STOPPED = 75
"""Stopped on request, and resumable: EX_TEMPFAIL of sysexits.h."""

# By name, because importing the classes would import torch.
_OF_ERRORS = {
    "ConfigError": USAGE,
    "DeviceLostError": DEVICE_LOST,
    "DeviceMemoryError": DOES_NOT_FIT,
    "HostMemoryError": DOES_NOT_FIT,
    "PlanError": DOES_NOT_FIT,
    "OutOfMemoryError": DOES_NOT_FIT,
    "StoppedEarlyError": STOPPED,
}


def of_error(error: BaseException) -> int:
    """Return the exit code of a process that this error ends."""
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((_OF_ERRORS[name] for name in names if name in _OF_ERRORS), FAILED)
