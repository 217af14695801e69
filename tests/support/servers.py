"""Real servers: uvicorn in a thread on a free port, a real engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import openai

from kvstrata.config import load
from kvstrata.models.load import LoadedModel
from kvstrata.platform.device import device
from kvstrata.platform.network import bind, url_of
from kvstrata.server.build import build_server
from kvstrata.server.history import History
from kvstrata.server.options import ServerOptions, server_options
from kvstrata.server.request_log import RequestLog
from kvstrata.server.run import Server


@dataclass(frozen=True)
class Served:
    url: str
    server: Server
    thread: threading.Thread

    @property
    def name(self) -> str:
        return self.server.state.name

    def openai(self, key: str = "none") -> openai.OpenAI:
        http = openai.DefaultHttpxClient(verify=False)  # as below
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120, http_client=http)

    def http(self) -> httpx.Client:
        # Without TLS there is nothing to verify, and reading the machine's certificates takes 65 ms each time.
        return httpx.Client(base_url=self.url, timeout=120, verify=False)

    def ask(self, path: str, **body: Any) -> httpx.Response:
        with self.http() as client:
            return client.post(path, json={"model": self.name, **body})

    def wait_idle(self) -> None:
        """Until no request is being served, which the server knows without being asked again and again."""
        loop = self.server._loop
        assert loop is not None
        assert asyncio.run_coroutine_threadsafe(self.server.state.drain_gate.wait_empty(60), loop).result(61)


Fields = Mapping[str, Any]


def with_fields(options: ServerOptions, **parts: Fields) -> ServerOptions:
    """Return options with other values of fields that no setting changes. `parts`: fields of `engine`, `cache`, `http`,
    and of the `disk`."""
    disk, tiers = parts.pop("disk", {}), options.tiers
    if tiers.disk is not None:
        tiers = replace(tiers, disk=replace(tiers.disk, **disk))
    return replace(
        options, tiers=tiers, **{name: replace(getattr(options, name), **fields) for name, fields in parts.items()}
    )


@contextmanager
def running(
    loaded: LoadedModel,
    *,
    keep_alive_s: float = 10.0,
    slot_s: float = 10.0,
    options: Mapping[str, Fields] | None = None,
    **flags: Any,
) -> Iterator[Served]:
    """Run a server. `slot_s`: of the history that is kept. `options`: arguments of `with_fields`."""
    settings, machine = load(flags={"port": 0, **flags}), device()
    changed = with_fields(server_options(settings, machine), **(options or {}))
    state = build_server(settings, loaded, machine, options=changed)
    state = replace(state, keep_alive_s=keep_alive_s, request_log=RequestLog(History(slot_s)))
    listener = bind(settings.host, settings.port)
    ready = threading.Event()
    server = Server(state, drain_timeout_s=settings.drain_timeout_s, on_ready=ready.set, say=lambda _line: None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield Served(url_of(listener), server, thread)
    finally:
        server.end()
        thread.join(30)
    assert not thread.is_alive()


def emptied(served: Served) -> Served:
    """Nothing stored, everything raw."""
    with served.http() as http:
        http.post("/cache/requantize", json={"k": "raw", "v": "raw"}).raise_for_status()
        http.post("/cache/clear", json={"tier": "all"}).raise_for_status()
    return served
