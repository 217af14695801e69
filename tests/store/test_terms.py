"""Pins with a term: they end by themselves, take each other's place, and stay within the quota."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.index.identity import owner_of
from kvstrata.store.pins import MAX_TERMS, Term
from tests.store.kv import TOKEN_BYTES, Clock, new_stock, store_tokens

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
def test_what_is_pinned_is_what_a_list_of_terms_says(steps: list[tuple]) -> None:
    clock = Clock()
    stock = new_stock(clock=clock)
    for salt in SALTS:
        for prompt in PROMPTS:
            store_tokens(stock, prompt, salt)
    terms: dict[tuple[str, str], tuple[int, float]] = {}  # salt and name: prompt and when it ends
    forever: set[tuple[str, int]] = set()

    def pinned(without: tuple[str, str] | None = None) -> set[tuple[str, int]]:
        return forever | {(key[0], number) for key, (number, _) in terms.items() if key != without}

    for step in steps:
        match step:
            case ("keep", salt, number, name, ttl_s):
                term = Term(name, ttl_s, LIMIT_BYTES)
                others = {each for each in pinned((salt, name)) if owner_of(each[0]) == owner_of(salt)}
                fits = len(others | {(salt, number)}) <= 2
                assert stock.pins.may_keep(PROMPTS[number], salt, term, TOKEN_BYTES) is fits
                assert stock.pins.keep(PROMPTS[number], salt, term) == 60 * fits
                if fits:
                    terms[salt, name] = number, clock.now_s + ttl_s
            case ("wait", seconds):
                clock.now_s += seconds - 0.5
                stock.pins.expire()
                terms = {key: term for key, term in terms.items() if term[1] > clock.now_s}
            case ("pin", salt, number):
                stock.pins.pin(PROMPTS[number], salt)
                forever.add((salt, number))
            case ("unpin", salt, number):
                stock.pins.unpin(PROMPTS[number], salt)
                forever.discard((salt, number))
                terms = {key: term for key, term in terms.items() if (key[0], term[0]) != (salt, number)}
        kept = {(entry.salt, PROMPTS.index(_tokens(entry))) for entry in stock.shelf.entries if entry.is_pinned}
        assert kept == pinned()
        assert (stock.pins.seconds_to_expiry() == math.inf) == (not terms)
    stock.evictor.shrink_to(0)
    for salt in SALTS:
        for number, prompt in enumerate(PROMPTS):
            assert stock.store.find(prompt, salt).num_tokens == 60 * ((salt, number) in pinned())


def _tokens(entry) -> tuple[int, ...]:
    return tuple(entry.last_node.tokens.tolist())


def test_there_are_never_more_than_so_many() -> None:
    stock = new_stock()
    for number in range(MAX_TERMS + 10):
        store_tokens(stock, range(number * 100, number * 100 + 5), "key-a")
        stock.pins.keep(range(number * 100, number * 100 + 5), "key-a", Term(str(number), 10.0 + number, 1 << 30))
    store_tokens(stock, range(5), "key-b")
    stock.pins.keep(range(5), "key-b", Term("b", 1.0, 1 << 30))
    assert sum(entry.is_pinned for entry in stock.shelf.entries) == MAX_TERMS + 1
    assert stock.store.find(range(5), "key-b").num_tokens == 5
