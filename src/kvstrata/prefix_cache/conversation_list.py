"""Conversation listing, taken in slices."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from weakref import WeakKeyDictionary

import numpy as np

from kvstrata.prefix_cache.conversations import ConversationTracker
from kvstrata.prefix_cache.entries import CachedPrefix, Entry
from kvstrata.prefix_cache.entry_table import EntryTable, EvictionCandidates
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.prefix_cache.matching import PrefixMatcher, ranges_of
from kvstrata.prefix_cache.radix_tree import Node
from kvstrata.prefix_cache.tier_client import TierClient
from kvstrata.prefix_cache.usage import PrecisionRun, precision_of, precision_runs
from kvstrata.spans.span import Span
from kvstrata.tier.lookups import Lookup, answered

NO_IDS: TokenIds = np.empty(0, np.int32)

# Conversations of one slice, at most: the caller formats them on the event loop, which takes time too.
MAX_COUNTED = 32

# Tokens that one slice looks up on the disk: hashing these takes some milliseconds.
MAX_LOOKUP_TOKENS = 1 << 16

# Conversations and runs of a snapshot, at most.
MAX_CONVERSATIONS = 64

MAX_RUNS = 400

# Entries that a snapshot examines, the newest first; each takes some microseconds.
MAX_EXAMINED = 256


@dataclass(frozen=True, eq=False)
class RememberedConversation:
    """Tokens of a conversation, wherever its KV is."""

    salt: str
    ids: TokenIds


@dataclass(frozen=True)
class CachedConversation:
    """The longest conversation of a session, and its cached prefix in memory."""

    num_ids: int  # of its prompt and reply; 0: the session has none, or they were forgotten
    tokens: int  # that a request can resume from
    k: Mapping[str, int]  # tokens by the precision of their keys
    v: Mapping[str, int]
    is_pinned: bool  # at least partly


@dataclass(frozen=True)
class CountedSlice:
    """The result of one slice of `SessionCounts`."""

    conversations: tuple[CachedConversation, ...]  # of the next sessions, in order
    on_disk: Lookup[tuple[int, ...]]  # their tokens on the disk; empty: there is no disk, or it did not answer
    is_last: bool


@dataclass
class _PartialCount:
    """The conversation that is being counted."""

    root: bytes
    ids: TokenIds
    end: int = 0  # position up to which the precision was counted
    k: Counter[str] = field(default_factory=Counter)
    v: Counter[str] = field(default_factory=Counter)


class SessionCounts:
    """The cached tokens of given sessions, counted in slices. One thread at a time may use it.

    `sessions`: salt and name of each.
    """

    def __init__(self, sessions: Sequence[tuple[str, str]], clock: Callable[[], float] = time.perf_counter) -> None:
        self._sessions = sessions
        self._clock = clock
        self._num_done = 0
        self._partial: _PartialCount | None = None  # None: the next session is not begun
        # Conversations share roots and spans, and computing these takes longer than all the rest.
        self._roots: dict[str, bytes] = {}  # by salt
        self._precisions: WeakKeyDictionary[Span, tuple[int, tuple[str, str]]] = WeakKeyDictionary()  # with its version

    def advance(
        self, tracker: ConversationTracker, matcher: PrefixMatcher, disk: TierClient, slice_s: float
    ) -> CountedSlice:
        """Count for about `slice_s`, at least one step."""
        until_s = self._clock() + slice_s
        counted: list[CachedConversation] = []
        looked_up: list[tuple[bytes, TokenIds]] = []
        num_lookup_tokens = 0
        while self._num_done < len(self._sessions):
            partial = self._partial = self._partial or self._begin_count(tracker, matcher)
            cached = self._count_prefix(partial, matcher.find_under(partial.root, partial.ids), until_s)
            if cached is not None:
                counted.append(cached)
                looked_up.append((partial.root, partial.ids))
                num_lookup_tokens += len(partial.ids) if disk.has_tier else 0
                self._num_done += 1
                self._partial = None
            if len(counted) == MAX_COUNTED or num_lookup_tokens > MAX_LOOKUP_TOKENS or self._clock() >= until_s:
                break
        is_last = self._num_done == len(self._sessions)
        return CountedSlice(tuple(counted), disk.count_usable(looked_up) if looked_up else answered(()), is_last)

    def _begin_count(self, tracker: ConversationTracker, matcher: PrefixMatcher) -> _PartialCount:
        salt, session = self._sessions[self._num_done]
        longest = tracker.longest(salt, session)
        return _PartialCount(self._root_of(salt, matcher), NO_IDS if longest is None else longest.ids)

    def _count_prefix(self, partial: _PartialCount, prefix: CachedPrefix, until_s: float) -> CachedConversation | None:
        """Count the precisions of a cached prefix. None: the slice ended before the last run."""
        ranges = ranges_of(prefix)
        for run in ranges:
            if run.end > partial.end:
                k, v = self._precision_of(run.span)
                num_tokens = run.end - max(run.start, partial.end)
                partial.k[k] += num_tokens
                partial.v[v] += num_tokens
                partial.end = run.end
                if run is not ranges[-1] and self._clock() >= until_s:
                    return None
        is_pinned = any(entry.is_pinned for entry in prefix.entries)
        return CachedConversation(len(partial.ids), prefix.num_tokens, dict(partial.k), dict(partial.v), is_pinned)

    def _precision_of(self, span: Span) -> tuple[str, str]:
        version, precision = self._precisions.get(span, (-1, ("", "")))
        if version != span.version:
            precision = precision_of(span)
            self._precisions[span] = span.version, precision
        return precision

    def _root_of(self, salt: str, matcher: PrefixMatcher) -> bytes:
        if salt not in self._roots:
            self._roots[salt] = matcher.root_of(salt)
        return self._roots[salt]


@dataclass(frozen=True, eq=False)
class ConversationRun:
    """Consecutive tokens in memory: one node of the radix tree."""

    parent: int | None  # index in the list of the run that it continues; None: it begins a prompt
    root: bytes
    salt: str
    start: int
    ids: TokenIds
    precisions: tuple[PrecisionRun, ...]  # in order; the last one reaches to the run's end
    nbytes: int
    shared_end: int  # tokens up to this position were given to the shared tier
    session: str  # of the request that computed it; empty: it had none
    unused_s: float  # since a request last resumed from it
    is_pinned: bool
    is_running: bool  # a request writes it, or continues from its end
    is_superseded: bool  # its conversation has continued on another branch


class ConversationSnapshot:
    """The latest runs of one owner's conversations, or of all, collected in slices.

    One thread at a time may use it. Nodes that are removed while it is collected stay in it as empty runs.
    """

    def __init__(self, owner: str | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._owner = owner
        self._clock = clock
        self._chosen: list[Node[Entry]] | None = None  # parents before their children; None: not chosen yet
        self._indices: dict[Node[Entry], int] = {}  # in `runs`
        self._precisions: dict[Entry, tuple[PrecisionRun, ...]] = {}
        self.runs: list[ConversationRun] = []
        self.has_more = False  # some conversations were left out

    @property
    def is_done(self) -> bool:
        return self._chosen is not None and len(self._indices) == len(self._chosen)

    def advance(
        self, table: EntryTable, candidates: EvictionCandidates, matcher: PrefixMatcher, slice_s: float
    ) -> None:
        """Collect for about `slice_s`, at least one step."""
        until_s = self._clock() + slice_s
        if self._chosen is None:
            self._chosen = self._choose_nodes(table, candidates, matcher.roots_begin(None, self._owner))
        while not self.is_done:
            self._add_run(self._chosen[len(self._indices)], candidates)
            if self._clock() >= until_s:
                return

    def _choose_nodes(self, table: EntryTable, candidates: EvictionCandidates, root_prefix: bytes) -> list[Node[Entry]]:
        """Return the nodes of the conversations that were used last. `root_prefix`: the owner's part of root keys."""
        newest = list(islice(reversed(table.entries), MAX_EXAMINED))
        last_nodes = [entry.last_node for entry in newest if entry.nodes and entry.root_key.startswith(root_prefix)]
        leaves = sorted((node for node in last_nodes if node.is_leaf), key=candidates.last_use_of_node_s, reverse=True)
        chosen: dict[Node[Entry], None] = {}
        for number, leaf in enumerate(leaves):
            path = leaf.path()
            num_new = sum(node not in chosen for node in path)
            if number and (number >= MAX_CONVERSATIONS or len(chosen) + num_new > MAX_RUNS):
                self.has_more = True
                break
            chosen.update(dict.fromkeys(path))
        self.has_more = self.has_more or len(table.entries) > len(newest)
        return sorted(chosen, key=lambda node: node.start)

    def _add_run(self, node: Node[Entry], candidates: EvictionCandidates) -> None:
        """Add a node, or an empty run where it was removed since it was chosen: its children refer to its index."""
        self._indices[node] = len(self.runs)
        entry = node.payload
        is_cached = node in entry.nodes
        self.runs.append(
            ConversationRun(
                parent=None if node.parent is None else self._indices.get(node.parent),
                root=node.root_key,
                salt=entry.salt,
                start=node.start,
                ids=node.tokens if is_cached else node.tokens[:0],
                precisions=self._precisions_of(node, entry) if is_cached else (),
                nbytes=entry.nbytes * node.num_tokens // max(1, entry.span.num_tokens) if is_cached else 0,
                shared_end=entry.shared_end,
                session=entry.session,
                unused_s=candidates.now_s() - candidates.last_use_of_node_s(node) if is_cached else 0.0,
                is_pinned=entry.is_pinned,
                is_running=entry.is_running or _is_read_to_its_end(node),
                is_superseded=candidates.is_superseded(node),
            )
        )

    def _precisions_of(self, node: Node[Entry], entry: Entry) -> tuple[PrecisionRun, ...]:
        """Return the precisions of a node's tokens.

        Several nodes may share an entry, and computing its precisions takes longer than all the rest.
        """
        if entry not in self._precisions:
            self._precisions[entry] = precision_runs(entry.span)
        runs = [replace(run, end=min(run.end, node.end)) for run in self._precisions[entry] if run.end > node.start]
        num_needed = next((number for number, run in enumerate(runs, 1) if run.end == node.end), len(runs))
        return tuple(runs[:num_needed])


def _is_read_to_its_end(node: Node[Entry]) -> bool:
    """Return whether a request reads a conversation whole.

    A lease on an entry of several nodes may end at any of them, most often because another conversation shares the
    beginning, so it does not count.
    """
    entry = node.payload
    return entry.num_leases > 0 and node.is_leaf and len(entry.nodes) == 1
