"""`cache_control` with a ttl pins a prompt, within the quota: real server, real client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from kvstrata.engine.executor import EngineCore
from kvstrata.server.anthropic import request
from tests.agents.forced import Forced, serving
from tests.server.anthropic.conftest import client_of, script
from tests.server.test_ops import scrape
from tests.support.eventually import eventually
from tests.support.servers import Served

TOKEN_BYTES = 2 * 16 * 4  # keys and values of one layer with one head of 16, in float32
LONG = "The bridges of Bergen are many. " * 60
OTHER = "Porto has six bridges over one river. " * 60
HOUR = {"type": "ephemeral", "ttl": "1h"}


@pytest.fixture
def forced() -> Iterator[Forced]:
    with serving(script) as one:
        yield one


def text(said: str, control: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": said, **({"cache_control": control} if control else {})}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


class Caller:
    """Asks by the real client; tells what the answer's header says, and what was cached."""

    def __init__(self, served: Served, client: anthropic.Anthropic) -> None:
        self.served = served
        self._client = client
        self.key = client.api_key or ""

    def ask(self, *messages: dict[str, Any], **fields: Any) -> tuple[str, int]:
        asked: dict[str, Any] = {"model": "claude-x", "max_tokens": 20, "messages": list(messages), **fields}
        answer = self._client.messages.with_raw_response.create(**asked)
        return answer.headers["x-kvstrata-miss"], answer.parse().usage.cache_read_input_tokens or 0

    def cache(self, path: str, **body: Any) -> dict[str, Any]:
        with self.served.http() as http:
            headers = {"x-api-key": self.key}
            answer = http.post(path, json=body, headers=headers) if body else http.get(path, headers=headers)
            return answer.raise_for_status().json()

    @property
    def pinned_bytes(self) -> int:
        return self.cache("/cache/usage")["pinned_bytes"]


@pytest.fixture
def caller(forced: Forced) -> Iterator[Caller]:
    with client_of(forced.served) as client:
        yield Caller(forced.served, client)


def evict_all(served: Served) -> None:
    done = threading.Event()

    def evict(core: EngineCore) -> None:
        while core.pacer.has_work:
            core.pacer.run_slice(1.0)
        core.prefix_cache.evictor.evict_to(0)
        done.set()

    served.server.state.engine.ask(evict).result(60)
    assert done.is_set()


def test_a_prompt_with_a_ttl_survives_pressure_and_others_do_not(caller: Caller) -> None:
    pinned, plain = user(text(LONG, HOUR)), user(text(OTHER, {"type": "ephemeral"}))
    miss, _ = caller.ask(pinned)
    assert "pin" not in miss
    assert caller.pinned_bytes > 0
    before = caller.pinned_bytes
    # Claude Code marks blocks in every request: without a ttl that pins nothing.
    caller.ask(plain)
    assert caller.pinned_bytes == before
    evict_all(caller.served)
    assert caller.ask(pinned)[1] > 400
    assert caller.ask(plain)[1] < 50
    metrics = scrape(caller.served)
    assert metrics["kvstrata_cache_ttl_pins_total"] == 2
    assert metrics["kvstrata_cache_ttl_pins_over_quota_total"] == 0


def test_a_ttl_in_the_system_text_or_tools_keeps_no_more_than_that(caller: Caller) -> None:
    tool = {"name": "look", "input_schema": {"type": "object"}, "cache_control": HOUR}
    for fields in ({"system": [text(LONG, HOUR)]}, {"system": LONG, "tools": [tool]}):
        caller.ask(user(text("hello")), **fields)
        caller.ask(user(text(OTHER)), **fields)
        evict_all(caller.served)
        cached = caller.ask(user(text(OTHER)), **fields)[1]
        evict_all(caller.served)
        assert cached > 400
        assert abs(caller.ask(user(text("Another.")), **fields)[1] - cached) < 10


def test_the_next_turn_takes_the_place_of_the_last(caller: Caller) -> None:
    turns = [user(text(LONG, HOUR))]
    caller.ask(*turns)
    first = caller.pinned_bytes
    for number in range(4):
        turns += [{"role": "assistant", "content": "What?"}, user(text(f"Turn {number}.", HOUR))]
        caller.ask(*turns)

    def pins(core: EngineCore) -> int:
        return len(core.prefix_cache.pins)

    assert caller.served.server.state.engine.ask(pins).result(10) == 1
    assert first < caller.pinned_bytes < 1.5 * first
    # What was taken back is gone with its one name.
    prompt = [{"role": "user", "content": LONG}]
    caller.cache("/cache/unpin", messages=prompt)
    assert caller.pinned_bytes == 0
    caller.cache("/cache/pin", messages=prompt)
    assert caller.pinned_bytes > 0


def test_a_term_ends_though_nobody_asks(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(request.TTLS_S, "5m", 0.5)
    caller.ask(user(text(LONG, {"type": "ephemeral", "ttl": "5m"})))
    pins = caller.served.server.state.engine.ask(lambda core: core.prefix_cache.pins).result(10)
    assert len(pins)
    eventually(lambda: not len(pins))  # no request wakes the engine
    assert caller.pinned_bytes == 0
    evict_all(caller.served)
    assert caller.ask(user(text(LONG)))[1] == 0


@pytest.mark.parametrize("keys", [{}, {"api_key": ["key-a", "key-b"]}])
def test_what_is_over_the_quota_is_served_and_said(keys: dict[str, Any]) -> None:
    # Room for one of the two prompts.
    quota = f"{TOKEN_BYTES * 1000}B"
    with serving(script, pin_quota=quota, **keys) as forced, client_of(forced.served, "key-a") as client:
        caller = Caller(forced.served, client)
        miss, _ = caller.ask(user(text(LONG, HOUR)))
        assert "pin" not in miss
        before = caller.pinned_bytes
        assert 0 < before < TOKEN_BYTES * 1000
        miss, _ = caller.ask(user(text(OTHER, HOUR)))
        assert miss.endswith("; pin=quota")
        assert caller.pinned_bytes == before
        with client.messages.stream(
            model="claude-x",
            max_tokens=5,
            messages=[user(text(OTHER, HOUR))],  # pyright: ignore
        ) as stream:
            assert stream.response.headers["x-kvstrata-miss"].endswith("; pin=quota")
            stream.until_done()
        if keys:
            # Each key has its own quota.
            with client_of(forced.served, "key-b") as other:
                assert "pin" not in Caller(forced.served, other).ask(user(text(OTHER, HOUR)))[0]
        else:
            assert scrape(forced.served)["kvstrata_cache_ttl_pins_over_quota_total"] == 2


@pytest.mark.parametrize("control", ["1h", {"ttl": 5}, {"type": "x", "ttl": "2h"}, {"ttl": None}, [], 7])
def test_any_other_form_is_taken_and_pins_nothing(caller: Caller, control: Any) -> None:
    block = {"type": "text", "text": LONG, "cache_control": control}
    caller.ask(user(block), system=[block])
    assert caller.pinned_bytes == 0


def test_openais_retention(caller: Caller) -> None:
    with caller.served.openai() as client:
        asked: dict[str, Any] = {"model": caller.served.name, "messages": [{"role": "user", "content": LONG}]}
        client.chat.completions.create(**asked, extra_body={"prompt_cache_retention": "in_memory"})
        assert caller.pinned_bytes == 0
        client.chat.completions.create(**asked, extra_body={"prompt_cache_retention": "24h"})
        assert caller.pinned_bytes > 0
        client.responses.create(model=caller.served.name, input=OTHER, extra_body={"prompt_cache_retention": "24h"})
