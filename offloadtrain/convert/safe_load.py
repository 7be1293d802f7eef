"""`torch.load` for files that may be hostile: checks sizes, then loads tensors and plain values."""

from __future__ import annotations

import io
import os
import re
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from offloadtrain.boundary.safe_open import UnsafeFileError, open_descriptor
from offloadtrain.convert.checkpoint import ForeignError

_MOST_PICKLE_BYTES = 64 << 20
"""Limit on the description of tensors; that of 100,000 tensors is smaller."""


class _Ignored:
    """Replaces a DeepSpeed object whose content is not used."""


class _Stage(int):
    """Replaces DeepSpeed's ZeroStageEnum."""


_STAND_INS: list[Any] = [
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Ignored, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Ignored, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Ignored, "deepspeed.utils.tensor_fragment.fragment_address"),
]
"""(our class, name of the foreign class that it replaces): foreign classes are never imported."""


def load(path: Path) -> Any:
    """Load a file of `torch.save`; its tensors are memory-mapped.

    Raises:
        ForeignError: it is not such a file, is damaged, or needs an unsupported class.
    """
    try:
        fd = open_descriptor(path, follow_link=True)
    except UnsafeFileError as error:
        raise ForeignError(str(error)) from None
    except OSError as error:
        raise ForeignError(f"{path}: {error.strerror}") from None
    try:
        with open(fd, "rb", closefd=False) as file:
            _check(str(path), file, os.fstat(fd).st_size)
        # By descriptor, so that the checked file is loaded.
        return _loaded(str(path), f"/proc/self/fd/{fd}", mmap=True)
    finally:
        os.close(fd)


def load_bytes(origin: str, content: bytes) -> Any:
    """Load `torch.save` output from a part of a file; raises what `load` raises."""
    _check(origin, io.BytesIO(content), len(content))
    return _loaded(origin, io.BytesIO(content), mmap=False)


def _check(origin: str, file: IO[bytes], num_bytes: int) -> None:
    """Refuse files that would grow while they are read."""
    try:
        entries = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, OSError):
        raise ForeignError(
            f"{origin}: it is cut short, or was not written by torch.save (1.6 or later)"
        ) from None
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ForeignError(f"{origin}: it is compressed, which torch.save never does")
    if sum(entry.file_size for entry in entries) > num_bytes:
        raise ForeignError(f"{origin}: it lists more bytes than its {num_bytes:,}")
    pickles = [entry.file_size for entry in entries if entry.filename.endswith(".pkl")]
    if max(pickles, default=0) > _MOST_PICKLE_BYTES:
        raise ForeignError(
            f"{origin}: the description of its tensors has {max(pickles):,} bytes, and at most "
            f"{_MOST_PICKLE_BYTES:,} are read"
        )


def _loaded(origin: str, source: str | IO[bytes], *, mmap: bool) -> Any:
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            return torch.load(source, map_location="cpu", mmap=mmap, weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes may raise any class
        raise ForeignError(f"{origin}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    text = str(error)
    wanted = re.search(r"(?:GLOBAL|class|function|instantiate)\s+([\w.]+\.[\w.]+)", text)
    if wanted:
        return (
            f"it needs {wanted[1]}, and only tensors and plain values are read: save it again "
            "without that object"
        )
    lines = [line for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else ""
    return f"it cannot be read: {type(error).__name__} {first}"[:300]
