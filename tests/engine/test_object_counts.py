"""Memory per request comes back: short requests leave no object of ours behind, beyond what the cache holds."""

from __future__ import annotations

import gc
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvstrata.engine.config import KvConfig
from kvstrata.kv.packing import count_labels
from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.options import DiskOptions
from tests.engine.drive import Drive
from tests.support.models import VOCAB, tiny_loaded

KIB, MIB = 1 << 10, 1 << 20
NUM_REQUESTS = 640
AT_ONCE = 16
PROMPT_TOKENS = 12
HOT_BYTES = 32 * KIB
# A queue of leaves drops outdated items, which refer to entries, when it has more than 64, and four for each leaf.
# There is a queue for each cost of computing a leaf again, as measured: on a busy machine costs differ by octaves.
NUM_QUEUES = 4
MOST_IN_QUEUE, MOST_FOR_LEAF = 64, 4


def count_objects() -> Counter[str]:
    """All objects that are alive, by type, but for what was there when the tests were collected."""
    gc.collect()
    return Counter(name_of(type(each)) for each in gc.get_objects())


def name_of(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def num_excess_entries(storage: KvConfig, tier: DiskTier | None = None) -> int:
    """Return the number of entries alive after many short requests, less the largest number that queues refer to."""
    before = count_objects()[name_of(Entry)]
    drive = Drive(tiny_loaded("llama", 1), kv_bytes=4 * MIB, storage=storage, tier=tier)
    rng = random.Random(1)
    for _ in range(NUM_REQUESTS // AT_ONCE):
        for _ in range(AT_ONCE):
            drive.submit([rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)], 1)
        drive.run()
    num_cached = len(drive.prefix_cache.table.entries)
    return count_objects()[name_of(Entry)] - before - NUM_QUEUES * MOST_IN_QUEUE - MOST_FOR_LEAF * num_cached


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["default", "dynamic"])
def test_entries_of_many_short_requests_die_when_evicted(is_dynamic: bool) -> None:
    assert num_excess_entries(KvConfig(hot_bytes=HOT_BYTES, dynamic=is_dynamic)) <= 0


def test_entries_of_many_short_requests_die_when_evicted_to_a_disk(tmp_path: Path) -> None:
    tier = DiskTier(DiskOptions(tmp_path, 64 * MIB, reserve_bytes=0), chain=chain, tally=count_labels)
    assert num_excess_entries(KvConfig(hot_bytes=HOT_BYTES), tier) <= 0
    tier.close()
