"""Every state format in plain torch: fields to fp32 values and back, and any update rule over them.

The three shipped formats also have fast kernels for the shipped rules. A user-defined format is an
object, a `StateCodec`; everything else follows from its declarations (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

import torch
from torch import Tensor

from offloadtrain.config.offload import PRECISIONS
from offloadtrain.runtime.kernels.codec import (
    decode_moments,
    encode_moments,
    halves,
    hashed,
    join,
    join_int8,
    random_bits,
    round_bf16,
    set_master_int8,
    split,
)
from offloadtrain.runtime.kernels.scalars import random_key
from offloadtrain.runtime.kernels.state import Int8State, Layout, pieces
from offloadtrain.step.layout import formats
from offloadtrain.step.layout.formats import FP32, INT8, SPLIT16, Field, StateFormat

Draw = Callable[[], Tensor]
"""Makes (n,) int64, uniform in [0, 2^32): a function of seed, step, parameter and element. The
compiled update of the shipped formats makes the same bits as int32."""

Change = Callable[[Tensor, list[Tensor], Tensor], object]
"""One step in place: (master, moments, gradient), all (n,) fp32; the gradient is scratch."""


class StateCodec(Protocol):
    """A state format with functions to read and write its fields, for elements of one parameter.

    Attributes:
        format: the stored fields.
    """

    @property
    def format(self) -> StateFormat: ...

    def load(self, fields: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Return master weights, then each moment, as (n,) fp32: fp32 fields themselves, not
        copies."""
        ...

    def store(
        self, fields: tuple[Tensor, ...], values: Sequence[Tensor], draw: Draw | None
    ) -> None:
        """Write the values that `load` would return into the fields.

        Args:
            draw: random bits for stochastic rounding; None: round to nearest.
        """
        ...


class _Fp32:
    format = FP32

    def load(self, fields: tuple[Tensor, ...]) -> Sequence[Tensor]:
        return [field.float() for field in fields]

    def store(
        self, fields: tuple[Tensor, ...], values: Sequence[Tensor], draw: Draw | None
    ) -> None:
        for field, value in zip(fields, values, strict=True):
            if field.data_ptr() != value.data_ptr():
                field.copy_(value)


class _Split16:
    format = SPLIT16

    def load(self, fields: tuple[Tensor, ...]) -> Sequence[Tensor]:
        weight, low, *moments = fields
        return [join(weight, low), *(moment.float() for moment in moments)]

    def store(
        self, fields: tuple[Tensor, ...], values: Sequence[Tensor], draw: Draw | None
    ) -> None:
        weight, low, *moments = fields
        # By identity: torch's compiler (2.11) cannot branch on whether a function is true.
        random = None if draw is None else draw().int()
        for field, half in zip((weight, low), split(values[0]), strict=True):
            field.copy_(half)
        for number, (field, value) in enumerate(zip(moments, values[1:], strict=True)):
            rounded = value if random is None else round_bf16(value, _16_bits(random, number))
            field.copy_(rounded)


def _16_bits(random: Tensor, number: int) -> Tensor:
    """Separate bits for each moment: the halves of `random`, then of its hashes."""
    word = random if number < 2 else hashed(random, number // 2, 0)
    return (word >> 16 * (number % 2)) & 0xFFFF


class _Int8:
    format = INT8

    def load(self, fields: tuple[Tensor, ...]) -> Sequence[Tensor]:
        state = Int8State(fields)
        return [join_int8(state.weight, state.correction), *decode_moments(state)]

    def store(
        self, fields: tuple[Tensor, ...], values: Sequence[Tensor], draw: Draw | None
    ) -> None:
        state, (master, *moments) = Int8State(fields), values
        if draw is None:
            nearest, _ = halves(0x80080080)  # half a unit in each of the three random numbers
            random = torch.full(master.shape, nearest, dtype=torch.int32, device=master.device)
        else:
            random = draw().int()
        set_master_int8(state, master, random & 0xFF)
        encode_moments(moments, random >> 8, state)


CODECS: dict[str, StateCodec] = {
    codec.format.name: codec for codec in (_Fp32(), _Split16(), _Int8())
}


@dataclass(frozen=True, slots=True)
class RegisteredFormat:
    """A registered format. In a `with` statement it is removed at the end."""

    name: str

    def remove(self) -> None:
        """Remove the format. Optimizers that use it must be closed."""
        if CODECS.pop(self.name, None) is not None:
            formats.unregister(self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def register_state_format(codec: StateCodec) -> RegisteredFormat:
    """Register a state format: `ot.offload(..., state=codec.format.name)`.

    It runs in plain torch, for every update rule.

    Raises:
        TypeError: the codec has no StateFormat, or its values are not fp32 of the right shapes.
        ValueError: a format of this name exists; its fields contradict each other; or zeroed
            memory, with which a run starts, does not decode to moments of zero.
    """
    if not isinstance(getattr(codec, "format", None), StateFormat):
        raise TypeError(f"{codec!r:.80} has no `format` that is a StateFormat")
    formats.register(codec.format)
    try:
        for precision in codec.format.precisions:
            _check(codec, getattr(torch, PRECISIONS[precision]))
    except BaseException:
        formats.unregister(codec.format.name)
        raise
    CODECS[codec.format.name] = codec
    return RegisteredFormat(codec.format.name)


def _check(codec: StateCodec, weights: torch.dtype, numel: int = 200) -> None:
    """Load and store zeroed memory whose last block is incomplete."""
    moments = formats.typical_moments(codec.format)
    fields = zeros(codec.format, moments, numel, weights, torch.device("cpu"))
    values = codec.load(fields)
    loaded = [(value.dtype, tuple(value.shape)) for value in values]
    if loaded != [(torch.float32, (numel,))] * (1 + len(moments)):
        raise TypeError(
            f"state format '{codec.format.name}': load of {numel} elements must give the master "
            f"and {len(moments)} moments as float32 of shape ({numel},), and gives {loaded}"
        )
    if any(bool(value.any()) for value in values):
        raise ValueError(
            f"state format '{codec.format.name}': memory of zeros, which a run starts with, is "
            "loaded as other values than zero"
        )
    for draw in (None, partial(draw_bits, 0, (0, numel), torch.device("cpu"))):
        codec.store(fields, values, draw)


def zeros(
    format: StateFormat,
    moments: Sequence[str],
    numel: int,
    weights: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, ...]:
    """Return fields of zeros for `numel` elements."""
    kinds = (
        (field.numel(numel), weights if field.dtype is None else getattr(torch, field.dtype))
        for field in format.fields(moments)
    )
    return tuple(torch.zeros(size, dtype=dtype, device=device) for size, dtype in kinds)


def codec_of(format: StateFormat) -> StateCodec:
    """Raises ValueError if it is not registered (any more)."""
    if format.name not in CODECS:
        raise ValueError(f"there is no state format '{format.name}': {', '.join(CODECS)}")
    return CODECS[format.name]


def update_by_codec(
    format: StateFormat,
    moments: Sequence[str],
    state: tuple[Tensor, ...],
    grad: Tensor,
    working: Tensor | None,
    layout: Layout,
    change: Change,
    *,
    step: int,
    grad_scale: float,
    seed: int,
    out: tuple[Tensor, ...] | None = None,
) -> None:
    """Run one step of one bucket: load, `change`, store, for one piece of a parameter at a time.

    Args:
        See `UpdateRule.update`. Elements of `working` outside of parameters become zero.
    """
    codec, fields, end = codec_of(format), format.fields(moments), 0
    for offset, numel, parameter, first in layout.rows():
        if working is not None:
            working[end:offset].zero_()
        for lo, hi in pieces(numel, first):
            piece = (offset + lo, offset + hi)
            part = cut(fields, state, *piece)
            if out is not None:
                source, part = part, cut(fields, out, *piece)
                torch._foreach_copy_(list(part), list(source))
            values = codec.load(part)
            change(values[0], list(values[1:]), grad[slice(*piece)].float() * grad_scale)
            key = random_key(seed, step, parameter, first + lo)
            elements = (first + lo, first + hi)
            codec.store(part, values, partial(draw_bits, key, elements, grad.device))
            if working is not None:
                working[slice(*piece)] = values[0]
        end = offset + numel
    if working is not None:
        working[end:].zero_()


def cut(fields: Sequence[Field], tensors: Sequence[Tensor], lo: int, hi: int) -> tuple[Tensor, ...]:
    """Return the part of each tensor for elements [lo, hi); `lo` is the start of a block."""
    return tuple(
        tensor[lo // field.per : -(-hi // field.per)]
        for field, tensor in zip(fields, tensors, strict=True)
    )


def draw_bits(key: int, elements: tuple[int, int], device: torch.device) -> Tensor:
    """See `Draw`; `elements`: [lo, hi) of a parameter; `key`: key of element lo."""
    numbers = torch.arange(*elements, device=device) & 0xFFFFFFFF
    return random_bits(key, numbers)


def set_master_by_codec(format: StateFormat, state: tuple[Tensor, ...], master: Tensor) -> None:
    """Set (n,) fp32 master weights; moments do not change, to the bit."""
    codec, scratch = codec_of(format), tuple(torch.empty_like(field) for field in state)
    codec.store(scratch, [master, *codec.load(state)[1:]], None)
    for field, new in zip(state[: len(format.master)], scratch, strict=False):
        field.copy_(new)


def convert_by_codec(
    source: StateFormat,
    given: tuple[Tensor, ...],
    format: StateFormat,
    state: tuple[Tensor, ...],
) -> None:
    """Set state from state of another format, rounded to nearest if this format is narrower."""
    codec_of(format).store(state, codec_of(source).load(given), None)
