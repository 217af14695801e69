"""Bridge between the engine's thread and asyncio: requests one way, events the other.

Handles threads and tasks, no HTTP or JSON. When a reader stops, for any reason, its requests are cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from kvstrata.engine.request import Event, Failed, Finished, Request, Sink
from kvstrata.errors import Unavailable

# Events per batch. A client that has not read for a while has thousands pending; encoding all of them at once would
# delay every other client.
MAX_TAKEN = 64


class EngineQueue(Protocol):
    """The part of the engine's interface that a generation needs."""

    def submit(self, request: Request, sink: Sink) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def finish_early(self, request_id: str) -> None: ...


@dataclass(frozen=True)
class RequestEvent:
    """An engine event of the request at `index`."""

    index: int
    event: Event


class RunningRequests:
    """Engine requests that were submitted together. Leaving the `with` block cancels unfinished ones."""

    def __init__(self, engine: EngineQueue, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[RequestEvent] = asyncio.Queue()
        self._open: set[int] = set()

    def __enter__(self) -> RunningRequests:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cancel()

    def submit(self) -> None:
        """Submit all requests, or none: if the engine refuses one, cancel the accepted ones and raise its error."""
        try:
            for index, request in enumerate(self.requests):
                self._engine.submit(request, self._sink(index))
                self._open.add(index)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        for index in tuple(self._open):
            self._engine.cancel(self.requests[index].id)
        self._open.clear()

    def finish_early(self, index: int) -> None:
        """Finish the reply at `index` as it is: its last event arrives as if the model had ended it."""
        self._engine.finish_early(self.requests[index].id)

    @property
    def ended(self) -> bool:
        return not self._open and self._queue.empty()

    async def next_events(self, timeout_s: float | None = None) -> list[RequestEvent]:
        """Wait for an event; return it with others that have already arrived, at most MAX_TAKEN. Raises
        TimeoutError."""
        async with asyncio.timeout(timeout_s):
            taken = [await self._queue.get()]
        while not self._queue.empty() and len(taken) < MAX_TAKEN:
            taken.append(self._queue.get_nowait())
        for arrival in taken:
            if isinstance(arrival.event, Finished | Failed):
                self._open.discard(arrival.index)
        return taken

    def _sink(self, index: int) -> Sink:
        def sink(event: Event) -> None:
            # RuntimeError: the loop is closed, so no task waits for this event.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._queue.put_nowait, RequestEvent(index, event))

        return sink


class DrainGate:
    """A counter of requests in progress that can refuse new ones. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.is_closed = False
        self._num_running = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_running(self) -> int:
        return self._num_running

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        if self.is_closed:
            raise Unavailable("The server is shutting down. Try again when it is back.")
        self._num_running += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._empty.set()

    async def wait_empty(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        return self._empty.is_set()
