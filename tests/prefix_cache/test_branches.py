"""What conversations leave behind goes first, and nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstrata.prefix_cache.conversations import MAX_CONVERSATIONS, REPLY_START_TOKENS, ConversationTracker
from kvstrata.prefix_cache.entries import Thread
from kvstrata.prefix_cache.prefix_cache import Stock
from tests.prefix_cache.disk import reachable, store_on, written
from tests.prefix_cache.kv import TOKEN_BYTES, Clock, Run, new_stock, settle, store_tokens

PROMPT = tuple(range(1000, 1100))
THOUGHT = tuple(range(2000, 2060))
SAID = tuple(range(3000, 3020))


def serve(stock: Stock, prompt: Sequence[int], reply: Sequence[int], salt: str = "", *, session: str = "") -> int:
    """Tells how many tokens of the prompt were there."""
    run = Run(stock, prompt, salt, room=len(reply), session=session)
    cached = run.num_computed
    run.tokens = (*prompt, *reply)
    run.compute(run.left)
    run.end()
    return cached


def superseded_tokens(stock: Stock) -> int:
    return sum(node.num_tokens for node in stock.candidates.superseded())


def stored(stock: Stock, tokens: Sequence[int]) -> int:
    return stock.store.lookup(tokens, "").num_tokens


def test_what_lies_behind_the_parting_point_is_superseded() -> None:
    stock = new_stock()
    serve(stock, PROMPT, THOUGHT + SAID, session="a")
    assert superseded_tokens(stock) == 0
    store_tokens(stock, (*PROMPT, *SAID, 1, 2, 3), session="a")
    assert superseded_tokens(stock) == len(THOUGHT + SAID)
    settle(stock)
    stock.evictor.shrink_to(stock.table.nbytes - 1)
    assert stored(stock, (*PROMPT, *SAID, 1, 2, 3)) == len(PROMPT) + len(SAID) + 3
    assert stored(stock, PROMPT + THOUGHT + SAID) == len(PROMPT)
    assert stock.counters["evicted_tokens"] == len(THOUGHT + SAID)


def test_a_chat_that_goes_on_as_it_was_supersedes_nothing() -> None:
    stock = new_stock()
    tokens = PROMPT
    for turn in range(5):
        tokens = (*tokens, *range(turn * 50, turn * 50 + 50))
        store_tokens(stock, tokens, session="a")
    assert superseded_tokens(stock) == 0


@pytest.mark.parametrize("others", ["b", ""])
def test_what_another_session_used_stays_as_it_is(others: str) -> None:
    stock = new_stock()
    serve(stock, PROMPT, THOUGHT, session="a")
    store_tokens(stock, (*PROMPT, *THOUGHT, 7, 8), session=others)
    store_tokens(stock, (*PROMPT, *SAID, 1), session="a")
    assert superseded_tokens(stock) == 0


def test_without_sessions_nothing_is_superseded() -> None:
    stock = new_stock()
    serve(stock, PROMPT, THOUGHT)
    store_tokens(stock, (*PROMPT, *SAID, 1))
    assert superseded_tokens(stock) == 0


def test_sessions_of_other_salts_are_others() -> None:
    stock = new_stock()
    serve(stock, PROMPT, THOUGHT, "mine", session="a")
    store_tokens(stock, (*PROMPT, *SAID, 1), "yours", session="a")
    assert superseded_tokens(stock) == 0


def test_who_comes_back_makes_it_normal_again() -> None:
    stock = new_stock()
    serve(stock, PROMPT, THOUGHT, session="a")
    store_tokens(stock, (*PROMPT, *SAID, 1), session="a")
    assert superseded_tokens(stock) == len(THOUGHT)
    store_tokens(stock, (*PROMPT, *THOUGHT, 5), session="b")
    assert superseded_tokens(stock) == 0


def test_another_conversation_of_the_session_supersedes_nothing() -> None:
    """An agent's title request, or a second agent that has the same system message."""
    stock = new_stock()
    serve(stock, PROMPT, THOUGHT, session="a")
    other = (*PROMPT[:70], *range(5000, 5040))
    assert len(PROMPT) - 70 > REPLY_START_TOKENS
    store_tokens(stock, other, session="a")
    assert superseded_tokens(stock) == 0
    # Both go on, each on its own way.
    store_tokens(stock, (*PROMPT, *THOUGHT, 1, 2), session="a")
    store_tokens(stock, (*other, 3, 4), session="a")
    assert superseded_tokens(stock) == 0
    store_tokens(stock, (*PROMPT, *THOUGHT, 9, 9), session="a")
    assert superseded_tokens(stock) == 2


def test_pins_win() -> None:
    stock = new_stock()
    serve(stock, PROMPT, THOUGHT, session="a")
    stock.pins.pin(PROMPT + THOUGHT, "")
    store_tokens(stock, (*PROMPT, *SAID, 1), session="a")
    settle(stock)
    stock.evictor.shrink_to(0)
    assert stored(stock, PROMPT + THOUGHT) == len(PROMPT + THOUGHT)
    stock.pins.unpin(PROMPT + THOUGHT, "")
    stock.evictor.shrink_to(stock.table.nbytes - 1)
    assert stored(stock, PROMPT + THOUGHT) < len(PROMPT + THOUGHT)


def test_sessions_and_their_threads_are_bounded() -> None:
    stock = new_stock()
    branches = ConversationTracker(stock.table, stock.candidates, max_sessions=10)
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
    stock = new_stock(hot_bytes=int(share * num_tokens * TOKEN_BYTES), clock=clock)
    found = asked = 0
    for _ in range(num_turns):
        number = min(int(rng.expovariate(3 / num_chats)), num_chats - 1)
        prompt = chats[number]
        thought, said, user = ([rng.randrange(10_000) for _ in range(length)] for length in (80, 15, 15))
        session = f"{session_of}{number}" if session_of else ""
        found += serve(stock, prompt, (*thought, *said), session=session)
        asked += len(prompt)
        settle(stock)
        stock.reclaimer.shrink_to(stock.table.max_bytes)
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
    with store_on(tmp_path) as stock:
        serve(stock, PROMPT, THOUGHT, session="a")
        serve(stock, (*PROMPT, *SAID, 1), (2, 3), session="a")
        settle(stock)
        stock.evictor.shrink_to(stock.table.nbytes - 1)
        assert stock.counters["dropped_tokens_superseded"] == len(THOUGHT)
        stock.evictor.shrink_to(0)
        assert reachable(stock, [*PROMPT, *SAID, 1, 2, 3]) == len(PROMPT) + len(SAID) + 3
        assert reachable(stock, [*PROMPT, *THOUGHT]) == len(PROMPT)


def test_at_the_end_only_what_conversations_go_on_from_is_written(tmp_path: Path) -> None:
    with store_on(tmp_path) as stock:
        serve(stock, PROMPT, THOUGHT, session="a")
        serve(stock, (*PROMPT, *SAID, 1), (2, 3), session="a")
        left = stock.flush(60)
        assert left.tokens == 0
        assert written(stock) == reachable(stock, [*PROMPT, *SAID, 1, 2, 3]) == len(PROMPT) + len(SAID) + 3
