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
from kvstrata.server.conversation.chat import Chat, Wanted
from kvstrata.server.sessions.names import Name, name_of_chat, name_of_text
from kvstrata.server.sessions.registry import MAX_CHARS, Sessions
from kvstrata.server.sessions.session import Parted, Where

DIGEST = b"the same chat"


def text(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def named(name: str, digest: bytes = DIGEST) -> Name:
    return Name("prompt_cache_key", name, digest)


def use(sessions: Sessions, salt: str, name: Name, num_prompt: int = 1, cached: int = 0, at: int | None = None) -> str:
    """Run one whole request, whose prompt diverged at a token. Return the session's key."""
    visit = sessions.visit(salt, name, text)
    divergence = None if at is None else PromptDivergence(at, "prompt", (1, 2), (3,), (4,))
    visit.learn(TokenUsage(num_prompt, cached, 1), visit.parted(divergence))
    return visit.key


def scope(**headers: str) -> dict[str, Any]:
    return {"headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]}


def chat(user: str, system: str = "", tools: Sequence[str] = (), cache_key: str | None = None) -> Chat:
    offered = tuple({"type": "function", "function": {"name": name}} for name in tools)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return Chat(messages, tools=offered, wanted=Wanted(cache_key=cache_key))


def test_a_session_adds_up_what_its_requests_took() -> None:
    sessions = Sessions()
    use(sessions, "", named("a"), 10)
    use(sessions, "", named("a"), 13, cached=11)
    found = sessions.find("a", None)
    assert found is not None
    assert (found.num_requests, found.prompt_tokens, found.cached_tokens) == (2, 23, 11)
    assert found.hit_rate == pytest.approx(11 / 23)
    assert found.parted is None
    assert found.created_s < found.last_use_s


def test_a_visit_alone_leaves_no_trace() -> None:
    sessions = Sessions()
    sessions.visit("", named("a"), text)
    assert len(sessions) == 0
    assert sessions.find("a", None) is None


@pytest.mark.parametrize(("where", "note"), [("prompt", "at"), ("reply", "reply_at")])
def test_divergence_is_reported_as_text(where: Where, note: str) -> None:
    sessions = Sessions()
    use(sessions, "", named("a"))
    visit = sessions.visit("", named("a"), text)
    assert visit.parted(None) is None
    parted = visit.parted(PromptDivergence(40, where, (38, 39), (40, 41), tuple(range(100, 200))))
    assert parted == Parted(40, where, "38 39", "40 41", text(range(100, 200))[:MAX_CHARS], 2)
    assert parted is not None
    assert parted.notes == {note: "40", "was": "40 41", "now": parted.now}
    visit.learn(TokenUsage(41), parted)
    found = sessions.find("a", None)
    assert found is not None
    assert found.parted == parted


def test_names_are_apart_under_different_salts() -> None:
    sessions = Sessions()
    keys = {use(sessions, salt, named("a")) for salt in ("", "k1", "k1:x", "k2")}
    assert len(keys) == len(sessions) == 4
    ids = [session.id for session in sessions.newest("k1", 10)]
    assert len(set(ids)) == 2
    assert "a" in ids
    assert all(sessions.find(id, "k2") is None for id in set(ids) - {"a"})
    with pytest.raises(InvalidRequest, match="3 keys have a session 'a'"):
        sessions.find("a", None)
    for key in keys:
        found = sessions.find(key, None)
        assert found is not None
        assert found.key == key
    own = sessions.find("a", "k2")
    assert own is not None
    assert own.owner == "k2"
    assert sessions.find(own.key, "k1") is None


@pytest.mark.parametrize("name", ["", "with space", "x" * 81, "\u00e4", "0123456789ab", "a" * 40, "\ud800"])
def test_a_name_that_is_not_fit_to_be_shown_gets_an_id(name: str) -> None:
    sessions = Sessions()
    key = use(sessions, "", named(name))
    assert sessions.newest(None, 1)[0].id == key[:12]
    found = sessions.find(key[:12], None)
    assert found is not None
    assert found.key == key


def test_a_chat_is_recognised_whatever_its_system_text() -> None:
    one = name_of_chat(scope(), chat("Hello", system="It is 12:31."))
    assert one == name_of_chat(scope(), chat("Hello", system="It is 12:32."))
    assert one.recognised_by == "first message"
    others = [chat("Hello!"), chat("Hello", tools=["read"]), chat("", tools=["Hello"])]
    assert len({one.key(""), *(name_of_chat(scope(), other).key("") for other in others)}) == 4
    parts = Chat([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}])
    assert name_of_chat(scope(), parts).key("") == one.key("")


def test_the_clients_word_goes_first() -> None:
    claude = scope(x_claude_code_session_id="s1")
    assert name_of_chat(claude, chat("Hello")).given == "s1"
    agent = scope(x_claude_code_session_id="s1", x_claude_code_agent_id="a2")
    assert name_of_chat(agent, chat("Hello")).given == "s1:a2"
    assert name_of_chat(agent, chat("Hello", cache_key="k")).recognised_by == "prompt_cache_key"
    own = scope(x_claude_code_session_id="s1", x_kvstrata_session="mine")
    assert name_of_chat(own, chat("Hello", cache_key="k")).given == "mine"
    assert name_of_text(own, None, [1]).given == "mine"


def test_texts_are_recognised_by_their_first_tokens() -> None:
    begun = list(range(64))
    key = name_of_text(scope(), None, begun).key("")
    assert name_of_text(scope(), None, [*begun, 5]).key("") == key
    assert name_of_text(scope(), None, [*begun[:63], 5]).key("") != key
    assert name_of_text(scope(), None, [1, 23]).key("") != name_of_text(scope(), None, [12, 3]).key("")


def test_forgetting_keeps_to_its_salt_and_owner() -> None:
    sessions = Sessions()
    for salt in ("k1", "k1:x", "k2"):
        use(sessions, salt, named("a"), at=2)
    sessions.forget("k1:x", None)
    assert {s.salt for s in sessions.newest(None, 9) if s.parted} == {"k1", "k2"}
    sessions.forget(None, "k1")
    assert {s.owner for s in sessions.newest(None, 9) if s.parted} == {"k2"}
    sessions.forget(None, None)
    assert not any(s.parted for s in sessions.newest(None, 9))
    assert len(sessions) == 3


def test_forgetting_and_expiry_drop_the_texts_of_where_prompts_parted() -> None:
    now_s = 0.0
    sessions = Sessions(clock=lambda: now_s)
    for name in ("a", "b"):
        use(sessions, "", named(name))
        use(sessions, "", named(name), at=2)
        now_s += 10.0
    assert all(session.parted is not None for session in sessions.newest(None, 9))
    sessions.expire(5.0)
    newest, oldest = sessions.newest(None, 9)
    assert (newest.parted is None, oldest.parted) == (False, None)
    assert oldest.num_requests == 2  # what was counted stays
    sessions.forget(None, None)
    assert all(session.parted is None for session in sessions.newest(None, 9))


def test_a_list_goes_on_where_it_ended() -> None:
    sessions = Sessions(clock=lambda: 5.0)  # a clock that stands still
    for number in range(10):
        use(sessions, "", named(f"s{number}"))
    first = sessions.newest(None, 4)
    assert [s.id for s in first] == ["s9", "s8", "s7", "s6"]
    use(sessions, "", named("s7"))  # used meanwhile
    rest = sessions.newest(None, 99, before_s=first[-1].last_use_s)
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
    sessions = Sessions(max_sessions=5)
    last: list[str] = []
    for salt, name, forgets in uses:
        key = use(sessions, salt, named(name), at=1)
        last = [key, *(other for other in last if other != key)]
        if forgets:
            sessions.forget(salt, None)
        listed = sessions.newest(None, 100)
        assert [session.key for session in listed] == last[: len(listed)]
        assert len(listed) == len(sessions) == min(5, len(last))
        assert len({(session.owner, session.id) for session in listed}) == len(listed)
        for session in listed:
            assert sessions.find(session.key, session.owner) is session
            assert sessions.find(session.id, session.owner) is session
        assert listed[0].num_requests >= 1


def test_many_threads_lose_no_request() -> None:
    sessions = Sessions()

    def work() -> None:
        for number in range(200):
            use(sessions, "", named(f"s{number % 7}"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(session.num_requests for session in sessions.newest(None, 99)) == 800
