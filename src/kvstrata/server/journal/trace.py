"""What is known of one request: told by those who serve it, read when it has ended. Knows no HTTP and keeps no prompt.

Belongs to the event loop's thread. Where the prompt parted from its session's last one is kept as that session has it,
with its text: only its own key may read that, and the log never has it.
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
    """A job as a trace needs it: `n` choices of each prompt stand one after the other."""

    prompt_tokens: int
    n: int = 1
    is_stream: bool = False
    session: str = ""  # its key
    salt: str = ""
    parted: Parted | None = None  # known when its prompt is begun


@dataclass
class Trace:
    id: str
    method: str = ""
    path: str = ""
    clock: Callable[[], float] = time.monotonic
    on_first_token: Callable[[float], None] = lambda _seconds: None
    began_s: float = field(default_factory=time.time)  # since the epoch
    status: int = 0  # 0: no answer was begun
    error: str = ""  # the code of what went wrong, also in a stream that had begun well
    is_complete: bool = False  # the whole answer was written
    asked: Asked | None = None  # None: it is no request to the model
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
        """Since the epoch."""
        return self.began_s + self.seconds

    @property
    def cached_tokens(self) -> int | None:
        """None: the cache was not asked."""
        n = self.asked.n if self.asked else 1
        return sum(count for index, count in self._cached.items() if index % n == 0) if self._cached else None

    @property
    def completion_tokens(self) -> int:
        return sum(self._generated.values())

    @property
    def miss(self) -> str:
        """Why not more was cached, in the store's word; several prompts may have several."""
        return ",".join(dict.fromkeys(miss for _, miss in sorted(self._misses.items()) if miss))

    @property
    def tokens_per_s(self) -> float | None:
        """Of all choices together, from the first token on. None: there were not two of them."""
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
    """The request's; where no journal watches, one that is thrown away."""
    return scope.get(SCOPE_TRACE) or Trace("")
