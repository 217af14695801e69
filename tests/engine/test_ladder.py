"""Precision that steps down by itself, through the loop."""

from __future__ import annotations

import pytest

from kvstrata.codecs.registry import parse
from kvstrata.engine.config import EngineLimits, KvConfig
from tests.engine.drive import Drive, do_one_step
from tests.engine.test_loop import prompt
from tests.engine.test_requantize import settle
from tests.tiny import tiny_loaded


def chats(drive: Drive, count: int) -> list[int]:
    """Each chat comes, and comes back when all have come; tells what was cached when it came back."""
    cached = []
    for turn in range(2):
        for i in range(count):
            client = drive.submit(prompt(400, seed=i), 8)
            drive.run()
            settle(drive)
            assert client.finished.usage.completion_tokens == 8
            assert drive.loop.state().kv_bytes <= drive.budget.total_bytes
            if turn:
                cached.append(client.finished.usage.cached_tokens)
    return cached


def test_a_quarter_of_the_memory_keeps_all_chats_at_a_lower_precision() -> None:
    loaded = tiny_loaded("llama")
    token_bytes = Drive(loaded).budget.token_bytes
    needed = 10 * 408 * token_bytes
    kv_bytes = needed // 4 + 900 * token_bytes  # and what one request needs to run
    plain = chats(Drive(loaded, EngineLimits(buffer_step_tokens=16), kv_bytes=kv_bytes), 10)
    ladder = Drive(loaded, EngineLimits(buffer_step_tokens=16), kv_bytes=kv_bytes, storage=KvConfig(dynamic=True))
    stepped = chats(ladder, 10)
    assert sum(stepped) > sum(plain)
    assert sum(stepped) == 10 * 399
    assert set(ladder.stock.usage.usage().by_precision) <= {"raw", "planes:8", "planes:4"}
    assert ladder.stock.usage.count()["stepped_down_spans"] > 0


def test_layers_at_the_edges_do_not_hide_how_far_the_others_have_stepped_down() -> None:
    loaded = tiny_loaded("llama", 4)
    kv_bytes = 3000 * Drive(loaded).budget.token_bytes
    drive = Drive(
        loaded, EngineLimits(buffer_step_tokens=16), kv_bytes=kv_bytes, storage=KvConfig(dynamic=True, edge_layers=1)
    )
    for i in range(13):
        drive.submit(prompt(700, seed=i), 8)
        drive.run()
        settle(drive)
    counts = drive.stock.usage.count()
    assert counts["evicted_tokens"] == 0
    # V to 8 bits, K to 8, V to 4, K to 4: more steps than these there are not.
    assert 13 < counts["stepped_down_spans"] <= 4 * 13
    assert drive.stock.usage.usage().by_precision["planes:4"] > 0
    # All is as low as it may be, and stays so.
    drive.stock.reclaimer.step_down(kv_bytes)
    settle(drive)
    counts = drive.stock.usage.count()
    drive.stock.reclaimer.step_down(kv_bytes)
    assert drive.stock.usage.count() == counts


def test_what_cannot_step_down_stays_beside_what_can() -> None:
    loaded = tiny_loaded("llama")
    kv_bytes = 1500 * Drive(loaded).budget.token_bytes
    storage = KvConfig(k=parse("rotated:4"), v=parse("raw"), dynamic=True)
    drive = Drive(loaded, EngineLimits(buffer_step_tokens=16), kv_bytes=kv_bytes, storage=storage)
    chats(drive, 6)
    assert drive.stock.usage.count()["stepped_down_spans"] > 0
    pairs = {
        pair for entry in drive.stock.table.entries for layer in entry.span.layers for pair in entry.span.pairs(layer)
    }
    assert {k.name for k, _ in pairs} == {"rotated:4"}
    assert "planes:8" in {v.name for _, v in pairs}


def test_without_the_ladder_precision_stays() -> None:
    loaded = tiny_loaded("llama")
    token_bytes = Drive(loaded).budget.token_bytes
    drive = Drive(loaded, EngineLimits(buffer_step_tokens=16), kv_bytes=1500 * token_bytes)
    chats(drive, 6)
    assert set(drive.stock.usage.usage().by_precision) == {"raw"}


@pytest.mark.parametrize("live", [False, True])
def test_long_conversations_step_down_at_their_length(live: bool) -> None:
    steps = ((600, parse("planes:8")), (1200, parse("planes:4")))
    drive = Drive(
        tiny_loaded("llama"), EngineLimits(prefill_chunk_tokens=300), storage=KvConfig(dynamic_at=steps, live=live)
    )
    for tokens, expected in ((500, {"raw"}), (700, {"planes:8"}), (1300, {"planes:4"})):
        drive.submit(prompt(tokens, seed=tokens), 8)
        drive.run()
        settle(drive)
        assert set(drive.stock.usage.usage().by_precision) == expected
        drive.clear()


def test_what_a_long_and_a_short_sequence_share_steps_down_once() -> None:
    steps = ((256, parse("planes:8")), (1024, parse("planes:4")))
    drive = Drive(tiny_loaded("llama"), EngineLimits(prefill_chunk_tokens=64), storage=KvConfig(dynamic_at=steps))
    drive.submit(prompt(300), 2)
    drive.run()
    drive.submit([*prompt(300), *prompt(900, seed=1)], 300)
    drive.submit([*prompt(300), *prompt(100, seed=2)], 300)
    drive.run()
    settle(drive)
    assert {entry.span.num_tokens: entry.target.k.name for entry in drive.stock.table.entries if entry.target} == {
        301: "planes:4",
        1199: "planes:4",
        399: "planes:8",
    }
    # What they share and the long one twice, the short one once.
    assert drive.stock.usage.count()["stepped_down_spans"] == 5


def test_a_request_waits_for_what_steps_down_and_streams_go_on() -> None:
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
        drive.loop.executor.step()
    assert drive.stock.usage.count()["stepped_down_spans"] == 0
    do_one_step(drive.loop.pacer)  # a layer of a span in each step
    late = drive.submit(prompt(900, seed=77), 2)
    before = len(stream.ids)
    while not late.events:
        drive.loop.executor.step()
        assert drive.loop.state().kv_bytes <= drive.budget.total_bytes
    assert len(stream.ids) - before > 4
    drive.run()
    assert late.finished.usage.completion_tokens == 2
    assert drive.stock.usage.count()["evicted_tokens"] == 0
    # Not further than was needed.
    assert set(drive.stock.usage.usage().by_precision) == {"raw", "planes:8"}
