"""Summary of a replica's cache for routing: keys of the most recently used cached prefixes, at most `max_keys`.

`Summary` is a listener of the prefix cache (`events/feed.py`), called on a thread other than the engine's. It keeps the
first bytes of chained keys (`prefix_cache/keys.py`), so it reveals no text. Its size is bounded: a conversation of 128k
tokens has 144 keys, and beyond `max_keys` the oldest are dropped.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from kvstrata.prefix_cache.keys import GridKeys, TokenIds, widening_grid

MAX_KEYS = 1 << 14
SHORT_BYTES = 8


def short(key: bytes) -> int:
    return int.from_bytes(key[:SHORT_BYTES], "little")


class PromptKeys:
    """Prefix keys of prompts, shortened for routing."""

    def __init__(self) -> None:
        self._keys = GridKeys(widening_grid)

    def of(self, root_key: bytes, ids: TokenIds) -> list[tuple[int, int]]:
        return [(position, short(key)) for position, key in self._keys.keys_for(root_key, ids)]


class ReplicaSummary:
    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._keys = PromptKeys()
        self._lock = threading.Lock()  # guards _held and _keys
        self._held: OrderedDict[int, None] = OrderedDict()  # newest last

    def stored(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        """Make all keys of a prompt's prefix the newest, so that reused prefixes stay."""
        del start
        with self._lock:
            for _, key in self._keys.of(root_key, ids):
                self._held[key] = None
                self._held.move_to_end(key)
            while len(self._held) > self._max_keys:
                self._held.popitem(last=False)

    def removed(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        with self._lock:
            for position, key in self._keys.of(root_key, ids):
                if position > start:
                    self._held.pop(key, None)

    def cleared(self) -> None:
        with self._lock:
            self._held.clear()

    def packed(self) -> bytes:
        """Return the keys as bytes; `unpacked` reads them."""
        with self._lock:
            return np.fromiter(self._held, dtype="<u8", count=len(self._held)).tobytes()


def unpacked(packed: bytes) -> frozenset[int]:
    return frozenset(np.frombuffer(packed, dtype="<u8").tolist())
