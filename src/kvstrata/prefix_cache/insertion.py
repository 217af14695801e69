"""Leases, and insertion of computed or loaded spans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstrata.prefix_cache.conversations import ConversationTracker
from kvstrata.prefix_cache.entries import Entry, Lease, record_reuse
from kvstrata.prefix_cache.entry_table import Checkpoints, EntryTable
from kvstrata.prefix_cache.keys import Tokens, as_ids
from kvstrata.prefix_cache.offload import DropCounters
from kvstrata.prefix_cache.pins import Pins
from kvstrata.prefix_cache.precision import StepDownPolicy
from kvstrata.prefix_cache.radix_tree import Node
from kvstrata.prefix_cache.transcode import Transcoder
from kvstrata.prefix_cache.worth import ReuseClass
from kvstrata.spans.marks import Mark


class Leases:
    """`review` is told of what is leased no more: maybe it should be stored in another way now."""

    def __init__(self, shelf: EntryTable, review: Callable[[Entry], None]) -> None:
        self._shelf = shelf
        self._review = review

    def hold(self, entries: Iterable[Entry]) -> Lease:
        """Keep these while a request waits that would go on from them."""
        lease = Lease(ReuseClass.CONTINUED)
        self.extend(lease, entries)
        return lease

    def extend(self, lease: Lease, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry not in lease.entries:
                lease.entries.add(entry)
                self._shelf.change(entry, num_leases=entry.num_leases + 1)

    def release(self, lease: Lease) -> None:
        """Nothing happens the second time."""
        if not lease.is_open:
            return
        lease.is_open = False
        for entry in lease.entries:
            self._shelf.change(entry, num_leases=entry.num_leases - 1)
            self._review(entry)


class Inserter:
    """Takes in spans that no sequence writes any more."""

    def __init__(
        self, shelf: EntryTable, pins: Pins, losses: DropCounters, counters: Counter[str], rewriting: Transcoder
    ) -> None:
        self._shelf = shelf
        self._pins = pins
        self._losses = losses
        self._counters = counters
        self._rewriting = rewriting

    def finish_owner(self, entry: Entry) -> None:
        """Its owner has ended."""
        if entry.nodes:
            self._counters["stored_spans"] += 1
            self._counters["stored_tokens"] += sum(node.num_tokens for node in entry.nodes)
            self._shelf.record_use(entry.nodes, entry.reuse_class, entry.session)
        else:
            # It computed nothing, or nothing that was not there already.
            self._counters["refused_present" if entry.span.num_tokens else "refused_empty"] += 1
        self.finish_span(entry)

    def finish_span(self, entry: Entry) -> None:
        """Keep what no other sequence has filed."""
        if not entry.nodes:
            self._shelf.drop_entry(entry)
            return
        start, end = min(node.start for node in entry.nodes), max(node.end for node in entry.nodes)
        entry.span.cut(start, end)
        self._shelf.change(entry, is_running=False)
        self._pins.pin_new_entry(entry)
        self._losses.record_insertion(entry)
        self._rewriting.review_ended(entry)


@dataclass(frozen=True)
class Desk:
    """What filing takes."""

    shelf: EntryTable
    marks: Checkpoints
    leases: Leases
    intake: Inserter
    pressure: StepDownPolicy
    rewriting: Transcoder
    branches: ConversationTracker


class Insertion:
    """`resume_at`: where its conversation is likely to be taken up again."""

    def __init__(self, desk: Desk, entry: Entry, lease: Lease, resume_at: Sequence[int] = ()) -> None:
        self._desk = desk
        self._resume_at = resume_at
        self._path: tuple[Node[Entry], ...] = ()  # of all tokens so far
        self._is_detached = False
        self.entry = entry
        self.lease = lease  # on what it goes on from, and on what it was filed under since

    @property
    def entries(self) -> set[Entry]:
        """All that its sequence holds."""
        return {*self.lease.entries, self.entry}

    def commit(self, tokens: Tokens, mark: Mark | None = None, *, is_end: bool = False) -> None:
        """From now on others may go on from `tokens`, all of the sequence so far. `is_end`: here a prompt ended."""
        if self._is_detached:
            return
        span = self.entry.span
        if len(tokens) - span.position > span.num_tokens or mark is not None:
            self._file(tokens, mark)
        if is_end:
            span.ends.add(len(tokens))

    def _file(self, tokens: Tokens, mark: Mark | None) -> None:
        entry, desk = self.entry, self._desk
        entry.span.num_tokens = len(tokens) - entry.span.position
        path = self._path = desk.shelf.insert_entry(entry, as_ids(tokens))
        record_reuse(path, self.lease.reused_end)
        desk.rewriting.review(entry)
        # Another sequence may have filed some of these tokens meanwhile: what ours hang on must stay.
        desk.leases.extend(self.lease, (node.payload for node in path if node.payload is not entry))
        if mark is not None:
            desk.marks.add_checkpoint(path, mark, self._resume_at)

    def has_grown(self, num_tokens: int) -> None:
        """To so many tokens: maybe it should be held in fewer bits, or more of it should be encoded."""
        if self._is_detached:
            return
        desk = self._desk
        desk.rewriting.step_down(desk.pressure.for_length(self.entries, num_tokens))
        desk.rewriting.review(self.entry)

    def detach(self) -> None:
        """A commit failed: the sequence goes on, and what it computes from now on is not filed."""
        self._is_detached = True

    def drop_checkpoints(self) -> bool:
        """All on the way of its sequence, which needs none of them itself. False: there are none."""
        return self._desk.marks.drop_checkpoints(self.entries)

    def close(self) -> None:
        """The sequence writes no more."""
        try:
            self._desk.intake.finish_owner(self.entry)
        finally:
            self._desk.leases.release(self.lease)
        if self.lease.conversation is not None and self._path:
            end = self.entry.span.position + self.entry.span.num_tokens
            self._desk.branches.end_turn(
                self.entry.root_key, self.lease.session, self.lease.conversation, self._path, end
            )


class DetachedInsertion(Insertion):
    """Of a sequence that files nothing: its caches cannot be shared, or the store could not open a filing."""

    def seal(self, tokens: Tokens, mark: Mark | None = None, *, is_end: bool = False) -> None:
        del tokens, mark, is_end

    def has_grown(self, num_tokens: int) -> None:
        del num_tokens

    def end(self) -> None:
        self._desk.leases.release(self.lease)
