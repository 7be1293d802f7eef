"""Tensors to and from safetensors files without a second copy of them in memory.

The format (https://github.com/huggingface/safetensors): 8 bytes little-endian length, a JSON header
of that length ({name: {dtype, shape, data_offsets}}), then the raw little-endian data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch

from offloadtrain.hardware.atomic_io import Bytes

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def file_parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[Bytes]:
    """Yield the bytes of a safetensors file, one part per tensor, in the order given.

    The parts of contiguous CPU tensors are views of the tensors themselves; any other tensor is
    copied to the host only when it is written.

    Raises:
        TypeError: a dtype that this package does not store.
    """
    yield _header(tensors)
    for tensor in tensors.values():
        host = tensor.detach().cpu().contiguous()
        yield host.reshape(-1).view(torch.uint8).numpy().data


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Return the name of a dtype in the format; `name` is the tensor's, for the error."""
    if dtype not in DTYPE_NAMES:
        known = ", ".join(str(known).removeprefix("torch.") for known in DTYPE_NAMES)
        raise TypeError(f"{name} is {dtype}; a checkpoint can hold {known}")
    return DTYPE_NAMES[dtype]


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {
            "dtype": dtype_name(name, tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
