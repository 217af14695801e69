"""The disk tier: blocks in a folder, within a limit, verified whenever they come back. Knows no arrays.

    put     never waits: a queue bounded in bytes, emptied by one thread
    find    is it here, on disk or on its way
    lengths what follows a key, for matching a prompt without loading token ids
    look    a walk over many blocks, on a thread of its own
    read    block by block on threads of its own, delivered by a callback

A fault of the disk is counted, said once and answered as a miss or a refusal. Nothing here raises into the caller
after the start but for blocks and arguments that make no sense.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvstrata.disk.block import BASE, Block, BlockId, Chain, Tally, no_tally
from kvstrata.disk.catalogue import CatalogueFault
from kvstrata.disk.checksum import fastest
from kvstrata.disk.daily_budget import DailyBudget, day_of
from kvstrata.disk.files import Files
from kvstrata.disk.folder import CacheFolder, prepare
from kvstrata.disk.loading import Loader
from kvstrata.disk.lookups import Lookup, Lookups, Work
from kvstrata.disk.options import DiskOptions
from kvstrata.disk.publish import Publisher, Written
from kvstrata.disk.reader import Deliver, Loaded, Missing, Reader, Ticket
from kvstrata.disk.reasons import Fault, Refusal, fault_of
from kvstrata.disk.row import Row, Totals
from kvstrata.disk.shelf import Shelf
from kvstrata.disk.usage import Counters, Event, Rates, Usage
from kvstrata.disk.writer import Flushed, Writer
from kvstrata.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0

# Notes in the catalogue: a restart does not give a new day's budget.
DAY = "day"
WRITTEN_BYTES = "written_bytes"


@dataclass(frozen=True, slots=True)
class Accepted:
    """On its way; `find` tells whether it still is, or arrived."""


@dataclass(frozen=True, slots=True)
class Refused:
    reason: Refusal
    nbytes: int = field(default=0, compare=False)  # of the block


@dataclass(frozen=True, slots=True)
class Removed:
    num_blocks: int
    num_tokens: int
    disk_bytes: int


def _nothing_pinned(_key: bytes) -> bool:
    return False


class DiskTier:
    def __init__(
        self,
        options: DiskOptions,
        *,
        chain: Chain,
        tally: Tally = no_tally,
        is_pinned: Callable[[bytes], bool] = _nothing_pinned,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`chain` is index.keys.chain; `tally` tells what a block holds, by label. `is_pinned(key)` is asked on our
        thread, under our lock: it must not wait for a thread that calls the tier.

        ConfigError where the folder cannot be used, CacheDirectoryBusy where another server uses it.
        """
        self.limit_bytes = options.limit_bytes
        self.read_ahead_bytes = options.read_ahead_bytes
        self._clock = clock
        self._ttl_s = math.inf if options.ttl_s is None else options.ttl_s
        self.on_room: Callable[[], None] = lambda: None  # called on our thread when the queue may have room again
        self._counters = Counters()
        self._folder = CacheFolder(options.directory, files or Files())
        prepare(self._folder)
        self._shelf = self._open_shelf(options, is_pinned, tally)
        self._second_touch = options.second_touch
        self._budget = self._open_budget(options.daily_write_bytes)
        publisher = Publisher(self._shelf, options.checksum or fastest(), clock, self._budget)
        self._writer = Writer(
            publisher.publish,
            settle_in=publisher.settle_in,
            counters=self._counters,
            on_written=self._on_written,
            limit_bytes=options.queue_bytes,
            first_pause_s=options.first_pause_s,
            expire=self._expire,
            share=options.writer_share,
            on_room=lambda: self.on_room(),
        )
        self._loader = Loader(self._shelf, self._writer.queued, self._counters, chain=chain, clock=clock)
        self._is_closed = False
        self._reader = Reader(self._loader.load, options.num_readers, options.read_ahead_bytes)
        self._lookups = Lookups()

    # Writing.

    def put(
        self, block: Block, *, asked_twice: bool = False, replace: bool = False, unused_s: float = 0.0
    ) -> Accepted | Refused:
        """Never waits. The block's bytes must not change any more. `replace`: also where the disk has this id.
        `asked_twice`: two requests had its tokens; under second touch nothing else is taken. `unused_s`: so long ago
        was the last of them."""
        block = dataclasses.replace(block, last_use=self._clock() - unused_s)
        refusal = self._refusal(block, asked_twice, replace) or self._writer.offer(block)
        if refusal is None:
            return Accepted()
        self._counters.add(Event.REFUSED, refusal, nbytes=block.nbytes)
        return Refused(refusal, block.nbytes)

    def _refusal(self, block: Block, asked_twice: bool, replace: bool) -> Refusal | None:
        if block.nbytes > self.limit_bytes:
            return Refusal.TOO_LARGE
        if not replace and self._holds(block.id):
            return Refusal.PRESENT
        if self._second_touch and not asked_twice:
            return Refusal.FIRST_TOUCH
        if not self._budget.allows(block.nbytes, self._writer.num_bytes, self._clock()):
            return Refusal.WRITE_BUDGET
        return None

    def would_take(self, refused: Refused) -> bool:
        """Whether a block that was refused may be taken now, where that did not lie in the block itself."""
        match refused.reason:
            case Refusal.PAUSED:
                return not self._writer.paused_because
            case Refusal.QUEUE_FULL:
                return self._writer.has_room(refused.nbytes)
            case Refusal.WRITE_BUDGET:
                return self._budget.allows(refused.nbytes, self._writer.num_bytes, self._clock())
            case _:
                return False

    def is_working(self, within_s: float) -> bool:
        """Whether it is worth waiting for room in the queue: blocks get to the disk, the last one within this time."""
        return self._writer.is_working(within_s)

    @property
    def paused_because(self) -> str:
        """Empty where blocks are taken."""
        return self._writer.paused_because

    def queued_keys(self) -> frozenset[bytes]:
        """Of blocks that are on their way."""
        return self._writer.queued_keys()

    def touch(self, blocks: Iterable[BlockId]) -> None:
        """These count as used now, though not read here. Nothing happens to those that are not here."""
        self._shelf.touch(blocks, self._clock())

    def flush(self, timeout_s: float) -> Flushed:
        """Waits until the queue is empty and the folder has been compared with its catalogue, or for so long."""
        return self._writer.flush(timeout_s)

    def end_pause(self) -> None:
        """After a fault of the disk: take blocks again now."""
        self._writer.end_pause()

    @property
    def num_faults(self) -> int:
        """How often the disk did not take a block, or had lost some: what was put may not be there. Those that find no
        room do not count, they would find none the next time either."""
        return self._writer.num_faults + self._shelf.num_losses

    # Looking.

    def look(self, work: Work[T], otherwise: T, on_answer: Callable[[], None]) -> Lookup[T]:
        """Have a walk over many blocks done on a thread of ours: never waits. `on_answer` is called there."""
        return self._lookups.ask(work, otherwise, on_answer)

    def find(self, key: bytes, part: str = BASE) -> bool:
        return self.size(BlockId(key, part)) > 0

    def size(self, block: BlockId) -> int:
        """The bytes that reading it takes; 0 where it is not here, or left alone for a while."""
        return 0 if self._loader.avoided(block) else self._size(block)

    def lengths(self, parent: bytes) -> tuple[int, ...]:
        """The lengths in tokens of the blocks that follow `parent`, the longest first."""
        queued = self._writer.lengths(parent)
        return tuple(sorted(queued.union(self._shelf.lengths(parent)), reverse=True))

    def contents(self, block: BlockId) -> Mapping[str, int]:
        """What `tally` says of a block; nothing where it is not here."""
        for queued in self._writer.queued(block):
            return self._shelf.tally(queued.description, {name: each.nbytes for name, each in queued.tensors.items()})
        return self._shelf.contents(block)

    def rows(self, under: bytes = b"") -> list[Row]:
        """What the catalogue knows of the blocks on disk, parents first."""
        return self._shelf.rows(under)

    def damaged_keys(self) -> frozenset[bytes]:
        """Of blocks that were not what they said, as far as they are kept for a look."""
        return self._shelf.quarantine.keys()

    def _holds(self, block: BlockId) -> bool:
        return self._size(block) > 0

    def _size(self, block: BlockId) -> int:
        # In this order: a block is on the shelf before it leaves the queue.
        for queued in self._writer.queued(block):
            return max(1, queued.nbytes)
        return self._shelf.size(block)

    # Reading.

    def read(
        self, blocks: Sequence[BlockId], deliver: Deliver, *, root: bytes, sizes: Sequence[int] | None = None
    ) -> Ticket:
        """Each block in order to `deliver`, on a thread of the tier, as soon as it is verified. Past `read_ahead_bytes`
        reading waits until blocks that were delivered are released. `sizes`: of the blocks; asked for if not given."""
        ticket = Ticket(blocks, root, deliver, sizes or [self._size(block) for block in blocks])
        self._reader.submit(ticket)
        return ticket

    def read_now(self, block: BlockId, *, root: bytes, names: Collection[str] | None = None) -> Loaded | Missing:
        """On the caller's thread. `names`: only these tensors are read."""
        return self._loader.load(block, root, names)

    @property
    def rates(self) -> Rates:
        return self._loader.meter.rates()

    # Making less of it.

    def remove(self, blocks: Sequence[BlockId]) -> Removed:
        """From the disk and from the queue, whatever hangs on them. As with `clear`, files are deleted later."""
        wanted = set(blocks)
        self._writer.withdraw(lambda block: block.id in wanted)
        return self._removed(self._shelf.index.hide(wanted))

    def clear(self, under: bytes = b"") -> Removed:
        """What is under all roots that begin so: not found any more when this returns, and never waits for the disk.
        The tier's thread deletes the files; what is put again meanwhile is not among them."""
        self._writer.withdraw(lambda block: block.root.startswith(under))
        return self._removed(self._shelf.index.hide_under(under))

    def _removed(self, totals: Totals) -> Removed:
        self._writer.wake()
        return Removed(totals.num_blocks, totals.num_tokens, totals.disk_bytes)

    def _expire(self, kept: frozenset[bytes]) -> float:
        """On the writer's thread, the oldest first and leaves before what they hang on."""
        if self._ttl_s == math.inf:
            return math.inf
        now = self._clock()
        try:
            return min(self._shelf.expire(now - self._ttl_s, kept) - now, 0.0) + self._ttl_s
        except (OSError, CatalogueFault) as error:
            self._counters.add(Event.FAILED, fault_of(error) if isinstance(error, OSError) else Fault.CATALOGUE)
            log.warning("Blocks that expired could not be removed: %s", error)
        return self._ttl_s

    # Being asked, and ending.

    def totals_under(self, under: bytes) -> Totals:
        """Of the blocks whose roots begin so."""
        return self._shelf.index.totals_under(under)

    def usage(self) -> Usage:
        totals = self._shelf.totals
        paused_because = self._writer.paused_because
        return Usage(
            limit_bytes=self.limit_bytes,
            disk_bytes=self._shelf.disk_bytes(),
            block_bytes=totals.disk_bytes,
            quarantine_bytes=self._shelf.quarantine.disk_bytes,
            leaving_bytes=self._shelf.index.leaving.num_bytes,
            num_blocks=totals.num_blocks,
            num_tokens=totals.num_tokens,
            labels=totals.labels,
            queue_bytes=self._writer.num_bytes,
            num_queued=self._writer.num_blocks,
            num_pending_reads=self._reader.num_pending,
            unused_bytes=self._reader.ahead_bytes,
            written_bytes=self._counters.nbytes(Event.WRITTEN),
            written_today_bytes=self._budget.written_bytes(self._clock()),
            read_bytes=self._counters.nbytes(Event.READ),
            is_writing_paused=bool(paused_because),
            paused_because=paused_because,
            rates=self.rates,
            counters=self._counters.snapshot(),
        )

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """What is queued is dropped: `flush` first to keep it. A disk that hangs is not waited for longer than this."""
        if self._is_closed:
            return
        self._is_closed = True
        until_s = time.monotonic() + timeout_s
        ends = [
            part.close(max(0.0, until_s - time.monotonic())) for part in (self._lookups, self._reader, self._writer)
        ]
        if all(ends):
            self._shelf.close()
            self._folder.release()
        else:
            # Their threads may still touch both; the end of the process closes them.
            log.warning("The disk cache did not close within %.0f s: the disk does not answer", timeout_s)

    def _open_shelf(self, options: DiskOptions, is_pinned: Callable[[bytes], bool], tally: Tally) -> Shelf:
        try:
            return Shelf(self._folder, options, self._counters, is_pinned=is_pinned, tally=tally)
        except (OSError, CatalogueFault) as error:
            self._folder.release()
            raise ConfigError(
                f"{self._folder.directory} cannot hold the disk cache: {error}. "
                "Make it readable and writable, or use another --disk-cache-dir"
            ) from error

    def _open_budget(self, limit_bytes: int) -> DailyBudget:
        try:
            day, written_bytes = (self._shelf.records.catalogue.note(name) for name in (DAY, WRITTEN_BYTES))
        except CatalogueFault:
            day, written_bytes = 0, 0
        return DailyBudget(limit_bytes, day=day, written_bytes=written_bytes)

    def _on_written(self, written: Written) -> None:
        """On the writer's thread, after each block."""
        now = self._clock()
        self._writer.expire_within(written.last_use + self._ttl_s - now)
        try:
            self._shelf.note({DAY: day_of(now), WRITTEN_BYTES: self._budget.written_bytes(now)})
        except CatalogueFault as fault:
            log.debug("The bytes written today were not noted: %s", fault)
