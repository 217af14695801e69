"""Values of the prefix cache: entry with its precision target and archived copy, lease, cached prefix, dirty set."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from kvstrata.kv.precision_plan import PrecisionPlan
from kvstrata.kv.sequence_cache import Prefix
from kvstrata.kv.span import Span, SpanRange
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.prefix_cache.radix_tree import Node
from kvstrata.prefix_cache.worth import ReuseClass

# A span with less than this share of its bytes on the disk has stepped down since it was written.
STEPPED_DOWN = 0.95


@dataclass(frozen=True)
class PrecisionTarget:
    """Target precision of one entry: a client's change, a step-down, or the KV format of a running request."""

    plan: PrecisionPlan
    upward: bool = False  # also where the span has fewer bits now
    # End of the running owner when the target was set: its tokens up to here are encoded. None: up to its current end,
    # or a job has begun.
    sealed_to: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ArchivedCopy:
    """Copy of all of an entry that the disk has, or has accepted. Withdrawn when one of its blocks leaves the disk."""

    token_bytes: float  # of each token on the disk

    def nbytes(self, num_tokens: int) -> float:
        """Return the bytes of a number of tokens on the disk."""
        return self.token_bytes * num_tokens


@dataclass(eq=False)
class Entry:
    """Payload of the radix tree: a span, and the nodes whose tokens it holds.

    After construction only the entry table assigns attributes: its byte totals, eviction candidates and dirty sets
    depend on them.
    """

    span: Span
    root_key: bytes
    salt: str
    reuse_class: ReuseClass  # of the request that computed it
    session: str = ""  # of that request; empty: it had none
    nodes: set[Node[Entry]] = field(default_factory=set)
    is_running: bool = True  # the sequence that owns it still writes
    num_leases: int = 0  # of sequences that read it, without its owner
    pins: frozenset[Hashable] = frozenset()  # that protect it from eviction
    nbytes: int = 0  # as counted in the table's total
    num_arrays: int = 0  # as counted in the table's total
    target: PrecisionTarget | None = None  # its own target; None: that of all new spans
    archived: ArchivedCopy | None = None  # on the disk; None: the disk lacks some of it
    longest_end: int = 0  # end of the longest sequence that was inserted through it
    shared_end: int = 0  # the tokens up to this position were given to the shared tier
    is_stuck: bool = False  # transcoding it failed once: it stays as it is

    @property
    def last_node(self) -> Node[Entry]:
        """Node with the entry's last token."""
        return max(self.nodes, key=lambda node: node.end)

    @property
    def is_pinned(self) -> bool:
        """Whether any pin protects the entry from eviction."""
        return bool(self.pins)

    @property
    def is_upward(self) -> bool:
        """Whether its own target may give the entry more bits than it has."""
        return self.target is not None and self.target.upward

    @property
    def is_archived(self) -> bool:
        """Whether the disk has, or has accepted, all of the entry."""
        return self.archived is not None

    @property
    def sequence_tokens(self) -> int:
        """Length of the longest sequence that the entry is a part of."""
        return max(self.span.end, self.longest_end)

    @property
    def needs_archive(self) -> bool:
        """Whether the entry must be written to the disk before it steps down: the disk has it in fewer bits, or not
        at all."""
        if self.is_running or self.span.is_live:
            return False
        return self.archived is None or self.archived.nbytes(self.span.num_tokens) < STEPPED_DOWN * self.span.kv_bytes

    @property
    def is_evictable(self) -> bool:
        """Whether no sequence and no pin needs the entry."""
        return not self.is_running and not self.num_leases and not self.is_pinned


@dataclass(eq=False)
class Lease:
    """Lease on the cached prefix of a request: its entries are not evicted until `release`. They may be transcoded."""

    reuse_class: ReuseClass  # of the request that it was made for
    num_tokens: int = 0
    prefix: Prefix | None = None  # None: no token is cached
    ranges: tuple[SpanRange, ...] = ()  # of the spans that make up the prefix
    uncounted_prompt: TokenIds | None = None  # the prompt, until the request begins; None: it was counted
    entries: set[Entry] = field(default_factory=set)
    is_open: bool = True
    session: str = ""  # of the request

    def readers(self, span: Span) -> int:
        """Return the number of sequences that hold a span of this lease."""
        return next((e.num_leases + e.is_running for e in self.entries if e.span is span), 0)


@dataclass(frozen=True)
class CachedPrefix:
    """Longest usable cached prefix of a prompt: a lease would be made of it.

    It names nodes and entries and holds no span: a waiting request may keep it, and the memory of an entry that is
    evicted meanwhile is still freed at once.
    """

    num_tokens: int
    path: tuple[Node[Entry], ...]  # of the usable tokens
    entries: tuple[Entry, ...]  # on the path
    checkpoint_at: int | None
    matched_tokens: int  # that are cached; more than num_tokens where a model can resume at checkpoints only


class DirtySet:
    """Dirty set of one reader: every entry in the entry table that has changed since the reader last took it, once.

    `table_entries` are those of the entry table; `on_removed` is called with an entry that has left it.
    """

    def __init__(self, table_entries: Container[Entry], on_removed: Callable[[Entry], None]) -> None:
        self._table_entries = table_entries
        self._on_removed = on_removed
        self._entries: OrderedDict[Entry, None] = OrderedDict()

    def add(self, entry: Entry) -> None:
        """Add an entry that has changed, unless it has left the entry table."""
        if entry in self._table_entries:
            self._entries[entry] = None

    def remove(self, entry: Entry) -> None:
        """Forget an entry that has left the entry table."""
        self._entries.pop(entry, None)
        self._on_removed(entry)

    def drain(self) -> Iterator[Entry]:
        """Take entries in the order in which they changed first. Entries that the caller does not take stay."""
        while self._entries:
            yield self._entries.popitem(last=False)[0]


class DirtySets:
    """Dirty sets of all readers of the entry table."""

    def __init__(self, table_entries: Container[Entry]) -> None:
        self._table_entries = table_entries
        self._readers: list[DirtySet] = []

    def new_dirty_set(self, on_removed: Callable[[Entry], None]) -> DirtySet:
        """Return a dirty set for another reader, of entries that change from now on. `on_removed`: see `DirtySet`."""
        self._readers.append(DirtySet(self._table_entries, on_removed))
        return self._readers[-1]

    def mark_dirty(self, entry: Entry) -> None:
        """Add an entry to all dirty sets: its size, tokens, use or precision has changed, or it has come or left."""
        for reader in self._readers:
            reader.add(entry)

    def mark_all_dirty(self, entries: Iterable[Entry]) -> None:
        """Add several entries to all dirty sets."""
        for entry in entries:
            self.mark_dirty(entry)

    def remove(self, entry: Entry) -> None:
        """Drop an entry that has left the entry table from every dirty set, and inform the readers."""
        for reader in self._readers:
            reader.remove(entry)
