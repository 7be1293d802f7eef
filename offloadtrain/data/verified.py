"""Token files are read once, from end to end, before anything is trained on them: a flipped byte
trains another model without a word, and a token outside the vocabulary ends a run in its middle.

What was found right is remembered in a folder of the user's own ($OFFLOADTRAIN_CACHE, or
~/.cache/offloadtrain), not beside the data, which may be read-only or somebody else's: size, inode
and times of the file and the hash of its tokens. Whatever changes one of these is read again. Where
nothing can be remembered the file is read at every start.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from offloadtrain.data.tokens import Progress, TokenFile


def verify(tokens: TokenFile, progress: Progress | None = None) -> None:
    """Read the file, unless it is the one that was read before.

    Args:
        progress: called in this thread with (bytes read, bytes in all).

    Raises:
        DataError: its tokens are not those that were written, or not of its vocabulary.
    """
    facts, memory = _facts(tokens), _memory(tokens)
    if memory is not None and _remembered(memory) == facts:
        return
    tokens.scan(progress)
    if memory is not None and _facts(tokens) == facts:  # else it was changed meanwhile
        _remember(memory, facts)


def _facts(tokens: TokenFile) -> dict[str, Any]:
    found = os.stat(tokens.path)
    return {
        "path": str(tokens.path.resolve()),
        "bytes": found.st_size,
        "inode": found.st_ino,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,  # of any change: mtime can be set to what it was
        "content": tokens.header.content,
        "vocab_size": tokens.header.vocab_size,
    }


def _memory(tokens: TokenFile) -> Path | None:
    """The file that remembers it; None: there is no place for one."""
    asked = os.environ.get("OFFLOADTRAIN_CACHE")
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.abspath(asked) if asked else os.path.join(caches, "offloadtrain")
    if not os.path.isabs(folder):  # there is no home
        return None
    name = hashlib.blake2b(bytes(tokens.path.resolve()), digest_size=16).hexdigest()
    return Path(folder, "tokens", f"{name}.json")


def _remembered(memory: Path) -> Any:
    try:
        return json.loads(memory.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _remember(memory: Path, facts: dict[str, Any]) -> None:
    fresh = memory.with_suffix(f".{os.getpid()}")
    with suppress(OSError):  # a full or read-only home: it is read again next time
        memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh.write_text(json.dumps(facts))
        fresh.replace(memory)
