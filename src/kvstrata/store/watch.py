"""Watches all requests and tells eviction what it must know: of which kind a request is, how soon each kind comes back,
and whether plain LRU does better at present. Knows tokens and times, no KV.
"""

from __future__ import annotations

import math

from kvstrata.index.ids import Tokens, as_ids
from kvstrata.store.history import History
from kvstrata.store.policy import Kind, Reuse
from kvstrata.store.shadow import AgeShadow, WorthShadow

# How many times the store's capacity must be asked for until a comparison is forgotten (to 1/e). Shorter ones change
# sides for noise, and each change costs what one side kept and the other did not.
COMPARED_FACTOR = 64


class Watch:
    """`max_tokens`: about what the store can hold."""

    def __init__(self, max_tokens: int) -> None:
        self.reuse = Reuse()
        self._history = History(self.reuse, max_tokens)
        self._by_age = AgeShadow(max_tokens)
        self._by_worth = WorthShadow(self.reuse, max_tokens)
        self._num_ahead = 0.0  # tokens that eviction by worth found and LRU did not, lately

    @property
    def prefers_age(self) -> bool:
        """LRU, unless eviction by worth has found more lately."""
        return self._num_ahead <= 0

    def resize(self, max_tokens: int) -> None:
        """The store holds more or less than it did: another budget, another precision."""
        self._by_age.max_tokens = self._by_worth.max_tokens = max_tokens
        self._history.resize(max_tokens)

    def known_tokens(self, root_key: bytes, tokens: Tokens) -> int:
        """How far a prompt was asked for before."""
        return self._history.known_tokens(root_key, tokens)

    def asked(self, root_key: bytes, tokens: Tokens, now_s: float) -> Kind:
        """A request came. Says of which kind the nodes are that it uses."""
        ids = as_ids(tokens)
        kind = self._history.asked(root_key, ids, now_s)
        fade = math.exp(-len(ids) / (COMPARED_FACTOR * max(1, self._by_age.max_tokens)))
        by_age = self._by_age.asked(root_key, ids, now_s)
        ahead = self._by_worth.asked(root_key, ids, kind, now_s) - by_age
        self._num_ahead = self._num_ahead * fade + ahead
        return kind
