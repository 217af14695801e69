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

Tokens = NDArray[np.integer[Any]] | Sequence[int]  # accepted from callers

MAX_ID = np.iinfo(np.int32).max


def as_ids(tokens: Tokens) -> TokenIds:
    """Return `tokens` as a contiguous int32 array, without a copy where it already is one.

    Ids outside the range raise ValueError; they are never wrapped around.
    """
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
    """Return the key of `token_ids` after the prefix that `parent_key` names.

    A parent key has a fixed length, so no two inputs hash the same bytes.
    """
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
    """Everything besides the tokens that determines the KV of a prompt."""

    fingerprint: str  # of weights, tokenizer, template, config and adapter: models/fingerprint.py
    dtype: str  # of the model's computation
    layout: tuple[str, ...]  # each layer's type and shape parameters, such as 'window:4096:4'
    max_kv_size: int | None = None  # maximum tokens that a sequence keeps; None: all


def owner_of(salt: str) -> str:
    """Return the owner part of a salt: the text before the first colon."""
    return salt.partition(":")[0]


def root_key(identity: Identity, salt: str) -> bytes:
    """Return the key of the radix tree root for a salt. Its first half is the key of the salt's owner."""
    owner = owner_of(salt)
    owner_digest = _digest(identity, owner)
    if salt == owner:
        return owner_digest
    return owner_digest[:OWNER_BYTES] + _digest(identity, salt)[OWNER_BYTES:]


def owner_key(identity: Identity, owner: str) -> bytes:
    """Return the common prefix of all root keys of an owner."""
    return _digest(identity, owner)[:OWNER_BYTES]


@lru_cache(maxsize=256)
def _digest(identity: Identity, salt: str) -> bytes:
    """Hash an identity and a salt, each field with its length, so that no two identities hash the same bytes."""
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
        # A salt comes from a client's JSON, which may contain a lone surrogate.
        encoded = field.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


# Maps a grid position, or 0, to the next grid position.
Grid = Callable[[int], int]

LEAST_STEP = 32

STEPS_PER_DOUBLING = 16

MAX_REMEMBERED = 32


def uniform_grid(step: int) -> Grid:
    """Return a grid with positions `step` tokens apart."""
    return lambda position: position + step


def widening_grid(position: int) -> int:
    """Return the next position of a grid that is 32 tokens wide at first, later a sixteenth of the position.

    A prompt of 128k tokens has 144 positions, and the common prefix of two prompts is known to a sixteenth.
    """
    if position < LEAST_STEP * STEPS_PER_DOUBLING:
        return position + LEAST_STEP
    return position + (1 << (position.bit_length() - 1)) // STEPS_PER_DOUBLING


def grid_positions(grid: Grid, num_tokens: int) -> list[int]:
    """Return all grid positions up to `num_tokens`."""
    positions: list[int] = []
    position = grid(0)
    while position <= num_tokens:
        positions.append(position)
        position = grid(position)
    return positions


class GridKeys:
    """Chained keys of prompts at grid positions.

    Keys of the last prompts are remembered, because most prompts extend one of them.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._remembered: OrderedDict[int, tuple[bytes, TokenIds, list[tuple[int, bytes]]]] = OrderedDict()
        self._num_remembered = 0

    def keys_for(self, root_key: bytes, ids: TokenIds) -> list[tuple[int, bytes]]:
        """Return (position, key) of each prefix of `ids` that ends on the grid, the shortest first."""
        keys = self._take_longest_prefix(root_key, ids)
        position, key = keys[-1] if keys else (0, root_key)
        while (next_position := self._grid(position)) <= len(ids):
            key = chain(key, ids[position:next_position])
            position = next_position
            keys.append((position, key))
        self._remember(root_key, ids[:position], keys)
        return keys

    def _take_longest_prefix(self, root_key: bytes, ids: TokenIds) -> list[tuple[int, bytes]]:
        """Remove and return the keys of the longest remembered prompt that is a prefix of `ids`."""
        best = None
        for number, (root, prompt, _) in self._remembered.items():
            is_longer = best is None or len(prompt) > len(self._remembered[best][1])
            fits = root == root_key and len(prompt) <= len(ids)
            if is_longer and fits and np.array_equal(prompt, ids[: len(prompt)]):
                best = number
        return [] if best is None else list(self._remembered.pop(best)[2])

    def _remember(self, root_key: bytes, ids: TokenIds, keys: list[tuple[int, bytes]]) -> None:
        if not keys:
            return
        self._num_remembered += 1
        self._remembered[self._num_remembered] = (root_key, ids.copy(), list(keys))
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
