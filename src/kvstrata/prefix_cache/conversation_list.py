"""Conversation listing: counts and snapshots that the engine thread takes in slices, and the list made from them.

`ConversationListing` belongs to a worker thread and asks no engine: it joins a snapshot of memory with the tracked
conversations of sessions, and records what other tiers answer. The id of a conversation is a digest of its salt and
tokens, which reveals neither.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice, pairwise
from operator import attrgetter
from weakref import WeakKeyDictionary

import numpy as np
from blake3 import blake3

from kvstrata.kv.span import Span
from kvstrata.prefix_cache.conversations import ConversationTracker, TrackedConversation
from kvstrata.prefix_cache.entries import CachedPrefix, Entry
from kvstrata.prefix_cache.entry_table import EntryTable, EvictionCandidates
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.prefix_cache.matching import PrefixMatcher, ranges_of
from kvstrata.prefix_cache.radix_tree import Node, RadixTree
from kvstrata.prefix_cache.tier_client import TierClient, TierRun
from kvstrata.prefix_cache.usage import PrecisionRun, precision_of, precision_runs
from kvstrata.tiers.lookups import Lookup, answered

NO_IDS: TokenIds = np.empty(0, np.int32)

# Conversations of one slice, at most: the caller formats them on the event loop, which takes time too.
MAX_COUNTED = 32

# Tokens of one lookup on the disk: hashing these takes some milliseconds.
MAX_LOOKUP_TOKENS = 1 << 16

# Conversations and runs of a snapshot, at most.
MAX_CONVERSATIONS = 64

MAX_RUNS = 400

# Entries that a snapshot examines, the newest first; each takes some microseconds.
MAX_EXAMINED = 256

# Tokens that a listing looks up on the disk, in all.
MAX_LISTING_LOOKUP_TOKENS = 1 << 17

# Conversations that a listing looks up on the shared tier: each takes a round trip over the network.
MAX_SHARED_LOOKUPS = 16

ID_CONTEXT = "kvstrata 2026-11 conversation v1"
ID_CHARS = 32


@dataclass(frozen=True, eq=False)
class ConversationTokens:
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


# A node of a listing: its tokens are in memory (a run), or only tracked.
ListingNode = Node[ConversationRun | TrackedConversation]


@dataclass(frozen=True)
class ConversationPart:
    """Consecutive tokens in one precision, in one set of tiers."""

    tokens: int
    tier: str  # that requests read it from: hot (memory), disk or remote
    k: str
    v: str
    nbytes: int
    also: tuple[str, ...] = ()  # other tiers that have a copy
    is_pinned: bool = False


@dataclass(frozen=True, eq=False)
class ListedConversation:
    """A conversation of a listing. Its own tokens begin where it diverges from its parent."""

    id: str
    parent: ListedConversation | None  # has the tokens before `start`
    start: int
    leaf: ListingNode

    @property
    def num_tokens(self) -> int:
        return self.leaf.end

    @property
    def session(self) -> str:
        return self.leaf.payload.session

    @property
    def unused_s(self) -> float:
        return self.leaf.payload.unused_s

    @property
    def is_in_memory(self) -> bool:
        return isinstance(self.leaf.payload, ConversationRun)

    @property
    def is_superseded(self) -> bool:
        return _is_superseded(self.leaf)

    @property
    def nodes(self) -> tuple[ListingNode, ...]:
        """Nodes of its own tokens, in order."""
        return tuple(node for node in self.leaf.path() if node.start >= self.start)

    @property
    def last_run(self) -> ConversationRun | None:
        """Last run of its own tokens in memory; None: memory has none of them."""
        runs = [node.payload for node in self.nodes if isinstance(node.payload, ConversationRun)]
        return runs[-1] if runs else None

    def prompt(self) -> ConversationTokens:
        """Return all of its tokens, the shared prefix included."""
        return _prompt_to(self.leaf)


class ConversationListing:
    """The conversations of a snapshot and of sessions, joined in a radix tree that has a shared prefix once.

    Tokens of tracked conversations that memory lacks are nodes of their own. A caller that lists them records what the
    other tiers have of them, then calls `remove_unavailable`.
    """

    def __init__(self, snapshot: ConversationSnapshot, tracked: Iterable[TrackedConversation]) -> None:
        self.has_more = snapshot.has_more  # some conversations were left out
        self._tree: RadixTree[ConversationRun | TrackedConversation] = RadixTree()  # roots: encoded salts
        # Runs and tokens of a whole conversation on other tiers, by each node of its path.
        self._on_disk: dict[ListingNode, tuple[TierRun, ...]] = {}
        self._shared_ends: dict[ListingNode, int] = {}
        self._shared_precision = ""
        self._insert_runs(snapshot.runs)
        for conversation in tracked:
            self._insert_tracked(conversation)
        self._ids = _ids_of(self._tree)  # each node may be the end of a conversation

    def _insert_runs(self, runs: Sequence[ConversationRun]) -> None:
        """Copy the nodes of a snapshot. Leave out nodes that do not fit, because the cache changed between two slices.

        The next snapshot has these nodes again.
        """
        nodes: dict[int, ListingNode] = {}  # by index of the run
        for index, run in enumerate(runs):
            parent, root = None if run.parent is None else nodes.get(run.parent), _encode(run.salt)
            end = 0 if parent is None else parent.end
            is_linked = (parent is None) == (run.parent is None) and run.start == end
            siblings = self._tree.children_of_root(root) if parent is None else parent.children
            if is_linked and len(run.ids) and run.ids.item(0) not in siblings:
                nodes[index] = self._tree.add_child(parent, root, run.ids, run)

    def _insert_tracked(self, conversation: TrackedConversation) -> None:
        """Insert a conversation if it adds to the tree more than its last token, which is never computed."""
        root = _encode(conversation.salt)
        if self._tree.match(root, conversation.ids).num_tokens < len(conversation.ids) - 1:
            self._tree.insert(root, conversation.ids, conversation)

    # The list.

    def conversations(self) -> list[ListedConversation]:
        """Return a conversation for each leaf of the tree, after the parent that has its shared prefix.

        Siblings are sorted by last use, the latest last; superseded ones come after them. The first one continues its
        parent, so it has the shared prefix.
        """
        order = self._order()
        listed: list[ListedConversation] = []
        pending: list[tuple[ListingNode, ListedConversation | None]] = [  # the next one is at the end
            (node, None) for node in sorted(self._first_nodes(), key=order.__getitem__)[::-1]
        ]
        while pending:
            leaf, parent = pending.pop()
            start, branches = leaf.start, list[ListingNode]()
            while not leaf.is_leaf:
                leaf, *others = sorted(leaf.children.values(), key=order.__getitem__)
                branches += others[::-1]
            conversation = ListedConversation(self._ids[leaf], parent, start, leaf)
            listed.append(conversation)
            pending += [(branch, conversation) for branch in branches]
        return listed

    def find(self, id: str) -> ConversationTokens | None:
        """Return the conversation that was listed under an id; None: there is none.

        A conversation that was continued since then is found with the tokens that it had, if a node ends with them.
        """
        return next((_prompt_to(node) for node in self._tree if self._ids[node] == id), None)

    def parts_of(self, conversation: ListedConversation) -> list[ConversationPart]:
        """Return the parts of a conversation's own tokens that some tier has, in order."""
        parts = (part for node in conversation.nodes for part in self._parts_of_node(node))
        alike = groupby(parts, attrgetter("tier", "k", "v", "also", "is_pinned"))
        return [_join(list(group)) for _, group in alike]

    def _first_nodes(self) -> list[ListingNode]:
        tree = self._tree
        return [node for root_key in tree.root_keys for node in tree.children_of_root(root_key).values()]

    def _order(self) -> dict[ListingNode, tuple[bool, float]]:
        """Return a sort key for each node: whether all leaves below it are superseded, and their last use."""
        order: dict[ListingNode, tuple[bool, float]] = {}
        for node in reversed(list(self._tree)):  # children before their parents
            below = [order[child] for child in node.children.values()]
            if below:
                order[node] = all(superseded for superseded, _ in below), max(used for _, used in below)
            else:
                order[node] = _is_superseded(node), -node.payload.unused_s
        return order

    # Other tiers.

    def disk_batches(self) -> list[list[ListedConversation]]:
        """Return the conversations to look up on the disk, the last used first: a batch for each lookup."""
        batches: list[list[ListedConversation]] = []
        num_total = num_in_batch = 0
        for conversation in self._last_used_first():
            if not batches or num_in_batch + conversation.num_tokens > MAX_LOOKUP_TOKENS:
                if num_total >= MAX_LISTING_LOOKUP_TOKENS:
                    break
                batches.append([])
                num_in_batch = 0
            batches[-1].append(conversation)
            num_in_batch += conversation.num_tokens
            num_total += conversation.num_tokens
        return batches

    def record_on_disk(self, conversations: Iterable[ListedConversation], runs: Iterable[tuple[TierRun, ...]]) -> None:
        """Record the runs of conversations on the disk. `runs`: the answer to the lookup; may be empty."""
        for conversation, on_disk in zip(conversations, runs, strict=False):
            for node in conversation.leaf.path():
                if _end_of(on_disk) > _end_of(self._on_disk.get(node, ())):
                    self._on_disk[node] = on_disk

    def shared_batch(self) -> list[ListedConversation]:
        """Return the conversations to look up on the shared tier: neither memory nor the disk has them whole."""
        missing = (
            conversation
            for conversation in self._last_used_first()
            if not conversation.is_in_memory
            # The last token of a reply is never computed.
            and _end_of(self._on_disk.get(conversation.leaf, ())) < conversation.num_tokens - 1
        )
        return list(islice(missing, MAX_SHARED_LOOKUPS))

    def record_in_shared(
        self, conversations: Iterable[ListedConversation], num_tokens: Iterable[int], precision: str
    ) -> None:
        """Record how many tokens of conversations the shared tier has, and its precision."""
        self._shared_precision = precision
        for conversation, end in zip(conversations, num_tokens, strict=False):
            for node in conversation.leaf.path():
                self._shared_ends[node] = max(end, self._shared_ends.get(node, 0))

    def remove_unavailable(self) -> None:
        """Remove the tokens that no tier has. A tier that has a node has its whole path, so only leaves are removed."""
        for node in reversed(list(self._tree)):  # children before their parents
            end = max(_end_of(self._on_disk.get(node, ())), self._shared_ends.get(node, 0))
            if not isinstance(node.payload, ConversationRun) and end <= node.start:
                self._tree.remove(node)

    def _last_used_first(self) -> list[ListedConversation]:
        return sorted(self.conversations(), key=attrgetter("unused_s"))

    def _parts_of_node(self, node: ListingNode) -> Iterator[ConversationPart]:
        on_disk, shared_end = self._on_disk.get(node, ()), self._shared_ends.get(node, 0)
        if isinstance(node.payload, ConversationRun):
            yield from _parts_in_memory(node, node.payload, _end_of(on_disk), shared_end)
        else:
            yield from _parts_on_tiers(node, on_disk, shared_end, self._shared_precision)


def _ids_of(tree: RadixTree[ConversationRun | TrackedConversation]) -> dict[ListingNode, str]:
    """Return for each node the id of the conversation that ends with it."""
    ids: dict[ListingNode, str] = {}
    hashers: dict[ListingNode, blake3] = {}
    for node in tree:
        if node.parent is None:
            hasher = blake3(_encode(node.payload.salt) + b"\0", derive_key_context=ID_CONTEXT)
        else:
            hasher = hashers[node.parent].copy()
        hashers[node] = hasher.update(node.tokens.tobytes())
        ids[node] = hasher.hexdigest()[:ID_CHARS]
    return ids


def _parts_in_memory(
    node: ListingNode, run: ConversationRun, disk_end: int, shared_end: int
) -> Iterator[ConversationPart]:
    copy_ends = {"disk": disk_end, "remote": max(shared_end, run.shared_end)}
    ends = {*copy_ends.values(), *(each.end for each in run.precisions)}
    cuts = {node.start, node.end, *(end for end in ends if node.start < end < node.end)}
    for start, end in pairwise(sorted(cuts)):
        nbytes = run.nbytes * (end - start) // max(1, len(run.ids))
        also = tuple(tier for tier, copy_end in copy_ends.items() if end <= copy_end)
        precision = next(each for each in run.precisions if each.end >= end)
        yield ConversationPart(end - start, "hot", precision.k, precision.v, nbytes, also, run.is_pinned)


def _parts_on_tiers(
    node: ListingNode, on_disk: tuple[TierRun, ...], shared_end: int, shared_precision: str
) -> Iterator[ConversationPart]:
    """Yield the parts of tokens that memory lacks: from the disk as far as it has them, then from the shared tier."""
    position, run_start = node.start, 0
    for run in on_disk:
        end = min(run.end, node.end)
        if end > position:
            nbytes = run.nbytes * (end - position) // max(1, run.end - run_start)
            yield ConversationPart(end - position, "disk", run.precision, run.precision, nbytes)
            position = end
        run_start = run.end
    end = min(shared_end, node.end)
    if end > position:
        yield ConversationPart(end - position, "remote", shared_precision, shared_precision, 0)


def _join(parts: Sequence[ConversationPart]) -> ConversationPart:
    """Join neighbouring parts that differ in size only."""
    return replace(parts[0], tokens=sum(part.tokens for part in parts), nbytes=sum(part.nbytes for part in parts))


def _prompt_to(node: ListingNode) -> ConversationTokens:
    return ConversationTokens(node.payload.salt, np.concatenate([each.tokens for each in node.path()]))


def _is_superseded(node: ListingNode) -> bool:
    return isinstance(node.payload, ConversationRun) and node.payload.is_superseded


def _end_of(runs: tuple[TierRun, ...]) -> int:
    return runs[-1].end if runs else 0


def _encode(salt: str) -> bytes:
    # A salt comes from a client's JSON, which may contain a lone surrogate.
    return salt.encode("utf-8", "surrogatepass")
