"""The tensors of safetensors files, read as views of their pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from offloadtrain.engine import ModelError

_MAPPED_BYTES = 256 << 20
"""Bytes read before the files are closed, so that pages that are done with leave the process."""

_LFS_POINTER = b"version https://git-lfs"


class SafetensorsFiles:
    """The tensors of some safetensors files, as views of their pages."""

    def __init__(self, files: Sequence[str]) -> None:
        self._open: dict[str, Any] = {}
        self._read_bytes = 0
        self._file_of: dict[str, str] = {}
        self.shapes: dict[str, Tensor] = {}
        """Name → a meta tensor."""
        for file in files:
            for name in self._opened(file).keys():
                self._file_of[name] = file
                self.shapes[name] = torch.empty_like(self.tensor(name), device="meta")
        self._open.clear()

    def tensor(self, name: str) -> Tensor:
        """View a tensor's pages, which stay mapped as long as the view lives."""
        if self._read_bytes > _MAPPED_BYTES:
            self._open.clear()
            self._read_bytes = 0
        tensor: Tensor = self._opened(self._file_of[name]).get_tensor(name)
        self._read_bytes += tensor.nbytes
        return tensor

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except FileNotFoundError as error:
                raise ModelError(
                    f"'{file}' is not there, and the index beside it names it: copy or download "
                    "the missing shard"
                ) from error
            except SafetensorError as error:
                raise ModelError(_unreadable(file, error)) from error
        return self._open[file]


def _unreadable(file: str, error: SafetensorError) -> str:
    with open(file, "rb") as opened:
        begins = opened.read(len(_LFS_POINTER))
    if begins == _LFS_POINTER:
        return (
            f"'{file}' is a pointer of Git LFS and holds no weights: run `git lfs pull` in its "
            "clone, or `hf download`"
        )
    return f"'{file}' is damaged, or no safetensors file: {error}"
