"""Requests to a run: files in its folder, which the trainer reads between steps."""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path

ACTIONS = ("checkpoint", "stop", "abort", "note", "acknowledge")
LONGEST_NOTE = 1000


class RequestError(Exception):
    """The request cannot be made."""


def write(folder: Path, action: str, message: str = "") -> str:
    """Send a request to the run in `folder`; return its id, which the answers carry.

    Raises:
        RequestError: there is no such action, or the folder cannot be written.
    """
    if action not in ACTIONS:
        raise RequestError(f"'{action}' is not one of {', '.join(ACTIONS)}")
    name = f"{time.time_ns()}-{secrets.token_hex(4)}"
    asked = {"action": action, "message": message[:LONGEST_NOTE], "time_s": time.time()}
    control = folder / "control"
    fresh = control / f".{name}.tmp"
    try:
        control.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(asked, file)
        fresh.rename(control / f"{name}.json")
    except OSError as error:
        raise RequestError(f"{control} cannot be written: {error.strerror}") from error
    return name
