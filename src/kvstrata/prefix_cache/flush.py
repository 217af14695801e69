"""Final write at shutdown, and a report of what is left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.entry_table import EntryTable, EvictionCandidates
from kvstrata.prefix_cache.offload import DropReason, Offloader, disk_reason
from kvstrata.prefix_cache.tier_client import TierClient, ids_to
from kvstrata.prefix_cache.transcode import Transcoder
from kvstrata.tier.chains import Link
from kvstrata.tier.lookups import Lookup, finish

WORDS: Mapping[DropReason, str] = {
    "disk_slow": "the time was up",
    "disk_failed": "the disk could not be written",
    "disk_full": "the disk has no room for it",
    "write_budget": "no more is written today",
}

MIB = 1 << 20


@dataclass(frozen=True)
class UnwrittenReport:
    conversations: int = 0
    tokens: int = 0
    nbytes: int = 0
    by_reason: Mapping[DropReason, int] = field(default_factory=dict)  # tokens
    bytes_per_s: float = 0.0  # as the rest was written; 0: nothing was
    seconds: float = 0.0  # that it had

    def __str__(self) -> str:
        why = ", ".join(f"{WORDS.get(reason, reason)} ({tokens} tokens)" for reason, tokens in self.by_reason.items())
        if self.bytes_per_s:
            more_s = self.nbytes / self.bytes_per_s
            took = f"At the {self.bytes_per_s / MIB:.1f} MiB/s of the rest it would have taken {more_s:.1f} s more."
        else:
            took = "Nothing was written in that time, so how long it would have taken is not known."
        return (
            f"{self.tokens} tokens of {self.conversations} conversations ({self.nbytes / MIB:.1f} MiB) were not "
            f"written to the disk cache within {self.seconds:.1f} s: {why}. {took} --drain-timeout-s sets the time."
        )


# Until the disk's queue is looked at again.
SLICE_S = 0.5

# Of the disk's limit, that a flush fills at most: the catalogue and whole pages take some.
LARGEST_SHARE = 0.9

# The second, where the disk failed during the first: maybe for a moment only.
MAX_ATTEMPTS = 2


class Flush:
    def __init__(
        self, cold: TierClient, shelf: EntryTable, leaves: EvictionCandidates, spills: Offloader, rewriting: Transcoder
    ) -> None:
        self._cold = cold
        self._tier = cold.tier
        self._shelf = shelf
        self._leaves = leaves
        self._spills = spills
        self._rewriting = rewriting

    def run(self, timeout_s: float) -> UnwrittenReport:
        """For at most so long, whatever the disk said before."""
        if not self._cold.has_tier:
            return UnwrittenReport()
        began_s, written_bytes = time.monotonic(), self._tier.usage().written_bytes
        self._write_all(began_s + timeout_s)
        seconds = time.monotonic() - began_s
        bytes_per_s = (self._tier.usage().written_bytes - written_bytes) / max(seconds, 1e-6)
        return self._unwritten(seconds, bytes_per_s, is_late=seconds >= timeout_s)

    def _write_all(self, until_s: float) -> None:
        for _ in range(MAX_ATTEMPTS):
            num_faults = self._tier.writing().num_faults
            self._tier.end_pause()
            self._write_once(until_s)
            self._tier.flush(max(0.0, until_s - time.monotonic()))
            if self._tier.writing().num_faults == num_faults:
                return

    def _write_once(self, until_s: float) -> None:
        chosen = self._chosen()
        lookups = [(entry, self._blocks_of(entry)) for entry in reversed(chosen) if entry.is_archived]
        for entry, lookup in lookups:
            lookup.wait(max(0.0, until_s - time.monotonic()))
            # Unless the disk has evicted it since, it was used just now: others go before it, and the newest last.
            self._cold.touch_blocks(lookup.answer)
            self._shelf.set_archived(entry, is_clean=bool(lookup.answer))
        version = self._shelf.version
        for leaf in [entry.last_node for entry in chosen]:
            if time.monotonic() < until_s:
                self._rewriting.finish_path(leaf)
                self._write_until(leaf.payload, until_s)
        if version != self._shelf.version:
            # Rewritten spans are joined: some have grown after they were written.
            for entry in self._chosen():
                self._write_until(entry, until_s)

    def _chosen(self) -> list[Entry]:
        """What is pinned and what was used last comes first. What there is no room for beside that would only push it
        out again; but the beginning of a conversation that is longer than the disk is better than nothing."""
        room_bytes = int(LARGEST_SHARE * self._tier.limit_bytes)
        chosen, left_bytes = list[Entry](), room_bytes
        by_use = sorted(self._ended(), key=lambda e: (e.is_pinned, self._leaves.last_use_of_end_s(e)), reverse=True)
        for entry in by_use:
            if left_bytes >= min(entry.span.nbytes, room_bytes):
                left_bytes -= entry.span.nbytes
                chosen.append(entry)
        return chosen

    def _ended(self) -> list[Entry]:
        return [entry for entry in self._shelf.entries if entry.nodes and not entry.is_running]

    def _blocks_of(self, entry: Entry) -> Lookup[tuple[Link, ...]]:
        leaf = entry.last_node
        return self._cold.find_whole_chain(leaf, with_checkpoint=leaf.end in entry.span.marks)

    def _write_until(self, entry: Entry, until_s: float) -> None:
        """Again and again as the disk's queue empties, unless that is not what keeps it out."""
        while entry.nodes and not entry.is_archived and time.monotonic() < until_s:
            was_full = self._tier.writing().queue_bytes > 0
            self._spills.write_entry(entry)
            if not entry.is_archived:
                if not was_full:
                    return
                self._tier.flush(min(SLICE_S, max(0.0, until_s - time.monotonic())))

    def _unwritten(self, seconds: float, bytes_per_s: float, *, is_late: bool) -> UnwrittenReport:
        reasons = Counter[DropReason]()
        num_bytes, leaves = 0.0, 0
        for entry in self._ended():
            leaf = entry.last_node
            chain = finish(self._tier.blocks.longest(leaf.root_key, 0, ids_to(leaf)))
            end = max((link.end for link in takewhile(lambda link: not link.is_queued, chain.links)), default=0)
            num_left = sum(max(0, node.end - max(node.start, end)) for node in entry.nodes)
            reason = "disk_slow" if is_late else self._why_left(entry)
            if num_left and reason != "first_touch":
                reasons[reason] += num_left
                num_bytes += entry.nbytes * num_left / entry.span.num_tokens
                leaves += leaf.is_leaf
        return UnwrittenReport(leaves, reasons.total(), int(num_bytes), reasons, bytes_per_s, seconds)

    def _why_left(self, entry: Entry) -> DropReason:
        """Where there was time."""
        untaken = self._spills.refused_writes.refusal_of(entry)
        return disk_reason(untaken.refused if untaken else None, self._tier.writing())
