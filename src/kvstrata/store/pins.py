"""What is to stay, whatever else has to go, because a caller asked for it. How much of it each owner may have.

A pin stays until it is taken back; or, where it has a term, for so long, and until the next one of its name.
Remembers tokens, not only entries: what a failed step took from memory stays pinned on the disk, and is pinned in
memory again when it comes back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstrata.errors import Forbidden
from kvstrata.index.identity import owner_of
from kvstrata.index.ids import TokenIds, Tokens, as_ids
from kvstrata.index.tree import Node
from kvstrata.store.cold.cold import Cold
from kvstrata.store.entry import Entry
from kvstrata.store.search import Search
from kvstrata.store.shelf import Shelf

MIB = 1 << 20
# Pins with a term of one owner: all of them are looked for whenever something is stored.
MAX_TERMS = 64


@dataclass(frozen=True, eq=False)
class Pin:
    root_key: bytes
    ids: TokenIds  # to the end of the last entry that holds some of them: blocks on the disk end there
    num_tokens: int  # that were asked for
    name: str = ""  # of a pin with a term: under one root the next of this name takes its place
    expires_s: float = math.inf

    @property
    def asked(self) -> TokenIds:
        return self.ids[: self.num_tokens]

    def concerns(self, root_key: bytes, ids: TokenIds) -> bool:
        """Whether one of the two begins the other."""
        length = min(self.num_tokens, len(ids))
        return self.root_key == root_key and np.array_equal(self.ids[:length], ids[:length])


@dataclass(frozen=True)
class Term:
    """A pin for some time."""

    name: str
    ttl_s: float
    limit_bytes: int  # most that the owner may have pinned


class Pins:
    def __init__(
        self, shelf: Shelf, search: Search, cold: Cold, counters: Counter[str], clock: Callable[[], float]
    ) -> None:
        self._shelf = shelf
        self._search = search
        self._cold = cold
        self._counters = counters
        self._clock = clock
        self._pins: list[Pin] = []
        self._entries: set[Entry] = set()  # that hold them

    def take_over(self, failed: Pins) -> None:
        """What was in memory is gone; on the disk it stays pinned."""
        self._pins = failed._pins

    def pin(self, tokens: Tokens, salt: str, limit_bytes: int | None = None) -> int:
        """Keep what is stored of these tokens, whatever else has to go. Tells how many are. Raises Forbidden where the
        salt's owner would have more pinned than this."""
        num_tokens = self._search.find(tokens, salt).num_tokens
        self._add(self._search.root_of(salt), as_ids(tokens)[:num_tokens], limit_bytes)
        return num_tokens

    def _add(self, root_key: bytes, asked: TokenIds, limit_bytes: int | None) -> None:
        path = self._shelf.tree.match(root_key, asked).path
        if not path:
            return
        if limit_bytes is not None:
            self._check({node.payload for node in path}, self._entries, owner_of(path[-1].payload.salt), limit_bytes)
        same_way = [pin for pin in self._pins if not pin.name and pin.concerns(root_key, asked)]
        if any(pin.num_tokens >= len(asked) for pin in same_way):
            return  # a longer one has it
        pin = Pin(root_key, _ids_of(path), len(asked))
        self._pins = [*(each for each in self._pins if each not in same_way), pin]
        self._apply()

    def keep(self, tokens: Tokens, salt: str, term: Term) -> int:
        """Likewise for some time, instead of what was kept under the term's name. Nothing changes where the owner would
        have too much pinned: that is counted."""
        self.expire()
        num_tokens, root_key = self._search.find(tokens, salt).num_tokens, self._search.root_of(salt)
        path = self._shelf.tree.match(root_key, as_ids(tokens)[:num_tokens]).path
        if not path:
            return 0
        others = self._without(root_key, term.name)
        try:
            self._check({node.payload for node in path}, self._wanted(others), owner_of(salt), term.limit_bytes)
        except Forbidden:
            self._counters["ttl_pins_over_quota"] += 1
            return 0
        roots = self._search.roots_begin(None, owner_of(salt))
        own = [pin for pin in others if pin.name and pin.root_key.startswith(roots)]
        if len(own) >= MAX_TERMS:
            others.remove(min(own, key=lambda pin: pin.expires_s))
        expires_s = self._clock() + term.ttl_s
        self._pins = [*others, Pin(root_key, _ids_of(path), num_tokens, term.name, expires_s)]
        self._apply()
        self._counters["ttl_pins"] += 1
        return num_tokens

    def may_keep(self, tokens: Tokens, salt: str, term: Term, token_bytes: int) -> bool:
        """Whether `keep` would find room in the quota when all these tokens are stored, with so many bytes for each
        that is not yet. What is not is counted."""
        root_key = self._search.root_of(salt)
        match = self._shelf.tree.match(root_key, as_ids(tokens))
        kept = self._wanted(self._without(root_key, term.name))
        new_bytes = _nbytes({node.payload for node in match.path} - kept)
        new_bytes += (len(tokens) - match.num_tokens) * token_bytes
        is_within = _nbytes(_of_owner(kept, owner_of(salt))) + new_bytes <= term.limit_bytes
        self._counters["ttl_pins_over_quota"] += not is_within
        return is_within

    def expire(self) -> None:
        """Let go of pins whose term is over."""
        if self.seconds_to_expiry() <= 0:
            now_s = self._clock()
            self._pins = [pin for pin in self._pins if pin.expires_s > now_s]
            self._apply()

    def seconds_to_expiry(self) -> float:
        """Until a term is over; infinite where there is none."""
        first_s = min((pin.expires_s for pin in self._pins), default=math.inf)
        return first_s if first_s == math.inf else max(0.0, first_s - self._clock())

    def _without(self, root_key: bytes, name: str) -> list[Pin]:
        return [pin for pin in self._pins if pin.root_key != root_key or pin.name != name]

    def unpin(self, tokens: Tokens, salt: str) -> int:
        """Every pin that these tokens begin with, or that begins with them. Tells how many of the tokens are stored."""
        ids, root_key = as_ids(tokens), self._search.root_of(salt)
        self._pins = [pin for pin in self._pins if not pin.concerns(root_key, ids)]
        self._apply()
        return self._search.find(ids, salt).num_tokens

    def look_at(self, entry: Entry) -> None:
        """It has come to memory: maybe it has some of what is pinned."""
        if any(pin.root_key == entry.root_key for pin in self._pins):
            self._hold(self._wanted(self._pins))

    def nbytes(self, owner: str | None) -> int:
        """What is pinned, in memory: of one owner or of all."""
        return _nbytes(self._entries if owner is None else _of_owner(self._entries, owner))

    def _check(self, entries: set[Entry], pinned: set[Entry], owner: str, limit_bytes: int) -> None:
        new_bytes = _nbytes(entries - pinned)
        pinned_bytes = _nbytes(_of_owner(pinned, owner))
        if pinned_bytes + new_bytes > limit_bytes:
            raise Forbidden(
                f"This key has {pinned_bytes / MIB:.1f} MiB pinned. This prompt takes {new_bytes / MIB:.1f} MiB more, "
                f"and each key may pin {limit_bytes / MIB:.1f} MiB. Unpin something (POST /cache/unpin), or start the "
                "server with a larger --pin-quota (KVSTRATA_PIN_QUOTA).",
                code="pin_quota_exceeded",
            )

    def _apply(self) -> None:
        self._hold(self._wanted(self._pins))
        self._cold.pin((pin.root_key, pin.ids) for pin in self._pins)

    def _wanted(self, pins: Iterable[Pin]) -> set[Entry]:
        """Those that hold what is pinned, where all of it is there: a few first tokens may be of any prompt."""
        found = [(pin, self._shelf.tree.match(pin.root_key, pin.asked)) for pin in pins]
        return {node.payload for pin, match in found if match.num_tokens == pin.num_tokens for node in match.path}

    def _hold(self, wanted: set[Entry]) -> None:
        for entry in self._entries - wanted:
            self._shelf.change(entry, is_pinned=False)
        for entry in wanted - self._entries:
            self._shelf.change(entry, is_pinned=True)
        self._entries = wanted


def _ids_of(path: Sequence[Node[Entry]]) -> TokenIds:
    """All tokens to the end of the last entry of a path."""
    return np.concatenate([node.tokens for node in path[-1].payload.last_node.path()])


def _of_owner(entries: Iterable[Entry], owner: str) -> Iterator[Entry]:
    return (entry for entry in entries if owner_of(entry.salt) == owner)


def _nbytes(entries: Iterable[Entry]) -> int:
    """Of one that still runs too: it stays when it has ended."""
    return sum(entry.span.nbytes for entry in entries)
