"""What other tools get wrong, row by row of the table at the end of the requirements, as far as memory is concerned."""

from __future__ import annotations

import gc
from dataclasses import replace

import mlx.core as mx
import pytest

from kvstrata.codecs.registry import parse
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.prefix_lookup import MIN_FOLLOW_TOKENS
from kvstrata.prefix_cache.requantize import PrecisionChange
from tests.engine.drive import Client, Drive
from tests.engine.test_loop import assert_same, prompt
from tests.engine.test_prefixes import cached, prefilled_tokens, serve, settle
from tests.support.models import tiny_config, tiny_loaded, tiny_module

LLAMA = "llama"


def alone(tokens: list[int], max_tokens: int, architecture: str = LLAMA) -> Client:
    return serve(Drive(tiny_loaded(architecture)), tokens, max_tokens)


def peak_over(drive: Drive, client: Client, num_tokens: int) -> int:
    """What MLX takes at most beyond what it has now, until a request has so many tokens."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    while len(client.ids) < num_tokens:
        drive.core.executor.step()
    return mx.get_peak_memory() - before


def test_the_same_prompt_three_times_is_prefilled_once_and_counted_so() -> None:
    drive = Drive(tiny_loaded(LLAMA))
    clients = [serve(drive, prompt(300)) for _ in range(3)]
    assert [cached(client) for client in clients] == [0, 299, 299]
    assert prefilled_tokens(drive) == 299
    assert drive.prefix_cache.usage.counters()["hit_tokens"] == 2 * 299
    hits = drive.metrics.registry.get_sample_value("vllm:prefix_cache_hits_total")
    queries = drive.metrics.registry.get_sample_value("vllm:prefix_cache_queries_total")
    assert (hits, queries) == (2 * 299, 900)


def test_another_model_under_the_same_name_gets_no_foreign_kv() -> None:
    drive = Drive(tiny_loaded(LLAMA))
    serve(drive, prompt(300))
    # The same store, asked by weights that have changed.
    cache = drive.prefix_cache
    cache.matcher.identity = replace(cache.matcher.identity, fingerprint="the same name, other weights")
    other = serve(drive, prompt(300))
    assert cached(other) == 0
    assert cached(serve(drive, prompt(300))) == 299


def test_a_chat_of_eight_turns_takes_little_more_than_its_largest_entry() -> None:
    drive = Drive(tiny_loaded(LLAMA))
    tokens: list[int] = []
    for turn in range(8):
        tokens = tokens + prompt(100, seed=turn)
        tokens = tokens + serve(drive, tokens, 8).ids
    assert drive.prefix_cache.table.nbytes <= 1.1 * len(tokens) * drive.budget.token_bytes


def test_the_longest_match_wins_over_a_short_exact_prefix() -> None:
    drive = Drive(tiny_loaded(LLAMA))
    long = prompt(1000)
    serve(drive, long[:130])
    serve(drive, [*long, 5, 6])
    assert cached(serve(drive, [*long, 7, 8])) == 1000
    assert cached(serve(drive, [*long[:130], *prompt(20, seed=1)])) == 130


def test_the_same_block_at_another_position_does_not_match() -> None:
    drive = Drive(tiny_loaded(LLAMA))
    block = prompt(256)
    serve(drive, block)
    moved = [*prompt(256, seed=1), *block]
    client = serve(drive, moved)
    assert cached(client) == 0
    assert_same(client, alone(moved, 4))


@pytest.mark.parametrize(
    ("architecture", "head_dim", "name"),
    [
        ("llama", 16, "planes:4"),
        ("llama", 96, "affine:5"),
        ("llama", 128, "affine:6"),
        ("llama", 256, "affine:5"),
        ("gemma3_text", 16, "planes:8"),
        ("gemma3_text", 64, "affine:4"),
        ("qwen3_next", 16, "planes:8"),
    ],
)
def test_quantized_kv_in_a_batch(architecture: str, head_dim: int, name: str) -> None:
    """Rings too, and any head size."""
    config = {**tiny_config(architecture), "head_dim": head_dim}
    loaded = replace(tiny_loaded(architecture), module=tiny_module(architecture, head_dim=head_dim), config=config)
    drive = Drive(loaded, storage=KvConfig(k=parse(name), v=parse(name), min_quantize_tokens=0))
    serve(drive, prompt(100), 2)
    clients = [drive.submit([*prompt(99), i, *prompt(5, seed=i)], 60) for i in range(4)]
    while not all(client.ids for client in clients):
        drive.core.executor.step()
    assert drive.core.state().running == 4
    drive.run()
    settle(drive)
    assert [cached(client) for client in clients] == 4 * [99]
    kinds = {name} if architecture != "qwen3_next" else {name, "raw"}  # recurrent state is never quantized
    assert {_short(precision) for precision in drive.prefix_cache.usage.usage().by_precision} == kinds


def _short(precision: str) -> str:
    """Without the size of a group, which follows from the head's."""
    return ":".join(precision.split(":")[:2])


def test_a_prompt_equal_to_a_cached_sequence_is_served() -> None:
    drive = Drive(tiny_loaded(LLAMA))
    first = serve(drive, prompt(50), 8)
    for end in (50, 54, 57, 58):
        equal = [*prompt(50), *first.ids][:end]
        again = serve(drive, equal, 4)
        assert cached(again) == end - 1
        assert_same(again, alone(equal, 4))


def test_a_change_of_membership_copies_nobodys_kv() -> None:
    drive = Drive(tiny_loaded(LLAMA), EngineLimits(buffer_step_tokens=4000))
    serve(drive, prompt(3000), 2)
    big = drive.submit([*prompt(3000), 1], 4000)
    while len(big.ids) < 3:
        drive.core.executor.step()
    held = drive.core.state().kv_bytes
    assert held > 7000 * drive.budget.token_bytes
    for i in range(3):
        small = drive.submit(prompt(20, seed=i + 1), 3)
        assert peak_over(drive, small, 2) < held / 20
    drive.core.executor.end_request(big.request.id)
    drive.run()


def test_a_hit_copies_nothing() -> None:
    drive = Drive(tiny_loaded(LLAMA, 4), EngineLimits(buffer_step_tokens=8))
    serve(drive, prompt(8000), 2)
    held = drive.prefix_cache.table.nbytes
    assert held > 7.5e6
    client = drive.submit([*prompt(8000), 1], 8)
    # One layer's scores and scratch at most.
    assert peak_over(drive, client, 2) < held / 8
    drive.run()
    assert cached(client) == 8000


def test_concurrent_sharers_hold_a_prefix_once() -> None:
    drive = Drive(tiny_loaded(LLAMA), EngineLimits(buffer_step_tokens=16))
    serve(drive, prompt(2000), 2)
    held = drive.prefix_cache.table.nbytes
    clients = [drive.submit([*prompt(2000), i], 16) for i in range(8)]
    while not all(len(client.ids) > 3 for client in clients):
        drive.core.executor.step()
    assert drive.prefix_cache.table.nbytes == held
    assert {sequence.parts[0].shared_by for sequence in drive.cache.usage().sequences} == {8}
    drive.run()


def test_the_partial_tail_is_stored_too() -> None:
    drive = Drive(tiny_loaded(LLAMA))
    for length in (1, 63, 257, 511):
        serve(drive, prompt(length, seed=length), 3)
        # Two tokens of the reply were fed.
        assert drive.prefix_cache.lookup(prompt(length, seed=length), "").num_tokens == length
        asked = [*prompt(length, seed=length), 5, 6, 7]
        assert cached(serve(drive, asked, 3)) >= length


def test_after_a_change_of_bits_what_is_stored_stays_usable() -> None:
    drive = Drive(tiny_loaded(LLAMA), storage=KvConfig(k=parse("planes:4"), v=parse("planes:4")))
    serve(drive, prompt(400))
    drive.cache.requantize(PrecisionChange(parse("planes:8"), parse("planes:8")))
    settle(drive)
    assert cached(serve(drive, [*prompt(400), 1, 2])) == 400
    serve(drive, prompt(400, seed=1))
    assert set(drive.prefix_cache.usage.usage().by_precision) == {"planes:4", "planes:8"}


def test_requantizing_lets_streams_run_on() -> None:
    drive = Drive(tiny_loaded(LLAMA), EngineLimits(slice_s=0))
    for seed in range(4):
        serve(drive, prompt(600, seed=seed))
    running = drive.submit(prompt(500, seed=9), 200)
    while len(running.ids) < 5:
        drive.core.executor.step()
    drive.cache.requantize(PrecisionChange(parse("planes:4"), parse("planes:4"), scope="stored"))
    steps = 0
    while drive.cache.requantize_progress().is_running:
        before = len(running.ids)
        drive.core.executor.step()
        # Every step does a little of the work, and brings its token.
        assert len(running.ids) == before + 1
        steps += 1
    assert steps >= 2
    drive.run()
    assert running.finished.usage.completion_tokens == 200


def test_chats_that_alternate_over_one_system_prompt_all_resume_where_they_left_off() -> None:
    drive = Drive(tiny_loaded(LLAMA))
    system = prompt(400)
    chats = [[*system, *prompt(200, seed=i + 1)] for i in range(3)]
    stored = [0, 400, 400]
    for _ in range(3):
        for i, chat in enumerate(chats):
            client = serve(drive, chat, 10)
            assert cached(client) == stored[i]
            stored[i] = len(chat) + 9
            chats[i] = [*chat, *client.ids, *prompt(30, seed=50 + i)]


def test_two_of_them_at_once_resume_where_they_left_off() -> None:
    drive = Drive(tiny_loaded(LLAMA))
    system = prompt(400)
    chats = [[*system, *prompt(1150, seed=i + 1)] for i in range(2)]
    first = [drive.submit(chat, 6) for chat in chats]
    drive.run()
    # The later one begins where it would not pay to wait any longer.
    assert cached(first[0]) == 0
    assert 400 - MIN_FOLLOW_TOKENS < cached(first[1]) <= 400
    again = [drive.submit([*chat, *client.ids, 1, 2], 6) for chat, client in zip(chats, first, strict=True)]
    drive.run()
    assert [cached(client) for client in again] == [1555, 1555]
