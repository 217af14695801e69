"""Spans that wait to be encoded: who waits for that, what goes first, and what happens to them without time for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.prefix_cache.usage import precision_of
from kvstrata.spans.rewrite import LayerRewrite
from kvstrata.spans.span import Span
from tests.prefix_cache.disk import load, random_tokens, reachable, store_on, written
from tests.prefix_cache.kv import Run, check_lease, new_stock, settle, store_tokens

NUM_TOKENS = 600
RAW, ENCODED = ("raw", "raw"), ("planes:8", "planes:8")


def precisions(stock: PrefixCache, tokens: list[int]) -> set[tuple[str, str]]:
    return {precision_of(entry.span) for entry in stock.lookup(tokens, "").entries}


def test_lease_encodes_nothing() -> None:
    stock, tokens = new_stock("planes:8"), random_tokens(NUM_TOKENS, 1)
    store_tokens(stock, tokens)
    lease = stock.lease(tokens, "")
    assert lease.num_tokens == NUM_TOKENS
    assert precisions(stock, tokens) == {RAW}
    stock.release(lease)
    settle(stock)
    assert precisions(stock, tokens) == {ENCODED}
    check_lease(stock.lease(tokens, ""), tokens)


def test_prefix_that_a_request_waits_for_is_encoded_first() -> None:
    stock, first, second = new_stock("planes:8"), random_tokens(NUM_TOKENS, 1), random_tokens(NUM_TOKENS, 2)
    for tokens in (first, second):
        store_tokens(stock, tokens)
    while stock.waits_for_encoding(stock.lookup(second, "")):
        stock.run_background(0)
    assert precisions(stock, second) == {ENCODED}
    assert precisions(stock, first) == {RAW}
    assert stock.waits_for_encoding(stock.lookup(first, ""))


def test_prefix_that_stays_raw_is_not_waited_for() -> None:
    stock, tokens = new_stock("raw"), random_tokens(NUM_TOKENS, 1)
    store_tokens(stock, tokens)
    assert stock.transcoder.jobs.waiting
    assert not stock.waits_for_encoding(stock.lookup(tokens, ""))


def test_prefix_that_another_request_reads_is_not_waited_for() -> None:
    """Its values do not change under that one: there is nothing to wait for."""
    stock, tokens = new_stock("planes:8"), random_tokens(NUM_TOKENS, 1)
    store_tokens(stock, tokens)
    reader = Run(stock, [*tokens, *random_tokens(10, 2)])
    assert not stock.waits_for_encoding(stock.lookup(tokens, ""))
    settle(stock)
    assert precisions(stock, tokens) == {RAW}
    reader.compute(reader.left)
    reader.check()


@pytest.fixture
def num_encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts in its only item how many small steps of encoding were made."""
    advance, count = LayerRewrite.advance, [0]

    def counting(self: LayerRewrite, span: Span, *, upward: bool = False) -> bool:
        count[0] += self._pair[0].name != "raw"
        return advance(self, span, upward=upward)

    monkeypatch.setattr(LayerRewrite, "advance", counting)
    return count


def test_eviction_without_time_writes_a_span_as_it_is(tmp_path: Path, num_encoded: list[int]) -> None:
    with store_on(tmp_path, name="planes:8") as stock:
        tokens = random_tokens(NUM_TOKENS, 1)
        store_tokens(stock, tokens)
        stock.reclaimer.shrink_to(0, 0.0, most_bytes=0)
        assert stock.table.nbytes == 0
        assert num_encoded == [0]
        assert written(stock) == reachable(stock, tokens) == NUM_TOKENS
        load(stock, tokens)
        settle(stock)
        assert precisions(stock, tokens) == {ENCODED}
        check_lease(stock.lease(tokens, ""), tokens)


def test_eviction_with_time_encodes_a_span_before_it_is_written(tmp_path: Path, num_encoded: list[int]) -> None:
    with store_on(tmp_path, name="planes:8") as stock:
        tokens = random_tokens(NUM_TOKENS, 1)
        store_tokens(stock, tokens)
        stock.reclaimer.shrink_to(0)
        assert num_encoded[0] >= 2
        assert written(stock) == NUM_TOKENS


def test_limit_on_arrays_evicts_nothing_while_a_leaf_is_handed_to_the_disk(tmp_path: Path) -> None:
    with store_on(tmp_path, name="planes:8", max_arrays=10) as stock:
        chats = [random_tokens(NUM_TOKENS, seed) for seed in range(3)]
        for tokens in chats:
            store_tokens(stock, tokens)
        stock.reclaimer.shrink_to(stock.table.nbytes // 2)
        assert not stock.table.has_too_many_arrays
        settle(stock)
        stock.reclaimer.shrink_to(stock.table.max_bytes)
        assert not stock.table.has_too_many_arrays
        assert written(stock) > 0
        assert all(reachable(stock, tokens) or stock.lookup(tokens, "").num_tokens for tokens in chats)
