"""Values of saved tensors as hashes, which do not depend on the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def digest(tensor: Tensor) -> str:
    """Return dtype, shape and a hash of the values."""
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {sha256(values).hexdigest()[:20]}"


def digests(value: Any, name: str = "") -> dict[str, str]:
    """Return the digest of each tensor, and the text of each plain value, of nested containers."""
    if isinstance(value, Tensor):
        return {name: digest(value)}
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        return {name: repr(value)}
    result = {}
    for key, item in items:
        result |= digests(item, f"{name}/{key}" if name else key)
    return result


def of_torch_file(path: Path) -> dict[str, str]:
    return digests(torch.load(path, weights_only=True))


def of_exported_folder(path: Path) -> dict[str, str]:
    """Return the digests of the tensors in a folder for transformers."""
    result = {}
    for file in sorted(path.glob("*.safetensors")):
        result |= digests(load_file(file))
    return result
