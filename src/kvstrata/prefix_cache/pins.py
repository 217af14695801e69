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
from kvstrata.prefix_cache.eviction_order import TimeQueue
from kvstrata.prefix_cache.keys import TokenIds, Tokens, as_ids, owner_of
from kvstrata.prefix_cache.matching import PrefixMatcher
from kvstrata.prefix_cache.radix_tree import Node
from kvstrata.prefix_cache.tier_client import TierClient

MIB = 1 << 20

# Pins with a term that one owner may have.
MAX_TERMS = 64

# Share of the memory for cached KV that all owners with a quota may pin together.
MAX_PINNED_SHARE = 0.5

K = TypeVar("K")


@dataclass(frozen=True, eq=False)
class Pin:
    """A pinned prefix."""

    root_key: bytes
    owner: str
    ids: TokenIds  # to the end of the last entry that has some of the tokens: blocks on the disk end there
    num_tokens: int  # that the client pinned
    name: str = ""  # of a pin with a term: under one root the next pin of this name replaces it
    expires_s: float = math.inf

    @property
    def pinned_ids(self) -> TokenIds:
        return self.ids[: self.num_tokens]

    def overlaps(self, ids: TokenIds) -> bool:
        """Whether the pinned tokens begin with these tokens, or these with the pinned ones. Both are under one root."""
        length = min(self.num_tokens, len(ids))
        return np.array_equal(self.ids[:length], ids[:length])


@dataclass(frozen=True)
class Term:
    """Name, duration and quota of a pin that expires."""

    name: str
    ttl_s: float
    limit_bytes: int  # that the owner may have pinned in all


class Pins:
    """Pins of all owners: pinned entries stay in memory, pinned blocks stay on the disk.

    An entry is pinned when memory has all tokens of a pin. A pin of which tokens are missing waits for them; on the
    disk it is in force all the same.
    """

    def __init__(
        self,
        table: EntryTable,
        matcher: PrefixMatcher,
        client: TierClient,
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._matcher = matcher
        self._client = client
        self._counters = counters
        self._clock = clock
        self._by_root: dict[bytes, dict[Pin, None]] = {}
        self._by_name: dict[tuple[bytes, str], Pin] = {}  # pins with a term
        self._terms_of: dict[str, dict[Pin, None]] = {}  # pins with a term, by owner
        self._expiring: TimeQueue[tuple[bytes, str]] = TimeQueue()  # root and name of pins with a term, by expiry
        self._entries: dict[Pin, tuple[Entry, ...]] = {}  # of each pin whose tokens are all in memory
        self._missing: dict[bytes, dict[Pin, None]] = {}  # by root, the pins that memory does not have all tokens of
        self._bytes = _PinnedBytes(table)

    def __len__(self) -> int:
        return sum(len(pins) for pins in self._by_root.values())

    def take_over(self, failed: Pins) -> None:
        """Continue the pins of a failed core. Its memory is gone; on the disk its blocks stay pinned."""
        for pins in failed._by_root.values():
            for pin in pins:
                self._register_pin(pin)
                self._missing.setdefault(pin.root_key, {})[pin] = None

    def pin(self, tokens: Tokens, salt: str, limit_bytes: int | None = None) -> int:
        """Pin the cached prefix of these tokens, and return its length. Raise Forbidden where the salt's owner would
        exceed `limit_bytes`."""
        num_tokens = self._matcher.find(tokens, salt).num_tokens
        self._pin_prefix(self._matcher.root_of(salt), as_ids(tokens)[:num_tokens], owner_of(salt), limit_bytes)
        return num_tokens

    def _pin_prefix(self, root_key: bytes, ids: TokenIds, owner: str, limit_bytes: int | None) -> None:
        path = self._table.tree.match(root_key, ids).path
        if not path:
            return
        if limit_bytes is not None:
            self._check_quota(_entries_of(path), owner, limit_bytes)
        overlapping = [pin for pin in self._by_root.get(root_key, ()) if not pin.name and pin.overlaps(ids)]
        if any(pin.num_tokens >= len(ids) for pin in overlapping):
            return  # a longer pin includes these tokens
        self._replace_pins(overlapping, Pin(root_key, owner, _ids_of(path), len(ids)), _entries_of(path))

    def pin_until(self, tokens: Tokens, salt: str, term: Term) -> int:
        """Pin the cached prefix of these tokens for some time, in place of the pin that has the term's name, and return
        the prefix's length. Where the owner would exceed the quota, nothing changes and the refusal is counted."""
        self.expire()
        num_tokens, root_key = self._matcher.find(tokens, salt).num_tokens, self._matcher.root_of(salt)
        path = self._table.tree.match(root_key, as_ids(tokens)[:num_tokens]).path
        if not path:
            return 0
        owner, before = owner_of(salt), self._by_name.get((root_key, term.name))
        try:
            self._check_quota(_entries_of(path), owner, term.limit_bytes, instead_of=before)
        except Forbidden:
            self._counters["ttl_pins_over_quota"] += 1
            return 0
        ending = [] if before is None else [before]
        others = [pin for pin in self._terms_of.get(owner, ()) if pin is not before]
        if len(others) >= MAX_TERMS:
            ending.append(min(others, key=lambda pin: pin.expires_s))
        expires_s = self._clock() + term.ttl_s
        pin = Pin(root_key, owner, _ids_of(path), num_tokens, term.name, expires_s)
        self._replace_pins(ending, pin, _entries_of(path))
        self._counters["ttl_pins"] += 1
        return num_tokens

    def can_pin_until(self, tokens: Tokens, salt: str, term: Term, token_bytes: int) -> bool:
        """Whether `pin_until` would stay within the quota once all these tokens are cached, where each token that is
        not yet takes `token_bytes`. A refusal is counted."""
        root_key = self._matcher.root_of(salt)
        match, before = self._table.tree.match(root_key, as_ids(tokens)), self._by_name.get((root_key, term.name))
        pinned_bytes, new_bytes = self._bytes_after(_entries_of(match.path), owner_of(salt), before)
        new_bytes += (len(tokens) - match.num_tokens) * token_bytes
        is_within = pinned_bytes + new_bytes <= min(
            term.limit_bytes, self._available_bytes(owner_of(salt), term.limit_bytes)
        )
        self._counters["ttl_pins_over_quota"] += not is_within
        return is_within

    def expire(self) -> None:
        """End the pins whose term is over."""
        if self.seconds_to_expiry() > 0:
            return
        now_s, expired = self._clock(), list[Pin]()
        while (name := self._expiring.oldest()) is not None and self._by_name[name].expires_s <= now_s:
            expired.append(self._by_name[name])
            self._remove_pin(expired[-1])
        self._client.unpin_chains(expired)

    def seconds_to_expiry(self) -> float:
        """Return the time until the next term is over; infinite where there is none."""
        name = self._expiring.oldest()
        return math.inf if name is None else max(0.0, self._by_name[name].expires_s - self._clock())

    def unpin(self, tokens: Tokens, salt: str) -> int:
        """End all pins that overlap these tokens, and return how many of the tokens are cached."""
        ids, root_key = as_ids(tokens), self._matcher.root_of(salt)
        self._end_pins([pin for pin in self._by_root.get(root_key, ()) if pin.overlaps(ids)])
        return self._matcher.find(ids, salt).num_tokens

    def pin_new_entry(self, entry: Entry) -> None:
        """Pin an entry that was inserted, if memory now has all tokens of a pin that waited for them."""
        for pin in list(self._missing.get(entry.root_key, ())):
            match = self._table.tree.match(pin.root_key, pin.pinned_ids)
            # Entries with some of the tokens are not pinned: many prompts may share the first few.
            if match.num_tokens == pin.num_tokens:
                self._pin_entries(pin, _entries_of(match.path))

    def pinned_bytes(self, owner: str | None) -> int:
        """Return the bytes that an owner has pinned in memory; None: all owners together."""
        return self._bytes.total() if owner is None else self._bytes.of_owner(owner)

    def _check_quota(
        self, entries: Iterable[Entry], owner: str, limit_bytes: int, *, instead_of: Pin | None = None
    ) -> None:
        pinned_bytes, new_bytes = self._bytes_after(entries, owner, instead_of)
        if pinned_bytes + new_bytes > self._available_bytes(owner, limit_bytes):
            raise Forbidden(
                f"All keys together have {self._bytes.total() / MIB:.1f} MiB pinned. This prompt takes "
                f"{new_bytes / MIB:.1f} MiB more, and half of the memory for cached KV is kept for what is not pinned. "
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

    def _available_bytes(self, owner: str, limit_bytes: int) -> int:
        """Return the bytes that the pins of all other owners leave to one, where each has a limit."""
        together_bytes = max(limit_bytes, int(self._table.max_bytes * MAX_PINNED_SHARE))
        return together_bytes - (self._bytes.total() - self._bytes.of_owner(owner))

    def _bytes_after(self, entries: Iterable[Entry], owner: str, instead_of: Pin | None) -> tuple[int, int]:
        """Return the bytes that an owner has pinned without one of its pins, and the bytes that these entries add."""
        ended = {instead_of}
        unpinned = [] if instead_of is None else [e for e in self._entries.get(instead_of, ()) if e.pins <= ended]
        new = [entry for entry in entries if entry.pins <= ended]
        return self._bytes.of_owner(owner) - sum(map(_nbytes, unpinned)), sum(map(_nbytes, new))

    def _replace_pins(self, ending: Sequence[Pin], pin: Pin, entries: tuple[Entry, ...]) -> None:
        """Add a pin, then end others: an entry of both is never without a pin."""
        self._pin_entries(pin, entries)
        self._register_pin(pin)
        for each in ending:
            self._remove_pin(each)
        self._client.pin_chain(pin, pin.root_key, pin.ids, instead_of=ending)

    def _end_pins(self, pins: Sequence[Pin]) -> None:
        for pin in pins:
            self._remove_pin(pin)
        self._client.unpin_chains(pins)

    def _register_pin(self, pin: Pin) -> None:
        self._by_root.setdefault(pin.root_key, {})[pin] = None
        if pin.name:
            self._by_name[pin.root_key, pin.name] = pin
            self._terms_of.setdefault(pin.owner, {})[pin] = None
            self._expiring.put((pin.root_key, pin.name), pin.expires_s, 0)

    def _remove_pin(self, pin: Pin) -> None:
        # Entries come first: where that fails nothing has changed, and the pin can be removed later.
        for entry in self._entries.get(pin, ()):
            self._table.set_pinned(entry, entry.pins - {pin})
        self._entries.pop(pin, None)
        _discard(self._by_root, pin.root_key, pin)
        _discard(self._missing, pin.root_key, pin)
        if pin.name:
            _discard(self._terms_of, pin.owner, pin)
            name = pin.root_key, pin.name
            if self._by_name[name] is pin:  # otherwise the next pin of this name is registered already
                del self._by_name[name]
                self._expiring.discard(name)

    def _pin_entries(self, pin: Pin, entries: tuple[Entry, ...]) -> None:
        for entry in entries:
            self._table.set_pinned(entry, entry.pins | {pin})
        self._entries[pin] = entries
        _discard(self._missing, pin.root_key, pin)


class _PinnedBytes:
    """Bytes of pinned entries by owner, as running sums: a question costs as much as has changed since the last one."""

    def __init__(self, table: EntryTable) -> None:
        self._changed = table.dirty_sets.new_dirty_set(self._forget_entry)
        self._nbytes_of: dict[Entry, int] = {}
        self._by_owner: Counter[str] = Counter()

    def of_owner(self, owner: str) -> int:
        self._count_changed()
        return self._by_owner[owner]

    def total(self) -> int:
        self._count_changed()
        return self._by_owner.total()

    def _count_changed(self) -> None:
        for entry in self._changed.drain():
            self._forget_entry(entry)
            if entry.is_pinned:
                self._nbytes_of[entry] = _nbytes(entry)
                self._by_owner[owner_of(entry.salt)] += self._nbytes_of[entry]

    def _forget_entry(self, entry: Entry) -> None:
        nbytes = self._nbytes_of.pop(entry, None)
        if nbytes is not None:
            owner = owner_of(entry.salt)
            self._by_owner[owner] -= nbytes
            if not self._by_owner[owner]:
                del self._by_owner[owner]


def _ids_of(path: Sequence[Node[Entry]]) -> TokenIds:
    """Return all tokens up to the end of the last entry of a path."""
    return np.concatenate([node.tokens for node in path[-1].payload.last_node.path()])


def _entries_of(path: Sequence[Node[Entry]]) -> tuple[Entry, ...]:
    return tuple(dict.fromkeys(node.payload for node in path))


def _nbytes(entry: Entry) -> int:
    """Return the bytes that a pin of an entry keeps; a running entry stays after its request has ended."""
    return entry.span.nbytes if entry.is_running else entry.nbytes


def _discard(by_key: dict[K, dict[Pin, None]], key: K, pin: Pin) -> None:
    """Remove a pin from the pins of a key, if it is there."""
    pins = by_key.get(key, {})
    pins.pop(pin, None)
    if not pins:
        by_key.pop(key, None)
