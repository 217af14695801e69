"""Token ids, identities, root keys and chained keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
from blake3 import blake3
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


KEY_BYTES = 32

CHAIN_DOMAIN = b"kvstrata chain 1\0"


def chain(parent_key: bytes, token_ids: Tokens) -> bytes:
    """The key of `token_ids` after what `parent_key` names. A parent's length is fixed: no two inputs look alike."""
    if len(parent_key) != KEY_BYTES:
        raise ValueError(
            f"A parent key has {KEY_BYTES} bytes, not {len(parent_key)}: take it from root_key() or chain()"
        )
    ids = as_ids(token_ids)
    if not ids.size:
        raise ValueError("A key names at least one token")
    return blake3(CHAIN_DOMAIN + parent_key + ids.astype(np.dtype("<i4"), copy=False).tobytes()).digest()


IDENTITY_DOMAIN = "kvstrata identity 1"

OWNER_BYTES = 16


@dataclass(frozen=True)
class Identity:
    fingerprint: str  # of weights, tokenizer, template, config and adapter: models/fingerprint.py
    dtype: str  # what the model computes in
    layout: tuple[str, ...]  # each layer's kind, with what decides its shape, such as 'window:4096:4'
    max_kv_size: int | None = None  # tokens that a sequence keeps at most; None: all


def owner_of(salt: str) -> str:
    """Whose a salt is."""
    return salt.partition(":")[0]


def root_key(identity: Identity, salt: str) -> bytes:
    """32 bytes, the root of the tree that callers with this salt share. The first half is its owner's."""
    owner = owner_of(salt)
    own = _digest(identity, owner)
    return own if salt == owner else own[:OWNER_BYTES] + _digest(identity, salt)[OWNER_BYTES:]


def owner_key(identity: Identity, owner: str) -> bytes:
    """What all roots of an owner begin with."""
    return _digest(identity, owner)[:OWNER_BYTES]


@lru_cache(maxsize=256)
def _digest(identity: Identity, salt: str) -> bytes:
    """Every field is written with its length, so that no two identities spell the same bytes."""
    fields = [
        IDENTITY_DOMAIN,
        identity.fingerprint,
        identity.dtype,
        str(len(identity.layout)),
        *identity.layout,
        "" if identity.max_kv_size is None else str(identity.max_kv_size),
        salt,
    ]
    digest = blake3()
    for field in fields:
        # A salt comes from a client's JSON, which may hold half a surrogate pair.
        encoded = field.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


# The next position after one that is on the grid, or after 0.
Grid = Callable[[int], int]

LEAST_STEP = 32

STEPS_PER_DOUBLING = 16

MAX_REMEMBERED = 32


def every(step: int) -> Grid:
    return lambda position: position + step


def widening(position: int) -> int:
    """32 tokens apart at first, and never more than a sixteenth of what lies before: a prompt of 128k tokens has 144
    positions, and what two prompts share is known to a sixteenth."""
    if position < LEAST_STEP * STEPS_PER_DOUBLING:
        return position + LEAST_STEP
    return position + (1 << (position.bit_length() - 1)) // STEPS_PER_DOUBLING


def positions(grid: Grid, num_tokens: int) -> list[int]:
    """All that are at most `num_tokens`."""
    found: list[int] = []
    position = grid(0)
    while position <= num_tokens:
        found.append(position)
        position = grid(position)
    return found


class GridKeys:
    """Keys of prompts on a grid. Remembers the last prompts, because most of what is asked goes on from one of them."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._remembered: OrderedDict[int, tuple[bytes, TokenIds, list[tuple[int, bytes]]]] = OrderedDict()
        self._next = 0

    def of(self, root_key: bytes, ids: TokenIds) -> list[tuple[int, bytes]]:
        """Position and key, from the shortest prefix to the longest."""
        keys = self._begun(root_key, ids)
        position, key = keys[-1] if keys else (0, root_key)
        while (following := self._grid(position)) <= len(ids):
            key = chain(key, ids[position:following])
            position = following
            keys.append((position, key))
        self._remember(root_key, ids[:position], keys)
        return keys

    def _begun(self, root_key: bytes, ids: TokenIds) -> list[tuple[int, bytes]]:
        """Those of the longest remembered prompt that `ids` begins with."""
        best = None
        for number, (root, before, _) in self._remembered.items():
            longer = best is None or len(before) > len(self._remembered[best][1])
            fits = root == root_key and len(before) <= len(ids)
            if longer and fits and np.array_equal(before, ids[: len(before)]):
                best = number
        return [] if best is None else list(self._remembered.pop(best)[2])

    def _remember(self, root_key: bytes, ids: TokenIds, keys: list[tuple[int, bytes]]) -> None:
        if not keys:
            return
        self._next += 1
        self._remembered[self._next] = (root_key, ids.copy(), list(keys))
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
