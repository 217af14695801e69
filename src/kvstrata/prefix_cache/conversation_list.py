"""Conversation listing, taken in slices."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from weakref import WeakKeyDictionary

from kvstrata.prefix_cache.entries import CachedPrefix, Entry
from kvstrata.prefix_cache.entry_table import EntryTable, EvictionCandidates
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.prefix_cache.matching import PrefixMatcher, ranges_of
from kvstrata.prefix_cache.radix_tree import Node
from kvstrata.prefix_cache.tier_client import TierClient
from kvstrata.prefix_cache.usage import PrecisionRun, precision_of, stored_as
from kvstrata.spans.span import Span
from kvstrata.tier.lookups import Lookup, answered

# Of one slice, at most: who asked has to write them down, and that takes time too.
MAX_COUNTED = 32

# The disk is asked about, in one slice: hashing these takes some milliseconds.
MAX_LOOKED_TOKENS = 1 << 16


@dataclass(frozen=True, eq=False)
class RememberedConversation:
    salt: str
    ids: TokenIds


@dataclass(frozen=True)
class CachedConversation:
    """What memory has of a conversation."""

    tokens: int  # that a request can go on from
    k: Mapping[str, int]  # tokens by the precision of their keys
    v: Mapping[str, int]
    is_pinned: bool  # some of it


@dataclass(frozen=True)
class CountedSlice:
    """What one slice did."""

    holdings: tuple[CachedConversation, ...]  # of the next conversations in order
    on_disk: Lookup[tuple[int, ...]]  # tokens of the same that the disk has; empty: there is none, or it did not answer
    is_last: bool


@dataclass
class _Begun:
    """The conversation that is being counted."""

    end: int = 0  # of the tokens whose precision is counted
    k: Counter[str] = field(default_factory=Counter)
    v: Counter[str] = field(default_factory=Counter)


class SessionCounts:
    """Of these conversations. One thread at a time."""

    def __init__(
        self, conversations: Sequence[RememberedConversation], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._conversations = conversations
        self._clock = clock
        self._num_done = 0
        self._begun = _Begun()
        # Conversations share both, and finding them out takes longer than all the rest.
        self._roots: dict[str, bytes] = {}  # by salt
        self._precisions: WeakKeyDictionary[Span, tuple[int, tuple[str, str]]] = WeakKeyDictionary()  # with its version

    def advance(self, search: PrefixMatcher, cold: TierClient, seconds: float) -> CountedSlice:
        """For about so long; at least one step."""
        until_s = self._clock() + seconds
        holdings: list[CachedConversation] = []
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
        return CountedSlice(tuple(holdings), cold.count_usable(looked) if looked else answered(()), is_last)

    def _count(self, found: CachedPrefix, until_s: float) -> CachedConversation | None:
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
        return CachedConversation(found.num_tokens, dict(begun.k), dict(begun.v), is_pinned)

    def _precision_of(self, span: Span) -> tuple[str, str]:
        version, precision = self._precisions.get(span, (-1, ("", "")))
        if version != span.version:
            precision = precision_of(span)
            self._precisions[span] = span.version, precision
        return precision

    def _root_of(self, salt: str, search: PrefixMatcher) -> bytes:
        if salt not in self._roots:
            self._roots[salt] = search.root_of(salt)
        return self._roots[salt]


MAX_CONVERSATIONS = 64

MAX_RUNS = 400

# Entries that are looked at, the newest first: a look at one takes some microseconds.
MAX_LOOKED = 256


@dataclass(frozen=True, eq=False)
class ConversationRun:
    """A run of tokens in memory."""

    above: int | None  # the place in the list of the one that it hangs on; None: it begins a prompt
    root: bytes
    salt: str
    start: int
    ids: TokenIds
    stored: tuple[PrecisionRun, ...]  # in order; together they reach to its end
    nbytes: int
    shared_end: int  # the tokens up to this position were given to a tier that others share
    session: str  # of the request that computed it; empty: it had none
    unused_s: float  # how long ago a request last went on from it
    is_pinned: bool
    is_running: bool  # a request writes it, or continues from its end
    is_superseded: bool  # its conversation has gone on elsewhere


class ConversationSnapshot:
    """Of one owner's conversations, or of all. One thread at a time."""

    def __init__(self, owner: str | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._owner = owner
        self._clock = clock
        self._chosen: list[Node[Entry]] | None = None  # parents before their children; None: not chosen yet
        self._places: dict[Node[Entry], int] = {}
        self._stored: dict[Entry, tuple[PrecisionRun, ...]] = {}
        self.runs: list[ConversationRun] = []
        self.has_more = False  # there are conversations that were left out

    @property
    def is_done(self) -> bool:
        return self._chosen is not None and len(self._places) == len(self._chosen)

    def advance(self, shelf: EntryTable, leaves: EvictionCandidates, search: PrefixMatcher, seconds: float) -> None:
        """For about so long; at least one step."""
        until_s = self._clock() + seconds
        if self._chosen is None:
            self._chosen = self._choose(shelf, leaves, search.roots_begin(None, self._owner))
        while not self.is_done:
            self._tell(self._chosen[len(self._places)], leaves)
            if self._clock() >= until_s:
                return

    def _choose(self, shelf: EntryTable, leaves: EvictionCandidates, under: bytes) -> list[Node[Entry]]:
        recent = list(islice(reversed(shelf.entries), MAX_LOOKED))
        last = [entry.last_node for entry in recent if entry.nodes and entry.root_key.startswith(under)]
        ends = sorted((node for node in last if node.is_leaf), key=leaves.last_use_of_node_s, reverse=True)
        chosen: dict[Node[Entry], None] = {}
        for number, end in enumerate(ends):
            path = end.path()
            num_new = sum(node not in chosen for node in path)
            if number and (number >= MAX_CONVERSATIONS or len(chosen) + num_new > MAX_RUNS):
                self.has_more = True
                break
            chosen.update(dict.fromkeys(path))
        self.has_more = self.has_more or len(shelf.entries) > len(recent)
        return sorted(chosen, key=lambda node: node.start)

    def _tell(self, node: Node[Entry], leaves: EvictionCandidates) -> None:
        """A node that has gone since it was chosen keeps its place, with nothing in it."""
        self._places[node] = len(self.runs)
        entry = node.payload
        is_there = node in entry.nodes
        self.runs.append(
            ConversationRun(
                above=None if node.parent is None else self._places.get(node.parent),
                root=node.root_key,
                salt=entry.salt,
                start=node.start,
                ids=node.tokens if is_there else node.tokens[:0],
                stored=self._stored_as(node, entry) if is_there else (),
                nbytes=entry.nbytes * node.num_tokens // max(1, entry.span.num_tokens) if is_there else 0,
                shared_end=entry.shared_end,
                session=entry.session,
                unused_s=leaves.now_s() - leaves.last_use_of_node_s(node) if is_there else 0.0,
                is_pinned=entry.is_pinned,
                is_running=entry.is_running or _is_read_to_its_end(node),
                is_superseded=leaves.is_superseded(node),
            )
        )

    def _stored_as(self, node: Node[Entry], entry: Entry) -> tuple[PrecisionRun, ...]:
        """Several nodes may share an entry, and finding this out takes longer than all the rest."""
        if entry not in self._stored:
            self._stored[entry] = stored_as(entry.span)
        runs = [replace(run, end=min(run.end, node.end)) for run in self._stored[entry] if run.end > node.start]
        num_needed = next((place for place, run in enumerate(runs, 1) if run.end == node.end), len(runs))
        return tuple(runs[:num_needed])


def _is_read_to_its_end(node: Node[Entry]) -> bool:
    """Whether a request reads a conversation whole. A lease on an entry of several nodes may end at any of them, so it
    is not counted: most often another conversation shares the beginning."""
    entry = node.payload
    return entry.num_leases > 0 and node.is_leaf and len(entry.nodes) == 1
