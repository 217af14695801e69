"""Texts beside the KV go with it: when a caller clears it, and when their time is over."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvstrata.server import state
from kvstrata.server.state import expire_texts
from tests.support.servers import Served

SALT = "to be forgotten"
PLACES = ("/cache/sessions", "/cache/history")


def leave_texts(served: Served, salt: str = SALT) -> str:
    """A stored response, and a session whose prompts diverged at words of its own."""
    for word in ("zebra", "okapi"):
        prompt = f"In the beginning there was a {word}"
        served.ask("/v1/completions", prompt=prompt, max_tokens=2, cache_salt=salt, prompt_cache_key="parts")
    response = served.ask("/v1/responses", input="Hi", max_output_tokens=2, cache_salt=salt)
    assert response.status_code == 200, response.text
    return response.json()["id"]


def texts(served: Served) -> dict[str, bool]:
    """Where the words can still be read."""
    with served.http() as http:
        return {place: "okapi" in http.get(place).text for place in PLACES}


def is_kept(served: Served, response_id: str) -> bool:
    with served.http() as http:
        return http.get(f"/v1/responses/{response_id}").status_code == 200


@pytest.mark.parametrize("body", [{"salt": SALT}, {"tier": "all"}])
def test_clear_forgets_responses_and_where_prompts_parted(served: Served, body: dict[str, str]) -> None:
    response_id = leave_texts(served)
    assert all(texts(served).values())
    assert is_kept(served, response_id)
    served.ask("/cache/clear", salt="another").raise_for_status()
    assert is_kept(served, response_id)
    assert all(texts(served).values())
    served.ask("/cache/clear", **body).raise_for_status()
    assert not is_kept(served, response_id)
    assert not any(texts(served).values())


def test_texts_expire(served: Served) -> None:
    response_id = leave_texts(served)
    expire_texts(served.server.state, 0.0)
    assert is_kept(served, response_id)
    assert all(texts(served).values())
    expire_texts(served.server.state, 1e12)
    assert not is_kept(served, response_id)
    assert not any(texts(served).values())


def test_a_server_with_a_time_to_live_looks_for_what_has_expired(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Semaphore(0)
    monkeypatch.setattr(state, "LEAST_PAUSE_S", 0.01)
    monkeypatch.setattr(state, "expire_texts", lambda _service, _before_s: looked.release())
    serve(cache_ttl_s=0.1)
    assert looked.acquire(timeout=30)
    assert looked.acquire(timeout=30)
