"""Leases, and insertion of computed or loaded spans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstrata.prefix_cache.conversations import Branches
from kvstrata.prefix_cache.entries import Entry, Lease, note_asked_twice
from kvstrata.prefix_cache.entry_table import Marks, Shelf
from kvstrata.prefix_cache.keys import Tokens, as_ids
from kvstrata.prefix_cache.offload import Losses
from kvstrata.prefix_cache.pins import Pins
from kvstrata.prefix_cache.precision import Pressure
from kvstrata.prefix_cache.radix_tree import Node
from kvstrata.prefix_cache.transcode import Rewriting
from kvstrata.prefix_cache.worth import Kind
from kvstrata.spans.marks import Mark


class Leases:
    """`review` is told of what is leased no more: maybe it should be stored in another way now."""

    def __init__(self, shelf: Shelf, review: Callable[[Entry], None]) -> None:
        self._shelf = shelf
        self._review = review

    def hold(self, entries: Iterable[Entry]) -> Lease:
        """Keep these while a request waits that would go on from them."""
        lease = Lease(Kind.CONTINUED)
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


class Intake:
    """Takes in spans that no sequence writes any more."""

    def __init__(self, shelf: Shelf, pins: Pins, losses: Losses, counters: Counter[str], rewriting: Rewriting) -> None:
        self._shelf = shelf
        self._pins = pins
        self._losses = losses
        self._counters = counters
        self._rewriting = rewriting

    def end(self, entry: Entry) -> None:
        """Its owner has ended."""
        if entry.nodes:
            self._counters["stored_spans"] += 1
            self._counters["stored_tokens"] += sum(node.num_tokens for node in entry.nodes)
            self._shelf.touch(entry.nodes, entry.kind, entry.session)
        else:
            # It computed nothing, or nothing that was not there already.
            self._counters["refused_present" if entry.span.num_tokens else "refused_empty"] += 1
        self.take_in(entry)

    def take_in(self, entry: Entry) -> None:
        """Keep what no other sequence has filed."""
        if not entry.nodes:
            self._shelf.drop(entry)
            return
        start, end = min(node.start for node in entry.nodes), max(node.end for node in entry.nodes)
        entry.span.cut(start, end)
        self._shelf.change(entry, is_running=False)
        self._pins.look_at(entry)
        self._losses.stored(entry)
        self._rewriting.review_ended(entry)


@dataclass(frozen=True)
class Desk:
    """What filing takes."""

    shelf: Shelf
    marks: Marks
    leases: Leases
    intake: Intake
    pressure: Pressure
    rewriting: Rewriting
    branches: Branches


class Filing:
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

    def seal(self, tokens: Tokens, mark: Mark | None = None, *, is_end: bool = False) -> None:
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
        path = self._path = desk.shelf.insert(entry, as_ids(tokens))
        note_asked_twice(path, self.lease.asked_twice)
        desk.rewriting.review(entry)
        # Another sequence may have filed some of these tokens meanwhile: what ours hang on must stay.
        desk.leases.extend(self.lease, (node.payload for node in path if node.payload is not entry))
        if mark is not None:
            desk.marks.add(path, mark, self._resume_at)

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

    def drop_marks(self) -> bool:
        """All on the way of its sequence, which needs none of them itself. False: there are none."""
        return self._desk.marks.drop(self.entries)

    def end(self) -> None:
        """The sequence writes no more."""
        try:
            self._desk.intake.end(self.entry)
        finally:
            self._desk.leases.release(self.lease)
        if self.lease.thread is not None and self._path:
            end = self.entry.span.position + self.entry.span.num_tokens
            self._desk.branches.ended(self.entry.root_key, self.lease.session, self.lease.thread, self._path, end)


class NoFiling(Filing):
    """Of a sequence that files nothing: its caches cannot be shared, or the store could not open a filing."""

    def seal(self, tokens: Tokens, mark: Mark | None = None, *, is_end: bool = False) -> None:
        del tokens, mark, is_end

    def has_grown(self, num_tokens: int) -> None:
        del num_tokens

    def end(self) -> None:
        self._desk.leases.release(self.lease)
