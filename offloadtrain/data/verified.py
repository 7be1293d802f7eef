"""Verification of token files: each is read in full once before training. A flipped byte would
silently train another model, and a token outside the vocabulary would end a run midway.

Results are cached in the user's folder ($OFFLOADTRAIN_CACHE, or ~/.cache/offloadtrain), not next to
the data, which may be read-only: size, inode and times of the file, and the hash of its tokens. A
file is read again if one of these changes, or at every start if there is no cache.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from offloadtrain.boundary.safe_open import read_json
from offloadtrain.boundary.safe_write import replace_file
from offloadtrain.data.tokens import Progress, TokenFile

_MOST_BYTES = 1 << 16


def verify(tokens: TokenFile, progress: Progress | None = None) -> None:
    """Read the file, unless it was verified before.

    Args:
        progress: called in this thread with (bytes read, bytes in all).

    Raises:
        DataError: its tokens differ from the written ones, or are outside its vocabulary.
    """
    facts, memory = _facts(tokens), _memory(tokens)
    if memory is not None and _remembered(memory) == facts:
        return
    tokens.scan(progress)
    if memory is not None and _facts(tokens) == facts:  # else it has changed meanwhile
        _remember(memory, facts)


def _facts(tokens: TokenFile) -> dict[str, Any]:
    status = os.stat(tokens.path)
    return {
        "path": str(tokens.path.resolve()),
        "bytes": status.st_size,
        "inode": status.st_ino,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,  # ctime sees any change: mtime can be reset
        "content": tokens.header.content,
        "vocab_size": tokens.header.vocab_size,
    }


def _memory(tokens: TokenFile) -> Path | None:
    """Return the cache file; None: there is no folder for it."""
    override = os.environ.get("OFFLOADTRAIN_CACHE")
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.abspath(override) if override else os.path.join(caches, "offloadtrain")
    if not os.path.isabs(folder):  # no home folder
        return None
    name = hashlib.blake2b(bytes(tokens.path.resolve()), digest_size=16).hexdigest()
    return Path(folder, "tokens", f"{name}.json")


def _remembered(memory: Path) -> Any:
    try:
        return read_json(memory, max_bytes=_MOST_BYTES, trusted_owner=True)
    except OSError:
        return None


def _remember(memory: Path, facts: dict[str, Any]) -> None:
    with suppress(OSError):  # a full or read-only home: the file is read again next time
        memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(memory, json.dumps(facts))
