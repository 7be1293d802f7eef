"""Exit codes of a process; help texts and docs use the same numbers."""

DONE = 0
FAILED = 1
"""Errors, including a non-finite loss or weight without skipping, and a second signal."""
USAGE = 2
"""Bad usage or configuration."""
DOES_NOT_FIT = 4
"""The job does not fit in memory."""
DEVICE_LOST = 74
"""The device failed; an emergency checkpoint holds the last step: EX_IOERR of sysexits.h."""
STOPPED = 75
"""Stopped on request, and resumable: EX_TEMPFAIL of sysexits.h."""
