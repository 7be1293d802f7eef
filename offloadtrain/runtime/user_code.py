"""The line of the user's code in a stack."""

from __future__ import annotations

import os
from pathlib import Path
from types import FrameType

import torch

OURS = f"{Path(__file__).parents[1]}/"
TORCHS = f"{Path(torch.__file__).parent}/"
"""Folders whose frames are not the user's."""
_PYTHONS = f"{Path(os.__file__).parent}/"
"""Folder of Python's standard library; installed packages are usually inside of it."""


def called_from(frame: FrameType | None) -> tuple[str, str]:
    """Return the function of this package that the user's code has called, and the line of the
    call; "" if the stack does not contain it."""
    called = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((OURS, TORCHS)) and not _of_python(file):
            return called, f"{file}:{frame.f_lineno}"
        called = frame.f_code.co_name if file.startswith(OURS) else called
        frame = frame.f_back
    return called, ""


def _of_python(file: str) -> bool:
    return file.startswith(_PYTHONS) and not file.startswith(f"{_PYTHONS}site-packages/")


def line_of(frame: FrameType | None) -> str:
    """Return the line of the user's code."""
    return called_from(frame)[1] or "a line that is not known"
