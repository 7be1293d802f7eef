"""Errors that say that the device has failed, or that its memory is full."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_SAYS = ("CUDA error", "CUDA driver error", "cuEvent", "cuDNN error", "CUBLAS_STATUS", "NCCL error")
"""Parts of the messages of plain RuntimeErrors, by libraries that know no class of their own."""


def device_failure(error: BaseException) -> BaseException | None:
    """Return the failure of the device that has caused an error, or that it is; None: the device is
    well."""
    return next((one for one in _chain(error) if _is_failure(one)), None)


def _is_failure(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    return type(error) is RuntimeError and any(text in str(error) for text in _SAYS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and what it was raised from, or while handling."""
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__
