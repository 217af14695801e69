"""Bodies that come compressed: read within the bound, whatever the pieces; bombs and damage refused."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import BodyTooLarge, InvalidRequest
from kvstrata.server.http.body_limit import INFLATED_BYTES, DecompressedBody
from tests.support.models import tiny_loaded
from tests.support.servers import Served, running

BODY = json.dumps({"prompt": [5] * 50, "max_tokens": 1}).encode()
MAX_BYTES = 1 << 20


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with running(tiny_loaded("llama"), options={"http": {"max_body_bytes": MAX_BYTES}}) as one:
        yield one


def send(served: Served, coding: str, body: bytes, path: str = "/v1/completions") -> httpx.Response:
    with served.http() as http:
        headers = {"content-type": "application/json", "content-encoding": coding}
        return http.post(path, content=body, headers=headers)


# Named, because packed bytes have the time in them: each process that collects tests would find other names.
@pytest.mark.parametrize(
    ("coding", "body"),
    [
        pytest.param("gzip", gzip.compress(BODY), id="gzip"),
        pytest.param("GZip", gzip.compress(BODY), id="GZip"),
        pytest.param("x-gzip", gzip.compress(BODY), id="x-gzip"),
        pytest.param("gzip", gzip.compress(BODY[:20]) + gzip.compress(BODY[20:]), id="gzip twice"),
        pytest.param("identity", BODY, id="identity"),
        pytest.param("", BODY, id="no coding"),
        pytest.param("identity, gzip", gzip.compress(BODY), id="identity, gzip"),
    ],
)
def test_what_is_read(served: Served, coding: str, body: bytes) -> None:
    answer = send(served, coding, body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 50


def test_every_path_reads_it(served: Served) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/cache/explain", {"tokens": [5] * 9})):
        assert send(served, "gzip", gzip.compress(json.dumps(body).encode()), path).status_code == 200


@pytest.mark.parametrize("coding", ["br", "zstd", "deflate", "gzip, gzip", "compress", "gzip;q=1"])
def test_what_is_not(served: Served, coding: str) -> None:
    answer = send(served, coding, gzip.compress(BODY))
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "gzip"
    error = answer.json()["error"]
    assert error["code"] == "unsupported_content_encoding"
    assert "by gzip" in error["message"]


def test_an_unknown_coding_has_the_shape_of_its_api(served: Served) -> None:
    assert send(served, "br", b"x", "/v1/messages").json()["type"] == "error"


@pytest.mark.parametrize(
    "body",
    [b"", b"not gzip", gzip.compress(BODY)[:-9], gzip.compress(BODY) + b"rest", gzip.compress(BODY)[:5]],
    ids=["empty", "another", "cut", "followed", "a start"],
)
def test_damage_is_400(served: Served, body: bytes) -> None:
    answer = send(served, "gzip", body)
    assert answer.status_code == 400
    assert "gzip" in answer.json()["error"]["message"]


def test_a_bomb_is_refused_before_it_is_inflated(served: Served) -> None:
    bomb = gzip.compress(b"\0" * (200 << 20), 9)
    assert len(bomb) < MAX_BYTES
    answer = send(served, "gzip", bomb)
    assert answer.status_code == 413
    assert "Send less" in answer.json()["error"]["message"]
    with served.http() as http:
        assert http.get("/health").status_code == 200


def test_the_bound_is_of_what_it_becomes(served: Served) -> None:
    for size, status in ((MAX_BYTES, 200), (MAX_BYTES + 1, 413)):
        body = BODY[:-1] + b" " * (size - len(BODY)) + b"}"
        assert len(body) == size
        assert send(served, "gzip", gzip.compress(body)).status_code == status


async def inflate(pieces: list[bytes], most_bytes: int) -> tuple[bytes, int]:
    """All of it, and its longest piece."""
    coming = iter([*pieces, b""])
    left = len(pieces)

    async def receive() -> dict[str, Any]:
        nonlocal left
        left -= 1
        return {"type": "http.request", "body": next(coming), "more_body": left >= 0}

    inflated = DecompressedBody(receive, most_bytes, BodyTooLarge("too large"))
    body, longest, more = b"", 0, True
    while more:
        message = await inflated()
        body, longest = body + message["body"], max(longest, len(message["body"]))
        more = message["more_body"]
    return body, longest


@given(
    st.binary(max_size=300),
    st.integers(0, 2000),
    st.lists(st.integers(0, 400), max_size=20),
    st.integers(0, 200_000),
)
def test_any_body_in_any_pieces(part: bytes, times: int, cuts: list[int], most_bytes: int) -> None:
    body = part * times
    packed = gzip.compress(body)
    places = sorted({0, len(packed), *(cut for cut in cuts if cut < len(packed))})
    pieces = [packed[a:b] for a, b in pairwise(places)]
    if len(body) > most_bytes:
        with pytest.raises(BodyTooLarge):
            asyncio.run(inflate(pieces, most_bytes))
        return
    whole, longest = asyncio.run(inflate(pieces, most_bytes))
    assert whole == body
    assert longest <= INFLATED_BYTES


@given(st.binary(min_size=1, max_size=2000), st.integers(0, 5000))
def test_a_cut_body_is_never_taken_for_whole(body: bytes, cut: int) -> None:
    packed = gzip.compress(body)
    with pytest.raises(InvalidRequest):
        asyncio.run(inflate([packed[: cut % len(packed)]], 1 << 20))
