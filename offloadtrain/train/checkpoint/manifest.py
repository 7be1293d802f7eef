"""The manifest of a checkpoint: contents and hashes of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.hardware import atomic_io

FORMAT = "offloadtrain-checkpoint"
VERSION = 1
MANIFEST, STATE = "manifest.json", "state.json"


class CheckpointError(OffloadTrainError):
    """A checkpoint cannot be written, or does not belong to this model or version."""


class NotFiniteError(CheckpointError):
    """The state must not be saved: weights in it are not finite."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, cut short or changed; an older one may be valid."""


def file_entry(record: atomic_io.FileRecord) -> dict[str, Any]:
    """A manifest's entry for a file."""
    return {"bytes": record.num_bytes, "sha256": record.sha256}


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Return the hash of a manifest without its own "sha256", independent of its text layout."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of the checkpoint in the folder `path`.

    Raises:
        DamagedCheckpointError: it cannot be read, or does not match its own hash.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest["sha256"] == digest_of(manifest) and manifest["format"] == FORMAT:
            return dict(manifest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{path / MANIFEST} cannot be read: {error!r}") from error
    raise DamagedCheckpointError(f"{path / MANIFEST} does not match its own hash")


def verify_file(path: Path, expected: Mapping[str, Any]) -> None:
    """Read a file once and compare it with its entry.

    Raises:
        DamagedCheckpointError: it is missing, unreadable, cut short or changed.
    """
    try:
        found = atomic_io.hash_file(path)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if found.num_bytes != expected["bytes"]:
        raise DamagedCheckpointError(
            f"{path} has {found.num_bytes} bytes, the manifest says {expected['bytes']}"
        )
    if found.sha256 != expected["sha256"]:
        raise DamagedCheckpointError(f"{path} has changed since it was written (sha256 differs)")
