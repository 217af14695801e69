"""The sealed blocks of a store: write, load, touch, sweep, delete, verify and measure.

Every call may wait for the store, so it belongs on a thread of the tier. The calls of a tier go through `StoreHealth`,
which remembers faults: `load` answers a fault with a miss; the other methods let StoreFault through. The functions at
the end need no server.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstrata.tiers.block import BASE, Block, BlockId, Chain
from kvstrata.tiers.block_file import Checksum, DamagedBlock, decode_block, encode_block
from kvstrata.tiers.interface import BlockEvent, Refusal, TierCounters
from kvstrata.tiers.options import RemoteOptions
from kvstrata.tiers.read_pool import LoadedBlock, MissingBlock, MissReason
from kvstrata.tiers.read_rates import RateMeter, ReadRates
from kvstrata.tiers.remote.chains import AvoidedNames
from kvstrata.tiers.remote.health import StoreFault, StoreHealth
from kvstrata.tiers.remote.sealing import BlockNames, Keys, is_name, seal, unseal
from kvstrata.tiers.remote.store import LARGEST_VALUE_BYTES, KeyValueStore, StoredValue
from kvstrata.tiers.write_limits import DailyWriteBudget

# Most bytes of a sealed block beside its tensors: the header of 256 tokens, and the seal.
MARGIN_BYTES = 5 << 20


class SealedBlockStore:
    """The blocks of one tier in a key-value store, sealed and named with its keys."""

    def __init__(
        self,
        store: KeyValueStore,
        keys: Keys,
        names: BlockNames,
        chain: Chain,
        health: StoreHealth,
        counters: TierCounters,
        options: RemoteOptions,
        clock: Callable[[], float],
    ) -> None:
        self.store = store
        self.names = names
        self.avoided = AvoidedNames()
        self._keys = keys
        self._chain = chain
        self._health = health
        self._counters = counters
        self._ttl_s = options.ttl_s
        self._largest_bytes = options.max_block_bytes + MARGIN_BYTES
        self._clock = clock
        self._budget = DailyWriteBudget(options.daily_write_bytes)
        self._meter = RateMeter()

    @property
    def budget_bytes(self) -> float:
        """Bytes that may still be written today; infinite without a limit."""
        return self._budget.left_bytes(self._clock())

    @property
    def written_today_bytes(self) -> int:
        return self._budget.written_bytes(self._clock())

    @property
    def rates(self) -> ReadRates:
        return self._meter.rates()

    def write(self, block: Block) -> None:
        name = self.names.name_of(block.id)
        sealed = seal(self._keys, name, b"".join(encode_block(block, Checksum.BLAKE3).pieces))
        if not self._budget.take(len(sealed), self._clock()):
            self._counters.add(BlockEvent.DROPPED, Refusal.WRITE_BUDGET)
            return
        try:
            with self._health.query(writes=True):
                is_new = self.store.create(name, sealed, self._ttl_s)
        except StoreFault:
            self._budget.give_back(len(sealed), self._clock())
            raise
        if not is_new:
            self._budget.give_back(len(sealed), self._clock())
            self._counters.add(BlockEvent.DROPPED, Refusal.PRESENT)
            return
        self.avoided.discard(name)
        self._counters.add(BlockEvent.WRITTEN, block.part, nbytes=len(sealed), num_tokens=_counted_tokens(block))

    def load(self, block: BlockId, root: bytes) -> LoadedBlock | MissingBlock:
        """Read and verify a block. The caller should delete the value after a miss with a Damage: values are never
        replaced, so a damaged one would keep its name."""
        result = self._load(block, root)
        if isinstance(result, MissingBlock):
            self._counters.add(BlockEvent.MISSED, result.reason)
        return result

    def _load(self, block: BlockId, root: bytes) -> LoadedBlock | MissingBlock:
        if self._health.is_paused:
            return MissingBlock(block, Refusal.PAUSED)
        name = self.names.name_of(block)
        try:
            with self._meter.reading() as measure, self._health.query():
                sealed = self.store.get(name, self._largest_bytes)
                if sealed is not None:
                    measure(len(sealed))
            if sealed is None:
                self.avoided.add(name)
                return MissingBlock(block, MissReason.ABSENT)
            found = _open_sealed(self._keys, name, sealed, block, root=root, chain=self._chain)
        except StoreFault as fault:
            return MissingBlock(block, fault.reason)
        except DamagedBlock as damage:
            self.avoided.add(name)
            return MissingBlock(block, damage.reason)
        self._counters.add(BlockEvent.READ, found.part, nbytes=len(sealed), num_tokens=_counted_tokens(found))
        return LoadedBlock(found)

    def touch(self, names: Sequence[str]) -> None:
        with self._health.query():
            self.store.touch(names, self._ttl_s)

    def sweep(self) -> None:
        with self._health.query():
            self.store.sweep(self._ttl_s)

    def delete(self, block: BlockId, reason: str) -> None:
        with self._health.query(writes=True):
            self.store.delete([self.names.name_of(block)])
        self._counters.add(BlockEvent.DELETED, reason)


def _open_sealed(
    keys: Keys, name: str, sealed: bytes | memoryview, wanted: BlockId | None, *, root: bytes | None, chain: Chain
) -> Block:
    """Open a value. Raises DamagedBlock unless a server with these keys sealed the wanted block under this name."""
    # The seal covers every byte, so the checksums of the tensors need not be verified, too.
    return decode_block(unseal(keys, name, sealed), wanted, root=root, chain=chain, verify_tensors=False)


def _counted_tokens(block: Block) -> int:
    """Return the tokens of a block, once for all its parts."""
    return block.num_tokens if block.part == BASE else 0


# Without a server.

PROBE_BYTES = 4 << 20

PROBE_TTL_S = 60.0

NUM_QUERIES = 5

NUM_READS = 3


@dataclass(frozen=True)
class VerifiedStore:
    num_blocks: int
    num_bytes: int
    num_tokens: int
    damaged: tuple[tuple[str, str], ...]  # name and reason


@dataclass(frozen=True)
class MeasuredStore:
    latency_s: float  # of a query without payload
    read_bytes_per_s: float
    write_bytes_per_s: float

    def break_even(self, token_bytes: float) -> float:
        """Return tokens per second: a server with a slower prefill loads such tokens faster than it computes them."""
        block_s = self.latency_s + 256 * token_bytes / self.read_bytes_per_s
        return 256 / block_s


def list_sealed_blocks(store: KeyValueStore) -> list[StoredValue]:
    return [value for value in store.values() if is_name(value.name)]


def verify_store(store: KeyValueStore, keys: Keys, chain: Chain) -> VerifiedStore:
    """Read every block and check it, as a server would. Changes nothing."""
    num_blocks = num_bytes = num_tokens = 0
    damaged: list[tuple[str, str]] = []
    for value in list_sealed_blocks(store):
        try:
            content = store.get(value.name, LARGEST_VALUE_BYTES)
            if content is None:
                continue  # it has expired since
            block = _open_sealed(keys, value.name, content, None, root=None, chain=chain)
        except DamagedBlock as error:
            damaged.append((value.name, error.reason))
            continue
        num_blocks += 1
        num_bytes += value.nbytes
        num_tokens += block.num_tokens
    return VerifiedStore(num_blocks, num_bytes, num_tokens, tuple(damaged))


def measure_store(store: KeyValueStore) -> MeasuredStore:
    """Measure a store with a temporary value, which is deleted."""
    name = os.urandom(32).hex()
    latency_s = min(_seconds(lambda: store.sizes([name])) for _ in range(NUM_QUERIES))
    content = os.urandom(PROBE_BYTES)
    try:
        write_s = _seconds(lambda: store.create(name, content, PROBE_TTL_S))
        read_s = min(_seconds(lambda: store.get(name, PROBE_BYTES)) for _ in range(NUM_READS))
    finally:
        store.delete([name])
    return MeasuredStore(latency_s, PROBE_BYTES / read_s, PROBE_BYTES / write_s)


def _seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return max(1e-9, time.perf_counter() - began_s)
