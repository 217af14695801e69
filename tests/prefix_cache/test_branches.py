"""What conversations leave behind goes first, and nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstrata.prefix_cache.conversations import MAX_CONVERSATIONS, REPLY_START_TOKENS, ConversationTracker
from kvstrata.prefix_cache.entries import Thread
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from tests.prefix_cache.disk import reachable, store_on, written
from tests.prefix_cache.kv import TOKEN_BYTES, Clock, Run, new_cache, settle, store_tokens

PROMPT = tuple(range(1000, 1100))
THOUGHT = tuple(range(2000, 2060))
SAID = tuple(range(3000, 3020))


def serve(cache: PrefixCache, prompt: Sequence[int], reply: Sequence[int], salt: str = "", *, session: str = "") -> int:
    """Tells how many tokens of the prompt were there."""
    run = Run(cache, prompt, salt, room=len(reply), session=session)
    cached = run.num_computed
    run.tokens = (*prompt, *reply)
    run.compute(run.left)
    run.end()
    return cached


def superseded_tokens(cache: PrefixCache) -> int:
    return sum(node.num_tokens for node in cache.candidates.superseded())


def stored(cache: PrefixCache, tokens: Sequence[int]) -> int:
    return cache.lookup(tokens, "").num_tokens


def test_what_lies_behind_the_parting_point_is_superseded() -> None:
    cache = new_cache()
    serve(cache, PROMPT, THOUGHT + SAID, session="a")
    assert superseded_tokens(cache) == 0
    store_tokens(cache, (*PROMPT, *SAID, 1, 2, 3), session="a")
    assert superseded_tokens(cache) == len(THOUGHT + SAID)
    settle(cache)
    cache.evictor.shrink_to(cache.table.nbytes - 1)
    assert stored(cache, (*PROMPT, *SAID, 1, 2, 3)) == len(PROMPT) + len(SAID) + 3
    assert stored(cache, PROMPT + THOUGHT + SAID) == len(PROMPT)
    assert cache.counters["evicted_tokens"] == len(THOUGHT + SAID)


def test_a_chat_that_goes_on_as_it_was_supersedes_nothing() -> None:
    cache = new_cache()
    tokens = PROMPT
    for turn in range(5):
        tokens = (*tokens, *range(turn * 50, turn * 50 + 50))
        store_tokens(cache, tokens, session="a")
    assert superseded_tokens(cache) == 0


@pytest.mark.parametrize("others", ["b", ""])
def test_what_another_session_used_stays_as_it_is(others: str) -> None:
    cache = new_cache()
    serve(cache, PROMPT, THOUGHT, session="a")
    store_tokens(cache, (*PROMPT, *THOUGHT, 7, 8), session=others)
    store_tokens(cache, (*PROMPT, *SAID, 1), session="a")
    assert superseded_tokens(cache) == 0


def test_without_sessions_nothing_is_superseded() -> None:
    cache = new_cache()
    serve(cache, PROMPT, THOUGHT)
    store_tokens(cache, (*PROMPT, *SAID, 1))
    assert superseded_tokens(cache) == 0


def test_sessions_of_other_salts_are_others() -> None:
    cache = new_cache()
    serve(cache, PROMPT, THOUGHT, "mine", session="a")
    store_tokens(cache, (*PROMPT, *SAID, 1), "yours", session="a")
    assert superseded_tokens(cache) == 0


def test_who_comes_back_makes_it_normal_again() -> None:
    cache = new_cache()
    serve(cache, PROMPT, THOUGHT, session="a")
    store_tokens(cache, (*PROMPT, *SAID, 1), session="a")
    assert superseded_tokens(cache) == len(THOUGHT)
    store_tokens(cache, (*PROMPT, *THOUGHT, 5), session="b")
    assert superseded_tokens(cache) == 0


def test_another_conversation_of_the_session_supersedes_nothing() -> None:
    """An agent's title request, or a second agent that has the same system message."""
    cache = new_cache()
    serve(cache, PROMPT, THOUGHT, session="a")
    other = (*PROMPT[:70], *range(5000, 5040))
    assert len(PROMPT) - 70 > REPLY_START_TOKENS
    store_tokens(cache, other, session="a")
    assert superseded_tokens(cache) == 0
    # Both go on, each on its own way.
    store_tokens(cache, (*PROMPT, *THOUGHT, 1, 2), session="a")
    store_tokens(cache, (*other, 3, 4), session="a")
    assert superseded_tokens(cache) == 0
    store_tokens(cache, (*PROMPT, *THOUGHT, 9, 9), session="a")
    assert superseded_tokens(cache) == 2


def test_pins_win() -> None:
    cache = new_cache()
    serve(cache, PROMPT, THOUGHT, session="a")
    cache.pins.pin(PROMPT + THOUGHT, "")
    store_tokens(cache, (*PROMPT, *SAID, 1), session="a")
    settle(cache)
    cache.evictor.shrink_to(0)
    assert stored(cache, PROMPT + THOUGHT) == len(PROMPT + THOUGHT)
    cache.pins.unpin(PROMPT + THOUGHT, "")
    cache.evictor.shrink_to(cache.table.nbytes - 1)
    assert stored(cache, PROMPT + THOUGHT) < len(PROMPT + THOUGHT)


def test_sessions_and_their_threads_are_bounded() -> None:
    cache = new_cache()
    branches = ConversationTracker(cache.table, cache.candidates, max_sessions=10)
    for number in range(100):
        branches.end_turn(b"root", f"session {number}", Thread(5), (), 5)
    assert len(branches) == 10
    for _ in range(3 * MAX_CONVERSATIONS):
        branches.end_turn(b"root", "one", Thread(5), (), 5)
    assert len(branches._sessions[b"root", "one"]) == MAX_CONVERSATIONS


def hit_rate(session_of: str, *, seed: int, share: float, num_chats: int = 12, num_turns: int = 200) -> float:
    """Chats in turn, each with thinking that the next prompt leaves out, in a store that holds a share of what they
    are. `session_of`: the name of a chat's session; empty: none has any."""
    rng = random.Random(seed)
    clock = Clock()
    chats = [tuple(rng.randrange(10_000) for _ in range(150)) for _ in range(num_chats)]
    num_tokens = num_chats * 400
    cache = new_cache(hot_bytes=int(share * num_tokens * TOKEN_BYTES), clock=clock)
    found = asked = 0
    for _ in range(num_turns):
        number = min(int(rng.expovariate(3 / num_chats)), num_chats - 1)
        prompt = chats[number]
        thought, said, user = ([rng.randrange(10_000) for _ in range(length)] for length in (80, 15, 15))
        session = f"{session_of}{number}" if session_of else ""
        found += serve(cache, prompt, (*thought, *said), session=session)
        asked += len(prompt)
        settle(cache)
        cache.reclaimer.shrink_to(cache.table.max_bytes)
        clock.now_s += rng.expovariate(1 / 20)
        chats[number] = (*prompt, *said, *user)
        if len(chats[number]) > 500:
            chats[number] = tuple(rng.randrange(10_000) for _ in range(150))
    return found / asked


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_more_is_found_where_sessions_are_known(share: float) -> None:
    before, after = (hit_rate(session_of, seed=0, share=share) for session_of in ("", "chat"))
    assert after > before + 0.04


def test_what_is_superseded_is_not_written(tmp_path: Path) -> None:
    with store_on(tmp_path) as cache:
        serve(cache, PROMPT, THOUGHT, session="a")
        serve(cache, (*PROMPT, *SAID, 1), (2, 3), session="a")
        settle(cache)
        cache.evictor.shrink_to(cache.table.nbytes - 1)
        assert cache.counters["dropped_tokens_superseded"] == len(THOUGHT)
        cache.evictor.shrink_to(0)
        assert reachable(cache, [*PROMPT, *SAID, 1, 2, 3]) == len(PROMPT) + len(SAID) + 3
        assert reachable(cache, [*PROMPT, *THOUGHT]) == len(PROMPT)


def test_at_the_end_only_what_conversations_go_on_from_is_written(tmp_path: Path) -> None:
    with store_on(tmp_path) as cache:
        serve(cache, PROMPT, THOUGHT, session="a")
        serve(cache, (*PROMPT, *SAID, 1), (2, 3), session="a")
        left = cache.flush(60)
        assert left.tokens == 0
        assert written(cache) == reachable(cache, [*PROMPT, *SAID, 1, 2, 3]) == len(PROMPT) + len(SAID) + 3
