"""Masks of transformers while tensors have no values.

Without a cache, transformers reads the positions of tokens: where they begin anew, sequences are
packed with several documents, which get a mask. It cannot read fake tensors, and makes the mask.
Without positions from the caller, each sequence is one document and needs no mask.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def masks_as_in_training(*, packed: bool) -> Iterator[None]:
    """Let transformers, where it is imported, make the masks that it makes of real tensors.

    Args:
        packed: the caller gives positions, and they begin anew inside sequences.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None or packed:
        yield
        return
    with patch.object(masks, "find_packed_sequence_indices", lambda position_ids: None):
        yield
