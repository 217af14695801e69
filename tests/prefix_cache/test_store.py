"""The prefix cache without a model: lookup, reclaiming memory, precision, counters."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence

import mlx.core as mx
import pytest

from kvstrata.codecs.registry import parse
from kvstrata.kv.checkpoints import Checkpoint
from kvstrata.kv.precision_plan import make_plan
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.prefix_cache.config import CacheConfig
from kvstrata.prefix_cache.entries import Lease, PrecisionTarget
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.prefix_cache.requantize import PrecisionChange
from kvstrata.prefix_cache.transcode import MAX_SPANS
from tests.prefix_cache.kv import (
    HYBRID,
    LAYOUT,
    TOKEN_BYTES,
    Clock,
    Run,
    Told,
    check_lease,
    new_cache,
    settle,
    store_tokens,
)


def tokens(length: int, seed: int = 0) -> list[int]:
    return [(i * 7 + i // 11 + 31 * seed) % 97 for i in range(length)]


def cached_tokens(cache: PrefixCache, ids: Sequence[int], salt: str = "") -> int:
    return cache.lookup(ids, salt).num_tokens


def requantize(cache: PrefixCache, name: str, *, dry_run: bool = False, force: bool = False) -> None:
    codec = parse(name)
    cache.requantizer.requantize(
        PrecisionChange(codec, codec, dry_run=dry_run, force=force), make_plan(LAYOUT, codec, codec)
    )


def held_names(cache: PrefixCache) -> set[str]:
    return set(cache.usage.usage().by_precision)


def active_bytes() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


# Lookup.


def test_lookup_ends_at_any_token() -> None:
    cache = new_cache()
    store_tokens(cache, tokens(300))
    for length in (1, 17, 255, 256, 299):
        prompt = [*tokens(300)[:length], 98, 99]
        lease = cache.lease(prompt, "")
        assert lease.num_tokens == length
        check_lease(lease, prompt)
        cache.release(lease)


def test_other_weights_or_salt_share_no_prefix() -> None:
    cache = new_cache()
    store_tokens(cache, tokens(300))
    assert cached_tokens(cache, tokens(300)) == 300
    assert cached_tokens(cache, tokens(300), "salt") == 0
    assert cached_tokens(new_cache(fingerprint="other weights"), tokens(300)) == 0


def test_lookup_after_spans_were_joined_returns_all_tokens() -> None:
    cache = new_cache()
    ids: list[int] = []
    for turn in range(3 * MAX_SPANS):
        ids = [*ids, *tokens(30, seed=turn)]
        assert store_tokens(cache, ids) == len(ids) - 30
    lease = cache.lease(ids, "")
    check_lease(lease, ids)
    assert lease.num_tokens == len(ids)
    assert {entry.span for entry in lease.entries} == {run.span for run in lease.ranges}
    assert lease.entries <= set(cache.table.entries)
    cache.release(lease)
    settle(cache)
    cache.reclaimer.shrink_to(0)
    assert cache.table.nbytes == 0


def chat_of(cache: PrefixCache, *ends: int) -> list[int]:
    """Store a conversation of several requests, each continuing the one before."""
    ids = list(tokens(ends[-1]))
    for end in ends:
        store_tokens(cache, ids[:end])
        settle(cache)
    return ids


def test_join_takes_the_shortest_neighbours_first() -> None:
    cache = new_cache()
    ids = chat_of(cache, 300, 320, 340, 640)
    cache.table.join_spans(cache.lookup(ids, "").path[-1], 3)
    assert [entry.span.end for entry in cache.lookup(ids, "").entries] == [300, 340, 640]


def test_join_leaves_spans_with_different_targets_apart() -> None:
    cache = new_cache()
    ids = chat_of(cache, 300, 600)
    first, second = cache.lookup(ids, "").entries
    plan = make_plan(LAYOUT, parse("planes:8"), parse("planes:8"))
    cache.table.set_target(first, PrecisionTarget(plan, upward=True))
    cache.table.set_target(second, PrecisionTarget(plan))
    assert cache.table.join_spans(second.last_node, 1) == []
    cache.table.set_target(second, PrecisionTarget(plan, upward=True, sealed_to=500))
    assert cache.table.join_spans(second.last_node, 1) == [first]


def test_listener_is_given_new_tokens_only() -> None:
    heard: list[tuple[int, int]] = []

    class Hears(Told):
        def stored(self, root_key: bytes, ids: TokenIds, start: int) -> None:
            heard.append((start, len(ids)))
            super().stored(root_key, ids, start)

    cache = new_cache(watcher=Hears())
    ids = chat_of(cache, 300, 600)
    store_tokens(cache, ids)
    store_tokens(cache, ids[:200])
    assert heard == [(0, 300), (300, 600)]


# Memory.


def test_evictable_bytes_are_the_sum_over_evictable_entries() -> None:
    cache = new_cache("planes:4")

    def check_free() -> None:
        evictable_bytes = sum(entry.nbytes for entry in cache.table.entries if entry.is_evictable)
        assert cache.table.evictable_bytes == evictable_bytes

    ids = chat_of(cache, 300, 600)
    check_free()
    store_tokens(cache, [*ids[:450], *tokens(300, seed=1)])
    check_free()
    settle(cache)
    check_free()
    lease = cache.lease(ids, "")
    check_free()
    cache.release(lease)
    cache.reclaimer.shrink_to(cache.table.nbytes // 2)
    check_free()
    cache.reclaimer.shrink_to(0)
    assert cache.table.evictable_bytes == 0


@pytest.mark.parametrize("is_trimmed", [True, False])
def test_small_reclaim_trims_only_the_end_of_a_conversation(is_trimmed: bool) -> None:
    cache = new_cache()
    before = active_bytes()
    run = Run(cache, tokens(1500), room=100)
    run.compute(1500)
    run.end()
    del run
    if is_trimmed:
        settle(cache)
    # Entries that wait to be trimmed are evicted too where streams cannot wait for the transcoder.
    most_bytes = cache.table.nbytes - 10 * TOKEN_BYTES
    cache.reclaimer.shrink_to(most_bytes, slice_s=0.0, hard_limit_bytes=most_bytes)
    assert cached_tokens(cache, tokens(1500)) == 1280
    assert active_bytes() - before == pytest.approx(cache.table.nbytes, rel=0.02)
    assert cache.table.nbytes == 1280 * TOKEN_BYTES
    check_lease(cache.lease(tokens(1500), ""), tokens(1500))


def test_eviction_frees_all_memory_of_a_span() -> None:
    cache = new_cache()
    before = active_bytes()
    requantize(cache, "planes:8")
    for seed in range(40):
        store_tokens(cache, tokens(400, seed))
    settle(cache)
    requantize(cache, "planes:4")
    settle(cache)
    limit = cache.table.nbytes // 8
    cache.reclaimer.shrink_to(limit)
    assert 0 < cache.table.nbytes <= limit
    assert active_bytes() - before == pytest.approx(cache.table.nbytes, rel=0.02)
    cache.evictor.clear()
    assert cache.table.nbytes == 0
    assert active_bytes() - before < TOKEN_BYTES


def test_ttl_evicts_unused_entries() -> None:
    clock = Clock()
    cache = new_cache(ttl_s=60, clock=clock)
    store_tokens(cache, tokens(300, seed=1))
    store_tokens(cache, tokens(300, seed=2))
    settle(cache)
    clock.now_s += 40
    cache.release(cache.lease(tokens(300, seed=1), ""))
    clock.now_s += 30
    assert cache.explain([*tokens(300, seed=2), 5], "").ends_because == "evicted"
    assert cached_tokens(cache, tokens(300, seed=1)) == 300
    assert cached_tokens(cache, tokens(300, seed=2)) == 0
    pinned = cache.pins.pin(tokens(300, seed=1), "")
    clock.now_s += 100
    cache.evictor.expire()
    assert cached_tokens(cache, tokens(300, seed=1)) == pinned == 300


def test_seconds_to_expiry_follow_the_oldest_candidate() -> None:
    clock = Clock()
    cache = new_cache(ttl_s=60, clock=clock)
    assert cache.candidates.seconds_to_expiry() == math.inf
    run = Run(cache, tokens(300))
    run.compute(300)
    assert cache.candidates.seconds_to_expiry() == math.inf  # it runs
    run.end()
    clock.now_s += 20
    assert cache.candidates.seconds_to_expiry() == pytest.approx(40, abs=0.1)
    clock.now_s += 50
    assert cache.candidates.seconds_to_expiry() == 0
    cache.evictor.expire()
    assert cache.candidates.seconds_to_expiry() == math.inf
    assert new_cache().candidates.seconds_to_expiry() == math.inf


def test_eviction_spares_pinned_and_leased_entries() -> None:
    cache = new_cache()
    for seed in range(3):
        store_tokens(cache, tokens(300, seed))
    settle(cache)
    assert cache.pins.pin(tokens(300, seed=0), "") == 300
    lease = cache.lease(tokens(200, seed=1), "")
    cache.reclaimer.shrink_to(0)
    assert [cached_tokens(cache, tokens(300, seed)) for seed in range(3)] == [300, 300, 0]
    cache.release(lease)
    assert cache.pins.unpin(tokens(300, seed=0), "") == 300
    cache.reclaimer.shrink_to(0)
    assert cache.table.nbytes == 0


def test_clear_of_one_salt_keeps_other_salts() -> None:
    cache = new_cache()
    store_tokens(cache, tokens(300), "a")
    store_tokens(cache, tokens(300), "b")
    settle(cache)
    cleared = cache.evictor.clear("a")
    assert (cleared.tokens, cleared.nbytes) == (300, 300 * TOKEN_BYTES)
    assert (cached_tokens(cache, tokens(300), "a"), cached_tokens(cache, tokens(300), "b")) == (0, 300)


def test_clear_of_an_owner_drops_exactly_its_salts() -> None:
    cache = new_cache()
    for salt in ("a", "a:x", "a:y", "ab", "b:x"):
        store_tokens(cache, tokens(300), salt)
    settle(cache)
    assert cache.usage.usage("a").tokens == 900
    assert cache.evictor.clear(owner="a").tokens == 900
    assert [cached_tokens(cache, tokens(300), salt) for salt in ("a", "a:x", "a:y", "ab", "b:x")] == [0, 0, 0, 300, 300]
    assert cache.explain(tokens(300), "ab").ends_because == "complete"


def test_tokens_of_two_pins_stay_until_both_end() -> None:
    cache = new_cache()
    shared = tokens(200)
    one, two = shared + [98] * 50, shared + [99] * 50
    for prompt in (one, two, one[:100]):
        store_tokens(cache, prompt)
        cache.pins.pin(prompt, "")
    settle(cache)
    cache.pins.unpin(one, "")
    cache.evictor.clear()
    assert cached_tokens(cache, two) == 250  # the other pin's span has the first 200
    cache.pins.unpin(two, "")
    cache.evictor.clear()
    assert cache.table.nbytes == 0


# Precision.


@pytest.mark.parametrize(("length", "name"), [(255, "raw"), (256, "planes:8")])
def test_sequence_below_min_quantize_tokens_stays_raw(length: int, name: str) -> None:
    cache = new_cache("planes:8", min_quantize_tokens=256)
    store_tokens(cache, tokens(length))
    settle(cache)
    assert held_names(cache) == {name}


def test_long_chat_of_short_turns_is_encoded() -> None:
    cache = new_cache("planes:8", min_quantize_tokens=256)
    for turn in range(1, 9):
        store_tokens(cache, tokens(60 * turn))
        settle(cache)
        assert held_names(cache) == ({"raw"} if turn < 5 else {"planes:8"})
    assert cache.table.nbytes < 0.4 * 480 * TOKEN_BYTES


def test_short_conversation_with_a_long_sibling_is_encoded_with_it() -> None:
    cache = new_cache("planes:8", min_quantize_tokens=256)
    prompt = tokens(100)
    store_tokens(cache, [*prompt, *tokens(50, seed=1)])
    store_tokens(cache, [*prompt, *tokens(300, seed=2)])
    settle(cache)
    long, short = (
        cache.lookup([*prompt, *tokens(300, seed=2)], ""),
        cache.lookup([*prompt, *tokens(50, seed=1)], ""),
    )
    assert long.num_tokens == 400
    assert {entry.span.position for entry in long.entries} == {0, 100}
    assert short.num_tokens == 150
    assert held_names(cache) == {"planes:8"}


def test_leased_short_prefix_of_a_long_sequence_is_encoded_after_release() -> None:
    cache = new_cache("planes:8", min_quantize_tokens=256)
    store_tokens(cache, tokens(100))
    settle(cache)
    reader = cache.lease(tokens(100), "")
    store_tokens(cache, tokens(300))
    settle(cache)
    assert held_names(cache) == {"raw", "planes:8"}
    cache.release(reader)
    settle(cache)
    assert held_names(cache) == {"planes:8"}


def test_repeated_prompt_is_encoded_once() -> None:
    cache = new_cache("planes:8")
    for _ in range(100):
        store_tokens(cache, tokens(400))
        settle(cache)
    assert cache.usage.counters()["encoded_spans"] == 1
    assert cache.usage.counters()["stored_tokens"] == 400
    assert cache.usage.counters()["refused_present"] == 99


def test_request_without_computed_tokens_counts_as_refused_empty() -> None:
    cache = new_cache()
    run = Run(cache, tokens(20))
    run.end()
    assert cache.usage.counters()["refused_empty"] == 1
    assert cache.table.entries == {}


def refused(cache: PrefixCache) -> dict[str, int]:
    return {name: count for name, count in cache.usage.counters().items() if name.startswith("refused_")}


def test_entry_above_the_limit_counts_as_refused_too_large() -> None:
    cache = new_cache(hot_bytes=200 * TOKEN_BYTES)
    store_tokens(cache, tokens(300))
    cache.reclaimer.shrink_to(1 << 40)
    assert refused(cache) == {"refused_too_large": 1}
    assert cache.table.nbytes <= 200 * TOKEN_BYTES


def test_entry_beside_pinned_memory_counts_as_refused_no_room() -> None:
    cache = new_cache(hot_bytes=300 * TOKEN_BYTES)
    store_tokens(cache, tokens(200, seed=1))
    cache.pins.pin(tokens(200, seed=1), "")
    lease = cache.lease(tokens(200, seed=1), "")
    store_tokens(cache, tokens(200, seed=2))
    cache.reclaimer.shrink_to(1 << 40)
    assert refused(cache) == {"refused_no_room": 1}
    assert cached_tokens(cache, tokens(200, seed=1)) == 200
    cache.release(lease)


def test_new_entry_of_least_worth_counts_as_refused_least_worth() -> None:
    cache = new_cache(hot_bytes=300 * TOKEN_BYTES)
    store_tokens(cache, tokens(200, seed=1))
    cache.reclaimer.shrink_to(1 << 40)
    store_tokens(cache, tokens(200, seed=2))
    cache.release(cache.lease(tokens(200, seed=1), ""))
    cache.reclaimer.shrink_to(1 << 40)
    assert refused(cache) == {"refused_least_worth": 1}


def test_entry_evicted_after_it_fitted_counts_as_evicted_only() -> None:
    cache = new_cache()
    store_tokens(cache, tokens(300))
    cache.reclaimer.shrink_to(1 << 40)
    cache.reclaimer.shrink_to(0)
    assert cache.usage.counters()["evicted_tokens"] == 300
    assert refused(cache) == {}


def test_change_discards_transcoding_to_an_earlier_target() -> None:
    cache = new_cache("planes:4")
    store_tokens(cache, tokens(400))
    cache.run_background(0)
    requantize(cache, "planes:8")
    settle(cache)
    # One layer was done by then, and more bits would bring nothing back.
    assert held_names(cache) == {"planes:4", "planes:8"}
    requantize(cache, "planes:2")
    settle(cache)
    assert held_names(cache) == {"planes:2"}


def test_entries_joined_during_encoding_are_encoded_whole() -> None:
    cache = new_cache("planes:8", min_quantize_tokens=256)
    ids: list[int] = []
    for turn in range(3 * MAX_SPANS):
        ids = [*ids, *tokens(40, seed=turn)]
        store_tokens(cache, ids)
        cache.run_background(0)
    settle(cache)
    for entry in cache.table.entries:
        assert cache.transcoder.precision.pending_plan(entry) is None
        assert {len(entry.span.sealed(layer)) for layer in entry.span.layers} == {1}


def test_leased_entry_keeps_its_values_until_release() -> None:
    cache = new_cache("planes:4")
    owner = Run(cache, tokens(400))
    owner.compute(400)
    owner.seal()
    lease = cache.lease(tokens(400), "")
    owner.end()
    settle(cache)
    assert held_names(cache) == {"raw"}
    check_lease(lease, tokens(400))
    cache.release(lease)
    settle(cache)
    assert held_names(cache) == {"planes:4"}


def test_checkpoints_of_another_branch_are_kept() -> None:
    cache = new_cache()
    first = Run(cache, tokens(200))
    for _ in range(4):
        first.compute(50)
        first.filing.commit(first.tokens[: first.num_computed], mark_at(first.cache))
    first.end()
    other = Run(cache, [*tokens(100), *tokens(1000, seed=5)])
    for _ in range(20):
        other.compute(50)
        other.filing.commit(other.tokens[: other.num_computed], mark_at(other.cache))
    other.end()
    marks = {id(mark): mark for entry in cache.table.entries for mark in entry.span.checkpoints.values()}
    kept = {at for entry in cache.table.entries if entry.span.end == 200 for at in entry.span.checkpoints}
    assert {150, 200} <= kept
    # And the one at 100, from which both resume.
    assert len(marks) == CacheConfig.max_checkpoints + 3


def test_checkpoints_of_two_branches_at_one_position_are_distinct() -> None:
    cache = new_cache(layout=HYBRID)
    first = [*tokens(100), *tokens(50, seed=1)]
    second = [*tokens(100), *tokens(50, seed=2)]
    for prompt in (first, second):
        run = Run(cache, prompt)
        run.compute(150)
        run.end()
    for prompt in (first, second):
        lease = cache.lease(prompt, "")
        assert lease.num_tokens == 150
        check_lease(lease, prompt)


def test_checkpoints_of_pinned_entries_are_kept() -> None:
    cache = new_cache(layout=HYBRID)
    store_tokens(cache, tokens(100))
    assert cache.pins.pin(tokens(100), "") == 100
    run = Run(cache, [*tokens(100), *tokens(1000, seed=5)])
    for _ in range(20):
        run.compute(50)
        run.seal()
    run.end()
    assert cached_tokens(cache, [*tokens(100), 98, 99]) == 100


def test_thousands_of_requests_leak_no_memory() -> None:
    cache = new_cache(layout=HYBRID)
    limit = mx.set_cache_limit(0)  # MLX reuses buffers that are larger than what is asked for
    try:
        before = active_bytes()
        for i in range(2000):
            store_tokens(cache, [i % 7, i % 11, *tokens(40 + i % 13, seed=i)])
            settle(cache)
            cache.reclaimer.shrink_to(500_000)
            if i % 500 == 499:
                assert 300_000 < cache.table.nbytes <= 500_000
                assert active_bytes() - before == pytest.approx(cache.table.nbytes, rel=0.02)
                assert len(cache.table.entries) < 40
        cache.evictor.clear()
        assert active_bytes() == before
    finally:
        mx.set_cache_limit(limit)


def mark_at(cache: SequenceCache) -> Checkpoint:
    return Checkpoint(cache.num_tokens, (None,) * len(cache.flat))


def test_second_release_has_no_effect() -> None:
    cache = new_cache()
    store_tokens(cache, tokens(50))
    lease: Lease = cache.lease(tokens(50), "")
    cache.release(lease)
    cache.release(lease)
    assert all(entry.is_evictable for entry in cache.table.entries)
