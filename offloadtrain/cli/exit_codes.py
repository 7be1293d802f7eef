"""Exit codes of commands, which help texts and docs use as well, and interruption by signals.

A signal to a command that writes files takes effect after its unfinished files are removed.
"""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.train.signals import signals_handled

DONE = 0
FAILED = 1
"""Errors, including a non-finite loss or weight without skipping, and a second signal."""
USAGE = 2
"""Invalid usage, configuration, model or data; a path that does not exist or must not be used."""
DOES_NOT_FIT = 4
"""The job does not fit in memory."""
HUNG = 70
"""A rank made no progress for `train.hang_timeout_s`; EX_SOFTWARE of sysexits.h."""
DEVICE_LOST = 74
"""The device failed; an emergency checkpoint holds the last step; EX_IOERR of sysexits.h."""
STOPPED = 75
"""Stopped on request, and resumable; EX_TEMPFAIL of sysexits.h."""

# By name, since importing the classes would import torch.
_OF_ERRORS = {
    "InputError": USAGE,
    "UnsafeFileError": USAGE,
    "DeviceLostError": DEVICE_LOST,
    "DeviceMemoryError": DOES_NOT_FIT,
    "HostMemoryError": DOES_NOT_FIT,
    "PlanError": DOES_NOT_FIT,
    "OutOfMemoryError": DOES_NOT_FIT,
    "StoppedEarlyError": STOPPED,
}

_OF_PATHS = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM),
    *(errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
)
"""Errors of the path itself, unlike a full or failing disk."""


def of_error(error: BaseException) -> int:
    """Return the exit code of a process that ends with this error."""
    # A plain OffloadTrainError has the code of its cause.
    cause = error.__cause__ if type(error) is OffloadTrainError else error
    if isinstance(cause, OSError) and cause.filename and cause.errno in _OF_PATHS:
        return USAGE
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop from"):
        return USAGE  # raised by Path.resolve
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((_OF_ERRORS[name] for name in names if name in _OF_ERRORS), FAILED)


@contextmanager
def ends_as_interrupted() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does. Training uses
    other handlers."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    is_main = threading.current_thread() is threading.main_thread()
    with signals_handled((signal.SIGTERM, signal.SIGHUP) if is_main else (), interrupt):
        yield
