"""State formats: the tensors of each parameter's state, and their dtypes. The one table of them.

See [Note: State formats] in `kernels.state`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from offloadtrain.config.offload import State

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of an element, by the name that torch gives its dtype."""

SCALE_BLOCK = 128
"""Elements that share one scale."""


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a parameter's state.

    Attributes:
        dtype: by torch's name; None: that of the working weights.
        per_block: one value per `SCALE_BLOCK` elements instead of one per element.
    """

    name: str
    dtype: str | None
    per_block: bool = False

    def numel(self, elements: int) -> int:
        """Return the number of values for a bucket of so many elements."""
        return -(-elements // SCALE_BLOCK) if self.per_block else elements

    def nbytes(self, elements: int, weight_bytes: int) -> int:
        """Return the bytes of this field for a bucket of so many elements."""
        return self.numel(elements) * (ITEMSIZE[self.dtype] if self.dtype else weight_bytes)


@dataclass(frozen=True, slots=True)
class StateFormat:
    """The encoding of master weights and moments.

    Attributes:
        master: the fields that together are the master weight. If the first of them is "weight", it
            is the working weight itself and is uploaded from where it lies.
        moment: dtype of each moment.
        scaled: moments have a scale per block.
    """

    name: State
    master: tuple[Field, ...]
    moment: str
    scaled: bool

    @property
    def holds_weight(self) -> bool:
        """True if the state's first field is the working weight."""
        return self.master[0].dtype is None

    def fields(self, moments: Sequence[str]) -> tuple[Field, ...]:
        """Every tensor kept for an optimizer with these moments, in the kernels' order."""
        kept = tuple(Field(name, self.moment) for name in moments)
        scales = tuple(Field(f"{name}_scale", "float32", per_block=True) for name in moments)
        return self.master + kept + (scales if self.scaled else ())

    def bytes_per_param(self, moments: Sequence[str], weight_bytes: int) -> float:
        """Return the bytes of the state per parameter, without gradients."""
        return sum(
            (ITEMSIZE[field.dtype] if field.dtype else weight_bytes)
            / (SCALE_BLOCK if field.per_block else 1)
            for field in self.fields(moments)
        )

    def traffic_per_param(
        self, moments: Sequence[str], weight_bytes: int, grad_bytes: int
    ) -> float:
        """Return the bytes that an update moves through memory per parameter: gradient and state
        read, state and working weight written."""
        state = 2 * self.bytes_per_param(moments, weight_bytes)
        return grad_bytes + state + (0 if self.holds_weight else weight_bytes)


_WEIGHT = Field("weight", None)
FP32 = StateFormat("fp32", (Field("master", "float32"),), "float32", scaled=False)
SPLIT16 = StateFormat("split16", (_WEIGHT, Field("low", "int16")), "bfloat16", scaled=False)
INT8 = StateFormat("int8", (_WEIGHT, Field("correction", "int8")), "uint8", scaled=True)
FORMATS: dict[str, StateFormat] = {state.name: state for state in (FP32, SPLIT16, INT8)}


def format_for(name: str, dtype: str) -> StateFormat:
    """The format of a bucket: weights that stay fp32 in a 16-bit model have fp32 state."""
    return FP32 if dtype == "float32" else FORMATS[name]


def recognise(keys: Collection[str], moments: Sequence[str]) -> StateFormat | None:
    """The format with exactly these tensors."""
    for state in FORMATS.values():
        if {field.name for field in state.fields(moments)} == set(keys):
            return state
    return None
