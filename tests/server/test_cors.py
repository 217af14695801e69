"""Pages of other origins in a browser: preflights, what they may read, with keys and without; and HEAD."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.models import tiny_loaded
from tests.support.servers import Served, running

PAGE, OTHER = "https://chat.example.org", "http://localhost:3000"
EVIL = "https://evil.example"
ASKS = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


@pytest.fixture(scope="module")
def keyless() -> Iterator[Served]:
    with running(tiny_loaded("llama"), allowed_origins=[f"{PAGE},{OTHER}"]) as one:
        yield one


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with running(tiny_loaded("llama"), allowed_origins=[PAGE], api_key=["secret"]) as one:
        yield one


@pytest.fixture(scope="module")
def anyones() -> Iterator[Served]:
    with running(tiny_loaded("llama"), allowed_origins=["*"]) as one:
        yield one


@pytest.fixture(params=["keyless", "locked"])
def served(request: pytest.FixtureRequest) -> Served:
    return request.getfixturevalue(request.param)


def preflight(served: Served, origin: str, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    with served.http() as http:
        return http.options(path, headers={"origin": origin, **ASKS, **headers})


def listed(response: httpx.Response, header: str) -> set[str]:
    return {name.strip().lower() for name in response.headers.get(header, "").split(",")} - {""}


def test_a_preflight_needs_no_key(served: Served) -> None:
    answer = preflight(served, PAGE)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert {"post", "get", "delete"} <= listed(answer, "access-control-allow-methods")
    assert listed(answer, "access-control-allow-headers") == set(ASKS["access-control-request-headers"].split(","))
    assert "origin" in listed(answer, "vary")
    # No cookies: what a page may do is what its own code can send.
    assert "access-control-allow-credentials" not in answer.headers
    assert "access-control-allow-private-network" not in answer.headers


def test_a_page_of_the_web_may_reach_a_private_network_where_it_is_named(served: Served) -> None:
    asked = {"access-control-request-private-network": "true"}
    assert preflight(served, PAGE, **asked).headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize("origin", [EVIL, "null", f"{PAGE}.evil.example", f"{PAGE}:444", "http://chat.example.org"])
def test_preflight_of_other_origins_is_refused(served: Served, origin: str) -> None:
    answer = preflight(served, origin)
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers


def test_a_page_reads_answers_and_errors(keyless: Served) -> None:
    with keyless.http() as http:
        http.headers["origin"] = OTHER
        good = http.post("/v1/completions", json={"prompt": [5] * 10, "max_tokens": 1})
        wrong = http.post("/v1/completions", json={"prompt": 5})
        lost = http.get("/nothing")
    assert [good.status_code, wrong.status_code, lost.status_code] == [200, 400, 404]
    for answer in (good, wrong, lost):
        assert answer.headers["access-control-allow-origin"] == OTHER
        assert "x-request-id" in listed(answer, "access-control-expose-headers")
    ours = {name for name in good.headers if name.startswith("x-kvstrata-")}
    assert {"x-kvstrata-miss", "x-kvstrata-cached-tokens"} <= ours <= listed(good, "access-control-expose-headers")


def test_a_page_reads_that_its_key_is_wrong(locked: Served) -> None:
    with locked.http() as http:
        http.headers["origin"] = PAGE
        wrong = http.get("/v1/models")
        right = http.get("/v1/models", headers={"authorization": "Bearer secret"})
    assert [wrong.status_code, right.status_code] == [401, 200]
    assert wrong.headers["access-control-allow-origin"] == right.headers["access-control-allow-origin"] == PAGE


def test_streams_have_the_headers_too(keyless: Served) -> None:
    body = {"prompt": [5] * 10, "max_tokens": 2, "stream": True}
    with keyless.http() as http, http.stream("POST", "/v1/completions", json=body, headers={"origin": PAGE}) as answer:
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert b"[DONE]" in answer.read()


def test_other_pages_get_nothing_without_keys(keyless: Served) -> None:
    with keyless.http() as http:
        answer = http.get("/v1/models", headers={"origin": EVIL})
        rebound = http.get("/v1/models", headers={"origin": PAGE, "host": "evil.example"})
    assert answer.status_code == rebound.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
    assert f"--allowed-origins {EVIL} " in answer.json()["error"]["message"]


def test_two_origins_are_none(keyless: Served) -> None:
    with keyless.http() as http:
        answer = http.get("/v1/models", headers=[("origin", PAGE), ("origin", EVIL)])
    assert answer.status_code == 403


def test_every_page_where_it_was_said_so(anyones: Served) -> None:
    for origin in (EVIL, "null"):
        assert preflight(anyones, origin).headers["access-control-allow-origin"] == "*"
        with anyones.http() as http:
            answer = http.get("/v1/models", headers={"origin": origin})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


def test_without_an_origin_nothing_is_said(keyless: Served) -> None:
    with keyless.http() as http:
        assert not [name for name in http.get("/v1/models").headers if name.startswith("access-control")]
        # A bare OPTIONS is no preflight.
        assert http.options("/v1/models").status_code == 405


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/metrics", "/dashboard/main.js"])
def test_head_is_get_without_the_body(keyless: Served, path: str) -> None:
    with keyless.http() as http:
        head, got = http.head(path), http.get(path)
        assert http.head(path).status_code == 200  # the connection is still in step
    assert head.status_code == got.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]
    if path != "/metrics":
        assert head.headers["content-length"] == str(len(got.content))


def test_head_needs_the_key_that_get_needs(locked: Served) -> None:
    with locked.http() as http:
        assert [http.head(path).status_code for path in ("/", "/health", "/v1/models")] == [200, 200, 401]
        assert http.head("/cache/sessions").status_code == 401
        assert http.head("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
