"""Reclaiming memory takes no more than is needed, and evicted prompts are remembered."""

from __future__ import annotations

from functools import partial

import pytest

from kvstrata.kv.precision_plan import make_plan
from kvstrata.prefix_cache import entry_table
from kvstrata.prefix_cache.config import CacheConfig, CacheLimits
from kvstrata.prefix_cache.keys import Identity
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from tests.prefix_cache.kv import LAYOUT, TOKEN_BYTES, new_cache, store_tokens
from tests.prefix_cache.test_store import tokens

CHAT_TOKENS = 1024
CHAT_BYTES = CHAT_TOKENS * TOKEN_BYTES


def stepping_down_stock() -> PrefixCache:
    config, limits = CacheConfig(dynamic=True), CacheLimits(64 * CHAT_BYTES)
    identity = Identity("weights", "float32", tuple(spec.signature for spec in LAYOUT.flat()))
    return PrefixCache(LAYOUT, identity, config, limits, partial(make_plan, LAYOUT))


def pending_plans(cache: PrefixCache) -> dict[int, object]:
    return {place: cache.transcoder.precision.pending_plan(entry) for place, entry in enumerate(cache.table.entries)}


def test_reclaim_counts_bytes_that_pending_step_downs_free() -> None:
    cache = stepping_down_stock()
    for seed in range(8):
        store_tokens(cache, tokens(CHAT_TOKENS, seed))
    while not cache.transcoder.jobs.is_idle:
        cache.run_background(0)
    limit_bytes = cache.table.nbytes - 2 * CHAT_BYTES
    assert cache.reclaimer.shrink_to(limit_bytes, slice_s=0.0) == "steps_down"
    first = pending_plans(cache)
    assert 0 < sum(plan is not None for plan in first.values()) < 8
    for _ in range(3):
        assert cache.reclaimer.shrink_to(limit_bytes, slice_s=0.0) == "steps_down"
    assert pending_plans(cache) == first


def test_explain_names_eviction_for_each_evicted_prompt() -> None:
    cache = new_cache()
    prompts = [tokens(CHAT_TOKENS, seed) for seed in range(3)]
    for prompt in prompts:
        store_tokens(cache, prompt)
    cache.reclaimer.shrink_to(0)
    assert cache.table.nbytes == 0
    assert [cache.explain([*prompt, 5], "").ends_because for prompt in prompts] == ["evicted"] * 3


def test_record_of_evicted_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_table, "GHOST_TOKENS", 2 * CHAT_TOKENS)
    cache = new_cache()
    for seed in range(9):
        store_tokens(cache, tokens(CHAT_TOKENS, seed))
        cache.reclaimer.shrink_to(0)
        assert cache.table.ghosts.num_tokens <= 3 * CHAT_TOKENS
