"""Conversation tracker: compared with a naive one, within its bounds, and after forgetting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.prefix_cache.conversations import CONTEXT_IDS, MAX_CONVERSATIONS, ConversationTracker, PromptDivergence
from kvstrata.prefix_cache.keys import as_ids
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from tests.prefix_cache.kv import Clock, Run, new_cache

Tokens = tuple[int, ...]

START_TOKENS = 3  # of a reply that may be rewritten


class StandingClock:
    """Clock that advances on request only."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def new_tracker(
    ttl_s: float | None = None, clock: StandingClock | None = None, max_sessions: int = 10, max_ids: int = 1000
) -> ConversationTracker:
    """Return a tracker of an empty cache."""
    cache = new_cache()
    return ConversationTracker(
        *(cache.table, cache.candidates, cache.matcher, ttl_s, clock or StandingClock()),
        max_sessions=max_sessions,
        max_ids=max_ids,
    )


def end_turn(
    tracker: ConversationTracker, session: str, tokens: Sequence[int], *, salt: str = "", digest: bytes = b""
) -> None:
    ids = as_ids(list(tokens))
    tracker.end_turn(salt, session, tracker.begin_turn(salt, session, ids), digest, ids, len(ids))


def common(a: Tokens, b: Tokens) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


# Turns against a naive tracker.


class Turn(NamedTuple):
    """A turn to come: its prompt begins with the first tokens of an earlier sequence."""

    session: str
    digest: bytes
    base: int
    kept: float
    prompt_end: list[int]
    reply: list[int]
    has_eviction: bool
    is_overlapped: bool  # it ends only after the next turn has begun


def turns(sessions: list[str]) -> st.SearchStrategy[list[Turn]]:
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=8)
    kept = st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0])
    return st.lists(
        st.builds(
            Turn,
            *(st.sampled_from(sessions), st.sampled_from([b"", b"1", b"2"]), st.integers(0, 5), kept),
            *(tokens, tokens, st.sampled_from([False, False, True]), st.booleans()),
        ),
        max_size=15,
    )


@dataclass
class NaiveConversation:
    digest: bytes
    tokens: Tokens
    num_prompt: int
    first_end: int


@dataclass
class NaiveTracker:
    sessions: dict[str, list[NaiveConversation]] = field(default_factory=dict)

    def continued_by(self, session: str, prompt: Tokens) -> NaiveConversation | None:
        known = self.sessions.get(session, [])
        best = max(known, key=lambda each: common(each.tokens, prompt), default=None)
        shared = 0 if best is None else common(best.tokens, prompt)
        return best if best is not None and 0 < shared >= best.first_end - START_TOKENS else None

    def abandoned(self, session: str, prompt: Tokens) -> set[Tokens]:
        """Return the prefixes that the prompt leaves behind and no other conversation of the session has."""
        continued = self.continued_by(session, prompt)
        if continued is None:
            return set()
        kept = [prompt, *(each.tokens for each in self.sessions[session] if each is not continued)]
        start = max(common(continued.tokens, each) for each in kept)
        return {continued.tokens[:end] for end in range(start + 1, len(continued.tokens) + 1)}

    def divergence(self, session: str, digest: bytes, prompt: Tokens) -> PromptDivergence | None:
        known = self.sessions.get(session, [])
        own = [each for each in known if digest and each.digest == digest]
        for last in [*own, *known][:1]:
            at, ids = common(last.tokens, prompt), last.tokens
            if at < len(ids) and at < len(prompt):
                was, now = (each[at : at + CONTEXT_IDS] for each in (ids, prompt))
                where = "prompt" if at < last.num_prompt else "reply"
                return PromptDivergence(at, where, ids[max(0, at - CONTEXT_IDS) : at], was, now)
        return None

    def end_turn(self, turn: Turn, conversation: NaiveConversation, prompt: Tokens) -> None:
        conversation.digest, conversation.tokens = turn.digest, (*prompt, *turn.reply)
        conversation.num_prompt = len(prompt)
        known = [each for each in self.sessions.get(turn.session, []) if each is not conversation]
        if turn.session:
            self.sessions[turn.session] = [conversation, *known][:MAX_CONVERSATIONS]


def superseded(cache: PrefixCache) -> set[Tokens]:
    """Return all prefixes that end in a superseded node."""
    found: set[Tokens] = set()
    for node in cache.candidates.superseded():
        path = tuple(int(token) for each in node.path() for token in each.tokens)
        found |= {path[:end] for end in range(node.start + 1, node.end + 1)}
    return found


def whole_nodes(cache: PrefixCache, prefixes: set[Tokens]) -> set[Tokens]:
    """Return the prefixes of a conversation that are cached, without those in a node that is longer than it: a request
    of which nothing is known has the rest."""
    match = cache.table.tree.match(cache.matcher.root_of(""), max(prefixes, key=len, default=()))
    end = max((node.end for node in match.path if node.end <= match.num_tokens), default=0)
    return {prefix for prefix in prefixes if len(prefix) <= end}


def end(run: Run, naive: NaiveTracker, turn: Turn, conversation: NaiveConversation, prompt: Tokens) -> None:
    run.end()
    naive.end_turn(turn, conversation, prompt)


def play(plan: list[Turn]) -> list[tuple[set[Tokens], set[Tokens], set[Tokens]]]:
    """Run turns, and compare divergences and conversations with the naive tracker. For each turn return the prefixes
    that were superseded before it began, those after, and those that it may supersede."""
    cache, naive = new_cache(clock=Clock()), NaiveTracker()
    sequences: list[Tokens] = [()]
    tracker = cache.conversations
    tracker.reply_start_tokens = START_TOKENS
    steps: list[tuple[set[Tokens], set[Tokens], set[Tokens]]] = []
    overlapped: list[Callable[[], None]] = []  # ends of turns that the next turn overlaps
    for turn in plan:
        if turn.has_eviction:
            cache.evictor.evict_to(cache.table.nbytes // 2)
        base = sequences[-1 - turn.base % len(sequences)]
        prompt: Tokens = (*base[: int(turn.kept * len(base))], *turn.prompt_end)
        ids = as_ids(prompt)
        expected = naive.divergence(turn.session, turn.digest, prompt)
        assert tracker.divergence("", turn.session, turn.digest, ids) == expected
        before, may_go = superseded(cache), whole_nodes(cache, naive.abandoned(turn.session, prompt))
        tracker.begin_turn("", turn.session, ids)
        steps.append((before, superseded(cache), may_go))
        conversation = naive.continued_by(turn.session, prompt)
        if conversation is None:
            conversation = NaiveConversation(turn.digest, (), 0, len(prompt))
        run = Run(cache, prompt, room=len(turn.reply), session=turn.session, digest=turn.digest)
        run.tokens = (*prompt, *turn.reply)
        run.compute(run.left)
        ends = [*overlapped, partial(end, run, naive, turn, conversation, prompt)]
        overlapped = [ends.pop()] if turn.is_overlapped else []
        for each in ends:
            each()
        sequences.append(run.tokens)
        known = [(each.digest, each.tokens, each.first_end) for each in naive.sessions.get(turn.session, [])]
        tracked = tracker.conversations_of("", turn.session)
        assert [(each.digest, tuple(each.ids.tolist()), each.first_end) for each in tracked] == known
    for each in overlapped:
        each()
    return steps


@settings(max_examples=50, deadline=None, derandomize=True)
@given(turns(["a"]))
def test_turn_supersedes_exactly_what_naive_tracker_says(plan: list[Turn]) -> None:
    for before, after, may_go in play(plan):
        assert after == before | may_go


@settings(max_examples=50, deadline=None, derandomize=True)
@given(turns(["a", "a", "b", ""]))
def test_turn_of_several_sessions_supersedes_no_other_tokens(plan: list[Turn]) -> None:
    for before, after, may_go in play(plan):
        assert before <= after <= before | may_go


def test_parallel_conversations_with_the_same_first_prompt_supersede_nothing() -> None:
    cache, prompt = new_cache(), tuple(range(200, 250))
    runs = [Run(cache, prompt, room=40, session="a", digest=b"same") for _ in range(2)]
    for turn in range(3):
        if turn:
            runs = [Run(cache, run.tokens, room=40, session="a", digest=b"same") for run in runs]
        for number, run in enumerate(runs):
            run.tokens = (*run.tokens, *range(1000 * number + 100 * turn, 1000 * number + 100 * turn + 40))
            run.compute(run.left)
        for run in runs:
            run.end()
        assert superseded(cache) == set()
    assert len(cache.conversations.conversations_of("", "a")) == 2


def test_another_conversation_protects_what_it_shares() -> None:
    cache = new_cache()
    cache.conversations.reply_start_tokens = 0
    first, side = tuple(range(100, 140)), tuple(range(100, 120))
    for tokens in (first, (*side, 5, 6, 7)):
        run = Run(cache, tokens, session="a")
        run.compute(run.left)
        run.end()
    assert len(cache.conversations.conversations_of("", "a")) == 2
    # Both conversations share 10 tokens with the prompt. It continues the newest; the other has its tokens 10 to 20.
    cache.conversations.reply_start_tokens = 1000
    cache.conversations.begin_turn("", "a", as_ids((*first[:10], 9)))
    assert superseded(cache) == {(*side, 5, 6, 7)[:end] for end in range(21, 24)}


# Bounds, expiry, forgetting.


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "k1", "k1:x", "k2"]),
            st.sampled_from(["a", "b", "c", "d"]),
            st.sampled_from([b"", b"1", b"2"]),
            st.lists(st.integers(0, 3), max_size=30),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_bounds_hold_and_the_newest_sessions_stay(uses: list[tuple[str, str, bytes, list[int], bool]]) -> None:
    tracker = new_tracker(max_sessions=5, max_ids=60)
    last: list[tuple[str, str]] = []
    for salt, session, digest, tokens, forgets in uses:
        end_turn(tracker, session, tokens, salt=salt, digest=digest)
        last = [(salt, session), *(each for each in last if each != (salt, session))]
        if forgets:
            tracker.forget(salt, None)
            last = [each for each in last if each[0] != salt]
        listed = tracker.newest(None, 100)
        kept = list(dict.fromkeys((each.salt, each.session) for each in listed))
        assert kept == last[: len(kept)]
        assert len(kept) == len(tracker) <= 5
        assert tracker.num_ids == sum(len(each.ids) for each in listed) <= 60
        for each in last[len(kept) :]:
            assert tracker.longest(*each) is None
        last = kept


def test_tracked_ids_cannot_be_changed() -> None:
    tracker, ids = new_tracker(), as_ids([1, 2, 3])
    tracker.adopt_conversation("", "a", b"", ids, 2)
    (conversation,) = tracker.conversations_of("", "a")
    with pytest.raises(ValueError, match="read-only"):
        conversation.ids[0] = 9
    ids[0] = 4  # the caller's own array is still its own to write


def test_sessions_expire_after_their_last_turn() -> None:
    clock = StandingClock()
    tracker = new_tracker(ttl_s=10.0, clock=clock)
    assert tracker.seconds_to_expiry() == float("inf")
    end_turn(tracker, "a", [1])
    clock.now_s = 6.0
    end_turn(tracker, "b", [2])
    assert tracker.seconds_to_expiry() == 4.0
    clock.now_s = 10.0
    assert tracker.divergence("", "a", b"", as_ids([9])) is None
    assert [each.session for each in tracker.newest(None, 9)] == ["b"]
    clock.now_s = 16.0
    tracker.expire()
    assert (len(tracker), tracker.num_ids) == (0, 0)


def test_forgetting_keeps_to_its_salt_and_owner() -> None:
    tracker = new_tracker()
    for salt in ("k1", "k1:x", "k2"):
        end_turn(tracker, "a", [1, 2, 3], salt=salt)
    assert [each.salt for each in tracker.newest("k1", 9)] == ["k1:x", "k1"]
    assert [each.salt for each in tracker.newest("k1", 1)] == ["k1:x"]
    tracker.forget("k1", None)
    assert [each.salt for each in tracker.newest(None, 9)] == ["k2", "k1:x"]
    tracker.forget(None, "k1")
    assert [each.salt for each in tracker.newest(None, 9)] == ["k2"]
    tracker.forget(None, None)
    assert (len(tracker), tracker.num_ids) == (0, 0)


def test_side_question_does_not_replace_the_conversation() -> None:
    """Ask for a title under the name of the session, as agents do."""
    tracker = new_tracker()
    end_turn(tracker, "a", range(100), digest=b"main")
    end_turn(tracker, "a", [107, 108, 109], digest=b"title")
    assert tracker.divergence("", "a", b"main", as_ids(range(120))) is None
    longest = tracker.longest("", "a")
    assert longest is not None
    assert len(longest.ids) == 100
    other = tracker.divergence("", "a", b"", as_ids([107, 5]))
    assert other == PromptDivergence(1, "prompt", (107,), (108, 109), (5,))


@pytest.mark.parametrize("length", [1, 50, 100, 102, 120])
def test_prompt_that_continues_or_goes_back_does_not_diverge(length: int) -> None:
    tracker = new_tracker()
    tracker.adopt_conversation("", "a", b"", as_ids(range(102)), 100)
    assert tracker.divergence("", "a", b"", as_ids(range(length))) is None


def test_requests_without_session_are_not_tracked() -> None:
    tracker = new_tracker()
    end_turn(tracker, "", [1, 2, 3])
    assert len(tracker) == 0
