"""A prefix cache with a disk tier."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvstrata.codecs.registry import parse
from kvstrata.kv.layout import Layout
from kvstrata.kv.packing import count_labels
from kvstrata.kv.precision_plan import make_plan
from kvstrata.prefix_cache.config import CacheConfig, CacheLimits, DiskWrite
from kvstrata.prefix_cache.keys import Identity, as_ids, chain
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.prefix_cache.tier_client import BlockLoad, TierClient
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.lookups import run_walk
from kvstrata.tiers.options import DiskOptions
from tests.prefix_cache.kv import LAYOUT, Clock, settle, store_tokens

MIB = 1 << 20
LOAD_TIMEOUT_S = 60.0


def identity_of(layout: Layout) -> Identity:
    return Identity("weights", "float32", tuple(spec.signature for spec in layout.flat()))


@contextmanager
def store_on(
    folder: Path,
    layout: Layout = LAYOUT,
    name: str = "raw",
    *,
    hot_bytes: int = 1 << 30,
    disk_write: DiskWrite = "on_evict",
    min_quantize_tokens: int = 0,
    dynamic: bool = False,
    max_arrays: int | None = None,
    patience_s: float = 60.0,
    cache_clock: Clock | None = None,
    **disk: Any,
) -> Iterator[PrefixCache]:
    options: dict[str, Any] = {"limit_bytes": 256 * MIB, "queue_bytes": 64 * MIB, "reserve_bytes": 0} | disk
    beside = {each: options.pop(each) for each in ("files", "clock", "is_pinned") if each in options}
    tier = DiskTier(DiskOptions(folder, **options), chain=chain, tally=count_labels, **beside)
    codec = parse(name)
    config = CacheConfig(
        k=codec, v=codec, min_quantize_tokens=min_quantize_tokens, dynamic=dynamic, disk_write=disk_write
    )
    cold = TierClient(tier, layout, post=lambda _: None, patience_s=patience_s)
    plan_of, limits = partial(make_plan, layout), CacheLimits(hot_bytes, max_arrays)
    yield PrefixCache(layout, identity_of(layout), config, limits, plan_of, disk=cold, clock=cache_clock or Clock())
    tier.close()


def random_tokens(count: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1000) for _ in range(count)]


def chat(cache: PrefixCache, tokens: list[int], num_turns: int, *, seed: int = 0, turn_tokens: int = 40) -> list[int]:
    """Continue a chat by turns. Each is settled before the next begins. Returns all tokens."""
    for turn in range(num_turns):
        tokens = [*tokens, *random_tokens(turn_tokens, 1000 * seed + turn)]
        store_tokens(cache, tokens)
        settle(cache)
    return tokens


def write_turns(cache: PrefixCache, tokens: list[int], ends: list[int]) -> None:
    for end in ends:
        store_tokens(cache, tokens[:end])
        settle(cache)
    cache.offloader.offer_changed()
    settle(cache)
    written(cache)


def written(cache: PrefixCache) -> int:
    """Flush the disk and return the number of tokens on it, in all chains."""
    assert cache.disk.tier.flush(60).is_empty
    return cache.disk.tier.usage().num_tokens


def reachable(cache: PrefixCache, tokens: list[int]) -> int:
    """Return how many tokens a restarted server would read from the disk."""
    return run_walk(cache.disk.longest_chain(cache.matcher.root_of(""), as_ids(tokens))).num_tokens


def load(cache: PrefixCache, tokens: list[int]) -> None:
    """Load the tokens that the disk has into memory."""
    loading = begin_load(cache, tokens)
    until_s = time.monotonic() + LOAD_TIMEOUT_S
    while not loading.is_done:
        assert time.monotonic() < until_s
        cache.run_background(0)
    cache.prefetcher.promote(loading)


def begin_load(cache: PrefixCache, tokens: list[int]) -> BlockLoad:
    lookup = cache.prefetcher.ask(tokens, "")
    assert lookup is not None
    assert lookup.wait(LOAD_TIMEOUT_S)
    loading = cache.prefetcher.begin_load(lookup.offers[0], tokens, "")
    assert loading is not None
    return loading
