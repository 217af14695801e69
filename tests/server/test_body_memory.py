"""All bodies together take a bounded memory: counted as they arrive, given back when they are understood."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from kvstrata.errors import Unavailable
from kvstrata.server.cache.transfer import IMPORT_PATH
from kvstrata.server.http.body_limit import BodyLimits, BoundBodyMemory, HttpLimits, release_body
from tests.support.models import tiny_loaded
from tests.support.raw_http import completion, connected, until
from tests.support.servers import Served, running

LIMITS = BodyLimits(HttpLimits(max_body_bytes=100, body_memory_bytes=100), {IMPORT_PATH: 1000})


class Body:
    """A request whose body the test sends in pieces."""

    def __init__(self, app: BoundBodyMemory, path: str = "/v1/completions") -> None:
        self.scope: dict[str, Any] = {"type": "http", "path": path, "headers": []}
        self._pieces: asyncio.Queue[Message] = asyncio.Queue()
        self._task = asyncio.ensure_future(app(self.scope, self._pieces.get, _nothing))

    async def send(self, num_bytes: int, *, more: bool = True) -> None:
        self._pieces.put_nowait({"type": "http.request", "body": bytes(num_bytes), "more_body": more})
        for _ in range(5):  # the app takes it meanwhile
            await asyncio.sleep(0)

    async def end(self) -> None:
        await self.send(0, more=False)
        await self._task

    async def refusal(self) -> Unavailable:
        with pytest.raises(Unavailable) as refused:
            await self._task
        return refused.value


async def _nothing(_: Message) -> None:
    pass


async def reading(_: Scope, receive: Receive, __: Send) -> None:
    while (await receive())["more_body"]:
        pass


def test_bodies_share_one_memory_until_they_end() -> None:
    async def run() -> None:
        app = BoundBodyMemory(reading, LIMITS)
        first, second = Body(app), Body(app)
        await first.send(70)
        await second.send(20)
        await second.send(20)
        refused = await second.refusal()
        assert refused.retry_after_s
        assert "--body-memory" in refused.message
        third = Body(app)
        await third.send(30)  # what was refused has given its part back
        await first.end()
        await third.send(70)
        await third.end()

    asyncio.run(run())


def test_a_body_that_is_understood_leaves_its_place_though_its_request_goes_on() -> None:
    async def run() -> None:
        app = BoundBodyMemory(reading, LIMITS)
        first, second = Body(app), Body(app)
        await first.send(100)
        release_body(first.scope)
        await second.send(100)
        await first.end()
        await second.end()
        third = Body(app)
        await third.send(100)
        await third.end()

    asyncio.run(run())


def test_files_are_not_held_in_memory_and_not_counted() -> None:
    async def run() -> None:
        app = BoundBodyMemory(reading, LIMITS)
        file, body = Body(app, IMPORT_PATH), Body(app)
        await file.send(500)
        await body.send(100)
        await body.end()
        await file.end()

    asyncio.run(run())


def test_the_memory_holds_the_largest_body_at_least() -> None:
    async def run() -> None:
        app = BoundBodyMemory(reading, BodyLimits(HttpLimits(max_body_bytes=200, body_memory_bytes=100)))
        body = Body(app)
        await body.send(200)
        await body.end()

    asyncio.run(run())


@contextmanager
def tight() -> Iterator[Served]:
    with running(
        tiny_loaded("llama"), options={"http": {"max_body_bytes": 1 << 20}}, body_memory="1MiB", keep_alive_s=0.2
    ) as one:
        yield one


def test_replies_that_stream_hold_no_memory_for_bodies() -> None:
    padding = "x" * 700_000
    with tight() as served, connected(served) as one, connected(served) as other:
        for line in (one, other):
            line.sendall(completion(served, max_tokens=4000, stream=True, user=padding))
            assert until(line, b"data: ").startswith(b"HTTP/1.1 200")
