"""Who may ask a server without keys: programs on this machine and its own page, not a page whose name was rebound."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.support.models import tiny_loaded
from tests.support.servers import Served, running

EVIL = "evil.example:8000"
PATHS = ("/", "/health", "/metrics", "/props", "/openapi.json", "/v1/models", "/cache/usage", "/nothing")


@pytest.fixture(scope="module")
def keyless() -> Iterator[Served]:
    with running(tiny_loaded("llama"), allowed_hosts=["models.example.org"]) as one:
        yield one


def get(served: Served, path: str, **headers: str) -> httpx.Response:
    with served.http() as http:
        return http.get(path, headers=headers)


def refused(response: httpx.Response) -> str:
    assert response.status_code == 403
    error = response.json()["error"]
    assert error["type"] == "permission_error"
    return f"{error['code']}: {error['message']}"


@pytest.mark.parametrize("path", PATHS)
def test_a_rebound_page_gets_nothing(keyless: Served, path: str) -> None:
    said = refused(get(keyless, path, host=EVIL))
    assert said.startswith("host_not_allowed")
    for word in ("evil.example", "--allowed-hosts", "--api-key"):
        assert word in said


def test_a_rebound_page_changes_nothing(keyless: Served) -> None:
    assert keyless.ask("/v1/completions", prompt=[7] * 300, max_tokens=1).status_code == 200
    headers = {"host": EVIL, "origin": f"http://{EVIL}", "sec-fetch-site": "same-origin"}
    with keyless.http() as http:
        for path, body in (("/cache/clear", {"tier": "all"}), ("/cache/explain", {"tokens": [7, 7]})):
            assert refused(http.post(path, json=body, headers=headers)).startswith("host_not_allowed")
        assert http.get("/cache/usage").json()["tiers"]["hot"]["tokens"] == 300


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST.:8000",
        "127.0.0.1:1",
        "127.8.8.8",
        "[::1]:8000",
        "[::1]",
        "192.168.1.5:8000",
        "[fd00::1]:8000",
        "models.example.org",
        "Models.Example.org:443",
        socket.gethostname(),
        "host.docker.internal:8000",
        "mini.local",
        "kvstrata:8000",
    ],
)
def test_its_own_names_and_addresses(keyless: Served, host: str) -> None:
    assert get(keyless, "/v1/models", host=host).status_code == 200
    # As its own page posts, through a proxy that speaks TLS too.
    for scheme in ("http", "https"):
        assert get(keyless, "/v1/models", host=host, origin=f"{scheme}://{host.lower()}").status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "localhost.evil.example",
        "127.0.0.1.evil.io",
        "a.local.evil.io",
        "[::1].evil",
        "[",
        "127.0.0.1@evil",
        "local@a",
        "",
    ],
)
def test_names_that_only_look_like_it(keyless: Served, host: str) -> None:
    refused(get(keyless, "/v1/models", host=host))


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "", "http://127.0.0.1", "http://localhost:1"])
def test_pages_of_other_sites(keyless: Served, origin: str) -> None:
    said = refused(get(keyless, "/v1/models", origin=origin))
    assert said.startswith("origin_not_allowed")
    # What would help: a key would not, and neither would a name of this server.
    assert f"--allowed-origins {origin if '://' in origin else chr(39) + '*' + chr(39)} " in said
    assert "--api-key" not in said


def test_a_proxy_that_asks_by_address(keyless: Served) -> None:
    assert get(keyless, "/v1/models", origin="https://models.example.org").status_code == 200


def test_programs_that_show_their_own_pages(keyless: Served) -> None:
    for origin in ("app://obsidian.md", "vscode-webview://1abc", "file://"):
        assert get(keyless, "/v1/models", origin=origin).status_code == 200


def test_a_host_said_twice_must_be_ours_twice(keyless: Served) -> None:
    with socket.create_connection(("127.0.0.1", int(keyless.url.rpartition(":")[2])), 10) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        assert line.makefile("rb").readline().split()[1] in (b"400", b"403")


def test_old_programs_say_no_host(keyless: Served) -> None:
    with socket.create_connection(("127.0.0.1", int(keyless.url.rpartition(":")[2])), 10) as line:
        line.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert line.makefile("rb").readline().split()[1] == b"200"


def test_clients_and_streams_work_as_before(keyless: Served) -> None:
    with keyless.openai() as client:
        stream = client.completions.create(model=keyless.name, prompt="a", max_tokens=3, stream=True)
        assert len(list(stream)) >= 1
    url = keyless.url.replace("127.0.0.1", "localhost")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        assert client.models.list().data[0].id == keyless.name


def test_with_a_key_any_name_will_do() -> None:
    with running(tiny_loaded("llama"), api_key=["secret"]) as one, one.http() as http:
        http.headers.update({"host": EVIL, "origin": f"http://other.{EVIL}"})
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models").status_code == 401
        assert http.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
