"""The number of classes per part of a loss that is computed in parts, for runs and plans."""

PART_BYTES_CPU = 16 * 1024**2
PART_BYTES_DEVICE = 128 * 1024**2
"""Bytes of the fp32 logits of one part. On a device, the products of a part are large enough to
fill it."""
_MULTIPLE = 128
"""The number of classes of a part is a multiple of this, for fast matrix products."""


def classes_of_part(tokens: int, *, on_cpu: bool) -> int:
    """Return the number of classes of every part except the last, for logits of `tokens` tokens."""
    columns = (PART_BYTES_CPU if on_cpu else PART_BYTES_DEVICE) // (4 * max(1, tokens))
    return max(_MULTIPLE, columns // _MULTIPLE * _MULTIPLE)
