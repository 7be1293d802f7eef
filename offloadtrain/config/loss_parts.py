"""The number of classes per part of a loss that is computed in parts, for runs and plans."""

PART_BYTES_CPU = 16 * 1024**2
PART_BYTES_DEVICE = 128 * 1024**2
"""Bytes of one part's logits in fp32. On a device, enough for products that fill it."""
_MULTIPLE = 128
"""Classes of a part are a multiple of it, as fast matrix products like them."""


def classes_of_part(tokens: int, *, on_cpu: bool) -> int:
    """Return the classes of every part but the last, for logits of so many tokens."""
    columns = (PART_BYTES_CPU if on_cpu else PART_BYTES_DEVICE) // (4 * max(1, tokens))
    return max(_MULTIPLE, columns // _MULTIPLE * _MULTIPLE)
