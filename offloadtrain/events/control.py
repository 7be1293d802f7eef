"""Requests to a running job, sender and receiver: files in its folder, read between steps.

    control/<time>-<random>.json        {"action": "checkpoint", "message": "", …}
    control/done/                       answered requests

Write access to the folder is the permission; no content of a request is executed or followed. One
`stat` per step detects new requests.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offloadtrain.boundary.safe_open import read_json
from offloadtrain.boundary.safe_write import own_folder, replace_file
from offloadtrain.config.errors import InputError

ACTIONS = ("checkpoint", "stop", "abort", "note", "acknowledge")
LONGEST_NOTE = 1000
_MOST_BYTES = 1 << 16
_MOST_AT_ONCE = 100
_SETTLED_S = 0.1
"""Resolution of a folder's timestamp: another change within this time may not alter it."""


class RequestError(InputError):
    """The request cannot be sent."""


def send(run: Path, action: str, message: str = "") -> str:
    """Send a request to the run in this folder; return its id, which its answers have.

    Raises:
        RequestError: the action is unknown, a note has no text, or the folder cannot be written.
    """
    if action not in ACTIONS:
        raise RequestError(f"'{action}' is not one of {', '.join(ACTIONS)}")
    if action == "note" and not message.strip():
        raise RequestError("a note needs its text: ctl RUN note 'disk replaced'")
    name = f"{time.time_ns()}-{secrets.token_hex(4)}"
    request = {"action": action, "message": message[:LONGEST_NOTE], "time_s": time.time()}
    folder = run / "control"
    try:
        replace_file(own_folder(folder) / f"{name}.json", json.dumps(request))
    except OSError as error:
        raise RequestError(f"{folder} cannot be written: {error.strerror}") from error
    return name


@dataclass(frozen=True, slots=True)
class Request:
    """A request from outside; `refused` is the reason if it is refused."""

    id: str
    action: str
    message: str = ""
    refused: str = ""


class Requests:
    """The control folder of one run, from the start of this process on.

    Existing requests belong to an earlier start: a run that was killed before it could stop must
    not stop when it is resumed.
    """

    def __init__(self, run: Path) -> None:
        self._folder = run / "control"
        self._done = self._folder / "done"
        own_folder(self._folder)
        own_folder(self._done)
        self._scanned_ns = 0
        self._stale = {path.name for path in self._folder.glob("*.json")}

    def poll(self) -> list[Request]:
        """Return new requests, oldest first; each is moved to `done` and returned once."""
        try:
            changed_ns = os.stat(self._folder).st_mtime_ns
        except OSError:  # the folder was removed: there are no requests
            return []
        if changed_ns == self._scanned_ns:
            return []
        requests = [
            self._take(path) for path in sorted(self._folder.glob("*.json"))[:_MOST_AT_ONCE]
        ]
        settled = not requests and time.time_ns() - changed_ns > _SETTLED_S * 1e9
        self._scanned_ns = changed_ns if settled else 0
        return requests

    def _take(self, path: Path) -> Request:
        """Read a request, and move it away in all cases."""
        try:
            request = _parsed(path.stem, read_json(path, max_bytes=_MOST_BYTES, trusted_owner=True))
            if path.name in self._stale:
                return replace(request, refused="it was made before this start: repeat it")
            return request
        except (OSError, ValueError) as error:
            return Request(path.stem[:80], "unknown", refused=f"it cannot be read: {error}")
        finally:
            try:
                path.rename(self._done / path.name)
            except OSError:
                path.unlink(missing_ok=True)


def _parsed(id: str, content: Any) -> Request:
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    action, message = content.get("action"), content.get("message", "")
    if action not in ACTIONS:
        return Request(id[:80], str(action)[:40], refused=f"the actions are {', '.join(ACTIONS)}")
    return Request(id[:80], action, str(message)[:LONGEST_NOTE])
