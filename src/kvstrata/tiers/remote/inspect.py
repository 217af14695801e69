"""List, verify and measure a store without a server. Knows bytes only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.tiers.block import Chain
from kvstrata.tiers.block_file import DamagedBlock
from kvstrata.tiers.remote.payload import decode
from kvstrata.tiers.remote.sealing import Keys, is_name, unseal
from kvstrata.tiers.remote.store import LARGEST_VALUE_BYTES, Store, StoredValue

PROBE_BYTES = 4 << 20

PROBE_TTL_S = 60.0

NUM_QUESTIONS = 5

NUM_READS = 3


@dataclass(frozen=True)
class Verified:
    num_blocks: int
    num_bytes: int
    num_tokens: int
    damaged: tuple[tuple[str, str], ...]  # name and reason


@dataclass(frozen=True)
class Measured:
    latency_s: float  # of a query without payload
    read_bytes_per_s: float
    write_bytes_per_s: float

    def break_even(self, token_bytes: float) -> float:
        """Return tokens per second: a server with a slower prefill loads such tokens faster than it computes them."""
        block_s = self.latency_s + 256 * token_bytes / self.read_bytes_per_s
        return 256 / block_s


def blocks_in(store: Store) -> list[StoredValue]:
    return [value for value in store.values() if is_name(value.name)]


def verify(store: Store, keys: Keys, chain: Chain) -> Verified:
    """Read every block and check it, as a server would. Changes nothing."""
    num_blocks = num_bytes = num_tokens = 0
    damaged: list[tuple[str, str]] = []
    for value in blocks_in(store):
        try:
            content = store.get(value.name, LARGEST_VALUE_BYTES)
            if content is None:
                continue  # it has expired since
            block = decode(unseal(keys, value.name, content), None, None, chain)
        except DamagedBlock as error:
            damaged.append((value.name, error.reason))
            continue
        num_blocks += 1
        num_bytes += value.nbytes
        num_tokens += block.num_tokens
    return Verified(num_blocks, num_bytes, num_tokens, tuple(damaged))


def measure(store: Store) -> Measured:
    """Measure a store with a temporary value, which is deleted."""
    name = os.urandom(32).hex()
    latency_s = min(_seconds(lambda: store.sizes([name])) for _ in range(NUM_QUESTIONS))
    content = os.urandom(PROBE_BYTES)
    try:
        write_s = _seconds(lambda: store.create(name, content, PROBE_TTL_S))
        read_s = min(_seconds(lambda: store.get(name, PROBE_BYTES)) for _ in range(NUM_READS))
    finally:
        store.delete([name])
    return Measured(latency_s, PROBE_BYTES / read_s, PROBE_BYTES / write_s)


def _seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return max(1e-9, time.perf_counter() - began_s)
