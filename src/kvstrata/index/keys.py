"""Chained keys: a run of tokens is named by itself and by all that comes before it. Knows no tree and no files."""

from __future__ import annotations

import numpy as np
from blake3 import blake3

from kvstrata.index.ids import Tokens, as_ids

KEY_BYTES = 32
DOMAIN = b"kvstrata chain 1\0"


def chain(parent_key: bytes, token_ids: Tokens) -> bytes:
    """The key of `token_ids` after what `parent_key` names. A parent's length is fixed: no two inputs look alike."""
    if len(parent_key) != KEY_BYTES:
        raise ValueError(
            f"A parent key has {KEY_BYTES} bytes, not {len(parent_key)}: take it from root_key() or chain()"
        )
    ids = as_ids(token_ids)
    if not ids.size:
        raise ValueError("A key names at least one token")
    return blake3(DOMAIN + parent_key + ids.astype(np.dtype("<i4"), copy=False).tobytes()).digest()
