"""Prefix hits and commits of sequences, through the engine core."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import mlx.core as mx
import pytest

from kvstrata.codecs.registry import parse
from kvstrata.config import load
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.request import Request, Sampling
from kvstrata.engine.sequence import Sequence
from kvstrata.errors import ConfigError
from kvstrata.kv.buffers import without_cache
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.kv.span import prefix_of
from kvstrata.models.load import LoadedModel
from kvstrata.prefix_cache.entries import Lease
from kvstrata.prefix_cache.keys import Tokens
from kvstrata.prefix_cache.matching import checkpoint_of, ranges_of
from tests.engine.drive import GREEDY, Client, Drive
from tests.engine.test_loop import assert_same, prompt
from tests.support.models import ARCHITECTURES, layout_of, steady_module, tiny_loaded

DRAWN = Sampling(temperature=1.0, seed=3, num_logprobs=0)
FULL = ("llama", "qwen3", "qwen3_moe", "deepseek_v3")
HYBRID = ("qwen3_next", "mamba2", "gemma3_text")


@cache
def steady_loaded(architecture: str) -> LoadedModel:
    return replace(tiny_loaded(architecture), module=steady_module(architecture))


def settle(drive: Drive) -> None:
    while drive.core.pacer.has_work:
        drive.core.pacer.run_slice(1.0)


def serve(drive: Drive, tokens: list[int], max_tokens: int = 4, **fields: object) -> Client:
    """Run one request and all background work after it."""
    client = drive.submit(tokens, max_tokens, DRAWN, **fields)
    drive.run()
    settle(drive)
    return client


def cached(client: Client) -> int:
    return client.finished.usage.cached_tokens


def prefilled_tokens(drive: Drive) -> int:
    """Return the computed prompt tokens, without the last of each prompt, which is the input of the first step."""
    return int(drive.metrics.registry.get_sample_value("kvstrata_prefill_tokens_total") or 0)


def active_bytes() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


# Same output.


@pytest.mark.parametrize("left", [0, 100, 299])
def test_prefix_evicted_before_the_start_is_computed(left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for one request may evict the prefix that the same step was planned with for another."""
    drive = Drive(steady_loaded("llama"))
    tokens = prompt(320, seed=1)
    serve(drive, tokens[:300])
    match = drive.prefix_cache.lease

    def match_after_eviction(tokens: Tokens, salt: str, *, is_new: bool = True, session: str = "") -> Lease:
        drive.prefix_cache.reclaimer.shrink_to(left * drive.budget.token_bytes)
        return match(tokens, salt, is_new=is_new, session=session)

    monkeypatch.setattr(drive.prefix_cache, "lease", match_after_eviction)
    client = serve(drive, tokens, 6)
    assert cached(client) <= left
    monkeypatch.undo()
    drive.clear()
    assert_same(client, serve(drive, tokens, 6))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hit_at_any_token_replies_as_an_uncached_prompt(architecture: str) -> None:
    drive = Drive(
        steady_loaded(architecture), EngineLimits(prefill_chunk_tokens=32), storage=KvConfig(checkpoint_every_tokens=64)
    )
    base = prompt(150)
    whole = base + serve(drive, base, 12).ids
    rng = random.Random(architecture)
    for i in range(4):
        cut = rng.randint(1, len(whole) - 1)
        tokens = whole[:cut] + prompt(20, seed=i + 1)
        hit, cold = serve(drive, tokens, 5), serve(drive, tokens, 5, salt=f"cold {i}")
        assert_same(hit, cold)
        assert cached(cold) == 0
        same = next((j for j in range(cut, len(whole) - 1) if whole[j] != tokens[j]), len(whole) - 1)
        assert cached(hit) == same if architecture in FULL else cached(hit) <= same
        again = serve(drive, tokens, 5)
        assert_same(again, cold)
        assert cached(again) == len(tokens) - 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_repeated_prompt_prefills_one_token(architecture: str) -> None:
    drive = Drive(steady_loaded(architecture))
    first = serve(drive, prompt(90), 6)
    before = prefilled_tokens(drive)
    assert before == 89
    second = serve(drive, prompt(90), 6)
    assert_same(second, first)
    assert second.finished.usage.cached_tokens == second.finished.usage.prompt_tokens - 1
    # The one token that is left is the first input of the batch.
    assert prefilled_tokens(drive) == before


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"])
def test_quantized_storage_equals_resuming_from_the_same_spans_by_hand(architecture: str) -> None:
    loaded = steady_loaded(architecture)
    storage = KvConfig(k=parse("planes:8"), v=parse("planes:4"), min_quantize_tokens=0)
    replies = []
    for _ in range(2):
        drive = Drive(loaded, storage=storage)
        base = prompt(150)
        tokens = base + serve(drive, base, 2).ids + prompt(30, seed=9)
        wanted = by_hand(drive, loaded, tokens, num_steps=6)
        reply = serve(drive, tokens, 6)
        assert cached(reply) >= 150
        assert [row.logprob for row in reply.logprobs] == pytest.approx(wanted(reply.ids), abs=1e-4)
        replies.append([(row.id, row.logprob) for row in reply.logprobs])
    assert replies[0] == replies[1]


def by_hand(drive: Drive, loaded: LoadedModel, tokens: list[int], num_steps: int) -> Callable[[list[int]], list[float]]:
    """Return the log-probabilities of a given reply over the cached prefix."""
    layout = layout_of(loaded)
    found = drive.prefix_cache.lookup(tokens[:-1], "")
    assert found.num_tokens
    prefix = prefix_of(layout, ranges_of(found), checkpoint_of(found))
    cache = SequenceCache(layout, loaded.module, len(tokens) - found.num_tokens + num_steps, prefix)
    loaded.module(mx.array([tokens[found.num_tokens : -1]]), cache=cache.caches())
    cache.end_pass(len(tokens) - 1 - found.num_tokens)
    mx.eval(cache.arrays())

    def logprobs(reply: list[int]) -> list[float]:
        values = []
        for token, following in zip([tokens[-1], *reply], reply, strict=False):
            logits = loaded.module(mx.array([[token]]), cache=cache.caches())[0, -1]
            cache.end_pass(1)
            values.append(float((logits[following] - mx.logsumexp(logits)).item()))  # pyright: ignore[reportArgumentType]
        return values

    return logprobs


# Together.


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3", *HYBRID])
def test_simultaneous_requests_prefill_their_common_prefix_once(architecture: str) -> None:
    drive = Drive(tiny_loaded(architecture), EngineLimits(prefill_chunk_tokens=64))
    shared = prompt(300)
    clients = [drive.submit([*shared, i, *prompt(9, seed=i)], 4, DRAWN) for i in range(6)]
    while not all(client.ids for client in clients):
        drive.core.executor.step()
    assert prefilled_tokens(drive) == 309 + 5 * 9
    assert [client.prefilled[0] for client in clients] == [0] + 5 * [300]
    drive.run()
    assert [cached(client) for client in clients] == [0] + 5 * [300]
    settle(drive)
    assert drive.prefix_cache.usage.usage().tokens == 300 + 6 * (10 + 3)
    for i, client in enumerate(clients):
        assert_same(client, serve(drive, [*shared, i, *prompt(9, seed=i)], 4, salt=f"alone {i}"))


@pytest.mark.parametrize("architecture", ["llama", *HYBRID])
def test_request_cancelled_in_prefill_leaves_its_tokens_cached(architecture: str) -> None:
    drive = Drive(tiny_loaded(architecture), EngineLimits(prefill_chunk_tokens=64))
    first = drive.submit([*prompt(300), 1, 2], 4, DRAWN)
    second = drive.submit([*prompt(300), 3, 4], 4, DRAWN)
    while first.prefilled[-1:] != [128]:
        drive.core.executor.step()
    assert not second.events
    drive.core.executor.end_request(first.request.id)
    drive.run()
    assert first.finished.usage.completion_tokens == 0
    assert cached(second) == 128
    assert prefilled_tokens(drive) == 301


def test_sixteen_requests_over_one_prefix_hold_it_once() -> None:
    drive = Drive(tiny_loaded("llama"), EngineLimits(buffer_step_tokens=60))
    serve(drive, prompt(64, seed=99), 2)
    drive.clear()
    before = active_bytes()
    shared = prompt(2000)
    clients = [drive.submit([*shared, *prompt(20, seed=i + 1)], 60, DRAWN) for i in range(16)]
    with without_cache():  # tails as small as these may else be put into freed buffers that are larger
        while not all(len(client.ids) > 3 for client in clients):
            drive.core.executor.step()
    held = active_bytes() - before
    one = 2000 * drive.budget.token_bytes + 16 * drive.budget.bytes_for(20 + 60)
    assert one * 0.95 <= held <= 1.15 * one
    drive.run()
    assert [cached(client) for client in clients] == [0] + 15 * [2000]


def test_waiting_requests_hold_no_kv() -> None:
    drive = Drive(tiny_loaded("qwen3_next"), EngineLimits(max_running=1))
    serve(drive, prompt(200), 2)
    running = drive.submit(prompt(100, seed=5), 500, DRAWN)
    while len(running.ids) < 3:
        drive.core.executor.step()
    before = active_bytes()
    waiting = [drive.submit([*prompt(150), i], 200, DRAWN) for i in range(20)]
    for _ in range(5):
        drive.core.executor.step()
    assert active_bytes() - before < 64_000
    assert sum(entry.num_leases for entry in drive.prefix_cache.table.entries) == 0
    for client in [running, *waiting]:
        drive.core.executor.end_request(client.request.id)
    drive.run()


# Models that can be resumed at some places only.


@pytest.mark.parametrize("architecture", HYBRID)
def test_prompt_that_diverges_after_a_checkpoint_resumes_from_it(architecture: str) -> None:
    drive = Drive(tiny_loaded(architecture))
    serve(drive, prompt(200), 4, resume_at=(70, 120))
    other = [*prompt(150), *prompt(40, seed=8)]
    assert cached(serve(drive, other)) == 120
    assert cached(serve(drive, [*other, 5])) == len(other) - 1


@pytest.mark.parametrize("architecture", HYBRID)
def test_chat_with_rewritten_reply_resumes_before_the_reply(architecture: str) -> None:
    drive = Drive(tiny_loaded(architecture))
    chat = prompt(80)  # system and user
    boundary = 0
    for turn in range(4):
        client = serve(drive, [*chat, 1, 2, 3], 20, resume_at=(len(chat),))
        assert cached(client) == boundary
        boundary = len(chat)
        # The reply begins in another way where what the model thought is left out.
        chat = [*chat, 4, 5, 6, *client.ids[12:], *prompt(15, seed=turn)]


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_session_with_rewritten_reply_supersedes_the_old_one(architecture: str) -> None:
    drive = Drive(tiny_loaded(architecture))
    chat, replies = prompt(80), 0
    for turn in range(3):
        client = serve(drive, [*chat, 1, 2, 3], 20, resume_at=(len(chat),), session="one")
        assert sum(node.num_tokens for node in drive.prefix_cache.candidates.superseded()) == replies
        replies += 3 + 19  # how the reply begins, and all of it but for its last token
        chat = [*chat, 4, 5, 6, *client.ids[12:], *prompt(15, seed=turn)]


@pytest.mark.parametrize("architecture", HYBRID)
def test_number_of_checkpoints_follows_the_setting(architecture: str) -> None:
    drive = Drive(tiny_loaded(architecture), storage=KvConfig(max_checkpoints=3, checkpoint_every_tokens=64))
    tokens = prompt(700)
    for turn in range(5):
        tokens = tokens + serve(drive, tokens, 4).ids + prompt(20, seed=turn)
        assert sum(len(entry.span.checkpoints) for entry in drive.prefix_cache.table.entries) <= 3
    drive.clear()
    assert drive.prefix_cache.table.nbytes == 0


@pytest.mark.parametrize("architecture", HYBRID)
def test_reused_checkpoints_outlive_newer_ones(architecture: str) -> None:
    drive = Drive(tiny_loaded(architecture), storage=KvConfig(max_checkpoints=3, checkpoint_every_tokens=64))
    tokens, first = prompt(150), prompt(150)
    for turn in range(8):
        # 110 has no mark of its own once the chat is longer: the last one before it is as good.
        resume_at = (70, 110, len(tokens) - 5)
        tokens = (
            tokens + serve(drive, tokens, 4, resume_at=resume_at if turn else (70, 100)).ids + prompt(20, seed=turn)
        )
        assert sum(len(entry.span.checkpoints) for entry in drive.prefix_cache.table.entries) <= 3 + len(resume_at)
    assert cached(serve(drive, [*first[:80], *prompt(40, seed=9)])) == 70
    assert cached(serve(drive, [*first[:112], *prompt(40, seed=10)])) == 100


@pytest.mark.usefixtures("exact_buffers")
def test_memory_is_constant_over_hundreds_of_requests() -> None:
    """Tests without a model, in tests/prefix_cache, run thousands."""
    drive = Drive(tiny_loaded("qwen3_next"))
    serve(drive, prompt(12), 1)
    room = 20 * drive.prefix_cache.table.nbytes
    drive = Drive(tiny_loaded("qwen3_next"), storage=KvConfig(hot_bytes=room))
    before = active_bytes()
    for i in range(320):
        drive.submit([i % 97, i // 97, *prompt(10, seed=i % 50)], 1, DRAWN)
        if i % 16 == 15:
            drive.run()
            settle(drive)
        if i % 80 == 79:
            assert drive.prefix_cache.table.nbytes <= room
            assert active_bytes() - before == pytest.approx(drive.prefix_cache.table.nbytes, rel=0.02)
    assert drive.prefix_cache.usage.counters()["evicted_tokens"] > 3000
    drive.clear()
    assert active_bytes() == before


@pytest.mark.parametrize("length", [40, 200])
def test_bounded_sequence_caches_the_kv_that_it_still_holds(length: int) -> None:
    drive = Drive(tiny_loaded("llama"), EngineLimits(max_kv_size=64, prefill_chunk_tokens=32))
    first = serve(drive, prompt(length), 6)
    second = serve(drive, prompt(length), 6)
    assert_same(second, first)
    assert cached(second) == length - 1
    longer = [*prompt(length), *first.ids, *prompt(10, seed=2)]
    assert_same(serve(drive, longer, 6), serve(drive, longer, 6, salt="cold"))
    # At the ends of two prompts and their replies, and of one under another salt.
    assert drive.prefix_cache.table.nbytes <= 6 * drive.budget.fixed_bytes


def test_bounded_sequence_is_cached_quantized() -> None:
    """Ring buffers are all that such a model keeps."""
    storage = KvConfig(k=parse("planes:8"), v=parse("planes:8"), min_quantize_tokens=0)
    drive = Drive(tiny_loaded("llama"), EngineLimits(max_kv_size=64), storage=storage)
    tokens = prompt(200)
    for turn in range(3):
        client = serve(drive, tokens, 6)
        assert cached(client) == (len(tokens) - 11 if turn else 0)
        tokens = [*tokens, *client.ids, *prompt(10, seed=turn)]
        assert set(drive.prefix_cache.usage.usage().by_precision) == {"planes:8"}
    assert drive.prefix_cache.table.nbytes < 6 * 0.45 * drive.budget.fixed_bytes


# How much, and in what precision.


def test_long_chat_of_many_turns_has_few_spans() -> None:
    drive = Drive(tiny_loaded("llama"))
    tokens = prompt(60)
    for turn in range(20):
        client = drive.submit(tokens, 8)
        drive.run()
        settle(drive)
        # The last token of a reply is never computed, so it is not stored.
        assert client.finished.usage.cached_tokens == (len(tokens) - 7 - 1 if turn else 0)
        tokens = [*tokens, *client.ids, *prompt(7, seed=turn)]
    assert len(drive.prefix_cache.table.entries) <= 9
    assert drive.prefix_cache.table.nbytes == pytest.approx(len(tokens) * drive.budget.token_bytes, rel=0.05)


@pytest.mark.parametrize("name", ["raw", "planes:8"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
def test_chat_of_eight_turns_holds_little_more_than_its_last_state(architecture: str, name: str) -> None:
    storage = KvConfig(k=parse(name), v=parse(name), min_quantize_tokens=0)
    drive, last = Drive(tiny_loaded(architecture), storage=storage), Drive(tiny_loaded(architecture), storage=storage)
    asked = tokens = prompt(200)
    for turn in range(8):
        client = serve(drive, tokens, 10)
        asked, tokens = tokens, [*tokens, *client.ids, *prompt(40, seed=turn)]
    serve(last, asked, 10)
    held, alone = drive.prefix_cache.usage.usage(), last.prefix_cache.usage.usage()
    assert alone.tokens == held.tokens
    assert held.by_kind["full"] <= 1.1 * alone.by_kind["full"]


@pytest.mark.parametrize(("length", "name"), [(252, "raw"), (253, "planes:8")])
def test_shorter_sequences_stay_raw(length: int, name: str) -> None:
    """Three tokens of a reply of four are cached."""
    drive = Drive(tiny_loaded("llama"), storage=KvConfig(k=parse("planes:8"), v=parse("planes:8")))
    serve(drive, prompt(length), 4)
    assert drive.prefix_cache.usage.usage().tokens in (255, 256)
    assert set(drive.prefix_cache.usage.usage().by_precision) == {name}


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_chat_of_short_turns_is_encoded_once_it_is_long(architecture: str) -> None:
    drive = Drive(tiny_loaded(architecture), storage=KvConfig(k=parse("planes:4"), v=parse("planes:4")))
    tokens: list[int] = []
    for turn in range(8):
        tokens = tokens + prompt(50, seed=turn)
        tokens = tokens + serve(drive, tokens, 10).ids
        precisions = set(drive.prefix_cache.usage.usage().by_precision)
        assert precisions == ({"planes:4"} if len(tokens) - 1 >= 256 else {"raw"})


def test_negative_shortest_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-min-quantize-tokens"):
        load(flags={"kv_cache_min_quantize_tokens": -1})


def test_prompt_repeated_a_hundred_times_is_encoded_once() -> None:
    drive = Drive(tiny_loaded("llama"), storage=KvConfig(k=parse("planes:8"), v=parse("planes:8")))
    clients = []
    for _ in range(100):
        clients.append(drive.submit(prompt(300), 2))
        drive.run()
        settle(drive)
    assert cached(clients[-1]) == 299
    counters = drive.prefix_cache.usage.counters()
    assert counters["encoded_spans"] == counters["stored_spans"] == 1
    assert counters["refused_present"] == 99
    assert counters["hit_tokens"] == 99 * 299
    assert counters["queried_tokens"] == 100 * 299


def test_live_sequences_are_encoded_and_finish() -> None:
    storage = KvConfig(k=parse("planes:8"), v=parse("planes:8"), encodes_running=True)
    drive = Drive(tiny_loaded("llama"), EngineLimits(prefill_chunk_tokens=128), storage=storage)
    clients = [drive.submit([*prompt(700), *prompt(50, seed=i + 1)], 300, DRAWN) for i in range(3)]
    while not all(len(client.ids) > 270 for client in clients):
        drive.core.executor.step()
    sequences = drive.cache.usage().sequences
    assert len(sequences) == 3
    # Beside the newest of each there are those that came since it was last encoded.
    assert all(sequence.parts[-1].tokens <= 128 + 256 + 4 for sequence in sequences)
    names = {
        name for sequence in drive.cache.usage().sequences for name in (sequence.parts[-2].k, sequence.parts[-1].k)
    }
    assert names == {"planes:8", "raw"}
    drive.run()
    assert all(client.finished.usage.completion_tokens == 300 for client in clients)
    settle(drive)
    assert cached(serve(drive, [*prompt(700), *prompt(50, seed=1)])) == 749


def test_running_sequence_stays_raw_without_live() -> None:
    storage = KvConfig(k=parse("planes:2"), v=parse("planes:2"))
    drive = Drive(tiny_loaded("llama"), storage=storage)
    running = drive.submit(prompt(400), 60, DRAWN)
    while len(running.ids) < 20:
        drive.core.executor.step()
    other = drive.submit([*prompt(300), 1, 2], 60, DRAWN)
    drive.run()
    settle(drive)
    for client in (running, other):
        tokens = list(client.request.prompt)
        raw = Drive(tiny_loaded("llama"))
        assert_same(client, serve(raw, tokens, 60))
    assert set(drive.prefix_cache.usage.usage().by_precision) == {"planes:2"}


# Who shares with whom.


def test_other_salt_has_no_hit() -> None:
    drive = Drive(tiny_loaded("llama"))
    serve(drive, prompt(200), salt="a")
    assert cached(serve(drive, prompt(200), salt="b")) == 0
    assert cached(serve(drive, prompt(200))) == 0
    assert cached(serve(drive, prompt(200), salt="a")) == 199


def test_expired_prefix_is_no_hit() -> None:
    drive = Drive(tiny_loaded("llama"), storage=KvConfig(ttl_s=60))
    serve(drive, prompt(200))
    drive.clock.advance(40)
    assert cached(serve(drive, prompt(200))) == 199
    drive.clock.advance(40)
    assert cached(serve(drive, prompt(200))) == 199
    drive.clock.advance(61)
    late = serve(drive, prompt(200))
    assert cached(late) == 0
    assert len(late.ids) == 4


def test_prompt_is_counted_once_however_often_its_request_tries_to_start() -> None:
    """Neither a start without memory nor a resumption after preemption counts again."""
    drive = Drive(tiny_loaded("llama"))
    drive.submit(prompt(300), 2)
    drive.run()
    before = dict(drive.prefix_cache.usage.counters())
    sequence = Sequence(Request("tried", tuple(prompt(300)), 2, GREEDY), lambda _: None, 2, 99)
    prefixes = drive.core.prefix_lookup
    prefixes.track_sequence(sequence)
    for _ in range(3):
        assert not prefixes.start(sequence, lambda _: 0)
        assert drive.prefix_cache.usage.counters()["queried_tokens"] == before["queried_tokens"]
    assert prefixes.start(sequence, lambda _: 256)
    prefixes.finish(sequence, "preempted")
    sequence.preempt()
    assert prefixes.start(sequence, lambda _: 256)
    prefixes.finish(sequence, "ended")
    after = drive.prefix_cache.usage.counters()
    assert after["queried_tokens"] - before["queried_tokens"] == 299
    assert after["hit_tokens"] - before.get("hit_tokens", 0) == 299
