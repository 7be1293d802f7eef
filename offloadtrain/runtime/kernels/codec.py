"""The state formats in plain torch: encoding of fp32 numbers, and decoding.

This is the oracle of the native formats (native/numbers.h), and initialises, exports and converts
state. GPUs update state with it, compiled by torch (`on_device`).

Integers are int32, like the bits of fp32 numbers, because 64-bit integers are slow on a GPU.
Sums and products wrap as unsigned ones do. A right shift repeats the sign: if the upper bits
matter, a mask follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offloadtrain.runtime.kernels.state import BLOCK, Int8State, blocks

_U32 = 0xFFFFFFFF
_SIGN, _MAGNITUDE = -0x80000000, 0x7FFFFFFF
_INFINITY, _NAN = 0x7F800000, 0x7FC00000


def bits_of(values: Tensor) -> Tensor:
    """(n,) fp32 → (n,) int32."""
    return values.view(torch.int32)


def float_of(bits: Tensor) -> Tensor:
    """(n,) int32 → (n,) fp32."""
    return bits.view(torch.float32)


def _lowest(bits: Tensor, width: int) -> Tensor:
    """Return the lowest `width` bits as a signed number."""
    return (bits << 32 - width) >> 32 - width


def fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c in fp32, rounded once; `b` and `c` are converted to fp32 first.

    The product is exact in double. The sum is rounded to odd, which makes the second rounding, to
    fp32, the rounding of the exact value (Boldo & Melquiond 2008).

    On a GPU the compiler decides whether it rounds once or twice: most GPUs have few fp64 units.
    """
    if a.is_cuda:
        return a * b + c
    b, c = (torch.as_tensor(x, dtype=torch.float32, device=a.device).double() for x in (b, c))
    product, addend = torch.broadcast_tensors(a.double() * b, c)
    total = product + addend
    rounded_addend = total - product
    error = (product - (total - rounded_addend)) + (addend - rounded_addend)
    bits = total.view(torch.int64)
    inexact_even = (error != 0) & torch.isfinite(error) & (bits & 1 == 0)
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact_even, bits + towards, bits).view(torch.float64).float()


def random_bits(key: int, elements: Tensor) -> Tensor:
    """Uniform 32-bit integers, a function of the 64-bit key and each element's index.

    Args:
        elements: (n,) int64 in [0, 2^32).

    Returns:
        (n,) int64 in [0, 2^32).
    """
    return hashed(elements.int(), *halves(key)).long() & _U32


def halves(key: int) -> tuple[int, int]:
    """Return the lower and the upper 32 bits of a 64-bit key, as signed numbers."""
    return (key & _U32 ^ 0x80000000) - 0x80000000, (key >> 32 ^ 0x80000000) - 0x80000000


def hashed(elements: Tensor, low: int | Tensor, high: int | Tensor) -> Tensor:
    """`random_bits` as (n,) int32, from int32 elements and the two halves of a key."""
    x = elements ^ low
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = x ^ high
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ (x >> 16 & 0xFFFF)


def round_bf16(values: Tensor, random: Tensor) -> Tensor:
    """fp32 → bf16, rounded up with the probability of the discarded fraction; `random`: uniform
    over 16 bits."""
    bits = bits_of(values)
    finite = (bits & _MAGNITUDE) < _INFINITY
    special = torch.where(values.isnan(), _NAN, bits)
    return _half(torch.where(finite, bits + random, special) >> 16, torch.bfloat16)


def _half(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """(n,) in [-2^15, 2^15) → (n,) of a 16-bit dtype."""
    return bits.to(torch.int16).view(dtype)


# split16 -----------------------------------------------------------------------------------------


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 → (weight, low) of split16; a NaN loses its payload."""
    bits = torch.where(master.isnan(), _NAN, bits_of(master))
    return _half((bits + 0x8000) >> 16, torch.bfloat16), _lowest(bits, 16).to(torch.int16)


def join(weight: Tensor, low: Tensor) -> Tensor:
    """(weight, low) of split16 → fp32."""
    return float_of((weight.view(torch.int16).int() << 16) + low.int())


# int8 --------------------------------------------------------------------------------------------


def split_int8(master: Tensor, dtype: torch.dtype, random: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 → (weight of `dtype`, correction); `random` is uniform over 8 bits."""
    bits = bits_of(master)
    magnitude = _bf16_plus_8 if dtype is torch.bfloat16 else _fp16_plus_8
    x = magnitude(bits & _MAGNITUDE, random)
    weight = _half(((bits & _SIGN) >> 16) | ((x + 0x80) >> 8), dtype)
    return weight, _lowest(x, 8).to(torch.int8)


def set_master_int8(state: Int8State, master: Tensor, random: Tensor) -> None:
    """Write weight and correction; `random` is uniform over 8 bits."""
    weight, correction = split_int8(master, state.weight.dtype, random)
    state.weight.copy_(weight)
    state.correction.copy_(correction)


def _bf16_plus_8(magnitude: Tensor, random: Tensor) -> Tensor:
    special = torch.where(magnitude > _INFINITY, _NAN, magnitude)
    return torch.where(magnitude < _INFINITY, magnitude + random, special) >> 8


def _fp16_plus_8(magnitude: Tensor, random: Tensor) -> Tensor:
    fifth, least_normal = random >> 3, 0x38800000
    normal = (magnitude - 0x38000000 + fifth) >> 5
    small = float_of(magnitude.clamp(max=least_normal))
    denormal = (small * 2.0**32 + fifth.float() * 2.0**-5).int()
    finite = torch.where(magnitude < least_normal, denormal, normal)
    infinite = torch.where(magnitude >= 0x47800000, 0x7C0000, finite)
    return torch.where(magnitude > _INFINITY, 0x7E0000, infinite)


def join_int8(weight: Tensor, correction: Tensor) -> Tensor:
    """(weight, correction) of int8 → fp32."""
    bits = weight.view(torch.int16).int()
    x = ((bits & 0x7FFF) << 8) + correction.int()
    magnitude = x << 8 if weight.dtype is torch.bfloat16 else _fp16_minus_8(x)
    return float_of((bits & _SIGN) | magnitude)


def _fp16_minus_8(x: Tensor) -> Tensor:
    denormal = bits_of(x.float() * 2.0**-32)
    finite = torch.where(x < 0x40000, denormal, (x << 5) + 0x38000000)
    infinite = torch.where(x >= 0x7C0000, _INFINITY, finite)
    return torch.where(x > 0x7C0000, _NAN, infinite)


@dataclass(frozen=True)
class Minifloat:
    """The code of a moment's magnitude relative to its block: the top bits of 1 + t.

    [Note: 8-bit moments] in native/numbers.h gives the reasons.

    Attributes:
        mantissa: number of mantissa bits per binade.
        largest: code of the block's largest magnitude.
    """

    mantissa: int
    largest: int

    @property
    def shift(self) -> int:
        return 23 - self.mantissa

    def top(self, device: torch.device) -> Tensor:
        """t of the largest code, () fp32."""
        steps = 1 << self.mantissa
        exponent, fraction = divmod(self.largest, steps)
        return torch.full(
            (), 2.0**exponent * (1 + fraction / steps) - 1, dtype=torch.float32, device=device
        )

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """t * scale, rounded once."""
        return fma(float_of((codes << self.shift) + 0x3F800000), scale, -scale)

    def encode(self, x: Tensor, inverse: Tensor, random: Tensor) -> Tensor:
        """The code of t = x * inverse, rounded stochastically; `random`: uniform over 12 bits."""
        steps = bits_of(fma(x, inverse, 1.0)) - 0x3F800000
        half = 1 << (self.shift - 13)
        rounded = (steps + (random << (self.shift - 12)) + half) >> self.shift
        return rounded.clamp(max=self.largest)

    def scales(self, largest: Tensor) -> tuple[Tensor, Tensor]:
        """(blocks,) fp32 largest magnitudes → (scale, its inverse); NaN and 0 if not finite."""
        finite = largest.isfinite()
        bound, top = largest.clamp(min=2.0**-80), self.top(largest.device)
        scale = torch.where(finite, bound * (1.0 / top), torch.nan)
        return scale, torch.where(finite, top / bound, 0.0)


SIGNED = Minifloat(mantissa=3, largest=127)
"""Code of a first moment, without its sign."""
UNSIGNED = Minifloat(mantissa=3, largest=256)
"""Code of a second moment, stored minus one: there is no code for zero, because a second moment of
zero would make the update explode."""


def decode_moments(state: Int8State) -> tuple[Tensor, ...]:
    """8-bit moments → fp32."""
    numel = state.weight.numel()
    wide = [scale.repeat_interleave(BLOCK)[:numel] for scale in state.scales]
    codes = [code.int() for code in state.codes]
    moments = []
    if codes:
        size = bits_of(SIGNED.decode(codes[0] & 0x7F, wide[0]))
        moments.append(float_of(size | ((codes[0] & 0x80) << 24)))
    if len(codes) > 1:
        moments.append(UNSIGNED.decode(codes[1] + 1, wide[1]))
    return tuple(moments)


def encode_moments(moments: Sequence[Tensor], random: Tensor, out: Int8State) -> None:
    """fp32 moments of one parameter, starting at a block's start, → 8 bits, written to `out`.

    Args:
        random: (n,) int32; its lowest 24 bits are uniform: 12 for each moment.
    """
    numel = random.numel()
    blocked = [_blocked(moment) for moment in moments]
    kinds = (SIGNED, UNSIGNED)[: len(blocked)]
    scaled = [kind.scales(x.abs().amax(1)) for kind, x in zip(kinds, blocked, strict=True)]
    # A block with a value that is not finite becomes NaN completely: its codes are zero.
    finite = torch.ones(blocks(numel), dtype=torch.bool, device=random.device)
    for _, inverse in scaled:
        finite &= inverse != 0
    for number, (x, (scale, inverse)) in enumerate(zip(blocked, scaled, strict=True)):
        values, draws = torch.where(finite.unsqueeze(1), x, 0.0), _blocked(random >> 12 * number)
        code = kinds[number].encode(values.abs(), inverse.unsqueeze(1), draws & 0xFFF)
        sign = (bits_of(values) >> 24) & 0x80
        stored = code | sign if kinds[number] is SIGNED else code.clamp(min=1) - 1
        out.codes[number].copy_(stored.view(-1)[:numel])
        out.scales[number].copy_(scale)


def _blocked(values: Tensor) -> Tensor:
    """(n,) → (blocks, BLOCK), zero after the end."""
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
