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
    return [
        Held(i, draw(BITS), draw(BITS), draw(st.integers(0, 1000)), draw(st.integers(0, 1000)), draw(st.floats(0, 100)))
        for i in range(count)
    ]


@given(spans(), st.integers(0, 20_000), st.sampled_from([8, 4, 2]), st.sampled_from([8, 4, 2]))
def test_nothing_goes_up_or_below_its_floor(held: list[Held[int]], need: int, k_floor: int, v_floor: int) -> None:
    by_id = {span.id: span for span in held}
    for move in step_down(held, need, Floors(k_floor, v_floor)):
        span = by_id[move.id]
        assert move.k_bits <= span.k_bits
        assert move.v_bits <= span.v_bits
        assert (move.k_bits, move.v_bits) != (span.k_bits, span.v_bits)
        assert move.k_bits >= min(k_floor, span.k_bits)
        assert move.v_bits >= min(v_floor, span.v_bits)


@given(spans(), st.integers(0, 20_000))
def test_more_need_never_moves_less(held: list[Held[int]], need: int) -> None:
    less = {move.id: move for move in step_down(held, need, Floors())}
    more = {move.id: move for move in step_down(held, need + 500, Floors())}
    for id_, move in less.items():
        assert more[id_].k_bits <= move.k_bits
        assert more[id_].v_bits <= move.v_bits


def test_the_coldest_values_go_first_then_keys_then_the_next_rung() -> None:
    cold, warm = Held(1, 16, 16, 100, 100, used_s=1.0), Held(2, 16, 16, 100, 100, used_s=2.0)

    def moved(need: int) -> list[tuple[int, int, int]]:
        return [(move.id, move.k_bits, move.v_bits) for move in step_down([warm, cold], need, Floors(4, 4))]

    assert moved(0) == []
    assert moved(50) == [(1, 16, 8)]
    assert moved(100) == [(1, 16, 8), (2, 16, 8)]
    assert moved(150) == [(1, 8, 8), (2, 16, 8)]
    assert moved(200) == [(1, 8, 8), (2, 8, 8)]
    assert moved(225) == [(1, 8, 4), (2, 8, 8)]
    assert moved(10_000) == [(1, 4, 4), (2, 4, 4)]


def test_lengths_are_read_or_refused() -> None:
    assert parse_lengths("16k=planes:8, 65536=planes:4") == ((16384, "planes:8"), (65536, "planes:4"))
    assert parse_lengths("") == ()
    for text in ("16k", "=planes:8", "k=planes:8", "64k=planes:4,16k=planes:8", "1k=planes:8,1024=planes:4"):
        with pytest.raises(ValueError, match="'"):
            parse_lengths(text)
