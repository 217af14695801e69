"""Carries a job through the engine and answers it, as one JSON value or as a stream.

The answer is an ASGI response of its own: everything that can end a request early (a refusal, a failure, a client that
goes away) is in one place, and leaving it cancels in the engine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Literal

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvstrata.engine.request import Finished, Piece, Prefilled, TokenUsage
from kvstrata.server.bridge import Replies
from kvstrata.server.disconnect import unless_gone
from kvstrata.server.openai.answers import json_bytes, token_usage_answer
from kvstrata.server.openai.ask import Job
from kvstrata.server.openai.choices import Choice
from kvstrata.server.openai.stream import EventWriter, failure, send_stream
from kvstrata.server.service import Service


class Reply(Response):
    def __init__(
        self,
        service: Service,
        job: Job,
        choices: Sequence[Choice],
        kind: Literal["chat.completion", "text_completion"],
    ) -> None:
        super().__init__()
        self._service = service
        self._job = job
        self._choices = choices
        streams_chat = job.stream and kind == "chat.completion"
        self._envelope: dict[str, Any] = {
            "id": job.id,
            "object": "chat.completion.chunk" if streams_chat else kind,
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": f"kvstrata-{service.loaded.fingerprint[:12]}",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A client that has gone away gets no answer, and that is no error.
        with contextlib.suppress(ClientDisconnect):
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._service.door.pass_through(), Replies(self._service.engine, self._job.requests) as replies:
            replies.submit()
            if self._job.stream:
                return await unless_gone(receive, self._stream(replies, send))
            answer = await unless_gone(receive, self._whole(replies))
            return await answer(scope, receive, send)

    async def _stream(self, replies: Replies, send: Send) -> None:
        writer = EventWriter(self._envelope, self._choices, self._job.include_usage)
        keep_alive_s = self._service.keep_alive_s
        await send_stream(replies, writer, send, keep_alive_s=keep_alive_s)

    async def _whole(self, replies: Replies) -> Response:
        usages: list[TokenUsage] = []
        misses: dict[int, str] = {}  # why not more of each prompt was cached
        while not replies.ended:
            for arrival in await replies.take():
                if error := failure(arrival.event):
                    raise error
                if isinstance(arrival.event, Prefilled):
                    misses[arrival.index] = arrival.event.miss
                elif isinstance(arrival.event, Piece):
                    self._choices[arrival.index].add(arrival.event)
                elif isinstance(arrival.event, Finished):
                    self._choices[arrival.index].end(arrival.event)
                    usages.append(arrival.event.usage)
        usage = token_usage_answer(usages)
        answer = {**self._envelope, "choices": [choice.whole() for choice in self._choices], "usage": usage}
        headers = {
            "x-kvstrata-cached-tokens": str(usage["prompt_tokens_details"]["cached_tokens"]),
            "x-kvstrata-miss": ",".join(dict.fromkeys(misses.values())),
        }
        return Response(json_bytes(answer), media_type="application/json", headers=headers)
