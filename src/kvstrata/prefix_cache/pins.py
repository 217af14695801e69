"""Pins: what stays cached on request, within quotas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvstrata.errors import Forbidden
from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.eviction_order import LeafQueue
from kvstrata.prefix_cache.keys import TokenIds, Tokens, as_ids, owner_of
from kvstrata.prefix_cache.matching import PrefixMatcher
from kvstrata.prefix_cache.radix_tree import Node
from kvstrata.prefix_cache.tier_client import TierClient

MIB = 1 << 20

# Pins with a term of one owner.
MAX_TERMS = 64

# Of the memory for stored KV, what all owners with a quota may pin together.
MAX_PINNED_SHARE = 0.5

K = TypeVar("K")


@dataclass(frozen=True, eq=False)
class Pin:
    root_key: bytes
    owner: str
    ids: TokenIds  # to the end of the last entry that holds some of them: blocks on the disk end there
    num_tokens: int  # that were asked for
    name: str = ""  # of a pin with a term: under one root the next of this name takes its place
    expires_s: float = math.inf

    @property
    def pinned_ids(self) -> TokenIds:
        return self.ids[: self.num_tokens]

    def overlaps(self, ids: TokenIds) -> bool:
        """Whether one of the two begins the other. Both are under one root."""
        length = min(self.num_tokens, len(ids))
        return np.array_equal(self.ids[:length], ids[:length])


@dataclass(frozen=True)
class Term:
    """A pin for some time."""

    name: str
    ttl_s: float
    limit_bytes: int  # most that the owner may have pinned


class Pins:
    def __init__(
        self,
        shelf: EntryTable,
        search: PrefixMatcher,
        cold: TierClient,
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._shelf = shelf
        self._search = search
        self._cold = cold
        self._counters = counters
        self._clock = clock
        self._by_root: dict[bytes, dict[Pin, None]] = {}
        self._by_name: dict[tuple[bytes, str], Pin] = {}  # those with a term
        self._terms_of: dict[str, dict[Pin, None]] = {}  # likewise, by owner
        self._expiring: LeafQueue[tuple[bytes, str]] = LeafQueue()  # their roots and names, by when they end
        self._entries: dict[Pin, tuple[Entry, ...]] = {}  # that hold a pin's tokens, where memory has all of them
        self._missing: dict[bytes, dict[Pin, None]] = {}  # by root, those of which memory has not
        self._bytes = _PinnedBytes(shelf)

    def __len__(self) -> int:
        return sum(len(pins) for pins in self._by_root.values())

    def take_over(self, failed: Pins) -> None:
        """What was in memory is gone; on the disk it stays pinned."""
        for pins in failed._by_root.values():
            for pin in pins:
                self._register(pin)
                self._missing.setdefault(pin.root_key, {})[pin] = None

    def pin(self, tokens: Tokens, salt: str, limit_bytes: int | None = None) -> int:
        """Keep what is stored of these tokens, whatever else has to go. Tells how many are. Raises Forbidden where the
        salt's owner would have more pinned than this."""
        num_tokens = self._search.find(tokens, salt).num_tokens
        self._add(self._search.root_of(salt), as_ids(tokens)[:num_tokens], owner_of(salt), limit_bytes)
        return num_tokens

    def _add(self, root_key: bytes, asked: TokenIds, owner: str, limit_bytes: int | None) -> None:
        path = self._shelf.tree.match(root_key, asked).path
        if not path:
            return
        if limit_bytes is not None:
            self._check(_entries_of(path), owner, limit_bytes)
        same_way = [pin for pin in self._by_root.get(root_key, ()) if not pin.name and pin.overlaps(asked)]
        if any(pin.num_tokens >= len(asked) for pin in same_way):
            return  # a longer one has it
        self._replace(same_way, Pin(root_key, owner, _ids_of(path), len(asked)), _entries_of(path))

    def pin_until(self, tokens: Tokens, salt: str, term: Term) -> int:
        """Likewise for some time, instead of what was kept under the term's name. Nothing changes where the owner would
        have too much pinned: that is counted."""
        self.expire()
        num_tokens, root_key = self._search.find(tokens, salt).num_tokens, self._search.root_of(salt)
        path = self._shelf.tree.match(root_key, as_ids(tokens)[:num_tokens]).path
        if not path:
            return 0
        owner, before = owner_of(salt), self._by_name.get((root_key, term.name))
        try:
            self._check(_entries_of(path), owner, term.limit_bytes, instead_of=before)
        except Forbidden:
            self._counters["ttl_pins_over_quota"] += 1
            return 0
        ending = [] if before is None else [before]
        own = [pin for pin in self._terms_of.get(owner, ()) if pin is not before]
        if len(own) >= MAX_TERMS:
            ending.append(min(own, key=lambda pin: pin.expires_s))
        expires_s = self._clock() + term.ttl_s
        pin = Pin(root_key, owner, _ids_of(path), num_tokens, term.name, expires_s)
        self._replace(ending, pin, _entries_of(path))
        self._counters["ttl_pins"] += 1
        return num_tokens

    def can_pin_until(self, tokens: Tokens, salt: str, term: Term, token_bytes: int) -> bool:
        """Whether `keep` would find room in the quota when all these tokens are stored, with so many bytes for each
        that is not yet. What is not is counted."""
        root_key = self._search.root_of(salt)
        match, before = self._shelf.tree.match(root_key, as_ids(tokens)), self._by_name.get((root_key, term.name))
        pinned_bytes, new_bytes = self._after(_entries_of(match.path), owner_of(salt), before)
        new_bytes += (len(tokens) - match.num_tokens) * token_bytes
        is_within = pinned_bytes + new_bytes <= min(
            term.limit_bytes, self._left_bytes(owner_of(salt), term.limit_bytes)
        )
        self._counters["ttl_pins_over_quota"] += not is_within
        return is_within

    def expire(self) -> None:
        """Let go of pins whose term is over."""
        if self.seconds_to_expiry() > 0:
            return
        now_s, over = self._clock(), list[Pin]()
        while (name := self._expiring.oldest()) is not None and self._by_name[name].expires_s <= now_s:
            over.append(self._by_name[name])
            self._forget(over[-1])
        self._cold.unpin_chains(over)

    def seconds_to_expiry(self) -> float:
        """Until a term is over; infinite where there is none."""
        name = self._expiring.oldest()
        return math.inf if name is None else max(0.0, self._by_name[name].expires_s - self._clock())

    def unpin(self, tokens: Tokens, salt: str) -> int:
        """Every pin that these tokens begin with, or that begins with them. Tells how many of the tokens are stored."""
        ids, root_key = as_ids(tokens), self._search.root_of(salt)
        self._end([pin for pin in self._by_root.get(root_key, ()) if pin.overlaps(ids)])
        return self._search.find(ids, salt).num_tokens

    def pin_new_entry(self, entry: Entry) -> None:
        """It has come to memory: maybe it has some of what is pinned, and was not there."""
        for pin in list(self._missing.get(entry.root_key, ())):
            match = self._shelf.tree.match(pin.root_key, pin.pinned_ids)
            # Where all of it is there: a few first tokens may be of any prompt.
            if match.num_tokens == pin.num_tokens:
                self._hold(pin, _entries_of(match.path))

    def pinned_bytes(self, owner: str | None) -> int:
        """What is pinned, in memory: of one owner or of all."""
        return self._bytes.total() if owner is None else self._bytes.of(owner)

    def _check(self, entries: Iterable[Entry], owner: str, limit_bytes: int, *, instead_of: Pin | None = None) -> None:
        pinned_bytes, new_bytes = self._after(entries, owner, instead_of)
        if pinned_bytes + new_bytes > self._left_bytes(owner, limit_bytes):
            raise Forbidden(
                f"All keys together have {self._bytes.total() / MIB:.1f} MiB pinned. This prompt takes "
                f"{new_bytes / MIB:.1f} MiB more, and half of the memory for stored KV is kept for what is not pinned. "
                "Unpin something (POST /cache/unpin), or start the server with more memory (--memory-limit).",
                code="pin_quota_exceeded",
            )
        if pinned_bytes + new_bytes > limit_bytes:
            raise Forbidden(
                f"This key has {pinned_bytes / MIB:.1f} MiB pinned. This prompt takes {new_bytes / MIB:.1f} MiB more, "
                f"and each key may pin {limit_bytes / MIB:.1f} MiB. Unpin something (POST /cache/unpin), or start the "
                "server with a larger --pin-quota (KVSTRATA_PIN_QUOTA).",
                code="pin_quota_exceeded",
            )

    def _left_bytes(self, owner: str, limit_bytes: int) -> int:
        """What other owners' pins leave to one of what all may pin together, where each has a limit."""
        together_bytes = max(limit_bytes, int(self._shelf.max_bytes * MAX_PINNED_SHARE))
        return together_bytes - (self._bytes.total() - self._bytes.of(owner))

    def _after(self, entries: Iterable[Entry], owner: str, instead_of: Pin | None) -> tuple[int, int]:
        """Bytes that an owner has pinned without one of its pins, and how many more these entries would be."""
        ended = {instead_of}
        let_go = [] if instead_of is None else [e for e in self._entries.get(instead_of, ()) if e.pins <= ended]
        new = [entry for entry in entries if entry.pins <= ended]
        return self._bytes.of(owner) - sum(map(_nbytes, let_go)), sum(map(_nbytes, new))

    def _replace(self, ending: Sequence[Pin], pin: Pin, entries: tuple[Entry, ...]) -> None:
        """What both hold is never without a pin."""
        self._hold(pin, entries)
        self._register(pin)
        for each in ending:
            self._forget(each)
        self._cold.pin_chain(pin, pin.root_key, pin.ids, instead_of=ending)

    def _end(self, pins: Sequence[Pin]) -> None:
        for pin in pins:
            self._forget(pin)
        self._cold.unpin_chains(pins)

    def _register(self, pin: Pin) -> None:
        self._by_root.setdefault(pin.root_key, {})[pin] = None
        if pin.name:
            self._by_name[pin.root_key, pin.name] = pin
            self._terms_of.setdefault(pin.owner, {})[pin] = None
            self._expiring.put((pin.root_key, pin.name), pin.expires_s, 0)

    def _forget(self, pin: Pin) -> None:
        # Entries first: where that fails nothing has changed, and the pin can be taken back again.
        for entry in self._entries.get(pin, ()):
            self._shelf.change(entry, pins=entry.pins - {pin})
        self._entries.pop(pin, None)
        _remove(self._by_root, pin.root_key, pin)
        _remove(self._missing, pin.root_key, pin)
        if pin.name:
            _remove(self._terms_of, pin.owner, pin)
            name = pin.root_key, pin.name
            if self._by_name[name] is pin:  # the next of its name is there already, otherwise
                del self._by_name[name]
                self._expiring.discard(name)

    def _hold(self, pin: Pin, entries: tuple[Entry, ...]) -> None:
        for entry in entries:
            self._shelf.change(entry, pins=entry.pins | {pin})
        self._entries[pin] = entries
        _remove(self._missing, pin.root_key, pin)


class _PinnedBytes:
    """What pinned entries take, by owner, as a running sum: asking costs what has changed since the last time."""

    def __init__(self, shelf: EntryTable) -> None:
        self._changed = shelf.dirty_sets.new_dirty_set(self._forget)
        self._shares: dict[Entry, int] = {}
        self._by_owner: Counter[str] = Counter()

    def of(self, owner: str) -> int:
        self._look()
        return self._by_owner[owner]

    def total(self) -> int:
        self._look()
        return self._by_owner.total()

    def _look(self) -> None:
        for entry in self._changed.drain():
            self._forget(entry)
            if entry.is_pinned:
                self._shares[entry] = _nbytes(entry)
                self._by_owner[owner_of(entry.salt)] += self._shares[entry]

    def _forget(self, entry: Entry) -> None:
        nbytes = self._shares.pop(entry, None)
        if nbytes is not None:
            owner = owner_of(entry.salt)
            self._by_owner[owner] -= nbytes
            if not self._by_owner[owner]:
                del self._by_owner[owner]


def _ids_of(path: Sequence[Node[Entry]]) -> TokenIds:
    """All tokens to the end of the last entry of a path."""
    return np.concatenate([node.tokens for node in path[-1].payload.last_node.path()])


def _entries_of(path: Sequence[Node[Entry]]) -> tuple[Entry, ...]:
    return tuple(dict.fromkeys(node.payload for node in path))


def _nbytes(entry: Entry) -> int:
    """Of one that still runs too: it stays when it has ended."""
    return entry.span.nbytes if entry.is_running else entry.nbytes


def _remove(by_key: dict[K, dict[Pin, None]], key: K, pin: Pin) -> None:
    """Nothing happens where it is not there."""
    pins = by_key.get(key, {})
    pins.pop(pin, None)
    if not pins:
        by_key.pop(key, None)
