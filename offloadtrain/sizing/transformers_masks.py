"""What the masks of transformers look like where nothing can be read from tensors.

Without a cache, transformers reads the positions of tokens: where they begin anew, sequences are
packed with several documents, which get a mask. Of fake tensors it cannot read them, and makes the
mask. Positions that the caller does not give are those of whole sequences, which have none.
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
