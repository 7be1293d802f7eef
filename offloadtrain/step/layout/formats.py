"""State formats: the only table of the tensors of each parameter's state, and their dtypes.

See [Note: State formats] in `kernels.state`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from offloadtrain.config.offload import PRECISIONS, STATE_PRECISIONS, Precision

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}
"""Bytes per element, by torch's name of the dtype."""

SCALE_BLOCK = 128
"""Number of elements that share a scale."""

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Field:
    """A tensor of a parameter's state.

    Attributes:
        name: for a moment's field, the suffix of the moment's name.
        dtype: torch's name; None: the working dtype.
        per: number of elements of the parameter per value: 1; `SCALE_BLOCK` for a scale; 2
            for two codes in a byte. A divisor of `SCALE_BLOCK`, on which parameters and shards
            start.
    """

    name: str
    dtype: str | None
    per: int = 1

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in ITEMSIZE:
            raise ValueError(
                f"field '{self.name}': dtype = {self.dtype!r} is not one of {', '.join(ITEMSIZE)}"
            )
        if self.per < 1 or SCALE_BLOCK % self.per:
            raise ValueError(f"field '{self.name}': per = {self.per} does not divide {SCALE_BLOCK}")

    def numel(self, elements: int) -> int:
        """Return the number of values for a bucket with this number of elements."""
        return -(-elements // self.per)

    def nbytes(self, elements: int, weight_bytes: int) -> int:
        """Return the bytes of this field for a bucket with this number of elements."""
        return self.numel(elements) * (ITEMSIZE[self.dtype] if self.dtype else weight_bytes)


@dataclass(frozen=True)
class StateFormat:
    """The encoding of master weights and moments.

    Zeroed memory must be a state with moments of zero: a run starts with it.

    Attributes:
        master: the fields that together encode the master weight. The first is the fp32 master
            weight or, if its dtype is None, the working weight, which is uploaded from there.
        moment: the fields of each moment.
        precisions: precisions of the working weights that it can store; others have fp32 state.
        moments: the sets of moments that it can store; empty: any.
    """

    name: str
    master: tuple[Field, ...]
    moment: tuple[Field, ...]
    precisions: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
    moments: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def holds_weight(self) -> bool:
        """True if the state's first field is the working weight."""
        return self.master[0].dtype is None

    def fields(self, moments: Sequence[str]) -> tuple[Field, ...]:
        """Return every tensor of the state for these moments, in the kernels' order."""
        return self.master + tuple(
            Field(name + field.name, field.dtype, field.per)
            for field in self.moment
            for name in moments
        )

    def keeps(self, dtype: str) -> bool:
        """Return True if the format can store working weights of this dtype."""
        return any(PRECISIONS.get(precision) == dtype for precision in self.precisions)

    def keeps_moments(self, moments: Sequence[str]) -> bool:
        """Return True if the format can store these moments."""
        return not self.moments or tuple(moments) in self.moments

    def bytes_per_param(self, moments: Sequence[str], weight_bytes: int) -> float:
        """Return the bytes of the state per parameter, without gradients."""
        return sum(
            field.nbytes(SCALE_BLOCK, weight_bytes) / SCALE_BLOCK for field in self.fields(moments)
        )

    def traffic_per_param(
        self, moments: Sequence[str], weight_bytes: int, grad_bytes: int
    ) -> float:
        """Return the bytes that an update moves through memory per parameter: gradient and state
        read, state and working weight written."""
        state = 2 * self.bytes_per_param(moments, weight_bytes)
        return grad_bytes + state + (0 if self.holds_weight else weight_bytes)


_WEIGHT = Field("weight", None)
FP32 = StateFormat(
    "fp32", (Field("master", "float32"),), (Field("", "float32"),), STATE_PRECISIONS["fp32"]
)
SPLIT16 = StateFormat(
    "split16",
    (_WEIGHT, Field("low", "int16")),
    (Field("", "bfloat16"),),
    STATE_PRECISIONS["split16"],
)
INT8 = StateFormat(
    "int8",
    (_WEIGHT, Field("correction", "int8")),
    (Field("", "uint8"), Field("_scale", "float32", SCALE_BLOCK)),
    STATE_PRECISIONS["int8"],
    moments=(ADAM_MOMENTS, ("exp_avg",), ("momentum_buffer",), ()),
)
FORMATS: dict[str, StateFormat] = {state.name: state for state in (FP32, SPLIT16, INT8)}


def register(state: StateFormat) -> None:
    """Register a format by name, for jobs, plans and `offload`. `kernels.register_state_format`
    also registers its codec.

    Raises:
        ValueError: a format of this name exists, or the fields contradict each other.
    """
    if state.name in FORMATS:
        raise ValueError(f"there is a state format '{state.name}': {', '.join(FORMATS)}")
    if not (state.master and state.moment and state.precisions):
        raise ValueError(f"state format '{state.name}' lacks master, moment or precisions")
    if state.master[0].dtype not in (None, "float32"):
        raise ValueError(
            f"state format '{state.name}': the first field of master is the fp32 master weight or "
            f"the working weight (dtype None), not {state.master[0].dtype}"
        )
    names = [field.name for field in state.fields(typical_moments(state))]
    if len(set(names)) < len(names):
        raise ValueError(f"state format '{state.name}' has fields of one name: {', '.join(names)}")
    FORMATS[state.name] = state
    STATE_PRECISIONS[state.name] = state.precisions


def typical_moments(state: StateFormat) -> tuple[str, ...]:
    """Return the first set of moments that a format can store; Adam's, if it stores any."""
    return state.moments[0] if state.moments else ADAM_MOMENTS


def unregister(name: str) -> None:
    """Undo `register`."""
    del FORMATS[name], STATE_PRECISIONS[name]


def format_for(name: str, dtype: str) -> StateFormat:
    """Return the format of a bucket: weights that `name` cannot store, such as those that stay fp32
    in a 16-bit model, have fp32 state."""
    return FORMATS[name] if FORMATS[name].keeps(dtype) else FP32


def recognise(
    dtypes: Mapping[str, str], moments: Sequence[str], own: StateFormat
) -> StateFormat | None:
    """Return the format of tensors with these names and dtypes: `own` if it fits, else the first
    that fits. If only names fit, the first of these: values are widened or narrowed."""
    named = [
        state
        for state in FORMATS.values()
        if {field.name for field in state.fields(moments)} == dtypes.keys()
    ]
    fitting = (
        state
        for state in sorted(named, key=lambda state: state is not own)
        if all(field.dtype in (None, dtypes[field.name]) for field in state.fields(moments))
    )
    return next(fitting, named[0] if named else None)
