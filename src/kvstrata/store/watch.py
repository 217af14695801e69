"""Watches all requests and tells eviction what it must know: of which kind a request is, how soon each kind comes back,
and whether plain LRU would have done better lately. Knows tokens and times, no KV.
"""

from __future__ import annotations

import math

from kvstrata.index.ids import Tokens, as_ids
from kvstrata.store.history import History
from kvstrata.store.policy import Kind, Reuse
from kvstrata.store.shadow import Shadow

# How many times the store's capacity must be asked for until a comparison is forgotten (to 1/e).
COMPARED_FACTOR = 32
# Behind LRU by more than this share of the tokens asked for: follow LRU until it is less.
MAX_BEHIND = 0.0005


class Watch:
    """`max_tokens`: about what the store can hold."""

    def __init__(self, max_tokens: int) -> None:
        self.reuse = Reuse()
        self._history = History(self.reuse, max_tokens)
        self._shadow = Shadow(max_tokens)
        self._num_behind = 0.0
        self._num_asked = 0.0

    @property
    def is_behind(self) -> bool:
        """LRU would have found more lately."""
        return self._num_behind > MAX_BEHIND * self._num_asked

    def resize(self, max_tokens: int) -> None:
        """The store holds more or less than it did: another budget, another precision."""
        self._shadow.max_tokens = max_tokens
        self._history.resize(max_tokens)

    def asked(self, root_key: bytes, tokens: Tokens, num_found: int, now_s: float) -> Kind:
        """A request came, of which the store had `num_found` tokens."""
        wanted = as_ids(tokens)
        fade = math.exp(-len(wanted) / (COMPARED_FACTOR * max(1, self._shadow.max_tokens)))
        lru_found = self._shadow.asked(root_key, wanted, now_s)
        self._num_behind = self._num_behind * fade + lru_found - num_found
        self._num_asked = self._num_asked * fade + len(wanted)
        return self._history.asked(root_key, wanted, now_s)
