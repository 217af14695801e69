"""The response of a job: submits it to the engine and sends the reply as one JSON value or as a stream.

It is an ASGI response of its own, so that everything that can end a request early (a refusal, a failure, a disconnected
client) is handled in one place; leaving it cancels the requests in the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from anyio import to_thread
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvstrata.errors import ContextTooLong, NeverFits, RequestError
from kvstrata.server.bridge import Replies
from kvstrata.server.conversation.job import Job
from kvstrata.server.conversation.stream import send_stream
from kvstrata.server.conversation.telling import Telling
from kvstrata.server.conversation.wire import Wire, json_response
from kvstrata.server.disconnect import unless_gone
from kvstrata.server.journal.trace import Asked, trace_in
from kvstrata.server.service import Service


class Reply(Response):
    """An ASGI response that runs a job.

    `on_end`: called with the complete response of a successful reply, streamed or not, before the client has received
    it; runs on a worker thread. `on_too_long`: returns the response to a prompt that does not fit the context or the
    memory; None: the normal error response.
    """

    def __init__(
        self,
        service: Service,
        job: Job,
        wire: Wire,
        *,
        stream: bool,
        on_end: Callable[[Any], None] | None = None,
        on_too_long: Callable[[RequestError], Response] | None = None,
    ) -> None:
        super().__init__()
        self._service = service
        self._job = job
        self._wire = wire
        self._is_stream = stream
        self._on_end = on_end
        self._on_too_long = on_too_long

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A client that has disconnected gets no response; this is not an error.
        with contextlib.suppress(ClientDisconnect):
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._service.door.pass_through(), Replies(self._service.engine, self._job.requests) as replies:
            trace = trace_in(scope)
            trace.asked = self._asked()
            telling = Telling(self._job, self._wire, replies.end, trace)
            try:
                replies.submit()
            except (ContextTooLong, NeverFits) as error:
                trace.fail(error)
                if self._on_too_long is None:
                    raise
                return await self._on_too_long(error)(scope, receive, send)
            self._count_prompt()
            if self._is_stream:
                return await unless_gone(receive, self._stream(replies, telling, send))
            answer = await unless_gone(receive, self._whole(replies, telling))
            return await answer(scope, receive, send)

    def _asked(self) -> Asked:
        job = self._job
        prompt_tokens = sum(len(request.prompt) for request in job.requests[:: job.n])
        session = job.visits[0].key if len(job.visits) == 1 else ""
        return Asked(prompt_tokens, job.n, self._is_stream, session, job.requests[0].salt)

    def _count_prompt(self) -> None:
        if (made := self._job.prompt) is not None:
            turns, tokens = made.replayed_turns, made.replayed_tokens
            self._service.metrics.prompts.count(made.hygiene, replayed_turns=turns, replayed_tokens=tokens)

    async def _stream(self, replies: Replies, telling: Telling, send: Send) -> None:
        def on_end() -> None:
            if self._on_end is not None:
                self._on_end(self._wire.whole(telling.usage()))

        keep_alive_s, headers = self._service.keep_alive_s, self._job.headers
        await send_stream(replies, telling, send, keep_alive_s=keep_alive_s, headers=headers, on_end=on_end)

    async def _whole(self, replies: Replies, telling: Telling) -> Response:
        while not replies.ended:
            arrivals = await replies.take()
            if error := telling.failure(arrivals):
                raise error
            for arrival in arrivals:
                telling.told(arrival)
            await telling.remember()
        return await to_thread.run_sync(self._answer, telling)

    def _answer(self, telling: Telling) -> Response:
        """Build the complete response. Runs on a worker thread: it may contain logprobs of 100,000 tokens."""
        self._wire.close(telling.usage())
        answer = self._wire.whole(telling.usage())
        if self._on_end is not None:
            self._on_end(answer)
        return json_response(answer, {**self._job.headers, **telling.whole_headers()})
