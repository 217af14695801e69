"""A reply as server-sent events: decides when to send; the wire decides the format."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from anyio import to_thread
from starlette.types import Send

from kvstrata.engine.request import Event, Finished, PrefillProgress, TextDelta
from kvstrata.server.bridge import Arrival, Replies
from kvstrata.server.conversation.telling import Telling
from kvstrata.server.conversation.wire import encode

PING_S = 1.0  # shortest interval between progress pings, and longest wait for the first byte


class Heartbeat:
    """A timer for pings: decides when a client needs a progress report or has heard nothing for too long.

    Only events that the client receives count, not those of the engine: a tool call that is held back is many tokens
    but no event.
    """

    def __init__(self, keep_alive_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_alive_s = keep_alive_s
        self._gap_s = min(PING_S, keep_alive_s)
        self._clock = clock
        self._sent = clock()  # time of the last bytes to the client
        self._pinged = -math.inf
        self._doing = "waiting"
        self._is_news = False

    def note(self, event: Event) -> None:
        if isinstance(event, PrefillProgress):
            self._doing, self._is_news = f"prefill {event.num_done}/{event.num_total}", True
        elif isinstance(event, TextDelta):
            self._doing, self._is_news = "writing", False

    def left_s(self) -> float:
        """Return the seconds until the next ping is due."""
        silent_until = self._sent + self._keep_alive_s
        due = min(silent_until, self._pinged + self._gap_s) if self._is_news else silent_until
        return max(0.0, due - self._clock())

    def due(self) -> str:
        """Return the text of the ping that is due now, or an empty string."""
        if self.left_s() > 0:
            return ""
        self._pinged, self._is_news = self._clock(), False
        return self._doing

    def on_sent(self) -> None:
        self._sent = self._clock()


async def send_stream(
    replies: Replies,
    telling: Telling,
    send: Send,
    *,
    keep_alive_s: float,
    headers: Mapping[str, str],
    on_end: Callable[[], None],
) -> None:
    """Send a reply as a stream. The headers wait for the first event, which has the number of cached tokens, but at
    most PING_S. `on_end`: called after a successful reply, before the client gets the last event. The last event of
    some APIs has the complete response, so it is encoded on a worker thread, where `on_end` runs too."""
    wire = telling.wire
    heartbeat = Heartbeat(keep_alive_s)
    arrivals = await _take(replies, min(PING_S, keep_alive_s))
    if failed := telling.failure(arrivals):
        raise failed
    await _send_start(send, {**headers, **telling.headers(arrivals)})
    body = encode(wire.begin(telling.begun(arrivals)))
    while True:
        for arrival in arrivals:
            heartbeat.note(arrival.event)
        if doing := heartbeat.due():
            body += wire.ping(doing)
        events = [event for arrival in arrivals for event in telling.told(arrival)]
        is_ending = any(isinstance(arrival.event, Finished) for arrival in arrivals)
        body += await to_thread.run_sync(encode, events) if is_ending else encode(events)
        if failed := telling.failure(arrivals):
            await _send_body(send, body + encode(wire.fail(failed)), more=False)
            return
        await telling.remember()
        if replies.ended:
            break
        if body:
            await _send_body(send, body, more=True)
            heartbeat.on_sent()
        arrivals, body = await _take(replies, heartbeat.left_s()), b""

    def last() -> bytes:
        closing = encode(wire.close(telling.usage()))
        on_end()
        return closing

    await _send_body(send, body + await to_thread.run_sync(last), more=False)


async def _take(replies: Replies, timeout_s: float) -> list[Arrival]:
    """Return the next events, or none if the timeout expires."""
    try:
        return await replies.take(timeout_s)
    except TimeoutError:
        return []


async def _send_start(send: Send, headers: Mapping[str, str]) -> None:
    all_headers = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",  # nginx would hold the events back
        **headers,
    }
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
