"""The registry of sessions alone: who is kept apart, what is counted, and that it stays within its bounds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine.cache_api import PromptDivergence
from kvstrata.engine.request import TokenUsage
from kvstrata.errors import InvalidRequest
from kvstrata.server.chat.request import ChatRequest, GenerationParams
from kvstrata.server.sessions import (
    MAX_CHARS,
    SessionDivergence,
    SessionName,
    SessionRegistry,
    Where,
    name_chat_session,
    name_text_session,
)

DIGEST = b"the same chat"


def text(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def named(name: str, digest: bytes = DIGEST) -> SessionName:
    return SessionName("prompt_cache_key", name, digest)


def use(
    sessions: SessionRegistry, salt: str, name: SessionName, num_prompt: int = 1, cached: int = 0, at: int | None = None
) -> str:
    """Run one whole request, whose prompt diverged at a token. Return the session's key."""
    visit = sessions.visit_session(salt, name, text)
    divergence = None if at is None else PromptDivergence(at, "prompt", (1, 2), (3,), (4,))
    visit.record_reply(TokenUsage(num_prompt, cached, 1), visit.describe_divergence(divergence))
    return visit.key


def scope(**headers: str) -> dict[str, Any]:
    return {"headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]}


def chat(user: str, system: str = "", tools: Sequence[str] = (), cache_key: str | None = None) -> ChatRequest:
    offered = tuple({"type": "function", "function": {"name": name}} for name in tools)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return ChatRequest(messages, tools=offered, params=GenerationParams(cache_key=cache_key))


def test_a_session_adds_up_what_its_requests_took() -> None:
    sessions = SessionRegistry()
    use(sessions, "", named("a"), 10)
    use(sessions, "", named("a"), 13, cached=11)
    found = sessions.find_session("a", None)
    assert found is not None
    assert (found.num_requests, found.prompt_tokens, found.cached_tokens) == (2, 23, 11)
    assert found.hit_rate == pytest.approx(11 / 23)
    assert found.divergence is None
    assert found.created_s < found.last_use_s


def test_a_visit_alone_leaves_no_trace() -> None:
    sessions = SessionRegistry()
    sessions.visit_session("", named("a"), text)
    assert len(sessions) == 0
    assert sessions.find_session("a", None) is None


@pytest.mark.parametrize(("where", "note"), [("prompt", "at"), ("reply", "reply_at")])
def test_divergence_is_reported_as_text(where: Where, note: str) -> None:
    sessions = SessionRegistry()
    use(sessions, "", named("a"))
    visit = sessions.visit_session("", named("a"), text)
    assert visit.describe_divergence(None) is None
    parted = visit.describe_divergence(PromptDivergence(40, where, (38, 39), (40, 41), tuple(range(100, 200))))
    assert parted == SessionDivergence(40, where, "38 39", "40 41", text(range(100, 200))[:MAX_CHARS], 2)
    assert parted is not None
    assert parted.notes == {note: "40", "was": "40 41", "now": parted.now}
    visit.record_reply(TokenUsage(41), parted)
    found = sessions.find_session("a", None)
    assert found is not None
    assert found.divergence == parted


def test_names_are_apart_under_different_salts() -> None:
    sessions = SessionRegistry()
    keys = {use(sessions, salt, named("a")) for salt in ("", "k1", "k1:x", "k2")}
    assert len(keys) == len(sessions) == 4
    ids = [session.id for session in sessions.newest_sessions("k1", 10)]
    assert len(set(ids)) == 2
    assert "a" in ids
    assert all(sessions.find_session(id, "k2") is None for id in set(ids) - {"a"})
    with pytest.raises(InvalidRequest, match="3 keys have a session 'a'"):
        sessions.find_session("a", None)
    for key in keys:
        found = sessions.find_session(key, None)
        assert found is not None
        assert found.key == key
    own = sessions.find_session("a", "k2")
    assert own is not None
    assert own.owner == "k2"
    assert sessions.find_session(own.key, "k1") is None


@pytest.mark.parametrize("name", ["", "with space", "x" * 81, "\u00e4", "0123456789ab", "a" * 40, "\ud800"])
def test_a_name_that_is_not_fit_to_be_shown_gets_an_id(name: str) -> None:
    sessions = SessionRegistry()
    key = use(sessions, "", named(name))
    assert sessions.newest_sessions(None, 1)[0].id == key[:12]
    found = sessions.find_session(key[:12], None)
    assert found is not None
    assert found.key == key


def test_a_chat_is_recognised_whatever_its_system_text() -> None:
    one = name_chat_session(scope(), chat("Hello", system="It is 12:31."))
    assert one == name_chat_session(scope(), chat("Hello", system="It is 12:32."))
    assert one.recognised_by == "first message"
    others = [chat("Hello!"), chat("Hello", tools=["read"]), chat("", tools=["Hello"])]
    assert len({one.key(""), *(name_chat_session(scope(), other).key("") for other in others)}) == 4
    parts = ChatRequest([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}])
    assert name_chat_session(scope(), parts).key("") == one.key("")


def test_the_clients_word_goes_first() -> None:
    claude = scope(x_claude_code_session_id="s1")
    assert name_chat_session(claude, chat("Hello")).given == "s1"
    agent = scope(x_claude_code_session_id="s1", x_claude_code_agent_id="a2")
    assert name_chat_session(agent, chat("Hello")).given == "s1:a2"
    assert name_chat_session(agent, chat("Hello", cache_key="k")).recognised_by == "prompt_cache_key"
    own = scope(x_claude_code_session_id="s1", x_kvstrata_session="mine")
    assert name_chat_session(own, chat("Hello", cache_key="k")).given == "mine"
    assert name_text_session(own, None, [1]).given == "mine"


def test_texts_are_recognised_by_their_first_tokens() -> None:
    begun = list(range(64))
    key = name_text_session(scope(), None, begun).key("")
    assert name_text_session(scope(), None, [*begun, 5]).key("") == key
    assert name_text_session(scope(), None, [*begun[:63], 5]).key("") != key
    assert name_text_session(scope(), None, [1, 23]).key("") != name_text_session(scope(), None, [12, 3]).key("")


def test_forgetting_keeps_to_its_salt_and_owner() -> None:
    sessions = SessionRegistry()
    for salt in ("k1", "k1:x", "k2"):
        use(sessions, salt, named("a"), at=2)
    sessions.forget_texts("k1:x", None)
    assert {s.salt for s in sessions.newest_sessions(None, 9) if s.divergence} == {"k1", "k2"}
    sessions.forget_texts(None, "k1")
    assert {s.owner for s in sessions.newest_sessions(None, 9) if s.divergence} == {"k2"}
    sessions.forget_texts(None, None)
    assert not any(s.divergence for s in sessions.newest_sessions(None, 9))
    assert len(sessions) == 3


def test_forgetting_and_expiry_drop_the_texts_of_where_prompts_parted() -> None:
    now_s = 0.0
    sessions = SessionRegistry(clock=lambda: now_s)
    for name in ("a", "b"):
        use(sessions, "", named(name))
        use(sessions, "", named(name), at=2)
        now_s += 10.0
    assert all(session.divergence is not None for session in sessions.newest_sessions(None, 9))
    sessions.expire_texts(5.0)
    newest, oldest = sessions.newest_sessions(None, 9)
    assert (newest.divergence is None, oldest.divergence) == (False, None)
    assert oldest.num_requests == 2  # what was counted stays
    sessions.forget_texts(None, None)
    assert all(session.divergence is None for session in sessions.newest_sessions(None, 9))


def test_a_list_goes_on_where_it_ended() -> None:
    sessions = SessionRegistry(clock=lambda: 5.0)  # a clock that stands still
    for number in range(10):
        use(sessions, "", named(f"s{number}"))
    first = sessions.newest_sessions(None, 4)
    assert [s.id for s in first] == ["s9", "s8", "s7", "s6"]
    use(sessions, "", named("s7"))  # used meanwhile
    rest = sessions.newest_sessions(None, 99, before_s=first[-1].last_use_s)
    assert [s.id for s in rest] == ["s5", "s4", "s3", "s2", "s1", "s0"]


@given(
    uses=st.lists(
        st.tuples(
            st.sampled_from(["", "k1", "k1:x", "k2"]),
            st.sampled_from(["a", "b", "c", "d e", "0123456789ab"]),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_bounds_hold_and_nothing_is_miscounted(uses: list[tuple[str, str, bool]]) -> None:
    sessions = SessionRegistry(max_sessions=5)
    last: list[str] = []
    for salt, name, forgets in uses:
        key = use(sessions, salt, named(name), at=1)
        last = [key, *(other for other in last if other != key)]
        if forgets:
            sessions.forget_texts(salt, None)
        listed = sessions.newest_sessions(None, 100)
        assert [session.key for session in listed] == last[: len(listed)]
        assert len(listed) == len(sessions) == min(5, len(last))
        assert len({(session.owner, session.id) for session in listed}) == len(listed)
        for session in listed:
            assert sessions.find_session(session.key, session.owner) is session
            assert sessions.find_session(session.id, session.owner) is session
        assert listed[0].num_requests >= 1


def test_many_threads_lose_no_request() -> None:
    sessions = SessionRegistry()

    def work() -> None:
        for number in range(200):
            use(sessions, "", named(f"s{number % 7}"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(session.num_requests for session in sessions.newest_sessions(None, 99)) == 800
