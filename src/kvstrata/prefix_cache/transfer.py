"""Engine-thread steps of export and import."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from kvstrata.attention.segments import SealedSegment
from kvstrata.errors import InvalidRequest, MemoryPinned, NeverFits, Unavailable
from kvstrata.kv.block_checks import check_checkpoint, check_segments
from kvstrata.kv.checkpoints import Checkpoint
from kvstrata.kv.packing import block_ends, join_blocks, pack, pack_checkpoint, unpack, unpack_checkpoint
from kvstrata.kv.span import Span, SpanRange
from kvstrata.prefix_cache.entries import Entry, Lease
from kvstrata.prefix_cache.insertion import Inserter
from kvstrata.prefix_cache.jobs import JobQueue, Steps
from kvstrata.prefix_cache.keys import Identity, TokenIds, Tokens, as_ids, chain, root_key
from kvstrata.prefix_cache.matching import PrefixMatcher
from kvstrata.prefix_cache.reclaim import Reclaimer
from kvstrata.prefix_cache.worth import ReuseClass
from kvstrata.sizes import format_bytes
from kvstrata.tiers.block import BASE, CHECKPOINT, Block, BlockContent

# Length of one step that gives a span memory of its own.
STEP_S = 0.003

# Arrays that an import collects before it inserts them as one span.
BATCH_BYTES = 32 << 20


def neutral_root(identity: Identity) -> bytes:
    """Return the root key that blocks of files are chained from: it names the model and no salt."""
    return root_key(identity, "")


@dataclass(eq=False)
class ExportProgress:
    """An export between its beginning and its end: what is leased, and how much was sent."""

    ids: TokenIds  # all that are exported
    lease: Lease
    runs: tuple[tuple[Entry, int, int], ...]  # entries with the positions [start, end) that each contributes
    checkpoints: dict[int, Checkpoint]  # by position; collected at the beginning, because the cache may drop them
    root: bytes
    nbytes: int  # approximate size of the file
    last_key: bytes = b""  # of the last block that was sent; empty: none was
    num_sent: int = 0  # tokens

    @property
    def is_done(self) -> bool:
        return self.num_sent == len(self.ids)

    @property
    def ranges(self) -> tuple[SpanRange, ...]:
        return tuple(SpanRange(entry.span, start, end) for entry, start, end in self.runs)


class ConversationExport:
    """Exports on the engine thread, as client tasks."""

    def __init__(self, inserter: Inserter, matcher: PrefixMatcher, job_queue: JobQueue) -> None:
        self._inserter = inserter
        self._matcher = matcher
        self._job_queue = job_queue

    def begin_export(self, tokens: Tokens, salt: str) -> Steps[ExportProgress]:
        """Lease the cached prefix of these tokens that a sequence can resume from and no request still computes.

        Raises InvalidRequest where there is none.
        """
        progress = self._lease_prefix(as_ids(tokens), salt)
        try:
            yield from self._finish_live_spans(progress)
        except BaseException:
            self.end_export(progress)
            raise
        return progress

    def next_blocks(self, progress: ExportProgress) -> Steps[tuple[Block, ...]]:
        """Return the next block, and the checkpoint at its end if there is one."""
        start = progress.num_sent
        entry, run_end = next((entry, end) for entry, first, end in progress.runs if first <= start < end)
        end = block_ends(entry.span, start, run_end)[0]
        # The last checkpoint must be at the end of a block, and the span may have dropped it since the beginning.
        end = min([end, *(at for at in progress.checkpoints if start < at < end)])
        content = yield from pack(entry.span, start, end)
        parent = progress.last_key or progress.root
        progress.last_key, progress.num_sent = chain(parent, progress.ids[start:end]), end
        blocks = [self._make_block(progress, parent, start, content, BASE)]
        if end in progress.checkpoints:
            yield
            blocks.append(
                self._make_block(progress, parent, start, pack_checkpoint(progress.checkpoints[end]), CHECKPOINT)
            )
        return tuple(blocks)

    def end_export(self, progress: ExportProgress) -> None:
        """Release the lease. A second call does nothing."""
        self._inserter.leases.release(progress.lease)

    def _lease_prefix(self, ids: TokenIds, salt: str) -> ExportProgress:
        match = self._inserter.table.tree.match(self._matcher.root_of(salt), ids)
        runs: list[tuple[Entry, int, int]] = []
        checkpoints: dict[int, Checkpoint] = {}
        for node in match.path:
            end = min(node.end, match.num_tokens)
            if node.payload.is_running or end <= node.start:
                break
            runs.append((node.payload, node.start, end))
            checkpoints |= {at: each for at, each in node.payload.span.checkpoints.items() if node.start < at <= end}
        end = max(checkpoints, default=0) if self._inserter.table.needs_checkpoints else (runs[-1][2] if runs else 0)
        if not end:
            raise InvalidRequest(
                "Nothing of this conversation can be exported: it is not stored, or a request still computes it. Try "
                "again when that has ended, or send its prompt once more.",
                code="not_stored",
            )
        exported = tuple((entry, first, min(last, end)) for entry, first, last in runs if first < end)
        lease = self._inserter.leases.hold(entry for entry, _, _ in exported)
        nbytes = sum(
            entry.span.kv_bytes * (last - first) // max(1, entry.span.num_tokens) for entry, first, last in exported
        )
        nbytes += sum(each.nbytes for each in checkpoints.values())
        return ExportProgress(ids[:end], lease, exported, checkpoints, neutral_root(self._matcher.identity), nbytes)

    def _finish_live_spans(self, progress: ExportProgress) -> Steps[None]:
        """Give spans of requests that have just ended memory of their own, in place of the KV buffer."""
        for entry in dict.fromkeys(entry for entry, _, _ in progress.runs):
            while entry.span.is_live and self._job_queue.has(entry):
                self._job_queue.run_entry(entry, time.monotonic() + STEP_S)
                yield
            if entry.span.is_live:
                raise Unavailable("This conversation is being written right now. Try again in a moment.")

    @staticmethod
    def _make_block(progress: ExportProgress, parent: bytes, start: int, content: BlockContent, part: str) -> Block:
        token_ids = progress.ids[start : progress.num_sent].astype("<i4", copy=False).tobytes()
        return Block(
            progress.last_key, parent, progress.root, start, token_ids, content.tensors, content.description, part
        )


@dataclass(frozen=True)
class ImportResult:
    """The size of an imported conversation in tokens."""

    num_tokens: int
    num_new: int  # that were not cached before


@dataclass(eq=False)
class ImportProgress:
    """An import between its beginning and its end: what is leased, and what waits to be inserted."""

    root: bytes
    salt: str
    ids: TokenIds  # all that are imported
    num_cached: int  # tokens that were cached before
    lease: Lease  # on the prefix that was cached before, and on what was inserted
    start: int  # positions [start, end) wait to be inserted
    end: int
    segments: list[dict[int, SealedSegment]] = field(default_factory=list)  # one per block, by layer
    num_bytes: int = 0
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)  # by position; they wait for their tokens


class ConversationImport:
    """Imports on the engine thread, as client tasks."""

    def __init__(
        self, inserter: Inserter, matcher: PrefixMatcher, reclaimer: Reclaimer, counters: Counter[str]
    ) -> None:
        self._inserter = inserter
        self._matcher = matcher
        self._reclaimer = reclaimer
        self._counters = counters

    def check_block(self, block: Block, example: Checkpoint | None) -> Steps[None]:
        """Raise ConfigError where a block is not of this model.

        `example`: any checkpoint of the model; None: it needs none.
        """
        yield
        end = block.start + block.num_tokens
        if block.part != CHECKPOINT:
            check_segments(self._matcher.layout, unpack(self._matcher.layout, block.content, block.start, end))
            return
        if example is None:
            raise ValueError("a model that needs no checkpoints has none")
        check_checkpoint(self._matcher.layout, unpack_checkpoint(block.content), end, example)

    def begin_import(self, ids: TokenIds, salt: str, nbytes: int) -> ImportProgress:
        """Lease what is cached of a conversation. Raises NeverFits or MemoryPinned where `nbytes` more cannot fit."""
        root = self._matcher.root_of(salt)
        match = self._inserter.table.tree.match(root, ids)
        lease = self._inserter.leases.hold(node.payload for node in match.path)
        try:
            self._require_memory(nbytes if match.num_tokens < len(ids) else 0)
        except BaseException:
            self._inserter.leases.release(lease)
            raise
        return ImportProgress(root, salt, ids, match.num_tokens, lease, match.num_tokens, match.num_tokens)

    def add_block(self, progress: ImportProgress, block: Block) -> Steps[None]:
        """Take in the next block, or the checkpoint at the end of the last one."""
        end = block.start + block.num_tokens
        if block.part == CHECKPOINT:
            progress.checkpoints[end] = unpack_checkpoint(block.content)
            return
        if end <= progress.num_cached:
            return
        if progress.num_bytes and progress.num_bytes + block.nbytes > BATCH_BYTES:
            yield from self._insert_batch(progress)
        if not progress.segments:
            progress.start = block.start
        progress.segments.append(unpack(self._matcher.layout, block.content, block.start, end))
        progress.end = end
        progress.num_bytes += block.nbytes

    def reclaim_memory(self, nbytes: int) -> Steps[None]:
        """Reclaim memory at once for arrays that the caller is about to read."""
        yield
        if nbytes > self._reclaimer.free_bytes:
            limit_bytes = self._reclaimer.limit_bytes - nbytes
            self._reclaimer.shrink_to(limit_bytes, 0.0, hard_limit_bytes=limit_bytes)

    def add_span(self, progress: ImportProgress, span: Span) -> Steps[ImportResult]:
        """Insert all tokens at once. `span` begins at the first token."""
        progress.checkpoints |= span.checkpoints
        span.checkpoints = {}
        self._insert_span(progress, span)
        return (yield from self.finish_import(progress))

    def finish_import(self, progress: ImportProgress) -> Steps[ImportResult]:
        """Insert what still waits, after the last block."""
        if progress.segments:
            yield from self._insert_batch(progress)
        path = self._inserter.table.tree.match(progress.root, progress.ids).path
        for at, checkpoint in sorted(progress.checkpoints.items()):
            if self._inserter.table.needs_checkpoints and any(node.start < at <= node.end for node in path):
                self._inserter.table.add_checkpoint(path, checkpoint)
        num_new = len(progress.ids) - progress.num_cached
        self._counters["imported_tokens"] += num_new
        return ImportResult(len(progress.ids), num_new)

    def end_import(self, progress: ImportProgress) -> None:
        """Release the lease. What was inserted stays cached until it is evicted."""
        self._inserter.leases.release(progress.lease)

    def _require_memory(self, nbytes: int) -> None:
        table, limit_bytes = self._inserter.table, self._reclaimer.limit_bytes
        if nbytes > table.max_bytes:
            raise NeverFits(
                f"This conversation takes {format_bytes(nbytes)}, and this server has {format_bytes(table.max_bytes)} "
                "for cached KV. Give it more (--memory-limit, --hot-cache-size), or export fewer tokens. Nothing was "
                "changed."
            )
        in_use_bytes = table.nbytes - table.evictable_bytes
        if nbytes > limit_bytes - in_use_bytes:
            raise MemoryPinned(
                f"This conversation takes {format_bytes(nbytes)}. Of the {format_bytes(limit_bytes)} for cached KV, "
                f"{format_bytes(in_use_bytes)} are in use or pinned. Try again when requests have ended, or unpin "
                "something (POST /cache/unpin). Nothing was changed."
            )

    def _insert_batch(self, progress: ImportProgress) -> Steps[None]:
        segments, progress.segments, progress.num_bytes = progress.segments, [], 0
        span = yield from join_blocks(self._matcher.layout, segments, progress.start, progress.end)
        self._insert_span(progress, span)

    def _insert_span(self, progress: ImportProgress, span: Span) -> None:
        table, limit_bytes = self._inserter.table, self._reclaimer.limit_bytes
        nbytes = span.nbytes + sum(each.nbytes for each in progress.checkpoints.values())
        self._reclaimer.shrink_to(limit_bytes - nbytes, 0.0, hard_limit_bytes=limit_bytes - nbytes)
        # A node may claim no token that its span lacks, so the tokens before the span must still be cached.
        has_prefix = table.tree.match(progress.root, progress.ids[: span.position]).num_tokens == span.position
        if not has_prefix or table.nbytes + nbytes > limit_bytes:
            raise MemoryPinned(
                f"The memory that there was for this conversation was needed by others meanwhile: {span.position} of "
                f"{len(progress.ids)} tokens were taken. Import it again when fewer requests run."
            )
        entry = Entry(span, progress.root, progress.salt, ReuseClass.CONTINUED, is_running=False)
        table.add_entry(entry)
        path = table.insert_entry(entry, progress.ids[: span.end])
        for at in [at for at in progress.checkpoints if at <= span.end]:
            self._inserter.table.add_checkpoint(path, progress.checkpoints.pop(at))
        self._inserter.finish_span(entry)
        # A request may have inserted some of these tokens meanwhile; the rest of the import continues its entries.
        self._inserter.leases.extend(progress.lease, (node.payload for node in path))
