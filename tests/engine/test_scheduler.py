"""The scheduler is pure: properties over any queue and any batch."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from kvstrata.engine.scheduler import MIN_CHUNK_TOKENS, Plan, Running, Waiting, chunk_tokens, plan, tail_tokens

SIZES = st.integers(1, 100)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Waiting], list[Running], int, int]:
    num_running = draw(st.integers(0, 6))
    running = [
        Running(
            i,
            held_bytes=draw(SIZES),
            prefill_left=(left := draw(st.sampled_from([0, 0, 1, 200, 5000]))),
            grow_bytes=0 if left else draw(st.sampled_from([0, 0, 10, 60])),
            complete=not left and draw(st.booleans()),
        )
        for i in range(num_running)
    ]
    running = [r if not r.complete else Running(r.id, r.held_bytes, 0, complete=True) for r in running]
    waiting = [
        Waiting(100 + i, draw(SIZES), draw(st.sampled_from([0, 20, 5000]))) for i in range(draw(st.integers(0, 5)))
    ]
    return waiting, running, draw(st.integers(0, 150)), draw(st.integers(1, 8))


def planned(situation: tuple[list[Waiting], list[Running], int, int], turn: int = 0) -> Plan:
    waiting, running, free, most = situation
    return plan(waiting, running, free_bytes=free, max_running=most, chunk_tokens=256, turn=turn)


@given(situations(), st.integers(0, 7))
def test_memory_is_never_promised_twice(situation: tuple[list[Waiting], list[Running], int, int], turn: int) -> None:
    waiting, running, free, _ = situation
    result = planned(situation, turn)
    held = {r.id: r for r in running}
    free += sum(held[i].held_bytes for i in result.set_aside)
    free -= sum(held[i].grow_bytes for i in result.grow)
    free -= sum(w.admit_bytes for w in waiting if w.id in result.admit)
    assert free >= 0


@given(situations())
def test_the_oldest_is_set_aside_only_for_itself(situation: tuple[list[Waiting], list[Running], int, int]) -> None:
    _, running, _, _ = situation
    result = planned(situation)
    kept = [r.id for r in running if r.id not in result.set_aside]
    # Only the youngest give way.
    assert not result.set_aside or not kept or max(kept) < min(result.set_aside)


@given(situations())
def test_admission_is_in_order_of_arrival(situation: tuple[list[Waiting], list[Running], int, int]) -> None:
    waiting, running, _, most = situation
    result = planned(situation)
    assert result.admit == tuple(w.id for w in waiting[: len(result.admit)])
    assert not result.admit or len(running) + len(result.admit) <= most
    assert not (result.admit and result.set_aside)


@given(situations())
def test_who_decodes_has_room_and_its_prompt_done(situation: tuple[list[Waiting], list[Running], int, int]) -> None:
    result = planned(situation)
    for r in situation[1]:
        if r.id in result.decode:
            assert r.id not in result.set_aside
            assert not r.complete
            assert not r.grow_bytes or r.id in result.grow
            assert not r.prefill_left or (result.prefill and result.prefill.id == r.id)


@given(situations(), st.integers(0, 7))
def test_something_happens_while_there_is_work(
    situation: tuple[list[Waiting], list[Running], int, int], turn: int
) -> None:
    running = situation[1]
    result = planned(situation, turn)
    if any(not r.complete for r in running):
        assert result.decode or result.prefill or result.set_aside


def test_a_short_prompt_goes_before_a_long_one_but_not_for_ever() -> None:
    long, short = Running(0, 10, prefill_left=4096), Running(1, 10, prefill_left=100)
    chosen = [planned(([], [long, short], 0, 8), turn).prefill for turn in range(4)]
    assert [chunk.id for chunk in chosen if chunk] == [1, 1, 1, 0]


def test_the_chunk_that_ends_a_prompt_brings_its_first_token() -> None:
    result = planned(([], [Running(0, 10, prefill_left=256)], 0, 8))
    assert result.prefill is not None
    assert result.decode == (0,)


@given(st.floats(0, 1e6), st.integers(MIN_CHUNK_TOKENS, 4096))
def test_chunks_follow_the_speed_within_bounds(speed: float, most: int) -> None:
    assert MIN_CHUNK_TOKENS <= chunk_tokens(speed, most) <= most


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 4096))
def test_tails_grow_by_steps_and_never_past_what_is_wanted(capacity: int, wanted: int, step: int) -> None:
    added = tail_tokens(capacity, wanted, step)
    assert 1 <= added <= wanted
    assert added == wanted or added >= step
