"""Final write at shutdown, and a report of what is left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.eviction import DropReason
from kvstrata.prefix_cache.offload import Offloader
from kvstrata.prefix_cache.tier_client import TierClient, ids_to
from kvstrata.prefix_cache.transcode import Transcoder
from kvstrata.tiers.interface import ChainLink, Tier
from kvstrata.tiers.lookups import Lookup, run_walk

REASON_TEXTS: Mapping[DropReason, str] = {
    "disk_slow": "the time was up",
    "disk_failed": "the disk could not be written",
    "disk_full": "the disk has no room for it",
    "write_budget": "no more is written today",
}

MIB = 1 << 20

# Seconds between two attempts while the disk's queue empties.
SLICE_S = 0.5

# Share of the disk's limit that a flush fills at most: the catalogue and whole pages take some.
MAX_SHARE = 0.9

# The second attempt is made after a fault of the disk, which may have been brief.
MAX_ATTEMPTS = 2


@dataclass(frozen=True)
class UnwrittenReport:
    """Report of the tokens that a flush has not written to the disk."""

    conversations: int = 0
    tokens: int = 0
    nbytes: int = 0
    by_reason: Mapping[DropReason, int] = field(default_factory=dict)  # tokens
    bytes_per_s: float = 0.0  # at which the rest was written; 0: nothing was
    seconds: float = 0.0  # that the flush took

    def __str__(self) -> str:
        why = ", ".join(
            f"{REASON_TEXTS.get(reason, reason)} ({tokens} tokens)" for reason, tokens in self.by_reason.items()
        )
        if self.bytes_per_s:
            more_s = self.nbytes / self.bytes_per_s
            took = f"At the {self.bytes_per_s / MIB:.1f} MiB/s of the rest it would have taken {more_s:.1f} s more."
        else:
            took = "Nothing was written in that time, so how long it would have taken is not known."
        return (
            f"{self.tokens} tokens of {self.conversations} conversations ({self.nbytes / MIB:.1f} MiB) were not "
            f"written to the disk cache within {self.seconds:.1f} s: {why}. {took} --drain-timeout-s sets the time."
        )


def flush_all(
    disk: TierClient, table: EntryTable, offloader: Offloader, transcoder: Transcoder, timeout_s: float
) -> UnwrittenReport:
    """Write all ended entries that the disk lacks, also entries that it refused before, for at most `timeout_s`. Report
    what is left."""
    if not disk.has_tier:
        return UnwrittenReport()
    tier = disk.tier
    began_s, written_bytes = time.monotonic(), tier.usage().written_bytes
    until_s = began_s + timeout_s
    for _ in range(MAX_ATTEMPTS):
        num_faults = tier.write_state().num_faults
        tier.end_pause()
        _write_once(disk, table, offloader, transcoder, until_s)
        tier.flush(max(0.0, until_s - time.monotonic()))
        if tier.write_state().num_faults == num_faults:
            break
    seconds = time.monotonic() - began_s
    bytes_per_s = (tier.usage().written_bytes - written_bytes) / max(seconds, 1e-6)
    return _report(table, tier, offloader, seconds, bytes_per_s, is_late=seconds >= timeout_s)


def _write_once(
    disk: TierClient, table: EntryTable, offloader: Offloader, transcoder: Transcoder, until_s: float
) -> None:
    chosen = _choose_entries(table, disk.tier.limit_bytes)
    lookups = [(entry, _find_blocks(disk, entry)) for entry in reversed(chosen) if entry.is_archived]
    for entry, lookup in lookups:
        lookup.wait(max(0.0, until_s - time.monotonic()))
        # These blocks count as used now, so that the disk evicts others before them, and the newest last. The disk may
        # have evicted some since they were written.
        disk.touch_blocks(lookup.answer)
        if not lookup.answer:
            table.set_archived(entry, None)
    version = table.version
    for leaf in [entry.last_node for entry in chosen]:
        if time.monotonic() < until_s:
            transcoder.finish_path(leaf)
            _write_until(disk.tier, offloader, leaf.payload, until_s)
    if version != table.version:
        # Transcoded spans are joined: some entries have grown after they were written.
        for entry in _choose_entries(table, disk.tier.limit_bytes):
            _write_until(disk.tier, offloader, entry, until_s)


def _choose_entries(table: EntryTable, disk_bytes: int) -> list[Entry]:
    """Return the ended entries that fit the disk together, pinned ones first, then by last use.

    Further entries would only evict these from the disk. An entry that is longer than the disk is chosen if it comes
    first, for its beginning.
    """
    limit_bytes = int(MAX_SHARE * disk_bytes)
    chosen, left_bytes = list[Entry](), limit_bytes
    by_use = sorted(
        _ended_entries(table), key=lambda e: (e.is_pinned, table.candidates.last_use_of_end_s(e)), reverse=True
    )
    for entry in by_use:
        if left_bytes >= min(entry.span.nbytes, limit_bytes):
            left_bytes -= entry.span.nbytes
            chosen.append(entry)
    return chosen


def _ended_entries(table: EntryTable) -> list[Entry]:
    return [entry for entry in table.entries if entry.nodes and not entry.is_running]


def _find_blocks(disk: TierClient, entry: Entry) -> Lookup[tuple[ChainLink, ...]]:
    leaf = entry.last_node
    return disk.find_whole_chain(leaf, with_checkpoint=leaf.end in entry.span.checkpoints)


def _write_until(tier: Tier, offloader: Offloader, entry: Entry, until_s: float) -> None:
    """Write an entry again whenever the disk's queue has emptied, until the disk has all of it or refuses it for
    another reason."""
    while entry.nodes and not entry.is_archived and time.monotonic() < until_s:
        was_full = tier.write_state().queue_bytes > 0
        offloader.write_entry(entry)
        if not entry.is_archived:
            if not was_full:
                return
            tier.flush(min(SLICE_S, max(0.0, until_s - time.monotonic())))


def _report(
    table: EntryTable, tier: Tier, offloader: Offloader, seconds: float, bytes_per_s: float, *, is_late: bool
) -> UnwrittenReport:
    reasons = Counter[DropReason]()
    num_bytes, num_leaves = 0.0, 0
    for entry in _ended_entries(table):
        leaf = entry.last_node
        chain = run_walk(tier.blocks.longest_chain(leaf.root_key, 0, ids_to(leaf)))
        end = max((link.end for link in takewhile(lambda link: not link.is_queued, chain.links)), default=0)
        num_left = sum(max(0, node.end - max(node.start, end)) for node in entry.nodes)
        reason = "disk_slow" if is_late else offloader.refusal_reason(entry)
        if num_left:
            reasons[reason] += num_left
            num_bytes += entry.nbytes * num_left / entry.span.num_tokens
            num_leaves += leaf.is_leaf
    return UnwrittenReport(num_leaves, reasons.total(), int(num_bytes), reasons, bytes_per_s, seconds)
