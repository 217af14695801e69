"""What memory and the disk have of many conversations, counted a slice at a time. Changes nothing.

A slice ends when its time is over, in the middle of a conversation if need be; the next one looks it up anew and goes
on. What the disk has is told by a thread of the tier. A slice asks it about few tokens, so that no request waits long
behind it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from kvstrata.index.ids import TokenIds
from kvstrata.spans.span import Span
from kvstrata.store.cold.cold import Cold
from kvstrata.store.entry import Found
from kvstrata.store.report import precision_of
from kvstrata.store.search import Search, ranges_of
from kvstrata.tier.lookups import Lookup, answered

# Of one slice, at most: who asked has to write them down, and that takes time too.
MAX_COUNTED = 32
# The disk is asked about, in one slice: hashing these takes some milliseconds.
MAX_LOOKED_TOKENS = 1 << 16


@dataclass(frozen=True, eq=False)
class Conversation:
    salt: str
    ids: TokenIds


@dataclass(frozen=True)
class Holding:
    """What memory has of a conversation."""

    tokens: int  # that a request can go on from
    k: Mapping[str, int]  # tokens by the precision of their keys
    v: Mapping[str, int]
    is_pinned: bool  # some of it


@dataclass(frozen=True)
class Counted:
    """What one slice did."""

    holdings: tuple[Holding, ...]  # of the next conversations in order
    on_disk: Lookup[tuple[int, ...]]  # tokens of the same that the disk has; empty: there is none, or it did not answer
    is_last: bool


@dataclass
class _Begun:
    """The conversation that is being counted."""

    end: int = 0  # of the tokens whose precision is counted
    k: Counter[str] = field(default_factory=Counter)
    v: Counter[str] = field(default_factory=Counter)


class Census:
    """Of these conversations. One thread at a time."""

    def __init__(self, conversations: Sequence[Conversation], clock: Callable[[], float] = time.perf_counter) -> None:
        self._conversations = conversations
        self._clock = clock
        self._num_done = 0
        self._begun = _Begun()
        # Conversations share both, and finding them out takes longer than all the rest.
        self._roots: dict[str, bytes] = {}  # by salt
        self._precisions: WeakKeyDictionary[Span, tuple[int, tuple[str, str]]] = WeakKeyDictionary()  # with its version

    def go_on(self, search: Search, cold: Cold, seconds: float) -> Counted:
        """For about so long; at least one step."""
        until_s = self._clock() + seconds
        holdings: list[Holding] = []
        looked: list[tuple[bytes, TokenIds]] = []
        num_looked = 0
        while self._num_done < len(self._conversations):
            conversation = self._conversations[self._num_done]
            root = self._root_of(conversation.salt, search)
            holding = self._count(search.find_under(root, conversation.ids), until_s)
            if holding is not None:
                holdings.append(holding)
                looked.append((root, conversation.ids))
                num_looked += len(conversation.ids) if cold.has_tier else 0
                self._num_done += 1
                self._begun = _Begun()
            if len(holdings) == MAX_COUNTED or num_looked > MAX_LOOKED_TOKENS or self._clock() >= until_s:
                break
        is_last = self._num_done == len(self._conversations)
        return Counted(tuple(holdings), cold.reach(looked) if looked else answered(()), is_last)

    def _count(self, found: Found, until_s: float) -> Holding | None:
        """None: the time was over before it was done."""
        begun, ranges = self._begun, ranges_of(found)
        for run in ranges:
            if run.end > begun.end:
                k, v = self._precision_of(run.span)
                num_tokens = run.end - max(run.start, begun.end)
                begun.k[k] += num_tokens
                begun.v[v] += num_tokens
                begun.end = run.end
                if run is not ranges[-1] and self._clock() >= until_s:
                    return None
        is_pinned = any(entry.is_pinned for entry in found.entries)
        return Holding(found.num_tokens, dict(begun.k), dict(begun.v), is_pinned)

    def _precision_of(self, span: Span) -> tuple[str, str]:
        version, precision = self._precisions.get(span, (-1, ("", "")))
        if version != span.version:
            precision = precision_of(span)
            self._precisions[span] = span.version, precision
        return precision

    def _root_of(self, salt: str, search: Search) -> bytes:
        if salt not in self._roots:
            self._roots[salt] = search.root_of(salt)
        return self._roots[salt]
