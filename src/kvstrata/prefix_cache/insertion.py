"""Leases, and insertion of computed or loaded spans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvstrata.kv.checkpoints import Checkpoint
from kvstrata.prefix_cache.entries import Entry, Lease
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.eviction import DropCounters
from kvstrata.prefix_cache.keys import Tokens, as_ids
from kvstrata.prefix_cache.pins import Pins
from kvstrata.prefix_cache.precision import StepDownPolicy
from kvstrata.prefix_cache.transcode import Transcoder
from kvstrata.prefix_cache.worth import ReuseClass


class Leases:
    """Leases of entries. An entry without a lease may be transcoded, so the transcoder reviews it at each release."""

    def __init__(self, table: EntryTable, transcoder: Transcoder) -> None:
        self._table = table
        self._transcoder = transcoder

    def hold(self, entries: Iterable[Entry]) -> Lease:
        """Return a lease that protects entries while a request waits to resume from them."""
        lease = Lease(ReuseClass.CONTINUED)
        self.extend(lease, entries)
        return lease

    def extend(self, lease: Lease, entries: Iterable[Entry]) -> None:
        """Let a lease protect further entries."""
        for entry in entries:
            if entry not in lease.entries:
                lease.entries.add(entry)
                self._table.add_lease(entry)

    def release(self, lease: Lease) -> None:
        """End a lease. A second call has no effect."""
        if not lease.is_open:
            return
        lease.is_open = False
        for entry in lease.entries:
            self._table.remove_lease(entry)
            self._transcoder.review(entry)


class Inserter:
    """Inserter: makes spans part of the cache, both computed ones and loaded or imported ones."""

    def __init__(
        self,
        table: EntryTable,
        leases: Leases,
        pins: Pins,
        step_down_policy: StepDownPolicy,
        transcoder: Transcoder,
        drops: DropCounters,
        counters: Counter[str],
    ) -> None:
        self.table = table
        self.leases = leases
        self.step_down_policy = step_down_policy
        self.transcoder = transcoder
        self._pins = pins
        self._drops = drops
        self._counters = counters

    def finish_owner(self, entry: Entry) -> None:
        """Finish the entry of a sequence that computes no more tokens."""
        if entry.nodes:
            self._counters["stored_spans"] += 1
            self._counters["stored_tokens"] += sum(node.num_tokens for node in entry.nodes)
            self.table.record_use(entry.nodes, entry.reuse_class, entry.session)
        else:
            # The sequence computed nothing, or only tokens that were cached already.
            self._counters["refused_present" if entry.span.num_tokens else "refused_empty"] += 1
        self.finish_span(entry)

    def finish_span(self, entry: Entry) -> None:
        """Cut the span of an entry that no sequence writes any more to the tokens that the table holds under it."""
        if not entry.nodes:
            self.table.drop_entry(entry)
            return
        start, end = min(node.start for node in entry.nodes), max(node.end for node in entry.nodes)
        entry.span.cut(start, end)
        self.table.set_ended(entry)
        self._pins.pin_new_entry(entry)
        self._drops.record_insertion(entry)
        self.transcoder.review_ended(entry)


class Insertion:
    """Insertion of the tokens that one sequence computes: each commit makes them visible to other requests.

    `resume_at`: positions in the prompt where later requests are likely to diverge.
    """

    def __init__(self, inserter: Inserter, entry: Entry, lease: Lease, resume_at: Sequence[int] = ()) -> None:
        self._inserter = inserter
        self._resume_at = resume_at
        self._is_detached = False
        self.entry = entry
        self.lease = lease  # on the prefix of the sequence, and on entries of others that its tokens are part of

    @property
    def entries(self) -> set[Entry]:
        """All entries that the sequence reads or writes."""
        return {*self.lease.entries, self.entry}

    def commit(self, ids: Tokens, checkpoint: Checkpoint | None = None, *, is_end: bool = False) -> None:
        """Make `ids`, all tokens of the sequence so far, visible to other requests. `is_end`: a prompt ends here."""
        if self._is_detached:
            return
        span = self.entry.span
        if len(ids) - span.position > span.num_tokens or checkpoint is not None:
            self._insert(ids, checkpoint)
        if is_end:
            span.prompt_ends.add(len(ids))

    def _insert(self, ids: Tokens, checkpoint: Checkpoint | None) -> None:
        entry, inserter = self.entry, self._inserter
        entry.span.num_tokens = len(ids) - entry.span.position
        path = inserter.table.insert_entry(entry, as_ids(ids))
        inserter.transcoder.review(entry)
        # Another sequence may have inserted some of these tokens meanwhile: the parents of ours must stay.
        inserter.leases.extend(self.lease, (node.payload for node in path if node.payload is not entry))
        if checkpoint is not None:
            inserter.table.add_checkpoint(path, checkpoint, self._resume_at)

    def has_grown(self, num_tokens: int) -> None:
        """Apply the precision policy to a sequence that has grown to `num_tokens`: its entries may step down, and more
        of its own KV may be encoded."""
        if self._is_detached:
            return
        inserter = self._inserter
        inserter.transcoder.apply_step_downs(inserter.step_down_policy.for_length(self.entries, num_tokens))
        inserter.transcoder.review(self.entry)

    def detach(self) -> None:
        """Insert no further tokens. Called when a commit has failed: the sequence continues."""
        self._is_detached = True

    def drop_checkpoints(self) -> bool:
        """Drop all checkpoints of the sequence's entries; the sequence itself needs none. False: there were none."""
        return self._inserter.table.drop_checkpoints(self.entries)

    def close(self) -> None:
        """End the insertion: the sequence computes no more tokens."""
        try:
            self._inserter.finish_owner(self.entry)
        finally:
            self._inserter.leases.release(self.lease)


class DetachedInsertion(Insertion):
    """Insertion that makes no token visible: the model's caches cannot be shared, or the cache has failed."""

    def commit(self, ids: Tokens, checkpoint: Checkpoint | None = None, *, is_end: bool = False) -> None:
        """Ignore the tokens."""
        del ids, checkpoint, is_end

    def has_grown(self, num_tokens: int) -> None:
        """Ignore the growth."""
        del num_tokens

    def close(self) -> None:
        """Release the lease."""
        self._inserter.leases.release(self.lease)
