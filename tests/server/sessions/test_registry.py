"""The registry of sessions alone: who is kept apart, what parts where, and that it stays within its bounds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine.cache_api import as_ids
from kvstrata.engine.request import TokenUsage
from kvstrata.errors import InvalidRequest
from kvstrata.server.conversation.chat import Chat, Wanted
from kvstrata.server.sessions.names import Name, name_of_chat, name_of_text
from kvstrata.server.sessions.registry import Sessions
from kvstrata.server.sessions.session import num_common

DIGEST = b"the same chat"


def text(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def named(name: str, digest: bytes = DIGEST) -> Name:
    return Name("prompt_cache_key", name, digest)


def use(
    sessions: Sessions, salt: str, name: Name, prompt: Sequence[int], reply: Sequence[int] = (), cached: int = 0
) -> str:
    """One whole request. Tells the session's key."""
    visit = sessions.visit(salt, name, as_ids(list(prompt)), text)
    visit.learn(TokenUsage(len(prompt), cached, len(reply)), reply)
    return visit.key


def scope(**headers: str) -> dict[str, Any]:
    return {"headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]}


def chat(user: str, system: str = "", tools: Sequence[str] = (), cache_key: str | None = None) -> Chat:
    offered = tuple({"type": "function", "function": {"name": name}} for name in tools)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return Chat(messages, tools=offered, wanted=Wanted(cache_key=cache_key))


def test_a_session_adds_up_what_its_requests_took() -> None:
    sessions = Sessions()
    use(sessions, "", named("a"), range(10), [77, 78])
    use(sessions, "", named("a"), [*range(10), 77, 78, 5], [79], cached=11)
    found = sessions.find("a", None)
    assert found is not None
    assert (found.num_requests, found.prompt_tokens, found.cached_tokens) == (2, 23, 11)
    assert found.hit_rate == pytest.approx(11 / 23)
    assert found.ids.tolist() == [*range(10), 77, 78, 5, 79]
    assert found.parted is None
    assert found.created_s < found.last_use_s


def test_a_visit_alone_leaves_no_trace() -> None:
    sessions = Sessions()
    sessions.visit("", named("a"), as_ids([1, 2, 3]), text)
    assert len(sessions) == 0
    assert sessions.find("a", None) is None


def test_where_a_prompt_parts_is_told_by_its_text() -> None:
    sessions = Sessions()
    use(sessions, "", named("a"), range(100), [500, 501])
    changed = sessions.visit("", named("a"), as_ids([*range(40), 99, *range(41, 100), 500]), text).parted
    assert changed is not None
    assert (changed.at, changed.where, changed.request) == (40, "prompt", 2)
    assert changed.before == text(range(28, 40))
    assert changed.was == text(range(40, 52))
    assert changed.now == text([99, *range(41, 52)])
    assert changed.notes == {"at": "40", "was": changed.was, "now": changed.now}
    cut = sessions.visit("", named("a"), as_ids([*range(100), 500, 7]), text).parted
    assert cut is not None
    assert (cut.at, cut.where, cut.was, cut.now) == (101, "reply", "501", "7")
    assert cut.notes == {"reply_at": "101", "was": "501", "now": "7"}


@pytest.mark.parametrize("length", [1, 50, 100, 102])
def test_going_on_or_back_is_no_parting(length: int) -> None:
    sessions = Sessions()
    use(sessions, "", named("a"), range(100), [100, 101])
    assert sessions.visit("", named("a"), as_ids(list(range(length))), text).parted is None
    assert sessions.visit("", named("a"), as_ids(list(range(120))), text).parted is None


def test_a_side_question_does_not_take_the_place_of_the_conversation() -> None:
    """Agents ask for a title under the name of the session."""
    sessions = Sessions()
    use(sessions, "", named("a", b"main"), range(100))
    use(sessions, "", named("a", b"title"), [7, 8, 9])
    assert sessions.visit("", named("a", b"main"), as_ids(list(range(120))), text).parted is None
    found = sessions.find("a", None)
    assert found is not None
    assert len(found.ids) == 100
    for number in range(10):
        use(sessions, "", named("a", b"%d" % number), [number])
    found = sessions.find("a", None)
    assert found is not None
    assert len(found.lines) == 4


def test_names_are_apart_under_different_salts() -> None:
    sessions = Sessions()
    keys = {use(sessions, salt, named("a"), [1, 2]) for salt in ("", "k1", "k1:x", "k2")}
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
    key = use(sessions, "", named(name), [1])
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
        use(sessions, salt, named("a"), [1, 2, 3])
    sessions.forget("k1:x", None)
    assert sessions.num_tokens == 6
    sessions.forget(None, "k1")
    assert {s.owner for s in sessions.newest(None, 9) if len(s.ids)} == {"k2"}
    sessions.forget(None, None)
    assert sessions.num_tokens == 0
    assert len(sessions) == 3
    assert sessions.visit("k1", named("a"), as_ids([9]), text).parted is None


def test_forgetting_and_expiry_drop_the_texts_of_where_prompts_parted() -> None:
    now_s = 0.0
    sessions = Sessions(clock=lambda: now_s)
    for name in ("a", "b"):
        use(sessions, "", named(name), [1, 2, 3])
        use(sessions, "", named(name), [1, 2, 4])
        now_s += 10.0
    assert all(session.parted is not None for session in sessions.newest(None, 9))
    sessions.expire(5.0)
    newest, oldest = sessions.newest(None, 9)
    assert (newest.parted is None, oldest.parted) == (False, None)
    assert (newest.num_ids, oldest.num_ids) == (3, 0)
    assert oldest.num_requests == 2  # what was counted stays
    sessions.forget(None, None)
    assert all(session.parted is None for session in sessions.newest(None, 9))
    assert sessions.num_tokens == 0


def test_a_list_goes_on_where_it_ended() -> None:
    sessions = Sessions(clock=lambda: 5.0)  # a clock that stands still
    for number in range(10):
        use(sessions, "", named(f"s{number}"), [number])
    first = sessions.newest(None, 4)
    assert [s.id for s in first] == ["s9", "s8", "s7", "s6"]
    use(sessions, "", named("s7"), [7])  # used meanwhile
    rest = sessions.newest(None, 99, before_s=first[-1].last_use_s)
    assert [s.id for s in rest] == ["s5", "s4", "s3", "s2", "s1", "s0"]


@given(
    uses=st.lists(
        st.tuples(
            st.sampled_from(["", "k1", "k1:x", "k2"]),
            st.sampled_from(["a", "b", "c", "d e", "0123456789ab"]),
            st.sampled_from([b"1", b"2", b"3", b"4", b"5", b"6"]),
            st.lists(st.integers(0, 3), max_size=30),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_bounds_hold_and_nothing_is_miscounted(uses: list[tuple[str, str, bytes, list[int], bool]]) -> None:
    sessions = Sessions(max_sessions=5, max_tokens=60)
    last: list[str] = []
    for salt, name, digest, prompt, forgets in uses:
        key = use(sessions, salt, named(name, digest), prompt)
        last = [key, *(other for other in last if other != key)]
        if forgets:
            sessions.forget(salt, None)
        listed = sessions.newest(None, 100)
        assert [session.key for session in listed] == last[: len(listed)]
        assert len(listed) == len(sessions) == min(5, len(last))
        assert sessions.num_tokens == sum(session.num_ids for session in listed) <= 60
        assert len({(session.owner, session.id) for session in listed}) == len(listed)
        for session in listed:
            assert sessions.find(session.key, session.owner) is session
            assert sessions.find(session.id, session.owner) is session
        assert listed[0].num_requests >= 1


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_common_tokens_are_counted(one: list[int], other: list[int]) -> None:
    expected = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert num_common(np.array(one, np.int32), np.array(other, np.int32)) == expected


def test_many_threads_lose_no_request() -> None:
    sessions = Sessions()

    def work() -> None:
        for number in range(200):
            use(sessions, "", named(f"s{number % 7}"), [number])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(session.num_requests for session in sessions.newest(None, 99)) == 800
