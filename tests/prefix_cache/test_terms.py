"""Pins with a term: they expire, replace each other by name, and stay within the quota."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.errors import Forbidden
from kvstrata.prefix_cache.keys import owner_of
from kvstrata.prefix_cache.pins import MAX_TERMS, Term
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from tests.prefix_cache.disk import store_on
from tests.prefix_cache.kv import TOKEN_BYTES, Clock, new_cache, settle, store_tokens

PROMPTS = [tuple(range(first, first + 60)) for first in range(0, 6000, 1000)]
SALTS = ("key-a", "key-a:inner", "key-b")
LIMIT_BYTES = 130 * TOKEN_BYTES  # two prompts
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("keep"), st.sampled_from(SALTS), st.integers(0, 5), st.sampled_from("xyz"), st.integers(1, 100)
        ),
        st.tuples(st.just("wait"), st.integers(1, 60)),
        st.tuples(st.just("pin"), st.sampled_from(SALTS), st.integers(0, 5)),
        st.tuples(st.just("unpin"), st.sampled_from(SALTS), st.integers(0, 5)),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(STEPS)
def test_pins_random_operations_match_list_of_terms(steps: list[tuple]) -> None:
    clock = Clock()
    cache = new_cache(clock=clock)
    for salt in SALTS:
        for prompt in PROMPTS:
            store_tokens(cache, prompt, salt)
    terms: dict[tuple[str, str], tuple[int, float]] = {}  # salt and name: prompt and expiry
    forever: set[tuple[str, int]] = set()

    def pinned(without: tuple[str, str] | None = None) -> set[tuple[str, int]]:
        return forever | {(key[0], number) for key, (number, _) in terms.items() if key != without}

    for step in steps:
        match step:
            case ("keep", salt, number, name, ttl_s):
                term = Term(name, ttl_s, LIMIT_BYTES)
                others = {each for each in pinned((salt, name)) if owner_of(each[0]) == owner_of(salt)}
                fits = len(others | {(salt, number)}) <= 2
                assert cache.pins.can_pin_until(PROMPTS[number], salt, term, TOKEN_BYTES) is fits
                assert cache.pins.pin_until(PROMPTS[number], salt, term) == 60 * fits
                if fits:
                    terms[salt, name] = number, clock.now_s + ttl_s
            case ("wait", seconds):
                clock.now_s += seconds - 0.5
                cache.pins.expire()
                terms = {key: term for key, term in terms.items() if term[1] > clock.now_s}
            case ("pin", salt, number):
                cache.pins.pin(PROMPTS[number], salt)
                forever.add((salt, number))
            case ("unpin", salt, number):
                cache.pins.unpin(PROMPTS[number], salt)
                forever.discard((salt, number))
                terms = {key: term for key, term in terms.items() if (key[0], term[0]) != (salt, number)}
        pinned_now = {(entry.salt, PROMPTS.index(_tokens(entry))) for entry in cache.table.entries if entry.is_pinned}
        assert pinned_now == pinned()
        assert (cache.pins.seconds_to_expiry() == math.inf) == (not terms)
    cache.evictor.evict_to(0)
    for salt in SALTS:
        for number, prompt in enumerate(PROMPTS):
            assert cache.lookup(prompt, salt).num_tokens == 60 * ((salt, number) in pinned())


def _tokens(entry) -> tuple[int, ...]:
    return tuple(entry.last_node.tokens.tolist())


def test_pins_of_all_owners_take_at_most_half_of_memory() -> None:
    cache = new_cache(hot_bytes=600 * TOKEN_BYTES)
    quota_bytes = 150 * TOKEN_BYTES
    term = Term("session", 10.0, quota_bytes)
    owners = [f"key-{letter}" for letter in "abcd"]
    for owner in owners:
        store_tokens(cache, range(100), owner)
    fits = [cache.pins.can_pin_until(range(100), owner, term, TOKEN_BYTES) for owner in owners[:1]]
    assert [cache.pins.pin_until(range(100), owner, term) for owner in owners] == [100, 100, 100, 0]
    assert [*fits, cache.pins.can_pin_until(range(100), owners[3], term, TOKEN_BYTES)] == [True, False]
    with pytest.raises(Forbidden, match="All keys together"):
        cache.pins.pin(range(100), owners[3], quota_bytes)
    assert cache.pins.pin(range(100), owners[3]) == 100  # an owner without a quota is not limited
    assert cache.pins.pinned_bytes(None) == 400 * TOKEN_BYTES


def test_pins_quota_above_half_of_memory_is_usable() -> None:
    cache = new_cache(hot_bytes=200 * TOKEN_BYTES)
    store_tokens(cache, range(150), "key-a")
    assert cache.pins.pin_until(range(150), "key-a", Term("session", 10.0, 160 * TOKEN_BYTES)) == 150


def test_pins_of_one_owner_beyond_max_terms_end_the_oldest() -> None:
    cache = new_cache()
    for number in range(MAX_TERMS + 10):
        store_tokens(cache, range(number * 100, number * 100 + 5), "key-a")
        cache.pins.pin_until(range(number * 100, number * 100 + 5), "key-a", Term(str(number), 10.0 + number, 1 << 30))
    store_tokens(cache, range(5), "key-b")
    cache.pins.pin_until(range(5), "key-b", Term("b", 1.0, 1 << 30))
    assert sum(entry.is_pinned for entry in cache.table.entries) == MAX_TERMS + 1
    assert cache.lookup(range(5), "key-b").num_tokens == 5


class WalkCounter:
    """Counts the walks over a prompt's tokens, in the radix tree and on the disk."""

    def __init__(self, cache: PrefixCache) -> None:
        self.in_memory = self.on_disk = 0
        match, longest = cache.table.tree.match, cache.disk.tier.blocks.longest_chain

        def counted_match(*args: Any) -> Any:
            self.in_memory += 1
            return match(*args)

        def counted_longest(*args: Any, **kwargs: Any) -> Any:
            self.on_disk += 1
            return longest(*args, **kwargs)

        cache.table.tree.match = counted_match  # pyright: ignore[reportAttributeAccessIssue]
        cache.disk.tier.blocks.longest_chain = counted_longest  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("num_pins", [1, MAX_TERMS])
def test_pins_new_pin_walks_only_its_own_tokens(num_pins: int, tmp_path: Path) -> None:
    with store_on(tmp_path) as cache:
        prompts = [list(range(100 * number, 100 * number + 20)) for number in range(num_pins + 1)]
        for number, prompt in enumerate(prompts[:-1]):
            store_tokens(cache, prompt)
            cache.pins.pin_until(prompt, "", Term(str(number), 100.0, 1 << 30))
        settle(cache)
        cache.disk.count_usable([]).wait(60)  # pins are looked up on a thread of the tier
        walks = WalkCounter(cache)
        cache.pins.can_pin_until(prompts[-1], "", Term("new", 100.0, 1 << 30), TOKEN_BYTES)
        before_insert = walks.in_memory
        store_tokens(cache, prompts[-1])
        during_insert = walks.in_memory - before_insert
        assert cache.pins.pin_until(prompts[-1], "", Term("new", 100.0, 1 << 30)) == 20
        cache.disk.count_usable([]).wait(60)  # started after the pin's lookup, so answered after it
        assert (before_insert, during_insert, walks.in_memory - before_insert - during_insert) == (1, 1, 2)
        assert walks.on_disk == 1


def test_pins_survive_take_over_from_failed_cache() -> None:
    failed, cache = new_cache(), new_cache()
    store_tokens(failed, PROMPTS[0])
    failed.pins.pin_until(PROMPTS[0], "", Term("x", 100.0, 1 << 30))
    cache.take_over(failed)
    assert len(cache.pins) == 1
    store_tokens(cache, PROMPTS[0][:30])
    assert not any(entry.is_pinned for entry in cache.table.entries)
    store_tokens(cache, PROMPTS[0])
    cache.evictor.evict_to(0)
    assert cache.lookup(PROMPTS[0], "").num_tokens == 60
    assert cache.pins.pinned_bytes(None) == cache.table.nbytes > 0
