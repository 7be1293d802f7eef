"""What a process ends with; `offloadtrain --help` and docs name the same numbers."""

DONE = 0
FAILED = 1
"""Also where the loss or a weight is not finite and such steps are not skipped, and where a second
signal ended the process at once."""
USAGE = 2
"""Bad usage or configuration."""
DOES_NOT_FIT = 4
"""The memory."""
STOPPED = 75
"""On request, and resumable: EX_TEMPFAIL of sysexits.h."""
