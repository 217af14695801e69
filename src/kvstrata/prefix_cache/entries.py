"""Values of the prefix cache: entry, lease, cached prefix, dirty set."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from kvstrata.layers.sequence import Prefix
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.prefix_cache.radix_tree import Node
from kvstrata.prefix_cache.worth import ReuseClass
from kvstrata.spans.plan import Plan
from kvstrata.spans.span import Span, SpanRange

# Of the bytes that it has elsewhere: a span that has fewer has stepped down since.
STEPPED_DOWN = 0.95


@dataclass(eq=False)
class Entry:
    """Payload of the nodes whose tokens its span holds."""

    span: Span
    root_key: bytes
    salt: str
    reuse_class: ReuseClass  # of the request that computed it
    session: str = ""  # likewise; empty: it had none
    nodes: set[Node[Entry]] = field(default_factory=set)
    is_running: bool = True  # its owner still writes
    num_leases: int = 0  # sequences that read it, its owner apart
    pins: frozenset[Hashable] = frozenset()  # that it must stay for
    nbytes: int = 0  # as counted in the store's total
    num_arrays: int = 0  # likewise
    target: Plan | None = None  # what a client asked for it to be stored as; None: what all are
    is_archived: bool = (
        False  # the disk has all of it, or all of it is on its way: withdrawn when a block leaves the disk
    )
    archived_token_bytes: float = 0.0  # with so many bytes for each token there
    reused_end: int = 0  # the tokens up to this position were in the prompts of two requests
    longest_end: int = 0  # of all sequences that were filed through it, the end of the longest
    shared_end: int = 0  # the tokens up to this position were given to a tier that others share
    is_upward: bool = False  # even where that takes more bits than it has
    is_stuck: bool = False  # changing it failed once: it stays as it is
    sealed_to: int | None = None  # where its owner was when the target was asked for; None: that is done

    @property
    def last_node(self) -> Node[Entry]:
        return max(self.nodes, key=lambda node: node.end)

    @property
    def is_pinned(self) -> bool:
        return bool(self.pins)

    @property
    def sequence_tokens(self) -> int:
        """Length of the longest sequence that it is a part of."""
        return max(self.span.end, self.longest_end)

    @property
    def needs_archive(self) -> bool:
        """Whether it would be written to the disk before it steps down: also where that has it in fewer bits."""
        if self.is_running or self.span.is_live:
            return False
        return (
            not self.is_archived or self.archived_token_bytes * self.span.num_tokens < STEPPED_DOWN * self.span.kv_bytes
        )

    @property
    def is_evictable(self) -> bool:
        """No sequence and no pin needs it to stay."""
        return not self.is_running and not self.num_leases and not self.is_pinned


@dataclass(eq=False)
class Thread:
    """Conversation of a session: the path of its last prompt and reply. Keeps no node alive."""

    first_end: int  # of its first prompt
    end: int = 0  # where it last ended: prompt and reply
    nodes: tuple[weakref.ref[Node[Entry]], ...] = ()  # on the way there

    def path(self) -> tuple[Node[Entry], ...]:
        """Return the nodes on the way to its end that are still cached."""
        for known in reversed(self.nodes):
            node = known()
            if node is not None and node in node.payload.nodes:
                return node.path()
        return ()


@dataclass(eq=False)
class Lease:
    """What a request found: its tokens stay until they are released. How they are stored may change meanwhile."""

    reuse_class: ReuseClass  # of the request that it was made for
    num_tokens: int = 0
    prefix: Prefix | None = None  # None: nothing was found
    ranges: tuple[SpanRange, ...] = ()  # what the prefix is made of
    reused_end: int = 0  # how far an earlier request had the same prompt, stored or not
    uncounted_prompt: TokenIds | None = None  # the prompt, until the request begins; None: it was counted
    entries: set[Entry] = field(default_factory=set)
    is_open: bool = True
    session: str = ""  # of the request
    conversation: Thread | None = None  # of the session, that the request goes on with

    def readers(self, span: Span) -> int:
        """Sequences that hold a span of this lease."""
        return next((e.num_leases + e.is_running for e in self.entries if e.span is span), 0)


@dataclass(frozen=True)
class CachedPrefix:
    """The longest usable match: what a lease would be made of. It names nodes and entries and holds no span: a waiting
    request may keep it, and the memory of an entry that is evicted meanwhile still goes at once."""

    num_tokens: int
    path: tuple[Node[Entry], ...]  # of what is used
    entries: tuple[Entry, ...]  # on the path
    checkpoint_at: int | None
    matched_tokens: int  # that are stored; more than num_tokens where a model can resume at marks only


def record_reuse(path: Iterable[Node[Entry]], end: int) -> None:
    """A second request had the tokens of a path up to here."""
    for node in path:
        node.payload.reused_end = max(node.payload.reused_end, min(node.end, end))


class DirtySet:
    """Dirty set of one reader: every held entry that has changed since the reader last took it, once. `held` is the
    entry table; `on_removed` is called with an entry that has left it."""

    def __init__(self, held: Container[Entry], on_removed: Callable[[Entry], None]) -> None:
        self._held = held
        self._on_removed = on_removed
        self._entries: OrderedDict[Entry, None] = OrderedDict()

    def add(self, entry: Entry) -> None:
        if entry in self._held:
            self._entries[entry] = None

    def remove(self, entry: Entry) -> None:
        """Forget an entry that has left the entry table."""
        self._entries.pop(entry, None)
        self._on_removed(entry)

    def drain(self) -> Iterator[Entry]:
        """In the order in which they changed first. What is not asked for stays on the list."""
        while self._entries:
            yield self._entries.popitem(last=False)[0]


class DirtySets:
    """`held`: the entry table."""

    def __init__(self, held: Container[Entry]) -> None:
        self._held = held
        self._readers: list[DirtySet] = []

    def new_dirty_set(self, on_removed: Callable[[Entry], None]) -> DirtySet:
        """A list of its own, of what changes from now on. `on_removed`: see `Changed`."""
        self._readers.append(DirtySet(self._held, on_removed))
        return self._readers[-1]

    def mark_dirty(self, entry: Entry) -> None:
        """Its size, its tokens, its use, its precision, or whether it is there at all."""
        for reader in self._readers:
            reader.add(entry)

    def mark_all_dirty(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.mark_dirty(entry)

    def remove(self, entry: Entry) -> None:
        """Drop an entry that has left the entry table from every dirty set, and tell the readers."""
        for reader in self._readers:
            reader.remove(entry)
