"""Commands in a job (`train.on_alert`, `train.on_end`), and the files that may set them.

A job file may be in a run folder from another person. Training that job runs their model, which
is data; but their commands would be code. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from offloadtrain.boundary.safe_open import UnsafeFileError, read_text
from offloadtrain.config.errors import ConfigError

KEYS = ("train.on_alert", "train.on_end")
_OF_A_RUN = ("run.json", "resolved.toml", "events/rank000.jsonl")
_SAME_BYTES = 1 << 20


def is_command(words: Sequence[str]) -> bool:
    """Return True if the words are a program and its arguments, or empty."""
    return not words or (words[0] != "" and all(word.isprintable() for word in words))


def check_origin(path: str | Path, text: str, named: Sequence[str]) -> None:
    """Refuse commands in a job file of another user or in a run folder.

    Args:
        text: the job as read from `path`. A file that has changed since then is also refused.
        named: the keys among `KEYS` that the file sets.

    Raises:
        ConfigError: with the names of the keys.
    """
    if named and (why := _foreign(Path(path), text)):
        raise ConfigError(
            f"{path}: {' and '.join(named)} run commands, which are not taken from this file: "
            f"{why}. Copy the job into a file of your own, or give them with --set"
        )


def _foreign(path: Path, text: str) -> str:
    """Return the reason not to trust the file; "" if the user owns it outside of a run folder."""
    try:
        trusted = read_text(path, max_bytes=_SAME_BYTES, follow_link=True, trusted_owner=True)
    except UnsafeFileError as error:
        return error.strerror or "it cannot be read"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if trusted != text:
        return "it was changed while it was read"
    runs = (
        folder
        for folder in path.resolve().parents
        if any(os.path.lexists(folder / name) for name in _OF_A_RUN)
    )
    return next((f"it lies in the run folder {folder}" for folder in runs), "")
