"""A fleet in this process: real servers of a tiny model behind a real front, without a cluster."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp, Message

from kvstrata.config import load as load_settings
from kvstrata.fleet.prompt_keys import PromptReader, ReplicaSummary, keys_from_bytes
from kvstrata.fleet.replicas import ReplicaLost, call_app
from kvstrata.fleet.router import FleetRouter
from kvstrata.fleet.routing import ReplicaReport, RoutingPolicy
from kvstrata.models.load import LoadedModel
from kvstrata.platform.device import device
from kvstrata.server.app import create_app, wrap_app
from kvstrata.server.build import build_server, protect_app
from kvstrata.server.chat.prompt import PromptRenderer
from kvstrata.server.state import ServerState
from tests.fleet.ray_fleet import free_port
from tests.support.eventually import eventually


@dataclass
class One:
    """A replica."""

    state: ServerState
    app: ASGIApp
    summary: ReplicaSummary
    is_lost: bool = False
    lost_after: int | None = None  # messages of an answer; None: never


@dataclass
class LocalFleet:
    router: RoutingPolicy = field(default_factory=RoutingPolicy)
    ones: dict[str, One] = field(default_factory=dict)

    def names(self) -> tuple[str, ...]:
        self.router.keep(list(self.ones))
        for name, one in self.ones.items():
            self.router.report(name, ReplicaReport(keys_from_bytes(one.summary.to_bytes()), 4))
        return tuple(self.ones)

    async def ask(
        self, name: str | None, request: Mapping[str, Any], body: bytes, *, only: bool
    ) -> AsyncIterator[Message]:
        del only
        one = self.ones[name] if name else next(iter(self.ones.values()))
        if one.is_lost:
            raise ReplicaLost("it was killed")
        number = 0
        async for message in call_app(one.app, request, body):
            if one.lost_after is not None and number >= one.lost_after:
                raise ReplicaLost("it was killed")
            number += 1
            yield message


@contextmanager
def serving(app: ASGIApp) -> Iterator[httpx.Client]:
    """An app on loopback, and a client of it."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        eventually(lambda: server.started)
        yield http
        server.should_exit = True
        thread.join(10)


@contextmanager
def local_fleet(loaded: LoadedModel, num_replicas: int, **flags: Any) -> Iterator[LocalFleet]:
    fleet, services = LocalFleet(), []
    try:
        for number in range(num_replicas):
            summary = ReplicaSummary()
            state = build_server(load_settings(flags=flags), loaded, device(), listeners=[summary])
            services.append(state)
            fleet.ones[f"r{number}"] = One(state, wrap_app(create_app(state), state, cors=False), summary)
        yield fleet
    finally:
        for state in services:
            state.engine.stop()
            for end in state.at_end:
                end()


def front_of(fleet: LocalFleet, **flags: Any) -> ASGIApp:
    state = next(iter(fleet.ones.values())).state
    renderer = PromptRenderer(state.template, state.renderer.thinking)
    prompts = PromptReader(state.loaded.tokenizer, renderer, state.engine.identity)
    return protect_app(FleetRouter(fleet, fleet.router, lambda: prompts), load_settings(flags=flags))
