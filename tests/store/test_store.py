"""What the store finds, keeps, encodes and counts, without a model."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence

import mlx.core as mx
import pytest

from kvstrata.layers.sequence import SequenceCache
from kvstrata.spans.marks import Mark
from kvstrata.spans.plan import make_plan
from kvstrata.store.entry import Lease
from kvstrata.store.precision.requantize import Change
from kvstrata.store.store import MAX_SPANS, Store
from kvstrata.store.totals import share_of
from tests.store.kv import HYBRID, LAYOUT, TOKEN_BYTES, Clock, Run, check_lease, make_store, settle, store_tokens


def tokens(length: int, seed: int = 0) -> list[int]:
    return [(i * 7 + i // 11 + 31 * seed) % 97 for i in range(length)]


def found(store: Store, ids: Sequence[int], salt: str = "") -> int:
    return store.find(ids, salt).num_tokens


def requantize(store: Store, name: str, *, dry_run: bool = False, force: bool = False) -> None:
    store.requantize(Change(name, name, dry_run=dry_run, force=force), make_plan(LAYOUT, name, name))


def held_names(store: Store) -> set[str]:
    return set(store.usage().by_precision)


def active_bytes() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


# Match.


def test_a_match_ends_at_any_token() -> None:
    store = make_store()
    store_tokens(store, tokens(300))
    for length in (1, 17, 255, 256, 299):
        prompt = [*tokens(300)[:length], 98, 99]
        lease = store.match(prompt, "")
        assert lease.num_tokens == length
        check_lease(lease, prompt)
        store.release(lease)


def test_other_weights_layout_or_salt_share_nothing() -> None:
    store = make_store()
    store_tokens(store, tokens(300))
    assert found(store, tokens(300)) == 300
    assert found(store, tokens(300), "salt") == 0
    assert found(make_store(fingerprint="other weights"), tokens(300)) == 0


def test_what_a_match_joins_it_still_finds() -> None:
    """The match of each turn brings what the turn before left in order, and that joins spans."""
    store = make_store()
    ids: list[int] = []
    for turn in range(3 * MAX_SPANS):
        ids = [*ids, *tokens(30, seed=turn)]
        assert store_tokens(store, ids) == len(ids) - 30
    lease = store.match(ids, "")
    check_lease(lease, ids)
    assert lease.num_tokens == len(ids)
    assert {entry.span for entry in lease.entries} == {run.span for run in lease.ranges}
    assert lease.entries <= set(store.entries)
    store.release(lease)
    settle(store)
    store.shrink_to(0)
    assert store.held_bytes == 0


# Room.


@pytest.mark.parametrize("is_trimmed", [True, False])
def test_a_little_room_costs_the_end_of_a_new_conversation_and_not_all_of_it(is_trimmed: bool) -> None:
    store = make_store()
    before = active_bytes()
    run = Run(store, tokens(1500), room=100)
    run.compute(1500)
    run.end()
    del run
    if is_trimmed:
        settle(store)
    # What waits to be trimmed goes too where streams cannot wait for that.
    most_bytes = store.held_bytes - 10 * TOKEN_BYTES
    store.shrink_to(most_bytes, slice_s=0.0, most_bytes=most_bytes)
    assert found(store, tokens(1500)) == 1280
    assert active_bytes() - before == pytest.approx(store.held_bytes, rel=0.02)
    assert store.held_bytes == 1280 * TOKEN_BYTES
    check_lease(store.match(tokens(1500), ""), tokens(1500))


def test_what_was_evicted_is_not_held_by_anybody() -> None:
    store = make_store()
    before = active_bytes()
    requantize(store, "planes:8")
    for seed in range(40):
        store_tokens(store, tokens(400, seed))
    settle(store)
    requantize(store, "planes:4")
    settle(store)
    limit = store.held_bytes // 8
    store.shrink_to(limit)
    assert 0 < store.held_bytes <= limit
    assert active_bytes() - before == pytest.approx(store.held_bytes, rel=0.02)
    store.clear()
    assert store.held_bytes == 0
    assert active_bytes() - before < TOKEN_BYTES


def test_what_nobody_asked_for_in_time_goes() -> None:
    clock = Clock()
    store = make_store(ttl_s=60, clock=clock)
    store_tokens(store, tokens(300, seed=1))
    store_tokens(store, tokens(300, seed=2))
    settle(store)
    clock.now_s += 40
    store.release(store.match(tokens(300, seed=1), ""))
    clock.now_s += 30
    assert store.explain([*tokens(300, seed=2), 5], "").ends_because == "evicted"
    assert found(store, tokens(300, seed=1)) == 300
    assert found(store, tokens(300, seed=2)) == 0
    pinned = store.pin(tokens(300, seed=1), "")
    clock.now_s += 100
    store.expire()
    assert found(store, tokens(300, seed=1)) == pinned == 300


def test_the_time_to_the_next_expiry_is_known() -> None:
    clock = Clock()
    store = make_store(ttl_s=60, clock=clock)
    assert store.seconds_to_expiry() == math.inf
    run = Run(store, tokens(300))
    run.compute(300)
    assert store.seconds_to_expiry() == math.inf  # it runs
    run.end()
    clock.now_s += 20
    assert store.seconds_to_expiry() == pytest.approx(40, abs=0.1)
    clock.now_s += 50
    assert store.seconds_to_expiry() == 0
    store.expire()
    assert store.seconds_to_expiry() == math.inf
    assert make_store().seconds_to_expiry() == math.inf


def test_pins_and_leases_outlive_every_eviction() -> None:
    store = make_store()
    for seed in range(3):
        store_tokens(store, tokens(300, seed))
    settle(store)
    assert store.pin(tokens(300, seed=0), "") == 300
    lease = store.match(tokens(200, seed=1), "")
    store.shrink_to(0)
    assert [found(store, tokens(300, seed)) for seed in range(3)] == [300, 300, 0]
    store.release(lease)
    assert store.unpin(tokens(300, seed=0), "") == 300
    store.shrink_to(0)
    assert store.held_bytes == 0


def test_clearing_one_salt_leaves_the_others() -> None:
    store = make_store()
    store_tokens(store, tokens(300), "a")
    store_tokens(store, tokens(300), "b")
    settle(store)
    cleared = store.clear("a")
    assert (cleared.tokens, cleared.nbytes) == (300, 300 * TOKEN_BYTES)
    assert (found(store, tokens(300), "a"), found(store, tokens(300), "b")) == (0, 300)


def test_clearing_an_owner_takes_all_its_salts_and_nobody_elses() -> None:
    store = make_store()
    for salt in ("a", "a:x", "a:y", "ab", "b:x"):
        store_tokens(store, tokens(300), salt)
    settle(store)
    assert store.usage("a").tokens == 900
    assert store.clear(owner="a").tokens == 900
    assert [found(store, tokens(300), salt) for salt in ("a", "a:x", "a:y", "ab", "b:x")] == [0, 0, 0, 300, 300]
    assert store.explain(tokens(300), "ab").ends_because == "complete"


def test_what_two_pins_share_stays_until_both_are_gone() -> None:
    store = make_store()
    shared = tokens(200)
    one, two = shared + [98] * 50, shared + [99] * 50
    for prompt in (one, two, one[:100]):
        store_tokens(store, prompt)
        store.pin(prompt, "")
    settle(store)
    store.unpin(one, "")
    store.clear()
    assert found(store, two) == 250  # of which the span of the other has the first 200
    store.unpin(two, "")
    store.clear()
    assert store.held_bytes == 0


# Precision.


@pytest.mark.parametrize(("length", "name"), [(255, "raw"), (256, "planes:8")])
def test_shorter_sequences_stay_raw(length: int, name: str) -> None:
    store = make_store("planes:8", min_quantize_tokens=256)
    store_tokens(store, tokens(length))
    settle(store)
    assert held_names(store) == {name}


def test_a_long_chat_of_short_turns_is_compressed() -> None:
    store = make_store("planes:8", min_quantize_tokens=256)
    for turn in range(1, 9):
        store_tokens(store, tokens(60 * turn))
        settle(store)
        assert held_names(store) == ({"raw"} if turn < 5 else {"raw", "planes:8"})
    raw = [entry for entry in store.entries if held_of(share_of(entry).by_precision) == {"raw"}]
    assert all(entry.span.end < 256 for entry in raw)
    assert store.held_bytes < 0.7 * 480 * TOKEN_BYTES


def held_of(by_precision: dict[str, int]) -> set[str]:
    return set(by_precision)


def test_the_same_tokens_a_hundred_times_are_encoded_once() -> None:
    store = make_store("planes:8")
    for _ in range(100):
        store_tokens(store, tokens(400))
        settle(store)
    assert store.count()["encoded_spans"] == 1
    assert store.count()["stored_tokens"] == 400
    assert store.count()["refused_present"] == 99


def test_a_request_that_computed_nothing_is_counted_so() -> None:
    store = make_store()
    run = Run(store, tokens(20))
    run.end()
    assert store.count()["refused_empty"] == 1
    assert store.entries == ()


def refused(store: Store) -> dict[str, int]:
    return {name: count for name, count in store.count().items() if name.startswith("refused_")}


def test_a_store_that_is_larger_than_the_budget_is_counted_so() -> None:
    store = make_store(hot_bytes=200 * TOKEN_BYTES)
    store_tokens(store, tokens(300))
    store.shrink_to(1 << 40)
    assert refused(store) == {"refused_too_large": 1}
    assert store.held_bytes <= 200 * TOKEN_BYTES


def test_a_store_without_room_is_counted_so() -> None:
    store = make_store(hot_bytes=300 * TOKEN_BYTES)
    store_tokens(store, tokens(200, seed=1))
    store.pin(tokens(200, seed=1), "")
    lease = store.match(tokens(200, seed=1), "")
    store_tokens(store, tokens(200, seed=2))
    store.shrink_to(1 << 40)
    assert refused(store) == {"refused_no_room": 1}
    assert found(store, tokens(200, seed=1)) == 200
    store.release(lease)


def test_a_store_that_goes_before_others_is_counted_so() -> None:
    store = make_store(hot_bytes=300 * TOKEN_BYTES)
    store_tokens(store, tokens(200, seed=1))
    store.shrink_to(1 << 40)
    store_tokens(store, tokens(200, seed=2))
    store.release(store.match(tokens(200, seed=1), ""))
    store.shrink_to(1 << 40)
    assert refused(store) == {"refused_least_worth": 1}


def test_what_goes_after_it_had_its_room_was_evicted_and_not_refused() -> None:
    store = make_store()
    store_tokens(store, tokens(300))
    store.shrink_to(1 << 40)
    store.shrink_to(0)
    assert store.count()["evicted_tokens"] == 300
    assert refused(store) == {}


def test_a_change_replaces_work_that_was_begun_for_another() -> None:
    store = make_store("planes:4")
    store_tokens(store, tokens(400))
    store.work(0)
    requantize(store, "planes:8")
    settle(store)
    # One layer was done by then, and more bits would bring nothing back.
    assert held_names(store) == {"planes:4", "planes:8"}
    requantize(store, "planes:2")
    settle(store)
    assert held_names(store) == {"planes:2"}


def test_what_is_joined_while_it_is_encoded_is_encoded_whole() -> None:
    store = make_store("planes:8", min_quantize_tokens=256)
    ids: list[int] = []
    for turn in range(3 * MAX_SPANS):
        ids = [*ids, *tokens(40, seed=turn)]
        store_tokens(store, ids)
        store.work(0)
    settle(store)
    for entry in store.entries:
        assert store.precision.plan_for(entry) is None
        assert entry.span.num_parts() == 1


def test_readers_go_on_over_the_values_that_they_began_with() -> None:
    store = make_store("planes:4")
    owner = Run(store, tokens(400))
    owner.compute(400)
    owner.seal()
    lease = store.match(tokens(400), "")
    owner.end()
    settle(store)
    assert held_names(store) == {"raw"}
    check_lease(lease, tokens(400))
    store.release(lease)
    settle(store)
    assert held_names(store) == {"planes:4"}


def test_marks_of_another_branch_are_not_thinned() -> None:
    """Sixteen marks on one way must not cost another way its own."""
    store = make_store()
    first = Run(store, tokens(200))
    for _ in range(4):
        first.compute(50)
        first.filing.seal(first.tokens[: first.num_computed], mark_at(first.cache))
    first.end()
    other = Run(store, [*tokens(100), *tokens(1000, seed=5)])
    for _ in range(20):
        other.compute(50)
        other.filing.seal(other.tokens[: other.num_computed], mark_at(other.cache))
    other.end()
    marks = {id(mark): mark for entry in store.entries for mark in entry.span.marks.values()}
    kept = {at for entry in store.entries if entry.span.end == 200 for at in entry.span.marks}
    assert {150, 200} <= kept
    # And 100, where both go on from.
    assert len(marks) == store.options.max_marks + 3


def test_marks_of_two_branches_at_one_position_are_told_apart() -> None:
    store = make_store(layout=HYBRID)
    first = [*tokens(100), *tokens(50, seed=1)]
    second = [*tokens(100), *tokens(50, seed=2)]
    for prompt in (first, second):
        run = Run(store, prompt)
        run.compute(150)
        run.end()
    for prompt in (first, second):
        lease = store.match(prompt, "")
        assert lease.num_tokens == 150
        check_lease(lease, prompt)


def test_marks_of_what_is_pinned_stay() -> None:
    store = make_store(layout=HYBRID)
    store_tokens(store, tokens(100))
    assert store.pin(tokens(100), "") == 100
    run = Run(store, [*tokens(100), *tokens(1000, seed=5)])
    for _ in range(20):
        run.compute(50)
        run.seal()
    run.end()
    assert found(store, [*tokens(100), 98, 99]) == 100


def test_thousands_of_requests_later_memory_is_where_it_was() -> None:
    store = make_store(layout=HYBRID)
    limit = mx.set_cache_limit(0)  # MLX reuses buffers that are larger than what is asked for
    try:
        before = active_bytes()
        for i in range(2000):
            store_tokens(store, [i % 7, i % 11, *tokens(40 + i % 13, seed=i)])
            settle(store)
            store.shrink_to(500_000)
            if i % 500 == 499:
                assert 300_000 < store.held_bytes <= 500_000
                assert active_bytes() - before == pytest.approx(store.held_bytes, rel=0.02)
                assert len(store.entries) < 40
        store.clear()
        assert active_bytes() == before
    finally:
        mx.set_cache_limit(limit)


def mark_at(cache: SequenceCache) -> Mark:
    return Mark(cache.num_tokens, (None,) * len(cache.flat))


def test_a_lease_is_released_once() -> None:
    store = make_store()
    store_tokens(store, tokens(50))
    lease: Lease = store.match(tokens(50), "")
    store.release(lease)
    store.release(lease)
    assert all(entry.is_free for entry in store.entries)
