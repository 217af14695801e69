"""What is to stay, whatever else has to go, because a caller asked for it. How much of it each owner may have.

Remembers tokens, not only entries: what a failed step took from memory stays pinned on the disk, and is pinned in
memory again when it comes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvstrata.errors import Forbidden
from kvstrata.index.identity import owner_of
from kvstrata.index.ids import TokenIds, Tokens, as_ids
from kvstrata.store.cold.cold import Cold
from kvstrata.store.entry import Entry
from kvstrata.store.search import Search
from kvstrata.store.shelf import Shelf

MIB = 1 << 20


@dataclass(frozen=True, eq=False)
class Pin:
    root_key: bytes
    ids: TokenIds  # to the end of the last entry that holds some of them: blocks on the disk end there
    num_tokens: int  # that were asked for

    @property
    def asked(self) -> TokenIds:
        return self.ids[: self.num_tokens]

    def concerns(self, root_key: bytes, ids: TokenIds) -> bool:
        """Whether one of the two begins the other."""
        length = min(self.num_tokens, len(ids))
        return self.root_key == root_key and np.array_equal(self.ids[:length], ids[:length])


class Pins:
    def __init__(self, shelf: Shelf, search: Search, cold: Cold) -> None:
        self._shelf = shelf
        self._search = search
        self._cold = cold
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
        entries = {node.payload for node in path}
        if limit_bytes is not None:
            self._check(entries, owner_of(path[-1].payload.salt), limit_bytes)
        same_way = [pin for pin in self._pins if pin.concerns(root_key, asked)]
        if any(pin.num_tokens >= len(asked) for pin in same_way):
            return  # a longer one has it
        ids = np.concatenate([node.tokens for node in path[-1].payload.last_node.path()])
        self._pins = [*(pin for pin in self._pins if pin not in same_way), Pin(root_key, ids, len(asked))]
        self._apply()

    def unpin(self, tokens: Tokens, salt: str) -> int:
        """Every pin that these tokens begin with, or that begins with them. Tells how many of the tokens are stored."""
        ids, root_key = as_ids(tokens), self._search.root_of(salt)
        self._pins = [pin for pin in self._pins if not pin.concerns(root_key, ids)]
        self._apply()
        return self._search.find(ids, salt).num_tokens

    def look_at(self, entry: Entry) -> None:
        """It has come to memory: maybe it has some of what is pinned."""
        if any(pin.root_key == entry.root_key for pin in self._pins):
            self._hold(self._wanted())

    def nbytes(self, owner: str | None) -> int:
        """What is pinned, in memory: of one owner or of all."""
        return _nbytes(entry for entry in self._entries if owner is None or owner_of(entry.salt) == owner)

    def _check(self, entries: set[Entry], owner: str, limit_bytes: int) -> None:
        new_bytes = _nbytes(entries - self._entries)
        pinned_bytes = self.nbytes(owner)
        if pinned_bytes + new_bytes > limit_bytes:
            raise Forbidden(
                f"This key has {pinned_bytes / MIB:.1f} MiB pinned. This prompt takes {new_bytes / MIB:.1f} MiB more, "
                f"and each key may pin {limit_bytes / MIB:.1f} MiB. Unpin something (POST /cache/unpin), or start the "
                "server with a larger --pin-quota (KVSTRATA_PIN_QUOTA).",
                code="pin_quota_exceeded",
            )

    def _apply(self) -> None:
        self._hold(self._wanted())
        self._cold.pin((pin.root_key, pin.ids) for pin in self._pins)

    def _wanted(self) -> set[Entry]:
        """Those that hold what is pinned, where all of it is there: a few first tokens may be of any prompt."""
        found = [(pin, self._shelf.tree.match(pin.root_key, pin.asked)) for pin in self._pins]
        return {node.payload for pin, match in found if match.num_tokens == pin.num_tokens for node in match.path}

    def _hold(self, wanted: set[Entry]) -> None:
        for entry in self._entries - wanted:
            self._shelf.change(entry, is_pinned=False)
        for entry in wanted - self._entries:
            self._shelf.change(entry, is_pinned=True)
        self._entries = wanted


def _nbytes(entries: Iterable[Entry]) -> int:
    """Of one that still runs too: it stays when it has ended."""
    return sum(entry.span.nbytes for entry in entries)
