"""The ladder alone: which spans step down, and how far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.codecs.planes import PlanesCodec
from kvstrata.errors import ConfigError
from kvstrata.prefix_cache.ladder import Bits, Ladder, LadderMove, SpanPrecision, parse_lengths

NUMBERS = st.sampled_from([32, 16, 8, 4, 2, 0])
BITS = st.builds(Bits, NUMBERS, NUMBERS)
SPANS = st.builds(SpanPrecision, BITS, st.integers(0, 1000), st.floats(0, 100))
FLOORS = st.builds(Bits, st.sampled_from([8, 4, 2]), st.sampled_from([8, 4, 2]))
FOUR_BITS = Bits(4, 4)


def token_bytes(bits: Bits) -> float:
    return bits.k + bits.v


def edged_token_bytes(bits: Bits) -> float:
    """Return the bytes of a token where two of four layers keep at least 8 bits."""
    return 2 * (bits.k + bits.v + max(bits.k, 8) + max(bits.v, 8))


Size = Callable[[Bits], float]


def step_down(
    spans: Sequence[SpanPrecision], need: float, floors: Bits, size: Size = token_bytes
) -> dict[int, LadderMove[int]]:
    ladder: Ladder[int] = Ladder(floors, size)
    for id_, span in enumerate(spans):
        ladder.put_span(id_, span)
    return {move.id: move for move in ladder.choose(need)}


def by_hand(spans: Sequence[SpanPrecision], need: float, floors: Bits, size: Size) -> dict[int, Bits]:
    """Choose the moves by trying every span at every step."""
    bits = {id_: span.bits for id_, span in enumerate(spans)}
    for step, side in ((step, side) for step in (8, 4, 2) for side in "vk"):
        for id_ in sorted(bits, key=lambda id_: spans[id_].used_s):
            lowered = replace(bits[id_], **{side: min(step, getattr(bits[id_], side))})
            freed = spans[id_].num_tokens * (size(bits[id_]) - size(lowered))
            if need > 0 and freed > 0 and step >= getattr(floors, side):
                need -= freed
                bits[id_] = lowered
    return {id_: after for id_, after in bits.items() if after != spans[id_].bits}


@given(
    st.lists(SPANS, max_size=8, unique_by=lambda span: span.used_s),
    st.integers(0, 20_000),
    FLOORS,
    st.sampled_from([token_bytes, edged_token_bytes]),
)
def test_ladder_chooses_same_moves_as_trial_of_every_span_at_every_step(
    spans: list[SpanPrecision], need: int, floors: Bits, size: Size
) -> None:
    moves = step_down(spans, need, floors, size)
    assert {id_: move.after for id_, move in moves.items()} == by_hand(spans, need, floors, size)
    assert all(move.before == spans[id_].bits for id_, move in moves.items())


@given(st.lists(SPANS, max_size=8), st.integers(0, 20_000), FLOORS)
def test_move_never_raises_bits_nor_falls_below_floor(spans: list[SpanPrecision], need: int, floors: Bits) -> None:
    for move in step_down(spans, need, floors).values():
        before, after = move.before, move.after
        assert after != before
        assert min(floors.k, before.k) <= after.k <= before.k
        assert min(floors.v, before.v) <= after.v <= before.v


@given(st.lists(SPANS, max_size=8), st.integers(0, 20_000))
def test_larger_need_never_moves_spans_less(spans: list[SpanPrecision], need: int) -> None:
    less, more = step_down(spans, need, FOUR_BITS), step_down(spans, need + 500, FOUR_BITS)
    for id_, move in less.items():
        assert more[id_].after.k <= move.after.k
        assert more[id_].after.v <= move.after.v


@given(st.lists(st.tuples(st.integers(0, 4), SPANS | st.none() | st.integers(0, 3000)), max_size=30))
def test_ladder_after_updates_chooses_like_fresh_ladder(
    operations: list[tuple[int, SpanPrecision | int | None]],
) -> None:
    ladder: Ladder[int] = Ladder(FOUR_BITS, token_bytes)
    known: dict[int, SpanPrecision] = {}
    for id_, operation in operations:
        if isinstance(operation, SpanPrecision):
            known[id_] = replace(operation, used_s=float(id_))
            ladder.put_span(id_, known[id_])
        elif operation is None:
            known.pop(id_, None)
            ladder.discard_span(id_)
        else:
            fresh: Ladder[int] = Ladder(FOUR_BITS, token_bytes)
            for each, span in known.items():
                fresh.put_span(each, span)
            moves = ladder.choose(operation)
            assert moves == fresh.choose(operation)
            known |= {move.id: replace(known[move.id], bits=move.after) for move in moves}


def test_oldest_values_step_down_first_then_keys_then_next_step() -> None:
    spans = [SpanPrecision(Bits(16, 16), 10, used_s=2.0), SpanPrecision(Bits(16, 16), 10, used_s=1.0)]

    def moved(need: int) -> dict[int, tuple[int, int]]:
        return {id_: (move.after.k, move.after.v) for id_, move in step_down(spans, need, FOUR_BITS).items()}

    assert moved(0) == {}
    assert moved(80) == {1: (16, 8)}
    assert moved(160) == {1: (16, 8), 0: (16, 8)}
    assert moved(240) == {1: (8, 8), 0: (16, 8)}
    assert moved(320) == {1: (8, 8), 0: (8, 8)}
    assert moved(360) == {1: (8, 4), 0: (8, 8)}
    assert moved(10_000) == {1: (4, 4), 0: (4, 4)}


def test_layers_that_keep_bits_free_nothing() -> None:
    spans = [SpanPrecision(Bits(8, 8), 10, used_s=i) for i in range(4)]
    moves = step_down(spans, 160, FOUR_BITS, edged_token_bytes)
    assert {id_: move.after for id_, move in moves.items()} == {0: Bits(8, 4), 1: Bits(8, 4)}


@given(st.lists(SPANS, max_size=8), st.integers(0, 20_000))
def test_move_that_frees_nothing_is_not_made(spans: list[SpanPrecision], need: int) -> None:
    assert step_down(spans, need, FOUR_BITS, lambda bits: max(bits.k, 32) + max(bits.v, 32)) == {}


def test_parse_lengths_reads_steps_and_refuses_errors() -> None:
    assert parse_lengths("16k=planes:8, 65536=planes:4") == ((16384, PlanesCodec(8)), (65536, PlanesCodec(4)))
    assert parse_lengths("") == ()
    for text in ("16k", "=planes:8", "k=planes:8", "64k=planes:4,16k=planes:8", "1k=planes:8,1024=planes:4"):
        with pytest.raises(ConfigError, match="'"):
            parse_lengths(text)
