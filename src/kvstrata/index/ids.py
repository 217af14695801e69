"""Token ids as the index keeps them: one contiguous int32 array. Knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]
Tokens = NDArray[np.integer[Any]] | Sequence[int]  # what callers may have
MAX_ID = np.iinfo(np.int32).max


def as_ids(tokens: Tokens) -> TokenIds:
    """Without a copy where it is such an array already. Ids that do not fit are refused, never wrapped around."""
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32:
        if tokens.ndim == 1 and tokens.flags.c_contiguous:
            return cast(TokenIds, tokens)
        ids = tokens
    else:
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() > MAX_ID):
            raise ValueError(f"Token ids must be from 0 to {MAX_ID}")
        ids = ids.astype(np.int32)
    if ids.ndim != 1:
        raise ValueError(f"Token ids must be one row, not an array of shape {ids.shape}")
    return np.ascontiguousarray(ids, dtype=np.int32)
