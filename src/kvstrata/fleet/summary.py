"""What a replica reports of its memory: keys of the prefixes that it holds, the newest, at most so many.

A listener of the prefix cache (`events/feed.py`), told on a thread that is not the engine's. A key is a few bytes of a
chained key (`prefix_cache/keys.py`), so a summary tells no text, and it cannot grow: a conversation of 128k tokens has
144 of them, and of more than `max_keys` the oldest are left out.
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
    """The keys of a prompt, as routing asks for them."""

    def __init__(self) -> None:
        self._keys = GridKeys(widening_grid)

    def of(self, root_key: bytes, ids: TokenIds) -> list[tuple[int, int]]:
        return [(position, short(key)) for position, key in self._keys.keys_for(root_key, ids)]


class Summary:
    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._keys = PromptKeys()
        self._lock = threading.Lock()  # guards the next
        self._held: OrderedDict[int, None] = OrderedDict()  # the newest last

    def stored(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        """A prompt that goes on makes all of its prefix the newest: what is asked for again stays."""
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
        """To be sent."""
        with self._lock:
            return np.fromiter(self._held, dtype="<u8", count=len(self._held)).tobytes()


def unpacked(packed: bytes) -> frozenset[int]:
    return frozenset(np.frombuffer(packed, dtype="<u8").tolist())
