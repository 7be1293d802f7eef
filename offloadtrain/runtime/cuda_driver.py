"""Direct calls to the CUDA driver.

The CUDA runtime is not used: after a rejected cudaHostRegister, an unrelated later operation would
report its pending error. torch exposes neither of these calls.
"""

from __future__ import annotations

import ctypes
import logging

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_PCI_ADDRESS_CHARS = 16


def register(memory: Tensor) -> bool:
    """Page-lock host memory, (bytes,) uint8; False if the driver refuses."""
    result = _driver().cuMemHostRegister_v2(
        ctypes.c_void_p(memory.data_ptr()),
        ctypes.c_size_t(memory.numel()),
        ctypes.c_uint(_PORTABLE),
    )
    return int(result) == 0


def unregister(memory: Tensor) -> None:
    """Unregister page-locked memory."""
    result = int(_driver().cuMemHostUnregister(ctypes.c_void_p(memory.data_ptr())))
    if result != 0:
        _log.warning("cuMemHostUnregister gave %d: the driver keeps these pages", result)


def pci_address(index: int) -> str | None:
    """Return "0000:3b:00.0" of a visible device, None if the driver does not report it."""
    text = ctypes.create_string_buffer(_PCI_ADDRESS_CHARS)
    result = _driver().cuDeviceGetPCIBusId(text, _PCI_ADDRESS_CHARS, ctypes.c_int(index))
    return text.value.decode().lower() if int(result) == 0 else None


def event_synchronize() -> int:
    """Return the address of `CUresult cuEventSynchronize(CUevent)`."""
    return ctypes.cast(_driver().cuEventSynchronize, ctypes.c_void_p).value or 0


def _driver() -> ctypes.CDLL:
    torch.cuda.current_stream().query()  # makes the primary context current on this thread
    return ctypes.CDLL("libcuda.so.1")
