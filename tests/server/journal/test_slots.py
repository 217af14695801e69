"""Slots of time, percentiles and the sentences of events, as values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine.request import Finished, PrefillProgress, TextDelta, TokenUsage
from kvstrata.metrics import CACHE_COUNTERS
from kvstrata.server.journal.events import most_grown, risen
from kvstrata.server.journal.slots import KEPT_S, Slot, Slots, percentile
from kvstrata.server.journal.trace import Asked, Trace


class Clock:
    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.floats(-100, 8000), max_size=600))
def test_an_hour_in_order_whatever_the_clock_does(moves: list[float]) -> None:
    clock = Clock()
    slots = Slots(10.0, clock)
    for move in moves:
        clock.now += move
        slots.current.requests += 1
    kept = slots.since(0.0)
    starts = [slot.start_s for slot in kept]
    assert starts == sorted(set(starts))
    assert all(start % 10 == 0 for start in starts)
    assert starts[-1] - starts[0] <= KEPT_S
    assert len(kept) <= KEPT_S / 10 + 1
    assert 0 <= slots.left_s() <= 10 or clock.now < starts[-1]


def test_a_slot_ends_after_its_seconds() -> None:
    clock = Clock(1003.0)
    slots = Slots(10.0, clock)
    assert (slots.current.start_s, slots.left_s()) == (1000.0, 7.0)
    clock.now = 1010.0
    assert slots.current.start_s == 1010.0
    assert [slot.start_s for slot in slots.since(1009.0)] == [1000.0, 1010.0]
    assert [slot.start_s for slot in slots.since(1010.0)] == [1010.0]


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_one_of_them(times: list[float], share: float) -> None:
    found = percentile(times, share)
    assert found in times
    assert sum(time <= found for time in times) >= share * len(times) - 1e-6
    assert sum(time < found for time in times) <= share * len(times)


def test_a_slot_knows_its_percentiles_at_any_time() -> None:
    slot = Slot(0.0)
    assert slot.first_token_percentiles() == (None, None)
    for number in range(1, 101):
        slot.note_first_token(float(number))
    assert slot.first_token_percentiles() == (50.0, 95.0)
    slot.note_first_token(0.0)
    assert slot.first_token_percentiles() == (50.0, 95.0)
    for _ in range(1000):
        slot.note_first_token(7.0)
    assert slot.first_token_percentiles() == (7.0, 7.0)


def test_of_none_there_is_none() -> None:
    assert percentile([], 0.5) is None


def test_a_trace_times_tokens() -> None:
    clock, first = Clock(0.0), []
    trace = Trace("id", clock=clock, on_first_token=first.append, asked=Asked(20, n=2))
    for index in (0, 1):
        trace.note(index, PrefillProgress(20, 20, 5 + index, "new"))
    assert (trace.cached_tokens, trace.miss) == (5, "new")
    clock.now = 2.0
    trace.note(0, TextDelta("a", (1,)))
    clock.now = 4.0
    trace.note(1, TextDelta("", (1, 2, 3)))
    trace.note(1, TextDelta("held back"))
    assert (first, trace.first_token_s, trace.completion_tokens, trace.tokens_per_s) == ([2.0], 2.0, 4, 1.5)
    trace.note(0, Finished("stop", TokenUsage(20, 7, 2)))
    assert (trace.cached_tokens, trace.completion_tokens) == (7, 5)
    clock.now = 5.0
    trace.end()
    assert (trace.seconds, trace.status, trace.error) == (5.0, 499, "client_gone")


@pytest.mark.parametrize(
    ("name", "count", "kind", "text"),
    [
        ("evicted_tokens", 1204, "evicted", "1,204 tokens were evicted to make room."),
        ("evicted_tokens", 1, "evicted", "1 token was evicted to make room."),
        ("stepped_down_spans", 2, "pressure", "2 spans went to fewer bits to make room."),
        ("encoded_spans", 2, "encoded", "2 spans were stored in fewer bits."),
        ("refused_promotions", 1, "refused", "1 time memory had no room for what a lower tier has."),
        ("refused_spills", 1, "refused", "1 span could not be written to the disk."),
        ("disk_failed_no_space", 1, "failed", "The disk failed 1 time: no space."),
        ("disk_quarantined_checksum", 3, "failed", "3 damaged blocks were put aside: checksum."),
        ("disk_written_bytes", 1 << 20, "spilled", "1.0 MiB were written to the disk."),
        ("dropped_tokens_disk_slow", 5, "dropped", "5 tokens were dropped and are on no disk: disk slow."),
        ("ttl_pins_over_quota", 1, "refused", "1 prompt was not pinned: the quota of their key is used up."),
        ("something_else", 2, "counted", "Something else: 2 more."),
    ],
)
def test_events_as_sentences(name: str, count: int, kind: str, text: str) -> None:
    (event,) = risen({name: 5}, {name: 5 + count}, 7.0)
    assert (event.kind, event.text, event.time_s, event.count) == (kind, text, 7.0, count)


def test_what_was_stored_in_fewer_bits_says_which_and_what_that_freed() -> None:
    counters = {"encoded_spans": 3, "encoded_freed_bytes": 120 << 20}
    (event,) = risen({}, counters, 0.0, grown="planes:4")
    assert event.text == "3 spans were stored in fewer bits, planes:4: 120 MiB freed."
    (one,) = risen({}, {"encoded_spans": 1}, 0.0, grown="planes:4")
    assert one.text == "1 span was stored in fewer bits, planes:4."
    assert most_grown({"raw": 9, "planes:8": 5}, {"raw": 90, "planes:8": 6, "planes:4": 3}) == "planes:4"
    assert most_grown({"planes:8": 5}, {"raw": 90, "planes:8": 4}) == most_grown({}, {}) == ""


@given(st.dictionaries(st.sampled_from([*CACHE_COUNTERS, "disk_read_disk", "remote_queue_bytes"]), st.integers(0, 9)))
def test_only_what_rose_happened(counters: dict[str, int]) -> None:
    assert list(risen(counters, counters, 0.0)) == []
    assert list(risen({name: value + 1 for name, value in counters.items()}, counters, 0.0)) == []
    quiet = {
        "queried_tokens", "hit_tokens", "stored_spans", "stored_tokens", "encoded_freed_bytes", "disk_read_disk",
        "remote_queue_bytes",
    }  # fmt: skip
    happened = {event.name for event in risen({}, counters, 0.0)}
    assert happened == {name for name, value in counters.items() if value and name not in quiet}
