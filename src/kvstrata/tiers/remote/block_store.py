"""The sealed blocks of a store: write, fetch, touch, sweep and delete. Every call may wait for the store, so it belongs
on a thread of the tier. Knows no queues.

Every call of the store goes through `Health`, which remembers faults. `fetch` answers a fault with a miss; the other
methods let StoreFault through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstrata.tiers.block import BASE, Block, BlockId
from kvstrata.tiers.block_file import DamagedBlock
from kvstrata.tiers.interface import BlockEvent, Refusal, TierCounters
from kvstrata.tiers.options import RemoteOptions
from kvstrata.tiers.read_pool import Loaded, Missing, MissReason
from kvstrata.tiers.read_rates import RateMeter, Rates
from kvstrata.tiers.remote.chains import Avoided
from kvstrata.tiers.remote.cluster import Cluster
from kvstrata.tiers.remote.health import Health, StoreFault
from kvstrata.tiers.remote.payload import LARGEST_HEADER_BYTES
from kvstrata.tiers.remote.store import Store
from kvstrata.tiers.write_limits import DailyWriteBudget

# Most bytes of a sealed block beside its tensors: the header and the seal.
SEAL_MARGIN_BYTES = LARGEST_HEADER_BYTES + (1 << 20)


class SealedBlocks:
    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        health: Health,
        counters: TierCounters,
        options: RemoteOptions,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._health = health
        self._counters = counters
        self._ttl_s = options.ttl_s
        self._largest_bytes = options.max_block_bytes + SEAL_MARGIN_BYTES
        self._clock = clock
        self._budget = DailyWriteBudget(options.daily_write_bytes)
        self._meter = RateMeter()
        self.avoided = Avoided()

    @property
    def budget_bytes(self) -> float:
        """Bytes that may still be written today; infinite without a limit."""
        return self._budget.left_bytes(self._clock())

    @property
    def written_today_bytes(self) -> int:
        return self._budget.written_bytes(self._clock())

    @property
    def rates(self) -> Rates:
        return self._meter.rates()

    def write(self, block: Block) -> None:
        sealed = self._cluster.sealed(block)
        if not self._budget.take(len(sealed), self._clock()):
            self._counters.add(BlockEvent.DROPPED, Refusal.WRITE_BUDGET)
            return
        name = self._cluster.name_of(block.id)
        try:
            with self._health.asking(writes=True):
                is_new = self._store.create(name, sealed, self._ttl_s)
        except StoreFault:
            self._budget.give_back(len(sealed), self._clock())
            raise
        if not is_new:
            self._budget.give_back(len(sealed), self._clock())
            self._counters.add(BlockEvent.DROPPED, Refusal.PRESENT)
            return
        self.avoided.discard(name)
        num_tokens = block.num_tokens if block.part == BASE else 0
        self._counters.add(BlockEvent.WRITTEN, block.part, nbytes=len(sealed), num_tokens=num_tokens)

    def fetch(self, block: BlockId, root: bytes) -> Loaded | Missing:
        """Read and verify a block. The caller should delete the value after a miss with a Damage: values are never
        replaced, so a damaged one would keep its name."""
        result = self._fetched(block, root)
        if isinstance(result, Missing):
            self._counters.add(BlockEvent.MISSED, result.reason)
        return result

    def _fetched(self, block: BlockId, root: bytes) -> Loaded | Missing:
        if self._health.is_paused:
            return Missing(block, Refusal.PAUSED)
        name = self._cluster.name_of(block)
        try:
            with self._meter.reading() as measure, self._health.asking():
                sealed = self._store.get(name, self._largest_bytes)
                if sealed is not None:
                    measure(len(sealed))
            if sealed is None:
                self.avoided.add(name)
                return Missing(block, MissReason.ABSENT)
            found = self._cluster.opened(block, root, sealed)
        except StoreFault as fault:
            return Missing(block, fault.reason)
        except DamagedBlock as damage:
            self.avoided.add(name)
            return Missing(block, damage.reason)
        num_tokens = found.num_tokens if found.part == BASE else 0
        self._counters.add(BlockEvent.READ, found.part, nbytes=len(sealed), num_tokens=num_tokens)
        return Loaded(found)

    def touch(self, names: Sequence[str]) -> None:
        with self._health.asking():
            self._store.touch(names, self._ttl_s)

    def sweep(self) -> None:
        with self._health.asking():
            self._store.sweep(self._ttl_s)

    def delete(self, block: BlockId, reason: str) -> None:
        with self._health.asking(writes=True):
            self._store.delete([self._cluster.name_of(block)])
        self._counters.add(BlockEvent.DELETED, reason)
