"""What the store finds, keeps, encodes and counts, without a model."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence

import mlx.core as mx
import pytest

from kvstrata.codecs.registry import parse
from kvstrata.layers.sequence import SequenceCache
from kvstrata.prefix_cache.config import CacheConfig
from kvstrata.prefix_cache.entries import Lease
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.prefix_cache.requantize import PrecisionChange
from kvstrata.prefix_cache.transcode import MAX_SPANS
from kvstrata.spans.marks import Mark
from kvstrata.spans.plan import make_plan
from tests.prefix_cache.kv import HYBRID, LAYOUT, TOKEN_BYTES, Clock, Run, check_lease, new_stock, settle, store_tokens


def tokens(length: int, seed: int = 0) -> list[int]:
    return [(i * 7 + i // 11 + 31 * seed) % 97 for i in range(length)]


def found(stock: PrefixCache, ids: Sequence[int], salt: str = "") -> int:
    return stock.lookup(ids, salt).num_tokens


def requantize(stock: PrefixCache, name: str, *, dry_run: bool = False, force: bool = False) -> None:
    codec = parse(name)
    stock.requantizer.requantize(
        PrecisionChange(codec, codec, dry_run=dry_run, force=force), make_plan(LAYOUT, codec, codec)
    )


def held_names(stock: PrefixCache) -> set[str]:
    return set(stock.usage.usage().by_precision)


def active_bytes() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


# Match.


def test_a_match_ends_at_any_token() -> None:
    stock = new_stock()
    store_tokens(stock, tokens(300))
    for length in (1, 17, 255, 256, 299):
        prompt = [*tokens(300)[:length], 98, 99]
        lease = stock.lease(prompt, "")
        assert lease.num_tokens == length
        check_lease(lease, prompt)
        stock.release(lease)


def test_other_weights_layout_or_salt_share_nothing() -> None:
    stock = new_stock()
    store_tokens(stock, tokens(300))
    assert found(stock, tokens(300)) == 300
    assert found(stock, tokens(300), "salt") == 0
    assert found(new_stock(fingerprint="other weights"), tokens(300)) == 0


def test_what_a_match_joins_it_still_finds() -> None:
    """The match of each turn brings what the turn before left in order, and that joins spans."""
    stock = new_stock()
    ids: list[int] = []
    for turn in range(3 * MAX_SPANS):
        ids = [*ids, *tokens(30, seed=turn)]
        assert store_tokens(stock, ids) == len(ids) - 30
    lease = stock.lease(ids, "")
    check_lease(lease, ids)
    assert lease.num_tokens == len(ids)
    assert {entry.span for entry in lease.entries} == {run.span for run in lease.ranges}
    assert lease.entries <= set(stock.table.entries)
    stock.release(lease)
    settle(stock)
    stock.reclaimer.shrink_to(0)
    assert stock.table.nbytes == 0


# Room.


@pytest.mark.parametrize("is_trimmed", [True, False])
def test_a_little_room_costs_the_end_of_a_new_conversation_and_not_all_of_it(is_trimmed: bool) -> None:
    stock = new_stock()
    before = active_bytes()
    run = Run(stock, tokens(1500), room=100)
    run.compute(1500)
    run.end()
    del run
    if is_trimmed:
        settle(stock)
    # What waits to be trimmed goes too where streams cannot wait for that.
    most_bytes = stock.table.nbytes - 10 * TOKEN_BYTES
    stock.reclaimer.shrink_to(most_bytes, slice_s=0.0, most_bytes=most_bytes)
    assert found(stock, tokens(1500)) == 1280
    assert active_bytes() - before == pytest.approx(stock.table.nbytes, rel=0.02)
    assert stock.table.nbytes == 1280 * TOKEN_BYTES
    check_lease(stock.lease(tokens(1500), ""), tokens(1500))


def test_what_was_evicted_is_not_held_by_anybody() -> None:
    stock = new_stock()
    before = active_bytes()
    requantize(stock, "planes:8")
    for seed in range(40):
        store_tokens(stock, tokens(400, seed))
    settle(stock)
    requantize(stock, "planes:4")
    settle(stock)
    limit = stock.table.nbytes // 8
    stock.reclaimer.shrink_to(limit)
    assert 0 < stock.table.nbytes <= limit
    assert active_bytes() - before == pytest.approx(stock.table.nbytes, rel=0.02)
    stock.clearing.clear()
    assert stock.table.nbytes == 0
    assert active_bytes() - before < TOKEN_BYTES


def test_what_nobody_asked_for_in_time_goes() -> None:
    clock = Clock()
    stock = new_stock(ttl_s=60, clock=clock)
    store_tokens(stock, tokens(300, seed=1))
    store_tokens(stock, tokens(300, seed=2))
    settle(stock)
    clock.now_s += 40
    stock.release(stock.lease(tokens(300, seed=1), ""))
    clock.now_s += 30
    assert stock.explain([*tokens(300, seed=2), 5], "").ends_because == "evicted"
    assert found(stock, tokens(300, seed=1)) == 300
    assert found(stock, tokens(300, seed=2)) == 0
    pinned = stock.pins.pin(tokens(300, seed=1), "")
    clock.now_s += 100
    stock.evictor.expire()
    assert found(stock, tokens(300, seed=1)) == pinned == 300


def test_the_time_to_the_next_expiry_is_known() -> None:
    clock = Clock()
    stock = new_stock(ttl_s=60, clock=clock)
    assert stock.candidates.seconds_to_expiry() == math.inf
    run = Run(stock, tokens(300))
    run.compute(300)
    assert stock.candidates.seconds_to_expiry() == math.inf  # it runs
    run.end()
    clock.now_s += 20
    assert stock.candidates.seconds_to_expiry() == pytest.approx(40, abs=0.1)
    clock.now_s += 50
    assert stock.candidates.seconds_to_expiry() == 0
    stock.evictor.expire()
    assert stock.candidates.seconds_to_expiry() == math.inf
    assert new_stock().candidates.seconds_to_expiry() == math.inf


def test_pins_and_leases_outlive_every_eviction() -> None:
    stock = new_stock()
    for seed in range(3):
        store_tokens(stock, tokens(300, seed))
    settle(stock)
    assert stock.pins.pin(tokens(300, seed=0), "") == 300
    lease = stock.lease(tokens(200, seed=1), "")
    stock.reclaimer.shrink_to(0)
    assert [found(stock, tokens(300, seed)) for seed in range(3)] == [300, 300, 0]
    stock.release(lease)
    assert stock.pins.unpin(tokens(300, seed=0), "") == 300
    stock.reclaimer.shrink_to(0)
    assert stock.table.nbytes == 0


def test_clearing_one_salt_leaves_the_others() -> None:
    stock = new_stock()
    store_tokens(stock, tokens(300), "a")
    store_tokens(stock, tokens(300), "b")
    settle(stock)
    cleared = stock.clearing.clear("a")
    assert (cleared.tokens, cleared.nbytes) == (300, 300 * TOKEN_BYTES)
    assert (found(stock, tokens(300), "a"), found(stock, tokens(300), "b")) == (0, 300)


def test_clearing_an_owner_takes_all_its_salts_and_nobody_elses() -> None:
    stock = new_stock()
    for salt in ("a", "a:x", "a:y", "ab", "b:x"):
        store_tokens(stock, tokens(300), salt)
    settle(stock)
    assert stock.usage.usage("a").tokens == 900
    assert stock.clearing.clear(owner="a").tokens == 900
    assert [found(stock, tokens(300), salt) for salt in ("a", "a:x", "a:y", "ab", "b:x")] == [0, 0, 0, 300, 300]
    assert stock.explain(tokens(300), "ab").ends_because == "complete"


def test_what_two_pins_share_stays_until_both_are_gone() -> None:
    stock = new_stock()
    shared = tokens(200)
    one, two = shared + [98] * 50, shared + [99] * 50
    for prompt in (one, two, one[:100]):
        store_tokens(stock, prompt)
        stock.pins.pin(prompt, "")
    settle(stock)
    stock.pins.unpin(one, "")
    stock.clearing.clear()
    assert found(stock, two) == 250  # of which the span of the other has the first 200
    stock.pins.unpin(two, "")
    stock.clearing.clear()
    assert stock.table.nbytes == 0


# Precision.


@pytest.mark.parametrize(("length", "name"), [(255, "raw"), (256, "planes:8")])
def test_shorter_sequences_stay_raw(length: int, name: str) -> None:
    stock = new_stock("planes:8", min_quantize_tokens=256)
    store_tokens(stock, tokens(length))
    settle(stock)
    assert held_names(stock) == {name}


def test_a_long_chat_of_short_turns_is_compressed() -> None:
    stock = new_stock("planes:8", min_quantize_tokens=256)
    for turn in range(1, 9):
        store_tokens(stock, tokens(60 * turn))
        settle(stock)
        assert held_names(stock) == ({"raw"} if turn < 5 else {"planes:8"})
    assert stock.table.nbytes < 0.4 * 480 * TOKEN_BYTES


def test_a_short_conversation_stays_raw_beside_a_long_one_that_begins_alike() -> None:
    stock = new_stock("planes:8", min_quantize_tokens=256)
    prompt = tokens(100)
    store_tokens(stock, [*prompt, *tokens(50, seed=1)])
    store_tokens(stock, [*prompt, *tokens(300, seed=2)])
    settle(stock)
    long, short = (
        stock.lookup([*prompt, *tokens(300, seed=2)], ""),
        stock.lookup([*prompt, *tokens(50, seed=1)], ""),
    )
    assert long.num_tokens == 400
    assert {entry.span.position for entry in long.entries} == {0, 100}
    assert short.num_tokens == 150
    assert held_names(stock) == {"planes:8"}


def test_a_short_beginning_that_others_read_is_encoded_when_they_have_ended() -> None:
    stock = new_stock("planes:8", min_quantize_tokens=256)
    store_tokens(stock, tokens(100))
    settle(stock)
    reader = stock.lease(tokens(100), "")
    store_tokens(stock, tokens(300))
    settle(stock)
    assert held_names(stock) == {"raw", "planes:8"}
    stock.release(reader)
    settle(stock)
    assert held_names(stock) == {"planes:8"}


def test_the_same_tokens_a_hundred_times_are_encoded_once() -> None:
    stock = new_stock("planes:8")
    for _ in range(100):
        store_tokens(stock, tokens(400))
        settle(stock)
    assert stock.usage.count()["encoded_spans"] == 1
    assert stock.usage.count()["stored_tokens"] == 400
    assert stock.usage.count()["refused_present"] == 99


def test_a_request_that_computed_nothing_is_counted_so() -> None:
    stock = new_stock()
    run = Run(stock, tokens(20))
    run.end()
    assert stock.usage.count()["refused_empty"] == 1
    assert stock.table.entries == {}


def refused(stock: PrefixCache) -> dict[str, int]:
    return {name: count for name, count in stock.usage.count().items() if name.startswith("refused_")}


def test_a_store_that_is_larger_than_the_budget_is_counted_so() -> None:
    stock = new_stock(hot_bytes=200 * TOKEN_BYTES)
    store_tokens(stock, tokens(300))
    stock.reclaimer.shrink_to(1 << 40)
    assert refused(stock) == {"refused_too_large": 1}
    assert stock.table.nbytes <= 200 * TOKEN_BYTES


def test_a_store_without_room_is_counted_so() -> None:
    stock = new_stock(hot_bytes=300 * TOKEN_BYTES)
    store_tokens(stock, tokens(200, seed=1))
    stock.pins.pin(tokens(200, seed=1), "")
    lease = stock.lease(tokens(200, seed=1), "")
    store_tokens(stock, tokens(200, seed=2))
    stock.reclaimer.shrink_to(1 << 40)
    assert refused(stock) == {"refused_no_room": 1}
    assert found(stock, tokens(200, seed=1)) == 200
    stock.release(lease)


def test_a_store_that_goes_before_others_is_counted_so() -> None:
    stock = new_stock(hot_bytes=300 * TOKEN_BYTES)
    store_tokens(stock, tokens(200, seed=1))
    stock.reclaimer.shrink_to(1 << 40)
    store_tokens(stock, tokens(200, seed=2))
    stock.release(stock.lease(tokens(200, seed=1), ""))
    stock.reclaimer.shrink_to(1 << 40)
    assert refused(stock) == {"refused_least_worth": 1}


def test_what_goes_after_it_had_its_room_was_evicted_and_not_refused() -> None:
    stock = new_stock()
    store_tokens(stock, tokens(300))
    stock.reclaimer.shrink_to(1 << 40)
    stock.reclaimer.shrink_to(0)
    assert stock.usage.count()["evicted_tokens"] == 300
    assert refused(stock) == {}


def test_a_change_replaces_work_that_was_begun_for_another() -> None:
    stock = new_stock("planes:4")
    store_tokens(stock, tokens(400))
    stock.run_background(0)
    requantize(stock, "planes:8")
    settle(stock)
    # One layer was done by then, and more bits would bring nothing back.
    assert held_names(stock) == {"planes:4", "planes:8"}
    requantize(stock, "planes:2")
    settle(stock)
    assert held_names(stock) == {"planes:2"}


def test_what_is_joined_while_it_is_encoded_is_encoded_whole() -> None:
    stock = new_stock("planes:8", min_quantize_tokens=256)
    ids: list[int] = []
    for turn in range(3 * MAX_SPANS):
        ids = [*ids, *tokens(40, seed=turn)]
        store_tokens(stock, ids)
        stock.run_background(0)
    settle(stock)
    for entry in stock.table.entries:
        assert stock.transcoder.precision.pending_plan(entry) is None
        assert {len(entry.span.sealed(layer)) for layer in entry.span.layers} == {1}


def test_readers_go_on_over_the_values_that_they_began_with() -> None:
    stock = new_stock("planes:4")
    owner = Run(stock, tokens(400))
    owner.compute(400)
    owner.seal()
    lease = stock.lease(tokens(400), "")
    owner.end()
    settle(stock)
    assert held_names(stock) == {"raw"}
    check_lease(lease, tokens(400))
    stock.release(lease)
    settle(stock)
    assert held_names(stock) == {"planes:4"}


def test_marks_of_another_branch_are_not_thinned() -> None:
    """Sixteen marks on one way must not cost another way its own."""
    stock = new_stock()
    first = Run(stock, tokens(200))
    for _ in range(4):
        first.compute(50)
        first.filing.commit(first.tokens[: first.num_computed], mark_at(first.cache))
    first.end()
    other = Run(stock, [*tokens(100), *tokens(1000, seed=5)])
    for _ in range(20):
        other.compute(50)
        other.filing.commit(other.tokens[: other.num_computed], mark_at(other.cache))
    other.end()
    marks = {id(mark): mark for entry in stock.table.entries for mark in entry.span.marks.values()}
    kept = {at for entry in stock.table.entries if entry.span.end == 200 for at in entry.span.marks}
    assert {150, 200} <= kept
    # And 100, where both go on from.
    assert len(marks) == CacheConfig(0).max_checkpoints + 3


def test_marks_of_two_branches_at_one_position_are_told_apart() -> None:
    stock = new_stock(layout=HYBRID)
    first = [*tokens(100), *tokens(50, seed=1)]
    second = [*tokens(100), *tokens(50, seed=2)]
    for prompt in (first, second):
        run = Run(stock, prompt)
        run.compute(150)
        run.end()
    for prompt in (first, second):
        lease = stock.lease(prompt, "")
        assert lease.num_tokens == 150
        check_lease(lease, prompt)


def test_marks_of_what_is_pinned_stay() -> None:
    stock = new_stock(layout=HYBRID)
    store_tokens(stock, tokens(100))
    assert stock.pins.pin(tokens(100), "") == 100
    run = Run(stock, [*tokens(100), *tokens(1000, seed=5)])
    for _ in range(20):
        run.compute(50)
        run.seal()
    run.end()
    assert found(stock, [*tokens(100), 98, 99]) == 100


def test_thousands_of_requests_later_memory_is_where_it_was() -> None:
    stock = new_stock(layout=HYBRID)
    limit = mx.set_cache_limit(0)  # MLX reuses buffers that are larger than what is asked for
    try:
        before = active_bytes()
        for i in range(2000):
            store_tokens(stock, [i % 7, i % 11, *tokens(40 + i % 13, seed=i)])
            settle(stock)
            stock.reclaimer.shrink_to(500_000)
            if i % 500 == 499:
                assert 300_000 < stock.table.nbytes <= 500_000
                assert active_bytes() - before == pytest.approx(stock.table.nbytes, rel=0.02)
                assert len(stock.table.entries) < 40
        stock.clearing.clear()
        assert active_bytes() == before
    finally:
        mx.set_cache_limit(limit)


def mark_at(cache: SequenceCache) -> Mark:
    return Mark(cache.num_tokens, (None,) * len(cache.flat))


def test_a_lease_is_released_once() -> None:
    stock = new_stock()
    store_tokens(stock, tokens(50))
    lease: Lease = stock.lease(tokens(50), "")
    stock.release(lease)
    stock.release(lease)
    assert all(entry.is_evictable for entry in stock.table.entries)
