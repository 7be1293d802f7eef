"""Requests to a run: files in its folder, which the trainer reads between steps."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path

from offloadtrain.boundary.safe_write import own_folder, replace_file

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
    request = {"action": action, "message": message[:LONGEST_NOTE], "time_s": time.time()}
    control = folder / "control"
    try:
        replace_file(own_folder(control) / f"{name}.json", json.dumps(request))
    except OSError as error:
        raise RequestError(f"{control} cannot be written: {error.strerror}") from error
    return name
