"""Spans that wait to be encoded: requests that wait for them, order, and eviction without time to encode."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.kv.span import Span
from kvstrata.kv.transcode import LayerTranscoder
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.prefix_cache.usage import precision_of
from tests.prefix_cache.disk import load, random_tokens, reachable, store_on, written
from tests.prefix_cache.kv import Run, check_lease, new_cache, settle, store_tokens

NUM_TOKENS = 600
RAW, ENCODED = ("raw", "raw"), ("planes:8", "planes:8")


def precisions(cache: PrefixCache, tokens: list[int]) -> set[tuple[str, str]]:
    return {precision_of(entry.span) for entry in cache.lookup(tokens, "").entries}


def test_lease_encodes_nothing() -> None:
    cache, tokens = new_cache("planes:8"), random_tokens(NUM_TOKENS, 1)
    store_tokens(cache, tokens)
    lease = cache.lease(tokens, "")
    assert lease.num_tokens == NUM_TOKENS
    assert precisions(cache, tokens) == {RAW}
    cache.release(lease)
    settle(cache)
    assert precisions(cache, tokens) == {ENCODED}
    check_lease(cache.lease(tokens, ""), tokens)


def test_prefix_that_a_request_waits_for_is_encoded_first() -> None:
    cache, first, second = new_cache("planes:8"), random_tokens(NUM_TOKENS, 1), random_tokens(NUM_TOKENS, 2)
    for tokens in (first, second):
        store_tokens(cache, tokens)
    while cache.waits_for_encoding(cache.lookup(second, "")):
        cache.run_background(0)
    assert precisions(cache, second) == {ENCODED}
    assert precisions(cache, first) == {RAW}
    assert cache.waits_for_encoding(cache.lookup(first, ""))


def test_prefix_that_stays_raw_is_not_waited_for() -> None:
    cache, tokens = new_cache("raw"), random_tokens(NUM_TOKENS, 1)
    store_tokens(cache, tokens)
    assert cache.transcoder.jobs.waiting
    assert not cache.waits_for_encoding(cache.lookup(tokens, ""))


def test_prefix_that_another_request_reads_is_not_waited_for() -> None:
    """The entry is leased, so its values do not change."""
    cache, tokens = new_cache("planes:8"), random_tokens(NUM_TOKENS, 1)
    store_tokens(cache, tokens)
    reader = Run(cache, [*tokens, *random_tokens(10, 2)])
    assert not cache.waits_for_encoding(cache.lookup(tokens, ""))
    settle(cache)
    assert precisions(cache, tokens) == {RAW}
    reader.compute(reader.left)
    reader.check()


@pytest.fixture
def num_encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List whose only item counts the steps of encoding."""
    advance, count = LayerTranscoder.advance, [0]

    def counting(self: LayerTranscoder, span: Span, *, upward: bool = False) -> bool:
        count[0] += self._pair[0].name != "raw"
        return advance(self, span, upward=upward)

    monkeypatch.setattr(LayerTranscoder, "advance", counting)
    return count


def test_eviction_without_time_writes_a_span_as_it_is(tmp_path: Path, num_encoded: list[int]) -> None:
    with store_on(tmp_path, name="planes:8") as cache:
        tokens = random_tokens(NUM_TOKENS, 1)
        store_tokens(cache, tokens)
        cache.reclaimer.shrink_to(0, 0.0, hard_limit_bytes=0)
        assert cache.table.nbytes == 0
        assert num_encoded == [0]
        assert written(cache) == reachable(cache, tokens) == NUM_TOKENS
        load(cache, tokens)
        settle(cache)
        assert precisions(cache, tokens) == {ENCODED}
        check_lease(cache.lease(tokens, ""), tokens)


def test_eviction_with_time_encodes_a_span_before_it_is_written(tmp_path: Path, num_encoded: list[int]) -> None:
    with store_on(tmp_path, name="planes:8") as cache:
        tokens = random_tokens(NUM_TOKENS, 1)
        store_tokens(cache, tokens)
        cache.reclaimer.shrink_to(0)
        assert num_encoded[0] >= 2
        assert written(cache) == NUM_TOKENS


def test_limit_on_arrays_evicts_nothing_while_a_leaf_is_handed_to_the_disk(tmp_path: Path) -> None:
    with store_on(tmp_path, name="planes:8", max_arrays=10) as cache:
        chats = [random_tokens(NUM_TOKENS, seed) for seed in range(3)]
        for tokens in chats:
            store_tokens(cache, tokens)
        cache.reclaimer.shrink_to(cache.table.nbytes // 2)
        assert not cache.table.has_too_many_arrays
        settle(cache)
        cache.reclaimer.shrink_to(cache.table.max_bytes)
        assert not cache.table.has_too_many_arrays
        assert written(cache) > 0
        assert all(reachable(cache, tokens) or cache.lookup(tokens, "").num_tokens for tokens in chats)
