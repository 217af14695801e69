"""Who steps down, and how far: the policy alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.store.ladder import Floors, Held, parse_lengths, step_down

BITS = st.sampled_from([32, 16, 8, 4, 2, 0])


@st.composite
def spans(draw: st.DrawFn) -> list[Held[int]]:
    count = draw(st.integers(0, 8))
    return [Held(i, draw(BITS), draw(BITS), draw(st.integers(0, 1000)), draw(st.floats(0, 100))) for i in range(count)]


def token_bytes(k_bits: int, v_bits: int) -> float:
    return k_bits + v_bits


def edged_token_bytes(k_bits: int, v_bits: int) -> float:
    """Of four layers two keep at least 8 bits."""
    return 2 * (k_bits + v_bits + max(k_bits, 8) + max(v_bits, 8))


@given(spans(), st.integers(0, 20_000), st.sampled_from([8, 4, 2]), st.sampled_from([8, 4, 2]))
def test_nothing_goes_up_or_below_its_floor(held: list[Held[int]], need: int, k_floor: int, v_floor: int) -> None:
    by_id = {span.id: span for span in held}
    for move in step_down(held, need, Floors(k_floor, v_floor), token_bytes):
        span = by_id[move.id]
        assert move.k_bits <= span.k_bits
        assert move.v_bits <= span.v_bits
        assert (move.k_bits, move.v_bits) != (span.k_bits, span.v_bits)
        assert move.k_bits >= min(k_floor, span.k_bits)
        assert move.v_bits >= min(v_floor, span.v_bits)


@given(spans(), st.integers(0, 20_000))
def test_more_need_never_moves_less(held: list[Held[int]], need: int) -> None:
    less = {move.id: move for move in step_down(held, need, Floors(), token_bytes)}
    more = {move.id: move for move in step_down(held, need + 500, Floors(), token_bytes)}
    for id_, move in less.items():
        assert more[id_].k_bits <= move.k_bits
        assert more[id_].v_bits <= move.v_bits


def test_the_coldest_values_go_first_then_keys_then_the_next_rung() -> None:
    cold, warm = Held(1, 16, 16, num_tokens=10, used_s=1.0), Held(2, 16, 16, num_tokens=10, used_s=2.0)

    def moved(need: int) -> list[tuple[int, int, int]]:
        moves = step_down([warm, cold], need, Floors(4, 4), token_bytes)
        return [(move.id, move.k_bits, move.v_bits) for move in moves]

    assert moved(0) == []
    assert moved(80) == [(1, 16, 8)]
    assert moved(160) == [(1, 16, 8), (2, 16, 8)]
    assert moved(240) == [(1, 8, 8), (2, 16, 8)]
    assert moved(320) == [(1, 8, 8), (2, 8, 8)]
    assert moved(360) == [(1, 8, 4), (2, 8, 8)]
    assert moved(10_000) == [(1, 4, 4), (2, 4, 4)]


def test_what_a_move_frees_is_what_the_layers_that_follow_it_free() -> None:
    spans = [Held(i, 8, 8, num_tokens=10, used_s=i) for i in range(4)]
    moves = step_down(spans, 160, Floors(), edged_token_bytes)
    assert [(move.id, move.k_bits, move.v_bits) for move in moves] == [(0, 8, 4), (1, 8, 4)]


@given(spans(), st.integers(0, 20_000))
def test_a_move_that_frees_nothing_is_not_made(held: list[Held[int]], need: int) -> None:
    assert step_down(held, need, Floors(), lambda k_bits, v_bits: max(k_bits, 32) + max(v_bits, 32)) == []


def test_lengths_are_read_or_refused() -> None:
    assert parse_lengths("16k=planes:8, 65536=planes:4") == ((16384, "planes:8"), (65536, "planes:4"))
    assert parse_lengths("") == ()
    for text in ("16k", "=planes:8", "k=planes:8", "64k=planes:4,16k=planes:8", "1k=planes:8,1024=planes:4"):
        with pytest.raises(ValueError, match="'"):
            parse_lengths(text)
