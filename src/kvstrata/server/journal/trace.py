"""The trace of one request: filled in while it is served, read when it has ended. Contains no prompt.

Belongs to the event loop's thread. The divergence from the session's last prompt includes text: it is shown only to the
request's own key and never logged.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import Scope

from kvstrata.engine.request import Event, Finished, PrefillProgress, TextDelta
from kvstrata.errors import RequestError
from kvstrata.server.sessions.session import Parted

SCOPE_TRACE = "kvstrata.trace"
CLIENT_GONE = 499  # as in nginx's log


@dataclass
class Asked:
    """A job as its trace stores it. The `n` choices of a prompt are adjacent."""

    prompt_tokens: int
    n: int = 1
    is_stream: bool = False
    session: str = ""  # the session's key
    salt: str = ""
    parted: Parted | None = None  # known when prefill begins


@dataclass
class Trace:
    id: str
    method: str = ""
    path: str = ""
    clock: Callable[[], float] = time.monotonic
    on_first_token: Callable[[float], None] = lambda _seconds: None
    began_s: float = field(default_factory=time.time)  # since the epoch
    status: int = 0  # 0: no response was started
    error: str = ""  # error code, also of a stream that fails after its start
    is_complete: bool = False  # the complete response was written
    asked: Asked | None = None  # None: not a request to the model
    seconds: float = 0.0
    first_token_s: float | None = None

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._last_token_s = 0.0
        self._cached: dict[int, int] = {}
        self._misses: dict[int, str] = {}
        self._generated: dict[int, int] = {}

    def note(self, index: int, event: Event) -> None:
        if isinstance(event, PrefillProgress):
            self._cached.setdefault(index, event.num_cached)
            self._misses.setdefault(index, event.miss_reason)
        elif isinstance(event, TextDelta) and event.ids:
            self._on_tokens(index, len(event.ids))
        elif isinstance(event, Finished):
            self._cached[index] = event.usage.cached_tokens
            self._generated[index] = event.usage.completion_tokens

    def fail(self, error: RequestError) -> None:
        self.error = error.code or error.type

    def end(self) -> None:
        self.seconds = self.clock() - self._began
        if not self.is_complete:
            self.status, self.error = CLIENT_GONE, self.error or "client_gone"

    @property
    def ended_s(self) -> float:
        """Time of the end, in seconds since the epoch."""
        return self.began_s + self.seconds

    @property
    def cached_tokens(self) -> int | None:
        """Cached tokens of all prompts, or None if the cache was not looked up."""
        n = self.asked.n if self.asked else 1
        return sum(count for index, count in self._cached.items() if index % n == 0) if self._cached else None

    @property
    def completion_tokens(self) -> int:
        return sum(self._generated.values())

    @property
    def miss(self) -> str:
        """Reasons for the cache misses of the prompts, in the cache's terms."""
        return ",".join(dict.fromkeys(miss for _, miss in sorted(self._misses.items()) if miss))

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed of all choices together from the first token on, or None with fewer than two tokens."""
        first_s = self.first_token_s
        if first_s is None or self._last_token_s <= first_s or self.completion_tokens < 2:
            return None
        return (self.completion_tokens - 1) / (self._last_token_s - first_s)

    def _on_tokens(self, index: int, number: int) -> None:
        self._generated[index] = self._generated.get(index, 0) + number
        self._last_token_s = self.clock() - self._began
        if self.first_token_s is None:
            self.first_token_s = self._last_token_s
            self.on_first_token(self.first_token_s)


def trace_in(scope: Scope) -> Trace:
    """Return the request's trace, or a temporary one if there is no journal."""
    return scope.get(SCOPE_TRACE) or Trace("")
