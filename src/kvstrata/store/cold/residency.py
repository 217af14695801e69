"""Block residency: which blocks on the disk have the tokens of which entries.

An entry is clean while all its blocks are on the disk or on their way. A block that leaves is looked up here, so that
withdrawing costs the same with ten entries and with thousands.
"""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakKeyDictionary, WeakSet

from kvstrata.store.entry import Entry

# An entry, or a load: that holds blocks until they are an entry's.
Holder = Hashable


class Residency:
    """Touched by the thread that owns MLX alone. Keeps no load alive that its request has lost in a fault."""

    def __init__(self) -> None:
        self._keys: WeakKeyDictionary[Holder, set[bytes]] = WeakKeyDictionary()
        self._holders: dict[bytes, WeakSet[Holder]] = {}
        self._incomplete: WeakSet[Holder] = WeakSet()  # lost a block since they were recorded
        self._doubted: dict[Entry, None] = {}  # those of them that the owner has not been told of

    def begin_recording(self, entry: Entry) -> None:
        """The blocks of an entry are walked: what it lost before is written again."""
        self._incomplete.discard(entry)
        self._doubted.pop(entry, None)

    def record_block(self, holder: Holder, key: bytes) -> None:
        """Before the caller asks the tier whether the block is there: then no removal is missed."""
        self._keys.setdefault(holder, set()).add(key)
        self._holders.setdefault(key, WeakSet()).add(holder)

    def has_block(self, load: Holder, key: bytes) -> bool:
        """Whether a block of a load has not left since the load began."""
        return key in self._keys.get(load, ())

    def is_complete(self, entry: Entry) -> bool:
        """Whether no block has left since its blocks were recorded."""
        return entry not in self._incomplete

    def remove_block(self, key: bytes) -> list[Entry]:
        """A block has left. Returns the entries that had tokens in it."""
        holders = list(self._holders.pop(key, ()))
        for holder in holders:
            self._keys[holder].discard(key)
        self._incomplete.update(holders)
        return [holder for holder in holders if isinstance(holder, Entry)]

    def doubt_all(self) -> None:
        """Any block may have left."""
        self.forget_loads()
        self._incomplete.update(self._keys)
        self._doubted.update(dict.fromkeys(holder for holder in self._keys if isinstance(holder, Entry)))

    @property
    def has_doubted(self) -> bool:
        return bool(self._doubted)

    def take_doubted(self, max_entries: int) -> list[Entry]:
        """Some of the entries of which any block may have left."""
        return [self._doubted.popitem()[0] for _ in range(min(max_entries, len(self._doubted)))]

    def join(self, first: Entry, second: Entry) -> None:
        """The first entry has the tokens of both now."""
        if second in self._incomplete:
            self._incomplete.add(first)
        for key in self._keys.get(second, ()):
            self.record_block(first, key)
        self.forget(second)

    def forget_loads(self) -> None:
        """What is on its way from the disk is not there any more."""
        for load in [holder for holder in self._keys if not isinstance(holder, Entry)]:
            self.forget(load)

    def forget(self, holder: Holder) -> None:
        """It has left memory, or needs its blocks no longer."""
        self._incomplete.discard(holder)
        if isinstance(holder, Entry):
            self._doubted.pop(holder, None)
        for key in self._keys.pop(holder, ()):
            holders = self._holders[key]
            holders.discard(holder)
            if not holders:
                del self._holders[key]
