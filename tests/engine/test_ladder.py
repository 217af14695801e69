"""Automatic step-downs in the engine."""

from __future__ import annotations

import pytest

from kvstrata.codecs.registry import parse
from kvstrata.engine.config import EngineLimits, KvConfig
from tests.engine.drive import Drive, do_one_step
from tests.engine.test_loop import prompt
from tests.engine.test_requantize import settle
from tests.support.models import tiny_loaded


def chats(drive: Drive, count: int) -> list[int]:
    """Submit each chat once and then once more. Return how many tokens of each were cached the second time."""
    cached = []
    for is_repeat in (False, True):
        for i in range(count):
            client = drive.submit(prompt(400, seed=i), 8)
            drive.run()
            settle(drive)
            assert client.finished.usage.completion_tokens == 8
            assert drive.core.state().kv_bytes <= drive.budget.total_bytes
            if is_repeat:
                cached.append(client.finished.usage.cached_tokens)
    return cached


def test_ladder_keeps_all_chats_in_quarter_of_memory() -> None:
    loaded = tiny_loaded("llama")
    token_bytes = Drive(loaded).budget.token_bytes
    needed = 10 * 408 * token_bytes
    kv_bytes = needed // 4 + 900 * token_bytes  # the rest is for one running request
    plain = chats(Drive(loaded, EngineLimits(buffer_step_tokens=16), kv_bytes=kv_bytes), 10)
    ladder = Drive(loaded, EngineLimits(buffer_step_tokens=16), kv_bytes=kv_bytes, storage=KvConfig(dynamic=True))
    stepped = chats(ladder, 10)
    assert sum(stepped) > sum(plain)
    assert sum(stepped) == 10 * 399
    assert set(ladder.prefix_cache.usage.usage().by_precision) <= {"raw", "planes:8", "planes:4"}
    assert ladder.prefix_cache.usage.counters()["stepped_down_spans"] > 0


def test_chat_steps_down_at_most_four_times() -> None:
    loaded = tiny_loaded("llama", 4)
    kv_bytes = 3000 * Drive(loaded).budget.token_bytes
    drive = Drive(loaded, EngineLimits(buffer_step_tokens=16), kv_bytes=kv_bytes, storage=KvConfig(dynamic=True))
    for i in range(13):
        drive.submit(prompt(700, seed=i), 8)
        drive.run()
        settle(drive)
    counts = drive.prefix_cache.usage.counters()
    assert counts["evicted_tokens"] == 0
    # A chat has four steps at most: V to 8 bits, K to 8, V to 4, K to 4.
    assert 13 < counts["stepped_down_spans"] <= 4 * 13
    assert drive.prefix_cache.usage.usage().by_precision["planes:4"] > 0
    # Every span is at its floor and stays there.
    drive.prefix_cache.reclaimer.step_down(kv_bytes)
    settle(drive)
    counts = drive.prefix_cache.usage.counters()
    drive.prefix_cache.reclaimer.step_down(kv_bytes)
    assert drive.prefix_cache.usage.counters() == counts


def test_codec_with_fewest_bits_stays_while_other_side_steps_down() -> None:
    loaded = tiny_loaded("llama")
    kv_bytes = 1500 * Drive(loaded).budget.token_bytes
    storage = KvConfig(k=parse("planes:2"), v=parse("raw"), dynamic=True)
    drive = Drive(loaded, EngineLimits(buffer_step_tokens=16), kv_bytes=kv_bytes, storage=storage)
    chats(drive, 6)
    assert drive.prefix_cache.usage.counters()["stepped_down_spans"] > 0
    pairs = {
        pair
        for entry in drive.prefix_cache.table.entries
        for layer in entry.span.layers
        for pair in entry.span.codec_pairs(layer)
    }
    assert {k.name for k, _ in pairs} == {"planes:2"}
    assert "planes:8" in {v.name for _, v in pairs}


def test_precision_stays_without_ladder() -> None:
    loaded = tiny_loaded("llama")
    token_bytes = Drive(loaded).budget.token_bytes
    drive = Drive(loaded, EngineLimits(buffer_step_tokens=16), kv_bytes=1500 * token_bytes)
    chats(drive, 6)
    assert set(drive.prefix_cache.usage.usage().by_precision) == {"raw"}


@pytest.mark.parametrize("live", [False, True])
def test_long_conversation_steps_down_at_configured_length(live: bool) -> None:
    steps = ((600, parse("planes:8")), (1200, parse("planes:4")))
    drive = Drive(
        tiny_loaded("llama"),
        EngineLimits(prefill_chunk_tokens=300),
        storage=KvConfig(dynamic_at=steps, encodes_running=live),
    )
    for tokens, expected in ((500, {"raw"}), (700, {"planes:8"}), (1300, {"planes:4"})):
        drive.submit(prompt(tokens, seed=tokens), 8)
        drive.run()
        settle(drive)
        assert set(drive.prefix_cache.usage.usage().by_precision) == expected
        drive.clear()


def test_prefix_shared_by_long_and_short_sequence_gets_lower_format_once() -> None:
    steps = ((256, parse("planes:8")), (1024, parse("planes:4")))
    drive = Drive(tiny_loaded("llama"), EngineLimits(prefill_chunk_tokens=64), storage=KvConfig(dynamic_at=steps))
    drive.submit(prompt(300), 2)
    drive.run()
    drive.submit([*prompt(300), *prompt(900, seed=1)], 300)
    drive.submit([*prompt(300), *prompt(100, seed=2)], 300)
    drive.run()
    settle(drive)
    assert {
        entry.span.num_tokens: entry.target.plan.k.name for entry in drive.prefix_cache.table.entries if entry.target
    } == {
        301: "planes:4",
        1199: "planes:4",
        399: "planes:8",
    }
    # The shared prefix and the long sequence step down twice, the short one once.
    assert drive.prefix_cache.usage.counters()["stepped_down_spans"] == 5


def test_request_waits_for_step_downs_while_streams_decode() -> None:
    loaded = tiny_loaded("llama")
    token_bytes = Drive(loaded).budget.token_bytes
    limits = EngineLimits(buffer_step_tokens=16)
    drive = Drive(loaded, limits, kv_bytes=2700 * token_bytes, storage=KvConfig(dynamic=True))
    for i in range(5):
        drive.submit(prompt(400, seed=i), 2)
        drive.run()
    settle(drive)
    stream = drive.submit(prompt(100, seed=99), 60)
    while len(stream.ids) < 4:
        drive.core.executor.step()
    assert drive.prefix_cache.usage.counters()["stepped_down_spans"] == 0
    do_one_step(drive.core.pacer)  # one layer of a span in each step
    late = drive.submit(prompt(900, seed=77), 2)
    before = len(stream.ids)
    while not late.events:
        drive.core.executor.step()
        assert drive.core.state().kv_bytes <= drive.budget.total_bytes
    assert len(stream.ids) - before > 4
    drive.run()
    assert late.finished.usage.completion_tokens == 2
    assert drive.prefix_cache.usage.counters()["evicted_tokens"] == 0
    # Spans step down no further than was needed.
    assert set(drive.prefix_cache.usage.usage().by_precision) == {"raw", "planes:8"}
