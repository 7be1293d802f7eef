"""State formats: which tensors the host keeps of each parameter, and in how many bytes.

See [Note: State formats] in `kernels.state`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from offloadtrain import kernels


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a parameter's state.

    Attributes:
        dtype: None: that of the working weights.
        per_block: one value per `kernels.BLOCK` elements instead of one per element.
    """

    name: str
    dtype: torch.dtype | None
    per_block: bool = False

    def numel(self, elements: int) -> int:
        """How many values a bucket of so many elements needs."""
        return kernels.blocks(elements) if self.per_block else elements


@dataclass(frozen=True, slots=True)
class StateFormat:
    """How master weights and moments are kept.

    Attributes:
        master: the fields that together are the master weight; where one of them is "weight", it is
            the working weight itself and is uploaded from where it lies.
        moment: dtype of each moment.
        scaled: whether moments have a scale per block.
        weights: dtypes that the working weights may have.
    """

    name: str
    master: tuple[Field, ...]
    moment: torch.dtype
    scaled: bool
    weights: tuple[torch.dtype, ...]

    @property
    def holds_weight(self) -> bool:
        """Whether the state's first field is the working weight."""
        return self.master[0].dtype is None

    def fields(self, moments: Sequence[str]) -> tuple[Field, ...]:
        """Every tensor kept for an optimizer with these moments, in the kernels' order."""
        kept = tuple(Field(name, self.moment) for name in moments)
        scales = tuple(Field(f"{name}_scale", torch.float32, per_block=True) for name in moments)
        return self.master + kept + (scales if self.scaled else ())

    def bytes_per_param(self, moments: Sequence[str], weight_bytes: int) -> float:
        """On the host, without gradients."""
        return sum(
            (field.dtype.itemsize if field.dtype else weight_bytes)
            / (kernels.BLOCK if field.per_block else 1)
            for field in self.fields(moments)
        )

    def traffic_per_param(
        self, moments: Sequence[str], weight_bytes: int, grad_bytes: int
    ) -> float:
        """Bytes that an update moves through memory: gradient and state read, state and working
        weight written."""
        state = 2 * self.bytes_per_param(moments, weight_bytes)
        return grad_bytes + state + (0 if self.holds_weight else weight_bytes)


_WEIGHT = Field("weight", None)
FP32 = StateFormat(
    "fp32",
    (Field("master", torch.float32),),
    torch.float32,
    scaled=False,
    weights=(torch.float32, torch.bfloat16, torch.float16),
)
SPLIT16 = StateFormat(
    "split16",
    (_WEIGHT, Field("low", torch.int16)),
    torch.bfloat16,
    scaled=False,
    weights=(torch.bfloat16,),
)
INT8 = StateFormat(
    "int8",
    (_WEIGHT, Field("correction", torch.int8)),
    torch.uint8,
    scaled=True,
    weights=(torch.bfloat16, torch.float16),
)
FORMATS = {state.name: state for state in (FP32, SPLIT16, INT8)}


def check_format(name: str, dtype: torch.dtype) -> None:
    """Raises ValueError where the format cannot keep working weights of this dtype."""
    if dtype in FORMATS[name].weights:
        return
    if dtype is torch.float32:
        raise ValueError(
            f"state = '{name}' keeps the upper half of each master as its 16-bit working weight, "
            "and precision is 'fp32': use state = 'fp32', or precision = 'bf16'"
        )
    raise ValueError(
        f"state = '{name}' cannot keep fp16 weights: what an fp16 weight below 2^-14 lacks of its "
        "fp32 master does not fit 16 bits. Use state = 'int8' or 'fp32', or precision = 'bf16'"
    )


def format_for(name: str, dtype: torch.dtype) -> StateFormat:
    """The format of a bucket: weights that stay fp32 in a 16-bit model have fp32 state."""
    return FP32 if dtype is torch.float32 else FORMATS[name]


def recognise(keys: Collection[str], moments: Sequence[str]) -> StateFormat | None:
    """The format with exactly these tensors."""
    for state in FORMATS.values():
        if {field.name for field in state.fields(moments)} == set(keys):
            return state
    return None
