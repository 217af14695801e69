"""Conversation tracking: abandoned branches are evicted first and not written, and nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstrata.prefix_cache.conversations import MAX_CONVERSATIONS, REPLY_START_TOKENS
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from tests.prefix_cache.disk import reachable, store_on, written
from tests.prefix_cache.kv import TOKEN_BYTES, Clock, Run, new_cache, settle, store_tokens

PROMPT = tuple(range(1000, 1100))
THINKING = tuple(range(2000, 2060))
ANSWER = tuple(range(3000, 3020))


def serve(cache: PrefixCache, prompt: Sequence[int], reply: Sequence[int], salt: str = "", *, session: str = "") -> int:
    """Run a request to its end. Return how many prompt tokens were cached."""
    run = Run(cache, prompt, salt, room=len(reply), session=session)
    cached = run.num_computed
    run.tokens = (*prompt, *reply)
    run.compute(run.left)
    run.end()
    return cached


def superseded_tokens(cache: PrefixCache) -> int:
    return sum(node.num_tokens for node in cache.candidates.superseded())


def cached_tokens(cache: PrefixCache, tokens: Sequence[int]) -> int:
    return cache.lookup(tokens, "").num_tokens


def test_tokens_behind_divergence_are_superseded_and_evicted_first() -> None:
    cache = new_cache()
    serve(cache, PROMPT, THINKING + ANSWER, session="a")
    assert superseded_tokens(cache) == 0
    store_tokens(cache, (*PROMPT, *ANSWER, 1, 2, 3), session="a")
    assert superseded_tokens(cache) == len(THINKING + ANSWER)
    settle(cache)
    cache.evictor.evict_to(cache.table.nbytes - 1)
    assert cached_tokens(cache, (*PROMPT, *ANSWER, 1, 2, 3)) == len(PROMPT) + len(ANSWER) + 3
    assert cached_tokens(cache, PROMPT + THINKING + ANSWER) == len(PROMPT)
    assert cache.counters["evicted_tokens"] == len(THINKING + ANSWER)


def test_chat_that_only_grows_supersedes_nothing() -> None:
    cache = new_cache()
    tokens = PROMPT
    for turn in range(5):
        tokens = (*tokens, *range(turn * 50, turn * 50 + 50))
        store_tokens(cache, tokens, session="a")
    assert superseded_tokens(cache) == 0


@pytest.mark.parametrize("others", ["b", ""])
def test_tokens_used_by_another_session_are_not_superseded(others: str) -> None:
    cache = new_cache()
    serve(cache, PROMPT, THINKING, session="a")
    store_tokens(cache, (*PROMPT, *THINKING, 7, 8), session=others)
    store_tokens(cache, (*PROMPT, *ANSWER, 1), session="a")
    assert superseded_tokens(cache) == 0


def test_requests_without_session_supersede_nothing() -> None:
    cache = new_cache()
    serve(cache, PROMPT, THINKING)
    store_tokens(cache, (*PROMPT, *ANSWER, 1))
    assert superseded_tokens(cache) == 0


def test_sessions_with_different_salts_are_separate() -> None:
    cache = new_cache()
    serve(cache, PROMPT, THINKING, "mine", session="a")
    store_tokens(cache, (*PROMPT, *ANSWER, 1), "yours", session="a")
    assert superseded_tokens(cache) == 0


def test_superseded_tokens_recover_when_used_again() -> None:
    cache = new_cache()
    serve(cache, PROMPT, THINKING, session="a")
    store_tokens(cache, (*PROMPT, *ANSWER, 1), session="a")
    assert superseded_tokens(cache) == len(THINKING)
    store_tokens(cache, (*PROMPT, *THINKING, 5), session="b")
    assert superseded_tokens(cache) == 0


def test_second_conversation_of_session_supersedes_nothing() -> None:
    """Send what agents send: a title request, or a second agent with the same system message."""
    cache = new_cache()
    serve(cache, PROMPT, THINKING, session="a")
    other = (*PROMPT[:70], *range(5000, 5040))
    assert len(PROMPT) - 70 > REPLY_START_TOKENS
    store_tokens(cache, other, session="a")
    assert superseded_tokens(cache) == 0
    # Both conversations continue, each on its own branch.
    store_tokens(cache, (*PROMPT, *THINKING, 1, 2), session="a")
    store_tokens(cache, (*other, 3, 4), session="a")
    assert superseded_tokens(cache) == 0
    store_tokens(cache, (*PROMPT, *THINKING, 9, 9), session="a")
    assert superseded_tokens(cache) == 2


def test_pinned_superseded_tokens_stay_until_unpinned() -> None:
    cache = new_cache()
    serve(cache, PROMPT, THINKING, session="a")
    cache.pins.pin(PROMPT + THINKING, "")
    store_tokens(cache, (*PROMPT, *ANSWER, 1), session="a")
    settle(cache)
    cache.evictor.evict_to(0)
    assert cached_tokens(cache, PROMPT + THINKING) == len(PROMPT + THINKING)
    cache.pins.unpin(PROMPT + THINKING, "")
    cache.evictor.evict_to(cache.table.nbytes - 1)
    assert cached_tokens(cache, PROMPT + THINKING) < len(PROMPT + THINKING)


@pytest.mark.parametrize(("num_later", "num_superseded"), [(MAX_CONVERSATIONS - 1, 60), (MAX_CONVERSATIONS, 0)])
def test_tracker_forgets_oldest_conversation_of_a_full_session(num_later: int, num_superseded: int) -> None:
    cache = new_cache()
    serve(cache, PROMPT, THINKING, session="a")
    for number in range(num_later):
        first = 10_000 + 100 * number
        serve(cache, range(first, first + 50), range(first + 50, first + 60), session="a")
    store_tokens(cache, (*PROMPT, *ANSWER, 1), session="a")
    assert superseded_tokens(cache) == num_superseded


def hit_rate(session_of: str, *, seed: int, share: float, num_chats: int = 12, num_turns: int = 200) -> float:
    """Return the hit rate of chats whose next prompt omits the thinking, in a cache that holds a share of them.

    `session_of` is the prefix of the session names; empty: no session.
    """
    rng = random.Random(seed)
    clock = Clock()
    chats = [tuple(rng.randrange(10_000) for _ in range(150)) for _ in range(num_chats)]
    num_tokens = num_chats * 400
    cache = new_cache(hot_bytes=int(share * num_tokens * TOKEN_BYTES), clock=clock)
    num_cached = num_prompt_tokens = 0
    for _ in range(num_turns):
        number = min(int(rng.expovariate(3 / num_chats)), num_chats - 1)
        prompt = chats[number]
        thinking, answer, user = ([rng.randrange(10_000) for _ in range(length)] for length in (80, 15, 15))
        session = f"{session_of}{number}" if session_of else ""
        num_cached += serve(cache, prompt, (*thinking, *answer), session=session)
        num_prompt_tokens += len(prompt)
        settle(cache)
        cache.reclaimer.shrink_to(cache.table.max_bytes)
        clock.now_s += rng.expovariate(1 / 20)
        chats[number] = (*prompt, *answer, *user)
        if len(chats[number]) > 500:
            chats[number] = tuple(rng.randrange(10_000) for _ in range(150))
    return num_cached / num_prompt_tokens


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_session_names_raise_hit_rate(share: float) -> None:
    before, after = (hit_rate(session_of, seed=0, share=share) for session_of in ("", "chat"))
    assert after > before + 0.04


def test_superseded_tokens_are_not_written_to_disk(tmp_path: Path) -> None:
    with store_on(tmp_path) as cache:
        serve(cache, PROMPT, THINKING, session="a")
        serve(cache, (*PROMPT, *ANSWER, 1), (2, 3), session="a")
        settle(cache)
        cache.evictor.evict_to(cache.table.nbytes - 1)
        assert cache.counters["dropped_tokens_superseded"] == len(THINKING)
        cache.evictor.evict_to(0)
        assert reachable(cache, [*PROMPT, *ANSWER, 1, 2, 3]) == len(PROMPT) + len(ANSWER) + 3
        assert reachable(cache, [*PROMPT, *THINKING]) == len(PROMPT)


def test_flush_writes_only_tokens_that_conversations_continue_from(tmp_path: Path) -> None:
    with store_on(tmp_path) as cache:
        serve(cache, PROMPT, THINKING, session="a")
        serve(cache, (*PROMPT, *ANSWER, 1), (2, 3), session="a")
        left = cache.flush(60)
        assert left.tokens == 0
        assert written(cache) == reachable(cache, [*PROMPT, *ANSWER, 1, 2, 3]) == len(PROMPT) + len(ANSWER) + 3
