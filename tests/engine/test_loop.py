"""Step executor over tiny models: batching, fairness, memory, preemption."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest

from kvstrata.engine.config import EngineLimits
from kvstrata.engine.request import Sampling, TokenUsage
from kvstrata.engine.scheduler import PassCost
from kvstrata.engine.sequence import Sequence
from kvstrata.kv.mixed_pass import MixedPass
from tests.engine.drive import GREEDY, Client, Drive
from tests.support.models import VOCAB, tiny_loaded

MIB = 1 << 20


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def alone(architecture: str, tokens: list[int], max_tokens: int, sampling: Sampling) -> Client:
    drive = Drive(tiny_loaded(architecture))
    client = drive.submit(tokens, max_tokens, sampling)
    drive.run()
    return client


def assert_same(client: Client, expected: Client) -> None:
    assert client.ids == expected.ids
    assert [row.logprob for row in client.logprobs] == pytest.approx(
        [row.logprob for row in expected.logprobs], abs=1e-4
    )


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"])
def test_batched_requests_that_come_and_go_reply_as_alone(architecture: str) -> None:
    drive = Drive(tiny_loaded(architecture), EngineLimits(max_running=3, prefill_chunk_tokens=16))
    sampling = [Sampling(temperature=1.0, seed=i, num_logprobs=0) for i in range(6)]
    clients = []
    for i in range(6):
        clients.append(drive.submit(prompt(5 + 13 * i, seed=i), 10 + 3 * i, sampling[i]))
        for _ in range(3):
            drive.core.executor.step()
    drive.run()
    for i, client in enumerate(clients):
        assert_same(client, alone(architecture, prompt(5 + 13 * i, seed=i), 10 + 3 * i, sampling[i]))


def test_first_token_arrives_before_the_next_step_is_read() -> None:
    """Later steps overlap: each token is read while the next step is pending."""
    drive = Drive(tiny_loaded("llama"))
    client = drive.submit(prompt(1), 4)
    seen = []
    while not drive.core.executor.is_idle:
        drive.core.executor.step()
        seen.append(len(client.ids))
    assert seen == [1, 1, 2, 3, 4]


def watch_mixed_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of prompt chunks in each mixed pass."""
    passes: list[int] = []
    run = MixedPass.__init__

    def watched(mixed: MixedPass, chunks: list[Any], *given: Any, **options: Any) -> None:
        passes.append(len(chunks))
        run(mixed, chunks, *given, **options)

    monkeypatch.setattr(MixedPass, "__init__", watched)
    return passes


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
def test_chunk_of_one_token_attends_like_longer_chunks(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(tiny_loaded(architecture))
    passes = watch_mixed_passes(monkeypatch)
    sampling = Sampling(temperature=0, num_logprobs=0)
    client = drive.submit(prompt(2), 6, sampling)
    drive.run()
    assert passes == ([1] if drive.core.runner.mixes else [])
    monkeypatch.setattr(type(drive.core.runner), "mixes", False)
    assert_same(client, alone(architecture, prompt(2), 6, sampling))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_short_prompts_in_shared_passes_reply_as_alone(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a pass costs as much as hundreds of tokens."""
    drive = Drive(tiny_loaded(architecture))
    drive.core.speeds.pass_cost = PassCost(pass_tokens=120)
    passes = watch_mixed_passes(monkeypatch)
    # Each ends with a pass that it shares: while no stream runs, and beside those that run then.
    lengths = [30, 50, 7, 90, 40, 25]
    clients = [drive.submit(prompt(length, seed=i), 8 + i) for i, length in enumerate(lengths)]
    drive.run()
    if architecture == "llama":
        assert max(passes) >= 3
        assert len(passes) < len(lengths)
    else:
        assert max(passes) == 1, "each window would take memory of its own"
    for i, client in enumerate(clients):
        assert_same(client, alone(architecture, prompt(lengths[i], seed=i), 8 + i, GREEDY))


def test_usage_counts_prompt_and_reply_tokens() -> None:
    client = alone("llama", prompt(9), 5, Sampling(temperature=0))
    assert client.finished.usage == TokenUsage(prompt_tokens=9, cached_tokens=0, completion_tokens=5)
    assert client.finished.reason == "length"
    assert len(client.text) == 5


def test_prompt_of_one_token_gets_a_reply() -> None:
    assert len(alone("llama", [3], 4, Sampling(temperature=0)).ids) == 4


def test_stop_ids_end_the_reply_and_are_not_emitted() -> None:
    drive = Drive(tiny_loaded("llama"))
    free = alone("llama", prompt(9), 12, Sampling(temperature=1.0, seed=1))
    end = free.ids[4]
    client = drive.submit(prompt(9), 12, Sampling(temperature=1.0, seed=1), stop_ids=frozenset({end}))
    drive.run()
    assert client.finished.reason == "stop"
    assert client.ids == free.ids[: free.ids.index(end)]
    assert client.finished.usage.completion_tokens == len(client.ids) + 1
    assert client.finished.ids == (*client.ids, end)


def test_stop_string_is_never_emitted() -> None:
    sampling = Sampling(temperature=1.0, seed=1, num_logprobs=0)
    free = alone("llama", prompt(9), 12, sampling)
    drive = Drive(tiny_loaded("llama"))
    client = drive.submit(prompt(9), 12, sampling, stop=(free.text[5:7],))
    drive.run()
    assert client.finished.reason == "stop"
    assert client.text == free.text[: free.text.index(free.text[5:7])]
    assert client.finished.ids == tuple(free.ids[: len(client.finished.ids)])
    assert len(client.finished.ids) == client.finished.usage.completion_tokens
    # Nor by its tokens.
    assert client.ids == free.ids[: len(client.text)]
    assert len(client.logprobs) == len(client.ids)


@pytest.mark.parametrize("phase", range(4))
def test_first_token_waits_for_at_most_two_chunks_of_a_long_prompt(phase: int) -> None:
    drive = Drive(tiny_loaded("llama"), EngineLimits(prefill_chunk_tokens=256))
    long = drive.submit(prompt(10 * 256), 4)
    while len(long.prefilled) < 4 + phase:
        drive.core.executor.step()
    # It came while the last of these chunks was computed: that one counts.
    before = len(long.prefilled) - 1
    short = drive.submit(prompt(20, seed=1), 4)
    while not short.ids:
        drive.core.executor.step()
    assert len(long.prefilled) - before <= 2
    assert not long.ids
    drive.run()
    assert long.finished.usage.completion_tokens == 4


@pytest.mark.parametrize("architecture", ["llama", "mamba2", "qwen3_next", "gemma3_text"])
def test_memory_account_equals_arrays_of_a_batch(architecture: str) -> None:
    drive = Drive(tiny_loaded(architecture), EngineLimits(buffer_step_tokens=2000))
    warm = drive.submit(prompt(5), 2)
    drive.run()
    assert warm.end is not None
    drive.clear()
    before = mx.get_active_memory()
    clients = [drive.submit(prompt(300 + i), 1000) for i in range(8)]
    while not all(client.ids for client in clients):
        drive.core.executor.step()
    counted = drive.core.state().kv_bytes
    # Beside it, a step in flight: a few vectors for each row.
    assert counted <= mx.get_active_memory() - before <= counted * 1.02 + 200_000
    for client in clients:
        drive.core.executor.end_request(client.request.id)
    drive.run()


def test_prefill_progress_is_reported() -> None:
    drive = Drive(tiny_loaded("llama"), EngineLimits(prefill_chunk_tokens=256))
    client = drive.submit(prompt(1000), 1)
    drive.run()
    assert client.prefilled == [0, 256, 512, 768, 999]


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_sequence_without_memory_to_grow_is_preempted_and_resumed(architecture: str) -> None:
    loaded = tiny_loaded(architecture)
    budget = Drive(loaded).budget
    # Room for both to begin, not for both to end.
    drive = Drive(
        loaded, EngineLimits(buffer_step_tokens=16), kv_bytes=2 * budget.fixed_bytes + 150 * budget.token_bytes
    )
    sampling = Sampling(temperature=1.0, seed=5, num_logprobs=0)
    clients = [drive.submit(prompt(30, seed=i), 70, sampling) for i in range(2)]
    drive.run()
    assert drive.num_preempted() >= 1
    for i, client in enumerate(clients):
        assert_same(client, alone(architecture, prompt(30, seed=i), 70, sampling))
        # What was generated before is not reported as prefill of the prompt.
        assert client.prefilled == sorted(client.prefilled)
        assert max(client.prefilled) <= 30


def test_memory_never_exceeds_the_budget() -> None:
    loaded = tiny_loaded("llama")
    drive = Drive(
        loaded, EngineLimits(buffer_step_tokens=16, max_running=8), kv_bytes=400 * Drive(loaded).budget.token_bytes
    )
    clients = [drive.submit(prompt(20 + i, seed=i), 90) for i in range(8)]
    while not drive.core.executor.is_idle:
        drive.core.executor.step()
        assert drive.core.state().kv_bytes <= drive.budget.total_bytes
    assert all(client.finished.usage.completion_tokens == 90 for client in clients)


def test_joining_and_leaving_a_batch_copies_no_other_kv() -> None:
    drive = Drive(tiny_loaded("llama", 4), EngineLimits(buffer_step_tokens=40_000))
    big = drive.submit(prompt(300), 40_000)
    while len(big.ids) < 3:
        drive.core.executor.step()
    held = drive.core.state().kv_bytes
    assert held > 38 * MIB
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for i in range(4):
        small = drive.submit(prompt(20, seed=i), 3)
        while small.end is None:
            drive.core.executor.step()
    assert mx.get_peak_memory() - before < held / 20
    drive.core.executor.end_request(big.request.id)
    drive.run()


def test_no_memory_is_held_after_the_last_reply() -> None:
    drive = Drive(tiny_loaded("qwen3_next"))
    drive.submit(prompt(50), 5)
    drive.run()
    drive.clear()
    before = mx.get_active_memory()
    for i in range(5):
        drive.submit(prompt(500 + i, seed=i), 100 + i)
    drive.core.executor.end_request("r3")
    drive.run()
    drive.clear()
    assert mx.get_active_memory() <= before * 1.01
    assert drive.core.state().kv_bytes == 0


def test_cancel_ends_waiting_and_running_requests() -> None:
    drive = Drive(tiny_loaded("llama"), EngineLimits(max_running=1))
    running, waiting = drive.submit(prompt(10), 1000), drive.submit(prompt(10), 1000)
    while len(running.ids) < 5:
        drive.core.executor.step()
    drive.core.executor.end_request(waiting.request.id)
    drive.core.executor.end_request(running.request.id)
    drive.core.executor.end_request("unknown")
    drive.run()
    assert running.finished.reason == waiting.finished.reason == "cancelled"
    assert waiting.finished.usage.completion_tokens == 0


def step_to_first_token(drive: Drive, client: Client) -> Sequence:
    """Run steps until the first token, which no pending step follows."""
    while not client.ids:
        drive.core.executor.step()
    (sequence,) = drive.core.sequences.all
    return sequence


def test_accept_tokens_drops_those_after_a_stop_token() -> None:
    first, *others = range(5, VOCAB)
    drive = Drive(tiny_loaded("llama"))
    sampling = Sampling(temperature=0, logit_bias=((first, 100.0),))
    client = drive.submit(prompt(9), 12, sampling, stop_ids=frozenset({others[2]}))
    sequence = step_to_first_token(drive, client)
    drive.core.executor.accept_tokens(sequence, others[:4], [None] * 4)
    assert client.finished.reason == "stop"
    assert client.finished.ids == (first, *others[:3])
    assert client.ids == [first, *others[:2]]
    assert drive.core.executor.is_idle


def test_accept_tokens_ends_at_the_limit_of_the_reply() -> None:
    drive = Drive(tiny_loaded("llama"))
    client = drive.submit(prompt(9), 3)
    sequence = step_to_first_token(drive, client)
    drive.core.executor.accept_tokens(sequence, [5, 6, 7], [None] * 3)
    assert client.finished.reason == "length"
    assert client.ids[1:] == [5, 6]


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_reply_continues_after_several_tokens_at_once(architecture: str) -> None:
    expected = alone(architecture, prompt(9), 12, GREEDY)
    drive = Drive(tiny_loaded(architecture))
    client = drive.submit(prompt(9), 12)
    sequence = step_to_first_token(drive, client)
    sequence.num_launched += 3
    drive.core.executor.accept_tokens(sequence, expected.ids[1:4], [None] * 3)
    drive.run()
    assert client.ids == expected.ids
