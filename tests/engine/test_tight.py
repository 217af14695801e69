"""Memory for hardly more than one sequence: an accepted request proceeds, whatever else is cached."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.request import Failed, Finished
from kvstrata.errors import NeverFits
from tests.engine.drive import Client, Drive
from tests.engine.test_loop import assert_same, prompt
from tests.engine.test_prefixes import DRAWN, cached, serve, settle, steady_loaded

MARKS = ("gemma3_text", "qwen3_next")
SIZE_TOKENS = 400


def tight(architecture: str = "llama", **limits: Any) -> Drive:
    loaded = steady_loaded(architecture)
    budget = Drive(loaded).budget
    kv_bytes = budget.bytes_for(SIZE_TOKENS)
    return Drive(loaded, EngineLimits(**limits), kv_bytes=kv_bytes, storage=KvConfig(checkpoint_every_tokens=64))


def assert_same_with_enough_memory(client: Client, architecture: str = "llama") -> None:
    """Assert the reply that the request gets with enough memory for all."""
    request = client.request
    drive = Drive(steady_loaded(architecture))
    alone = drive.submit(list(request.prompt), request.max_tokens, DRAWN)
    drive.run()
    assert_same(client, alone)


def test_hit_on_a_long_conversation_evicts_only_its_unused_end() -> None:
    """The prefix begins the conversation that fills memory: only as much of its end as necessary is evicted."""
    drive = tight()
    serve(drive, long := prompt(360))
    branch = serve(drive, [*long[:40], *prompt(180, seed=9)])
    assert cached(branch) == 40
    assert_same_with_enough_memory(branch)
    assert 40 < cached(serve(drive, long)) < 359


def test_sequence_that_outgrows_memory_evicts_its_own_prefix() -> None:
    drive = tight(buffer_step_tokens=32)
    serve(drive, long := prompt(250))
    branch = serve(drive, [*long[:40], *prompt(40, seed=9)], 280)
    assert branch.finished.usage.completion_tokens == 280
    assert_same_with_enough_memory(branch)


@pytest.mark.parametrize("architecture", MARKS)
def test_sequence_that_outgrows_memory_drops_its_own_checkpoints(architecture: str) -> None:
    drive = tight(architecture, buffer_step_tokens=32)
    only = serve(drive, prompt(200), SIZE_TOKENS - 199)
    assert only.finished.usage.completion_tokens == SIZE_TOKENS - 199
    assert_same_with_enough_memory(only, architecture)


def test_prompt_that_does_not_fit_beside_pins_fails_and_delays_no_other() -> None:
    drive = tight()
    serve(drive, long := prompt(360))
    drive.prefix_cache.pins.pin(long, "")
    large, small = drive.submit(prompt(200, seed=9)), drive.submit(prompt(20, seed=8))
    drive.run()
    assert isinstance(large.end, Failed)
    assert large.end.reason == "pinned"
    assert "pinned" in large.end.message
    assert isinstance(small.end, Finished)
    drive.prefix_cache.pins.unpin(long, "")
    assert serve(drive, prompt(200, seed=9)).finished


def test_reply_beside_pins_ends_at_the_memory_limit() -> None:
    drive = tight(buffer_step_tokens=64)
    serve(drive, other := prompt(150, seed=9), 1)
    drive.prefix_cache.pins.pin(other, "")
    pinned = drive.prefix_cache.table.nbytes // drive.budget.token_bytes
    reply = serve(drive, prompt(100), SIZE_TOKENS - 100)
    assert reply.finished.reason == "length"
    # All that was free, and what it had computed stays.
    assert reply.finished.usage.completion_tokens == SIZE_TOKENS - pinned - 100 + 1
    assert cached(serve(drive, prompt(100))) == 99


def test_requests_behind_an_unservable_one_start_at_once() -> None:
    drive = tight()
    serve(drive, long := prompt(360))
    drive.prefix_cache.pins.pin(long, "")
    large = [drive.submit(prompt(200, seed=10 + number)) for number in range(5)]
    small = drive.submit(prompt(20, seed=8), 1)
    drive.core.executor.step()
    assert all(isinstance(client.end, Failed) for client in large)
    assert not drive.core.executor.is_stalled
    drive.run(5)
    assert isinstance(small.end, Finished)


def test_preempted_prompt_counts_as_one_request() -> None:
    drive = tight(buffer_step_tokens=16)
    clients = [drive.submit(prompt(100, seed=seed), 150, DRAWN) for seed in range(3)]
    drive.run()
    assert drive.num_preempted() > 0
    assert all(client.finished for client in clients)
    assert drive.prefix_cache.counters["queried_tokens"] == sum(len(prompt(100, seed=seed)) - 1 for seed in range(3))


@pytest.mark.parametrize("architecture", ["llama", *MARKS])
@pytest.mark.parametrize("seed", range(2))
def test_every_accepted_request_is_served(architecture: str, seed: int) -> None:
    rng = random.Random(seed)
    drive = tight(architecture, buffer_step_tokens=16)
    shared = prompt(150, seed=seed)
    clients = []
    for number in range(10):
        tokens = [*shared[: rng.choice((0, 30, 64, 150))], *prompt(rng.randint(1, 100), seed=100 + number)]
        if clients and rng.random() < 0.3:
            before = rng.choice(clients)
            tokens = [*before.request.prompt, *before.ids, *prompt(rng.randint(1, 30), seed=number)]
        try:
            clients.append(drive.submit(tokens, rng.choice((1, 20, 120)), DRAWN))
        except NeverFits:
            continue
        for _ in range(rng.choice((0, 3, 40))):
            drive.core.executor.step()
    drive.run(20_000)
    settle(drive)
    for client in clients:
        assert isinstance(client.end, Finished), client.end
    assert_same_with_enough_memory(rng.choice(clients), architecture)
    assert drive.prefix_cache.table.evictable_bytes == drive.prefix_cache.table.nbytes <= drive.budget.total_bytes


def test_recurrent_model_fits_with_or_without_its_checkpoints() -> None:
    """A recurrent model holds state only: memory has space for one sequence and no checkpoint beside it."""
    loaded = steady_loaded("mamba2")
    budget = Drive(loaded).budget
    assert budget.token_bytes == 0
    drive = Drive(loaded, kv_bytes=budget.bytes_for(1))
    first = serve(drive, prompt(40))
    again = serve(drive, [*prompt(40), *first.ids, *prompt(5, seed=9)])
    assert_same_with_enough_memory(again, "mamba2")
