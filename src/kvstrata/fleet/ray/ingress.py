"""Router deployment on Ray Serve: passes Ray's replica reports to `fleet/router.py`, behind a server's keys and
limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextvars import Context
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstrata.config import Settings
from kvstrata.config import load as load_settings
from kvstrata.fleet.prompt_keys import PromptReader, keys_from_bytes
from kvstrata.fleet.ray import reports
from kvstrata.fleet.ray.replica import GONE
from kvstrata.fleet.replicas import ReplicaLost
from kvstrata.fleet.router import FleetRouter
from kvstrata.fleet.routing import ReplicaReport, RoutingPolicy
from kvstrata.prefix_cache.keys import Identity
from kvstrata.server.chat.prompt import PromptRenderer

RETRY_S = 0.5


@serve.ingress()
class RayIngress:
    def __init__(self, settings: Mapping[str, Any], replicas: DeploymentHandle) -> None:
        self._settings = load_settings(flags=settings)
        self._replicas = RayReplicas(replicas)
        self._prompts: PromptReader | None = None
        self._learning: asyncio.Task[None] | None = None

    def __serve_build_asgi_app__(self) -> ASGIApp:
        from kvstrata.server.build import protect_app

        front = FleetRouter(self._replicas, self._replicas.router, lambda: self._prompts)
        self._replicas.listen(asyncio.get_running_loop())
        self._learning = asyncio.get_running_loop().create_task(self._learn())
        return _named_by_ray(protect_app(front, self._settings))

    async def _learn(self) -> None:
        """Load the prompt renderer and ask a replica for the identity of its cache keys. Until then requests are routed
        by load."""
        renders = asyncio.get_running_loop().run_in_executor(None, _renderer, self._settings)
        while True:
            try:
                identity = await self._replicas.identity()
                break
            except (RayError, RayServeException):
                await asyncio.sleep(RETRY_S)
        tokenizer, renderer = await renders
        self._prompts = PromptReader(tokenizer, renderer, identity)


def _named_by_ray(app: ASGIApp) -> ASGIApp:
    """Remove our `x-request-id` header: Ray's proxy adds the same id to every response."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_once(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [pair for pair in message["headers"] if pair[0].lower() != b"x-request-id"]
                message = {**message, "headers": kept}
            await send(message)

        await app(scope, receive, send_once)

    return run


class RayReplicas:
    """Replicas reached through a Ray handle. Reports arrive on Ray's thread and are applied on the router's event
    loop."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self.router = RoutingPolicy()

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        reports.listen(lambda reports: loop.call_soon_threadsafe(self._update, dict(reports)))

    def _update(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        self.router.keep(list(reports))
        for name, report in reports.items():
            if report:
                self.router.report(name, ReplicaReport(keys_from_bytes(report["keys"]), report["capacity"]))

    def names(self) -> tuple[str, ...]:
        return self.router.replicas

    async def identity(self) -> Identity:
        identity = await self._handle.identity.remote()
        return Identity(**{**identity, "layout": tuple(identity["layout"])})

    async def ask(
        self, name: str | None, request: Mapping[str, Any], body: bytes, *, only: bool
    ) -> AsyncIterator[Message]:
        asking = self._handle.options(stream=True).ask
        # A fresh context: Ray identifies calls within one request's context and would mix up the replicas.
        answer: Any = Context().run(asking.remote, request, body, to=name or "", only=only)
        has_ended = False
        try:
            async for message in answer:
                if message["type"] == GONE:
                    raise ReplicaLost("it is not there any more")
                yield message
            has_ended = True
        except (RayError, RayServeException) as error:
            has_ended = True
            raise ReplicaLost(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
        finally:
            if not has_ended:
                answer.cancel()


def _renderer(settings: Settings) -> tuple[Any, PromptRenderer]:
    from kvstrata.models.load import load_tokenizer
    from kvstrata.text.template import ChatTemplate
    from kvstrata.text.thinking import ThinkingSwitch

    tokenizer = load_tokenizer(settings.model)
    template = ChatTemplate(
        tokenizer, system_in_place=settings.stable_prompts, allow_special_tokens=settings.allow_special_tokens
    )
    return tokenizer, PromptRenderer(template, ThinkingSwitch(template), settings.stable_prompts)
