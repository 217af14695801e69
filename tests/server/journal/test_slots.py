"""Slots of time, percentiles and the sentences of events, as values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine.request import Finished, PrefillProgress, TextDelta, TokenUsage
from kvstrata.metrics import CACHE_COUNTERS
from kvstrata.server.history import KEPT_S, History, HistorySlot, events_between, most_grown, percentile
from kvstrata.server.request_log import RequestTrace, TracedGeneration


class Clock:
    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.floats(-100, 8000), max_size=600))
def test_an_hour_in_order_whatever_the_clock_does(moves: list[float]) -> None:
    clock = Clock()
    slots = History(10.0, clock)
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
    slots = History(10.0, clock)
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
    slot = HistorySlot(0.0)
    assert slot.first_token_percentiles() == (None, None)
    for number in range(1, 101):
        slot.record_first_token(float(number))
    assert slot.first_token_percentiles() == (50.0, 95.0)
    slot.record_first_token(0.0)
    assert slot.first_token_percentiles() == (50.0, 95.0)
    for _ in range(1000):
        slot.record_first_token(7.0)
    assert slot.first_token_percentiles() == (7.0, 7.0)


def test_of_none_there_is_none() -> None:
    assert percentile([], 0.5) is None


def test_a_trace_times_tokens() -> None:
    clock, first = Clock(0.0), []
    trace = RequestTrace("id", clock=clock, on_first_token=first.append, generation=TracedGeneration(20, n=2))
    for index in (0, 1):
        trace.record_event(index, PrefillProgress(20, 20, 5 + index, "new"))
    assert (trace.cached_tokens, trace.miss) == (5, "new")
    clock.now = 2.0
    trace.record_event(0, TextDelta("a", (1,)))
    clock.now = 4.0
    trace.record_event(1, TextDelta("", (1, 2, 3)))
    trace.record_event(1, TextDelta("held back"))
    assert (first, trace.first_token_s, trace.completion_tokens, trace.tokens_per_s) == ([2.0], 2.0, 4, 1.5)
    trace.record_event(0, Finished("stop", TokenUsage(20, 7, 2)))
    assert (trace.cached_tokens, trace.completion_tokens) == (7, 5)
    clock.now = 5.0
    trace.finish()
    assert (trace.seconds, trace.status, trace.error) == (5.0, 499, "client_gone")


@pytest.mark.parametrize(
    ("name", "count", "kind", "text"),
    [
        ("evicted_tokens", 1204, "evicted", "Tokens evicted from memory: 1,204"),
        ("stepped_down_spans", 2, "pressure", "Spans stepped down in precision: 2"),
        ("encoded_spans", 2, "encoded", "Spans quantized: 2"),
        ("refused_promotions", 1, "refused", "Loads refused for lack of memory: 1"),
        ("refused_spills", 1, "refused", "Spans that could not be offloaded to the disk: 1"),
        ("disk_failed_no_space", 1, "failed", "Disk failures (no space): 1"),
        ("disk_quarantined_checksum", 3, "failed", "Damaged blocks quarantined (checksum): 3"),
        ("disk_written_bytes", 1 << 20, "spilled", "Written to the disk: 1.0 MiB"),
        ("dropped_tokens_disk_slow", 5, "dropped", "Tokens dropped that are on no disk (disk slow): 5"),
        ("ttl_pins_over_quota", 1, "refused", "Pins refused by the key's quota: 1"),
        ("something_else", 2, "counted", "Something else: 2"),
    ],
)
def test_events_have_a_label_and_a_count(name: str, count: int, kind: str, text: str) -> None:
    (event,) = events_between({name: 5}, {name: 5 + count}, 7.0)
    assert (event.kind, event.text, event.time_s, event.count) == (kind, text, 7.0, count)


def test_quantization_events_name_the_precision_and_the_freed_bytes() -> None:
    counters = {"encoded_spans": 3, "encoded_freed_bytes": 120 << 20}
    (event,) = events_between({}, counters, 0.0, grown="planes:4")
    assert event.text == "Spans quantized: 3 (planes:4, 120 MiB freed)"
    (one,) = events_between({}, {"encoded_spans": 1}, 0.0, grown="planes:4")
    assert one.text == "Spans quantized: 1 (planes:4)"
    assert most_grown({"raw": 9, "planes:8": 5}, {"raw": 90, "planes:8": 6, "planes:4": 3}) == "planes:4"
    assert most_grown({"planes:8": 5}, {"raw": 90, "planes:8": 4}) == most_grown({}, {}) == ""


@given(st.dictionaries(st.sampled_from([*CACHE_COUNTERS, "disk_read_disk", "remote_queue_bytes"]), st.integers(0, 9)))
def test_only_what_rose_happened(counters: dict[str, int]) -> None:
    assert list(events_between(counters, counters, 0.0)) == []
    assert list(events_between({name: value + 1 for name, value in counters.items()}, counters, 0.0)) == []
    quiet = {
        "queried_tokens", "hit_tokens", "stored_spans", "stored_tokens", "encoded_freed_bytes", "disk_read_disk",
        "remote_queue_bytes",
    }  # fmt: skip
    happened = {event.name for event in events_between({}, counters, 0.0)}
    assert happened == {name for name, value in counters.items() if value and name not in quiet}
