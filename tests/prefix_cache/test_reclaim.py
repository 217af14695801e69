"""Reclaiming memory takes no more than is needed, and evicted prompts are remembered."""

from __future__ import annotations

from functools import partial

import pytest

from kvstrata.prefix_cache import entry_table
from kvstrata.prefix_cache.config import CacheConfig, LadderConfig
from kvstrata.prefix_cache.keys import Identity
from kvstrata.prefix_cache.prefix_cache import PrefixCache, Stock
from kvstrata.spans.plan import make_plan
from tests.prefix_cache.kv import LAYOUT, TOKEN_BYTES, new_stock, store_tokens
from tests.prefix_cache.test_store import tokens

CHAT_TOKENS = 1024
CHAT_BYTES = CHAT_TOKENS * TOKEN_BYTES


def stepping_down_stock() -> Stock:
    options = CacheConfig(hot_bytes=64 * CHAT_BYTES, ladder=LadderConfig(by_pressure=True))
    identity = Identity("weights", "float32", tuple(spec.signature for spec in LAYOUT.flat()))
    return PrefixCache(LAYOUT, identity, options, partial(make_plan, LAYOUT))


def pending_plans(stock: Stock) -> dict[int, object]:
    return {place: stock.transcoder.precision.pending_plan(entry) for place, entry in enumerate(stock.table.entries)}


def test_reclaim_counts_bytes_that_pending_step_downs_free() -> None:
    stock = stepping_down_stock()
    for seed in range(8):
        store_tokens(stock, tokens(CHAT_TOKENS, seed))
    while not stock.transcoder.jobs.idle:
        stock.background.run_background(0)
    limit_bytes = stock.table.nbytes - 2 * CHAT_BYTES
    assert stock.reclaimer.shrink_to(limit_bytes, slice_s=0.0) == "steps_down"
    first = pending_plans(stock)
    assert 0 < sum(plan is not None for plan in first.values()) < 8
    for _ in range(3):
        assert stock.reclaimer.shrink_to(limit_bytes, slice_s=0.0) == "steps_down"
    assert pending_plans(stock) == first


def test_explain_names_eviction_for_each_evicted_prompt() -> None:
    stock = new_stock()
    prompts = [tokens(CHAT_TOKENS, seed) for seed in range(3)]
    for prompt in prompts:
        store_tokens(stock, prompt)
    stock.reclaimer.shrink_to(0)
    assert stock.table.nbytes == 0
    assert [stock.explain([*prompt, 5], "").ends_because for prompt in prompts] == ["evicted"] * 3


def test_record_of_evicted_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_table, "GHOST_TOKENS", 2 * CHAT_TOKENS)
    stock = new_stock()
    for seed in range(9):
        store_tokens(stock, tokens(CHAT_TOKENS, seed))
        stock.reclaimer.shrink_to(0)
        assert stock.table.ghosts.num_tokens <= 3 * CHAT_TOKENS
