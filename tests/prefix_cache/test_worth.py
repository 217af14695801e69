"""Eviction policy: worth of each reuse class, eviction order, records of uses and requests."""

from __future__ import annotations

import math
import random
import weakref

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvstrata.bench.replay import KvstrataPolicy, LruPolicy, serve_all
from kvstrata.bench.trace import ReplayRequest, trace_of
from kvstrata.prefix_cache.eviction_order import (
    HISTORY_FACTOR,
    EvictionOrder,
    LeafValue,
    RequestHistory,
    TimeQueue,
    Use,
    UseRecords,
)
from kvstrata.prefix_cache.radix_tree import RadixTree
from kvstrata.prefix_cache.worth import (
    EDGES_S,
    NUM_BUCKETS,
    PRIOR_WEIGHT,
    PrefillCost,
    Reuse,
    ReuseClass,
    best_rate,
    bucket,
    hazard,
    kept_tokens,
)

ROOT = b"root"
CHANCES = st.lists(st.floats(0.0, 0.95), min_size=NUM_BUCKETS, max_size=NUM_BUCKETS).map(np.array)


def eviction(reuse: Reuse | None = None, quantum_tokens: int = 1) -> EvictionOrder[str]:
    return EvictionOrder(reuse or Reuse(), PrefillCost(), quantum_tokens)


def add(queue: EvictionOrder[str], leaf: str, used_s: float, num_tokens: int = 10, nbytes: int = 10, **rest) -> None:
    queue.add(leaf, LeafValue(nbytes, rest.pop("start", 0), num_tokens, used_s, **rest))


# Leaf queue.

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "discard"]), st.integers(0, 8), st.integers(0, 20)), max_size=200
)


@given(OPERATIONS)
def test_leaf_queue_returns_oldest_and_newest(operations: list[tuple[str, int, int]]) -> None:
    queue: TimeQueue[int] = TimeQueue()
    model: dict[int, int] = {}
    for operation, key, used_s in operations:
        if operation == "put":
            queue.put(key, used_s, start=0)
            model[key] = used_s
        else:
            queue.discard(key)
            model.pop(key, None)
        assert len(queue) == len(model)
        oldest, newest = queue.oldest(), queue.newest()
        assert (oldest is None) == (newest is None) == (not model)
        if oldest is not None and newest is not None:
            assert model[oldest] == min(model.values())
            assert model[newest] == max(model.values())


class CountedKey:
    """A key that is equal to others of its number, so that each use can have an object of its own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CountedKey) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


def test_leaf_queue_does_not_grow_with_number_of_uses() -> None:
    queue: TimeQueue[CountedKey] = TimeQueue()
    keys: list[weakref.ref[CountedKey]] = []
    for used_s in range(20_000):
        key = CountedKey(used_s % 10)
        keys.append(weakref.ref(key))
        queue.put(key, used_s, start=0)
        if used_s == 9_999:
            newest = queue.newest()
            assert newest is not None
            assert newest.number == 9
    assert sum(key() is not None for key in keys) < 300


# Worth.


@given(CHANCES)
def test_best_rate_is_maximum_over_all_times_to_give_up(chance: np.ndarray) -> None:
    widths = np.diff(EDGES_S)
    rates = best_rate(chance)
    for first in (0, 7, NUM_BUCKETS - 1):
        alive, uses, seconds, best = 1.0, 0.0, 0.0, 0.0
        for at in range(first, NUM_BUCKETS):
            uses += alive * chance[at]
            seconds += alive * widths[at] * (1 - chance[at] / 2)
            alive *= 1 - chance[at]
            best = max(best, uses / seconds)
        assert rates[first] == pytest.approx(best, rel=1e-6, abs=1e-12)


def test_hazard_counts_open_observations_only_up_to_their_age() -> None:
    used, ended, none = np.zeros(NUM_BUCKETS), np.zeros(NUM_BUCKETS), np.zeros(NUM_BUCKETS)
    used[5] = ended[5] = 1000.0  # all observations that reached the bucket ended by a use
    ended[2] = 9000.0  # these have not reached bucket 5
    chances = hazard(used, ended, none)
    assert chances[5] > 0.9
    assert chances[2] == 0.0


def test_what_leaves_a_bucket_without_a_use_was_in_it_half_the_time() -> None:
    used, ended, none = np.zeros(NUM_BUCKETS), np.zeros(NUM_BUCKETS), np.zeros(NUM_BUCKETS)
    used[5], ended[5] = 100.0, 300.0
    assert hazard(used, ended, none)[5] == pytest.approx(100.0 / (200.0 + PRIOR_WEIGHT))


@given(st.floats(0, 1e7))
def test_bucket_contains_its_age(age_s: float) -> None:
    at = bucket(age_s)
    assert EDGES_S[at] <= age_s or at == 0
    assert age_s <= EDGES_S[at + 1] or at == NUM_BUCKETS - 1


def test_density_without_measurements_falls_with_age() -> None:
    reuse = Reuse()
    rates = [reuse.density(ReuseClass.FRESH, age_s) for age_s in (0.1, 0.6, 1, 10, 100, 1000, 10_000)]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == len(rates)


def learned(gaps_s: dict[ReuseClass, float], num_uses: int = 400) -> Reuse:
    """Return statistics in which every use of a class is followed by another after its gap; infinite: never."""
    reuse = Reuse(refresh_every=10**9)
    for reuse_class, gap_s in gaps_s.items():
        for at in range(num_uses):
            awaited = reuse.opened(reuse_class, 1.0, float(at))
            if gap_s < math.inf:
                reuse.reused(awaited, 1.0, at + gap_s)
    reuse.refresh(1e5)
    return reuse


def test_density_is_higher_for_class_that_is_reused() -> None:
    reuse = learned({ReuseClass.FRESH: math.inf, ReuseClass.CONTINUED: 60.0})
    assert reuse.density(ReuseClass.CONTINUED, 10.0) > 5 * reuse.density(ReuseClass.FRESH, 10.0)


def test_density_is_highest_shortly_before_reuse() -> None:
    reuse = learned({ReuseClass.CONTINUED: 60.0})
    before, young, late = (reuse.density(ReuseClass.CONTINUED, age_s) for age_s in (50.0, 1.0, 500.0))
    assert before > 2 * young
    assert young > 2 * late


def test_reuse_learns_from_last_window_only() -> None:
    reuse = Reuse(window=100)
    for at in range(1000):
        reuse.reused(reuse.opened(ReuseClass.FRESH, 1.0, float(at)), 1.0, at + 1.0)
    for at in range(1000, 1200):
        reuse.opened(ReuseClass.FRESH, 1.0, float(at))
    assert reuse.density(ReuseClass.FRESH, 1.0) < Reuse().density(ReuseClass.FRESH, 1.0)


# Eviction order.


def test_oldest_leaf_of_a_class_is_chosen_first() -> None:
    queue = eviction()
    for leaf, used_s in (("b", 2.0), ("a", 1.0), ("c", 3.0)):
        add(queue, leaf, used_s)
    assert [queue.choose(10, 4.0)[0].leaf for _ in range(3)] == ["a", "b", "c"]
    assert queue.choose(10, 4.0) == []


def test_young_leaf_of_unused_class_is_chosen_before_old_leaf_of_reused_class() -> None:
    queue = eviction(learned({ReuseClass.LEFT_FRESH: math.inf, ReuseClass.CONTINUED: 60.0}))
    add(queue, "chat", 0.0, reuse_class=ReuseClass.CONTINUED)
    add(queue, "left", 30.0, reuse_class=ReuseClass.LEFT_FRESH)
    assert queue.choose(10, 31.0)[0].leaf == "left"


@pytest.mark.parametrize(("nbytes", "chosen"), [(105, "older"), (130, "larger")])
def test_oldest_leaf_is_spared_only_for_clearly_lower_worth(nbytes: int, chosen: str) -> None:
    queue = eviction()
    add(queue, "older", 1.0, num_tokens=100, nbytes=100)
    add(queue, "larger", 1.01, num_tokens=100, nbytes=nbytes)
    assert queue.choose(10, 1000.0)[0].leaf == chosen


def test_leaf_with_more_bytes_per_token_is_chosen_first() -> None:
    queue = eviction()
    add(queue, "4 bits", 1.0, nbytes=1000, num_tokens=40)
    add(queue, "16 bits", 1.0, nbytes=1000, num_tokens=10)
    assert queue.choose(10, 2.0)[0].leaf == "16 bits"


def test_weighted_position_makes_late_leaf_worth_more() -> None:
    queue: EvictionOrder[str] = EvictionOrder(Reuse(), PrefillCost(attention_tokens=1000), 1)
    add(queue, "far", 1.0, start=100_000)
    add(queue, "near", 1.0, start=0)
    assert queue.choose(1, 2.0)[0].leaf == "near"


def test_discarded_leaf_is_never_chosen_and_expired_leaf_without_need() -> None:
    queue = eviction()
    add(queue, "leased", 1.0)
    add(queue, "short", 2.0, expires_s=50.0)
    add(queue, "long", 3.0, expires_s=500.0)
    queue.discard("leased")
    assert queue.choose(0, 49.0) == []
    assert queue.choose(0, 50.0) == [("short", 0)]
    assert queue.choose(0, 60.0) == []
    assert queue.choose(10, 60.0) == [("long", 0)]
    assert queue.choose(10, 60.0) == []
    assert len(queue) == 0


def test_leaf_added_again_moves_to_its_new_time() -> None:
    queue = eviction()
    for used_s, leaf in enumerate("abc"):
        add(queue, leaf, float(used_s))
    add(queue, "a", 9.0)
    assert len(queue) == 3
    assert queue.choose(1, 10.0)[0].leaf == "b"


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([1, 16, 256]))
def test_kept_tokens_frees_need_and_at_least_an_eighth(num_tokens: int, need_tokens: int, quantum: int) -> None:
    keep = kept_tokens(num_tokens, need_tokens, quantum)
    assert 0 <= keep < num_tokens
    assert keep % quantum == 0
    assert num_tokens - keep >= min(need_tokens, num_tokens)
    assert num_tokens - keep >= num_tokens / 8


def test_all_trims_of_a_leaf_copy_at_most_seven_times_its_length() -> None:
    left, copied = 100_000, 0
    while left:
        left = kept_tokens(left, 1, 1)
        copied += left
    assert copied <= 7 * 100_000


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 100)), min_size=1, max_size=20), st.integers(1, 500))
def test_repeated_choices_free_need_or_everything(sizes: list[tuple[int, int]], need: int) -> None:
    queue = eviction()
    held = {str(at): (tokens, 10 * tokens) for at, (tokens, _) in enumerate(sizes)}
    for at, (tokens, used_s) in enumerate(sizes):
        add(queue, str(at), float(used_s), num_tokens=tokens, nbytes=10 * tokens)
    total = sum(nbytes for _, nbytes in held.values())
    freed = 0
    while freed < need and (chosen := queue.choose(need - freed, 200.0)):
        for leaf, keep in chosen:
            tokens, nbytes = held.pop(leaf)
            freed += nbytes * (tokens - keep) // tokens
            if keep:
                held[leaf] = keep, 10 * keep
                add(queue, leaf, 150.0, num_tokens=keep, nbytes=10 * keep)
    assert freed >= min(need, total)
    assert sum(nbytes for _, nbytes in held.values()) == total - freed


LEAVES = st.lists(
    st.tuples(st.sampled_from(list(ReuseClass)), st.floats(0, 90), st.integers(1, 50), st.booleans(), st.booleans()),
    min_size=1,
    max_size=30,
)


@given(LEAVES, st.booleans())
def test_superseded_leaves_are_chosen_before_all_others(
    leaves: list[tuple[ReuseClass, float, int, bool, bool]], spare_only: bool
) -> None:
    queue, known = eviction(), dict[str, LeafValue]()
    for number, (reuse_class, used_s, nbytes, is_spare, is_superseded) in enumerate(leaves):
        known[str(number)] = LeafValue(
            nbytes, 0, 10, used_s, reuse_class, is_archived=is_spare, is_superseded=is_superseded
        )
        queue.add(str(number), known[str(number)])
    evicted = []
    while chosen := queue.choose(1000, 100.0, spare_only=spare_only):
        evicted += [known[leaf] for leaf, keep_tokens in chosen if not keep_tokens]
    superseded = [leaf.is_superseded for leaf in evicted]
    assert superseded == sorted(superseded, reverse=True)
    assert superseded.count(True) == sum(leaf.is_superseded for leaf in known.values())
    others = [leaf for leaf in known.values() if not leaf.is_superseded and (leaf.is_archived or not spare_only)]
    assert len(evicted) == superseded.count(True) + len(others)


@given(LEAVES)
def test_superseded_leaves_do_not_change_order_of_others(
    leaves: list[tuple[ReuseClass, float, int, bool, bool]],
) -> None:
    """Compare the order of the other leaves with the order that they have alone."""
    queue, without = eviction(), eviction()
    for number, (reuse_class, used_s, nbytes, is_spare, is_superseded) in enumerate(leaves):
        leaf = LeafValue(nbytes, 0, 10, used_s, reuse_class, is_archived=is_spare, is_superseded=is_superseded)
        queue.add(str(number), leaf)
        if not is_superseded:
            without.add(str(number), leaf)

    def order(of: EvictionOrder[str]) -> list[str]:
        evicted = []
        while chosen := of.choose(1000, 100.0):
            evicted += [leaf for leaf, _ in chosen]
        return evicted

    assert order(queue)[sum(leaf[-1] for leaf in leaves) :] == order(without)


# Records of uses and requests.


def test_lower_half_of_split_node_has_left_class() -> None:
    tree: RadixTree[str] = RadixTree()
    uses = UseRecords()
    uses.record_insert(tree.insert(ROOT, [1, 2, 3, 4], "a"), ReuseClass.CONTINUED, 1.0)
    inserted = tree.insert(ROOT, [1, 2, 9], "b")
    uses.record_insert(inserted, ReuseClass.FRESH, 2.0)
    upper, lower = inserted.halves
    assert uses[lower] == Use(1.0, ReuseClass.LEFT_CONTINUED)
    assert uses[upper] == uses[inserted.path[-1]] == Use(2.0, ReuseClass.FRESH)


def test_history_classes_prompt_as_continued_from_half_known_on() -> None:
    history = RequestHistory(Reuse(), cache_tokens=lambda: 100)
    assert history.record_request(ROOT, [1, 2, 3], 0.0) is ReuseClass.FRESH
    assert history.record_request(ROOT, [1, 2, 3, 4, 5, 6], 1.0) is ReuseClass.CONTINUED
    assert history.record_request(ROOT, [1, 2, 3, 7, 7, 7, 7], 2.0) is ReuseClass.FRESH
    assert history.record_request(b"other", [1, 2, 3], 3.0) is ReuseClass.FRESH


def test_history_is_bounded_and_forgets_oldest_first() -> None:
    history = RequestHistory(Reuse(), cache_tokens=lambda: 100)
    rng = random.Random(0)
    for at in range(500):
        start = rng.randrange(10**6)
        history.record_request(ROOT, list(range(start, start + 30)), float(at))
        assert history.num_tokens <= HISTORY_FACTOR * 100
    history.record_request(ROOT, [1, 2, 3], 500.0)
    assert history.record_request(ROOT, [1, 2, 3], 501.0) is ReuseClass.CONTINUED


def test_worth_beats_lru_on_cyclic_prompts() -> None:
    """Cycle through more prompts than fit: LRU evicts each shortly before its next request."""
    prompts = [np.arange(100 * which, 100 * which + 20, dtype=np.int32) for which in range(12)]
    trace = trace_of("scans", [ReplayRequest(10.0 * at, prompts[at % 12]) for at in range(12 * 40)])
    assert serve_all(trace, LruPolicy(120)).num_found == 0
    assert serve_all(trace, KvstrataPolicy(120)).rate > 0.25


def test_density_changes_only_after_refresh_interval() -> None:
    reuse = Reuse(refresh_every=3)
    known = reuse.density(ReuseClass.FRESH, 1.0)
    for now_s in (1.0, 2.0):
        reuse.reused(reuse.opened(ReuseClass.FRESH, 1.0, now_s), 1.0, now_s + 0.9)
        assert reuse.density(ReuseClass.FRESH, 1.0) == known
    reuse.opened(ReuseClass.FRESH, 1.0, 3.0)
    assert reuse.density(ReuseClass.FRESH, 1.0) != known


def test_reuse_ignores_uses_that_left_the_window() -> None:
    reuse = Reuse(window=10, refresh_every=10**9)
    opened = [reuse.opened(ReuseClass.FRESH, 1.0, 0.0) for _ in range(30)]
    reuse.refresh(1.0)
    unused = reuse.density(ReuseClass.FRESH, 0.9)
    reuse.reused(opened[19], 1.0, 0.9)  # ten uses have followed
    reuse.refresh(1.0)
    assert reuse.density(ReuseClass.FRESH, 0.9) == unused
    reuse.reused(opened[20], 1.0, 0.9)
    reuse.refresh(1.0)
    assert reuse.density(ReuseClass.FRESH, 0.9) > unused
