"""Load a block from the queue or the disk, verified, or return why it is missing. Faults of the disk do not raise."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from kvstrata.tiers.block import Block, BlockId, Chain
from kvstrata.tiers.block_file import Damage, DamagedBlock
from kvstrata.tiers.disk.block_store import Holdings
from kvstrata.tiers.disk.errors import Fault, fault_of
from kvstrata.tiers.disk.filesystem import NotAFile
from kvstrata.tiers.disk.reader import read_block
from kvstrata.tiers.interface import BlockEvent, TierCounters
from kvstrata.tiers.read_pool import Loaded, Missing, MissReason
from kvstrata.tiers.read_rates import RateMeter

log = logging.getLogger(__name__)

# An unreadable sector can hold up a thread for seconds, at each read.
AVOIDED_FOR_S = 60.0

NUM_AVOIDED = 4096


class Loader:
    def __init__(
        self,
        holdings: Holdings,
        queued: Callable[[BlockId], list[Block]],
        counters: TierCounters,
        *,
        chain: Chain,
        clock: Callable[[], float],
    ) -> None:
        self._holdings = holdings
        self._queued = queued
        self._counters = counters
        self._chain = chain
        self._clock = clock
        self._lock = threading.Lock()
        self._avoided: OrderedDict[BlockId, tuple[float, Fault]] = OrderedDict()
        self._said: set[Fault] = set()
        self.meter = RateMeter()

    def load(self, block: BlockId, root: bytes) -> Loaded | Missing:
        result = self._load(block, root)
        match result:
            case Missing(_, reason):
                self._counters.add(BlockEvent.MISSED, reason)
            case Loaded():
                self._holdings.records.touches.add([block], self._clock())
        return result

    def avoided(self, block: BlockId) -> list[Fault]:
        """Return the fault for which a block is avoided for a while, if there was one."""
        with self._lock:
            until, fault = self._avoided.get(block, (0.0, Fault.OTHER))
            return [fault] if until > self._clock() else []

    def _load(self, block: BlockId, root: bytes) -> Loaded | Missing:
        for queued in self._queued(block):
            if queued.root != root:
                return Missing(block, Damage.ROOT)
            self._counters.add(BlockEvent.READ, "queue", nbytes=queued.nbytes)
            return Loaded(queued)
        if self._holdings.index.leaving.row(block) is not None:
            return Missing(block, MissReason.ABSENT)  # it was cleared, and its file is still there
        for fault in self.avoided(block):
            return Missing(block, fault)
        try:
            return self._from_disk(block, root)
        except DamagedBlock as damage:
            self._holdings.isolate(block, damage.reason)
            return Missing(block, damage.reason)
        except FileNotFoundError:
            if self._holdings.index.row(block) is not None:
                self._holdings.forget(block)
            return Missing(block, MissReason.ABSENT)
        except NotAFile:
            self._counters.add(BlockEvent.FAILED, Fault.NOT_A_FILE)
            self._holdings.forget(block)
            return Missing(block, Fault.NOT_A_FILE)
        except OSError as error:
            return Missing(block, self._fault(block, error))

    def _from_disk(self, block: BlockId, root: bytes) -> Loaded:
        folder = self._holdings.folder
        with self.meter.reading() as measure:
            found = read_block(folder.files, folder.path(block), block, chain=self._chain, root=root)
            measure(found.nbytes)
        self._counters.add(BlockEvent.READ, "disk", nbytes=found.nbytes)
        return Loaded(found)

    def _fault(self, block: BlockId, error: OSError) -> Fault:
        fault = fault_of(error)
        self._counters.add(BlockEvent.FAILED, fault)
        with self._lock:
            self._avoided[block] = (self._clock() + AVOIDED_FOR_S, fault)
            if len(self._avoided) > NUM_AVOIDED:
                self._avoided.popitem(last=False)
            is_news = fault not in self._said
            self._said.add(fault)
        if is_news:
            log.warning("The disk cache cannot be read (%s): %s. Such blocks are computed again", fault, error)
        return fault
