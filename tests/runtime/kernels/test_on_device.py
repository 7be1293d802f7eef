"""The kernels for GPU memory wait for no value: they run on memory that has none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offloadtrain.runtime.kernels import on_device
from offloadtrain.runtime.kernels.scalars import (
    AdagradScalars,
    AdamScalars,
    BlendScalars,
    LionScalars,
    Scalars,
)
from offloadtrain.runtime.kernels.state import STATES, Fp32State, Layout
from offloadtrain.step.layout.formats import ADAM_MOMENTS

LAYOUT = Layout([0, 512], [500, 7000], [3, 1], [0, 1280])
NUMEL = 512 + 7040
COMMON: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "step": 3, "grad_scale": 0.5}
ADAM = AdamScalars(beta1=0.9, beta2=0.95, eps=1e-8, decoupled=True, **COMMON)


class NoWaits(TorchDispatchMode):
    """Refuses to copy a tensor of the host to the device, which stops the launching thread until
    the device has come there. CUDA reads up to 64 KiB at once, if it is not asked to wait."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        sources = [tensor for tensor in tensors if tensor.is_cpu and tensor.ndim]
        targets = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_meta]
        at_once = (kwargs or {}).get("non_blocking") and sum(x.nbytes for x in sources) <= 64 << 10
        assert at_once or not (sources and targets), f"{func} copies to the device"
        return out


class NoHiddenCopies(TorchFunctionMode):
    """Refuses tensors of values on the device: `torch.tensor` copies them, unseen by the above."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        device = (kwargs or {}).get("device", "cpu")
        assert func is not torch.tensor or str(device) == "cpu", "torch.tensor copies to the device"
        return func(*args, **kwargs or {})


def memory(numel: int = NUMEL, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(numel, dtype=dtype, device="meta")


def update(scalars: Scalars, fields: int) -> None:
    state: Any = tuple(memory() for _ in range(fields))
    working = memory(dtype=torch.bfloat16)
    on_device.update(state, memory(dtype=torch.bfloat16), working, scalars)


def update_narrow(name: str) -> None:
    kind = STATES[name]
    fields = (
        memory(field.numel(NUMEL), getattr(torch, field.dtype or "bfloat16"))
        for field in kind.format.fields(ADAM_MOMENTS)
    )
    on_device.update_narrow(kind(fields), memory(dtype=torch.bfloat16), LAYOUT, ADAM)


def blend() -> None:
    scalars = BlendScalars(momentum=0.95, nesterov=True, step=3)
    state, target = Fp32State((memory(), memory())), memory(dtype=torch.bfloat16)
    on_device.blend(state, memory(dtype=torch.bfloat16), target, LAYOUT, scalars)


def subtract() -> None:
    state, change = Fp32State((memory(), memory())), memory(dtype=torch.bfloat16)
    on_device.subtract(state, change, memory(dtype=torch.bfloat16), LAYOUT, 0.9, [0.1, 0.2])


def sum_squares() -> None:
    on_device.sum_squares(memory(), LAYOUT, memory(4, torch.float64))


def sum_squares_each() -> None:
    apart = [(3, memory()), (1, memory().view(2, -1))]
    on_device.sum_squares_each(apart, memory(4, torch.float64))


# Not SGD and momentum: torch's fused ones have no kernel for this memory.
CALLS: dict[str, Callable[[], None]] = {
    "adam": partial(update, ADAM, 3),
    "lion": partial(update, LionScalars(beta1=0.9, beta2=0.99, **COMMON), 2),
    "adagrad": partial(update, AdagradScalars(lr_decay=0.1, eps=1e-8, **COMMON), 2),
    "split16": partial(update_narrow, "split16"),
    "int8": partial(update_narrow, "int8"),
    "blend": blend,
    "subtract": subtract,
    "sum_squares": sum_squares,
    "sum_squares_each": sum_squares_each,
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_read_and_no_copy_to_the_device_waits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_device, "_compiled", lambda *_: on_device.narrow_adam)
    with NoWaits(), NoHiddenCopies():
        CALLS[name]()


def test_this_memory_refuses_to_be_read() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        memory().sum().item()
    with pytest.raises(AssertionError, match="copies to the device"), NoWaits():
        torch.tensor([1, 2], device="cpu").to("meta")
    with pytest.raises(AssertionError, match="tensor copies to the device"), NoHiddenCopies():
        torch.tensor([1, 2], device="meta")


class Wide(TorchDispatchMode):
    """Collects operations with results of 64 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **kwargs or {})
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_meta]
        self.operations += [str(func) for tensor in tensors if tensor.itemsize == 8]
        return out


@pytest.mark.parametrize("name", ["split16", "int8"])
def test_narrow_state_is_updated_in_32_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most GPUs have few units for double, and none for integers of 64 bits."""
    monkeypatch.setattr(on_device, "_compiled", lambda *_: on_device.narrow_adam)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    with Wide() as wide:
        update_narrow(name)
    assert wide.operations == []
