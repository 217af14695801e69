"""Trace of one request, its log line, and the last 500 requests. Contains no prompt.

The outermost middleware gives each request an id and a trace; handlers fill the trace; it is logged when the request
has ended. Belongs to the event loop's thread. The divergence from the session's last prompt includes text: it is shown
only to the request's own key and never logged.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstrata.engine.cache_api import owner_of
from kvstrata.engine.request import Event, Finished, PrefillProgress, TextDelta
from kvstrata.errors import ReplyFailed, RequestError
from kvstrata.server import dashboard
from kvstrata.server.history import History
from kvstrata.server.http.access import owner_salt
from kvstrata.server.http.errors import CLIENT_GONE, SCOPE_TRACE
from kvstrata.server.sessions import SessionDivergence

REQUEST_ID = b"x-request-id"
ANTHROPIC_ID = b"request-id"  # the header that Anthropic's clients read
SANE_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:+/=-]{0,127}")
MAX_PATH_CHARS = 200
MAX_REQUESTS = 500
MODEL_PATHS = "/v1/"
COUNT_TOKENS = "/count_tokens"
# Paths that monitoring polls, logged only at level debug.
QUIET_PATHS = dashboard.OPEN_PATHS | {
    "/health", "/metrics", "/props", "/cache/usage", "/cache/sessions", "/cache/history", "/cache/requantize",
    "/cache/conversations",
}  # fmt: skip


@dataclass
class TracedGeneration:
    """A generation as its trace stores it. The `n` choices of a prompt are adjacent."""

    prompt_tokens: int
    n: int = 1
    is_stream: bool = False
    session: str = ""  # the session's key
    salt: str = ""
    divergence: SessionDivergence | None = None  # known when prefill begins


@dataclass
class RequestTrace:
    """Figures of one request, filled in while it is served."""

    id: str
    method: str = ""
    path: str = ""
    clock: Callable[[], float] = time.monotonic
    on_first_token: Callable[[float], None] = lambda _seconds: None
    began_s: float = field(default_factory=time.time)  # since the epoch
    status: int = 0  # 0: no response was started
    error: str = ""  # error code, also of a stream that fails after its start
    is_complete: bool = False  # the complete response was written
    generation: TracedGeneration | None = None  # None: not a request to the model
    seconds: float = 0.0
    first_token_s: float | None = None

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._last_token_s = 0.0
        self._cached: dict[int, int] = {}
        self._misses: dict[int, str] = {}
        self._generated: dict[int, int] = {}

    def record_event(self, index: int, event: Event) -> None:
        if isinstance(event, PrefillProgress):
            self._cached.setdefault(index, event.num_cached)
            self._misses.setdefault(index, event.miss_reason)
        elif isinstance(event, TextDelta) and event.ids:
            self._on_tokens(index, len(event.ids))
        elif isinstance(event, Finished):
            self._cached[index] = event.usage.cached_tokens
            self._generated[index] = event.usage.completion_tokens

    def record_error(self, error: RequestError) -> None:
        self.error = error.code or error.type

    def finish(self) -> None:
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
        n = self.generation.n if self.generation else 1
        return sum(count for index, count in self._cached.items() if index % n == 0) if self._cached else None

    @property
    def has_failed(self) -> bool:
        return self.status >= 400 or bool(self.error)

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


def trace_of(scope: Scope) -> RequestTrace:
    """Return the request's trace, or a temporary one outside of the middleware."""
    return scope.get(SCOPE_TRACE) or RequestTrace("")


class TraceRequests:
    """Outermost middleware: gives each request an id and a trace, and logs it when it has ended.

    A client that sends an x-request-id gets the same id back, so that its log and the server's agree.
    """

    def __init__(self, app: ASGIApp, log: RequestLog) -> None:
        self.app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path = _printable(scope["path"])
        trace = RequestTrace(_id_of(scope), scope["method"], path, on_first_token=self._log.on_first_token)
        scope[SCOPE_TRACE] = trace
        names = (REQUEST_ID, ANTHROPIC_ID) if path.startswith("/v1/messages") else (REQUEST_ID,)
        try:
            return await self.app(scope, receive, _traced_send(trace, send, names))
        finally:
            trace.finish()
            self._log.add_request(trace, owner_salt(scope))


def _traced_send(trace: RequestTrace, send: Send, names: tuple[bytes, ...]) -> Callable[[Message], Awaitable[None]]:
    async def traced(message: Message) -> None:
        if message["type"] == "http.response.start":
            trace.status = message["status"]
            headers = [*message.get("headers", ()), *((name, trace.id.encode()) for name in names)]
            message = {**message, "headers": headers}
        await send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            trace.is_complete = True

    return traced


def _id_of(scope: Scope) -> str:
    """Return the first valid id that the client sent, or a new one. The id is used in headers and logs."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID and SANE_ID.fullmatch(value):
            return value.decode()
    return f"req_{uuid.uuid4().hex[:24]}"


def _printable(path: str) -> str:
    """Return a path for the log, without line breaks and other control characters: the path is already decoded."""
    return "".join(char if char.isprintable() else "?" for char in path[:MAX_PATH_CHARS])


def log_line(trace: RequestTrace) -> str:
    parts = [f"{trace.method} {trace.path} {trace.status} in {trace.seconds:.2f} s"]
    if trace.generation is not None:
        parts.append(_prompt_part(trace))
    if trace.first_token_s is not None:
        parts.append(f"first token {trace.first_token_s:.2f} s")
    if trace.completion_tokens:
        speed = trace.tokens_per_s
        parts.append(f"{trace.completion_tokens:,} tokens" + (f" at {speed:.1f}/s" if speed else ""))
    if trace.error:
        parts.append(trace.error)
    return ", ".join(parts) + f" [{trace.id}]"


def log_fields(trace: RequestTrace) -> dict[str, Any]:
    """Return the fields of a finished request, without unknown ones."""
    fields: dict[str, Any] = {
        "request_id": trace.id,
        "method": trace.method,
        "path": trace.path,
        "status": trace.status,
        "seconds": round(trace.seconds, 4),
        "error": trace.error or None,
    }
    if trace.generation is not None:
        divergence = trace.generation.divergence
        fields |= {
            "stream": trace.generation.is_stream,
            "prompt_tokens": trace.generation.prompt_tokens,
            "cached_tokens": trace.cached_tokens,
            "miss": trace.miss or None,
            "diverged_at": divergence.at if divergence else None,
            "diverged_in": divergence.where if divergence else None,
            "first_token_s": rounded(trace.first_token_s),
            "completion_tokens": trace.completion_tokens,
            "tokens_per_s": rounded(trace.tokens_per_s),
        }
    return {name: value for name, value in fields.items() if value is not None}


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _prompt_part(trace: RequestTrace) -> str:
    assert trace.generation is not None
    text = f"prompt {trace.generation.prompt_tokens:,}"
    if trace.cached_tokens is None:
        return text
    divergence = trace.generation.divergence
    in_reply = " in a reply" if divergence and divergence.where == "reply" else ""
    where = f" at {divergence.at:,}{in_reply}" if divergence else ""
    why = f" ({trace.miss}{where})" if trace.miss else ""
    return f"{text}, {trace.cached_tokens:,} cached{why}"


logger = logging.getLogger("kvstrata.requests")


@dataclass(frozen=True)
class LoggedRequest:
    trace: RequestTrace
    owner: str | None  # the salt of the request's key; None: it had none


class RequestLog:
    """The last requests to the model. Logs each request and counts it in the history."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.requests: deque[LoggedRequest] = deque(maxlen=MAX_REQUESTS)

    def on_first_token(self, seconds: float) -> None:
        self.history.current.record_first_token(seconds)

    def add_request(self, trace: RequestTrace, owner: str | None) -> None:
        if logger.isEnabledFor(level := _level(trace)):
            logger.log(level, "%s", log_line(trace), extra={"fields": log_fields(trace)})
        if not _is_for_the_model(trace):
            return
        self.requests.append(LoggedRequest(trace, owner))
        is_cancelled = trace.status == CLIENT_GONE
        slot = self.history.current
        slot.count_request(is_cancelled=is_cancelled, has_failed=not is_cancelled and trace.has_failed)
        if trace.generation is not None and trace.cached_tokens is not None:
            slot.count_prompt(trace.generation.prompt_tokens, trace.cached_tokens)

    def forget_texts(self, salt: str | None, owner: str | None) -> None:
        """Remove the texts of requests under a salt, under all salts of an owner, or all; their figures stay."""
        for recent in self.requests:
            generation = recent.trace.generation
            if generation and salt in (None, generation.salt) and owner in (None, owner_of(generation.salt)):
                generation.divergence = None

    def expire_texts(self, before_s: float) -> None:
        """Remove the texts of requests that ended before a time."""
        for recent in self.requests:
            if recent.trace.generation and recent.trace.ended_s < before_s:
                recent.trace.generation.divergence = None


def _is_for_the_model(trace: RequestTrace) -> bool:
    """Return whether a request belongs to the recent ones. Token counting computes nothing, so only its failures do."""
    if trace.method != "POST" or not trace.path.startswith(MODEL_PATHS):
        return False
    return not trace.path.endswith(COUNT_TOKENS) or trace.status >= 400


def _level(trace: RequestTrace) -> int:
    if trace.status >= 500 or trace.error == ReplyFailed.code:
        return logging.WARNING
    is_quiet = trace.method in ("GET", "HEAD") and trace.path in QUIET_PATHS
    return logging.DEBUG if is_quiet and (trace.status < 400 or trace.status == CLIENT_GONE) else logging.INFO
