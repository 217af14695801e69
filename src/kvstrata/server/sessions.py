"""Requests that belong together: the name of a session, its id and counters. Calls no engine.

A session is named by the client, or by a digest of the start of its first request: the first user message and the
names of the tools, which stay the same from turn to turn even if the system message contains a clock. The registry is
bounded, evicts the least recently used and is safe from any thread. A request looks up its session when its prompt is
known, and is counted when its reply has ended successfully. The engine has the tokens of conversations.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from blake3 import blake3
from starlette.types import Scope

from kvstrata.engine.cache_api import PromptDivergence, owner_of
from kvstrata.engine.request import TokenUsage
from kvstrata.errors import InvalidRequest
from kvstrata.server.chat.request import ChatRequest

# The field that names the session, or the part of its first request that identifies it.
RecognisedBy = Literal[
    "x-kvstrata-session", "prompt_cache_key", "x-claude-code-session-id", "first message", "first tokens"
]

# prompt: text that was sent before has changed. reply: the client sends back a reply that differs from the sampled one,
# or only its beginning.
Where = Literal["prompt", "reply"]
CONTEXT = "kvstrata 2026-11 session v1"
KEY_CHARS = 40
OWN_HEADER = b"x-kvstrata-session"
CLAUDE_SESSION, CLAUDE_AGENT = b"x-claude-code-session-id", b"x-claude-code-agent-id"
FIRST_TOKENS = 64
# A client's JSON may contain half a surrogate pair.
SAFELY = ("utf-8", "surrogatepass")
MAX_SESSIONS = 10_000
MAX_CHARS = 200  # for each text of a divergence
SHOWN = re.compile(r"[A-Za-z0-9._:-]{1,80}")
SHORT = 12  # length of a key's short form
LIKE_A_KEY = re.compile(f"[0-9a-f]{{{SHORT}}}|[0-9a-f]{{{KEY_CHARS}}}")  # a client's name of this form is not shown
STRIDE, REST_S = 1000, 50e-6  # sessions that take about half a millisecond to scan, and the pause after them
APART_S = 1e-6  # least difference of two times of use


@dataclass(frozen=True)
class SessionDivergence:
    """The point at which a prompt diverged from the session's last one, and the texts there."""

    at: int  # the first token that differs
    where: Where
    before: str  # common text before it
    was: str
    now: str
    request: int  # number of the diverged request in the session, from 1

    @property
    def notes(self) -> dict[str, str]:
        """Notes for the miss header."""
        return {"at" if self.where == "prompt" else "reply_at": str(self.at), "was": self.was, "now": self.now}


@dataclass(frozen=True, eq=False)
class Session:
    """Names and counters of a session. The engine has the tokens of its conversations."""

    key: str  # internal name: unique for each salt and name
    id: str  # public name: unique for each owner
    salt: str
    recognised_by: RecognisedBy
    created_s: float  # since the epoch
    last_use_s: float  # unique among sessions
    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    divergence: SessionDivergence | None = None  # the last divergence

    @property
    def owner(self) -> str:
        return owner_of(self.salt)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True)
class SessionName:
    recognised_by: RecognisedBy
    given: str  # name given by the client, or empty
    digest: bytes  # digest of the start of the request

    def key(self, salt: str) -> str:
        """Return the key of a session, unique for each salt and name, from which neither can be derived."""
        fields = [salt.encode(*SAFELY), b"given" if self.given else b"derived"]
        return _digest([*fields, self.given.encode(*SAFELY) or self.digest]).hex()[:KEY_CHARS]


def name_chat_session(scope: Scope, chat: ChatRequest) -> SessionName:
    tools = sorted(str(tool["function"]["name"]) for tool in chat.tools)
    first = next((message for message in chat.messages if message["role"] == "user"), None)
    text = "" if first is None else _text(first.get("content"))
    digest = _digest(part.encode(*SAFELY) for part in ("chat", text, *tools))
    return _name(scope, chat.params.cache_key, digest, "first message")


def name_text_session(scope: Scope, cache_key: str | None, prompt: Sequence[int]) -> SessionName:
    digest = _digest([b"text", *(str(token).encode() for token in prompt[:FIRST_TOKENS])])
    return _name(scope, cache_key, digest, "first tokens")


def _name(scope: Scope, cache_key: str | None, digest: bytes, derived: RecognisedBy) -> SessionName:
    headers = {name: value.decode("latin-1").strip() for name, value in reversed(scope.get("headers", ()))}
    claude = headers.get(CLAUDE_SESSION, "")
    agent = headers.get(CLAUDE_AGENT, "")
    given: tuple[tuple[RecognisedBy, str], ...] = (
        ("x-kvstrata-session", headers.get(OWN_HEADER, "")),
        ("prompt_cache_key", cache_key or ""),
        ("x-claude-code-session-id", f"{claude}:{agent}" if claude and agent else claude),
    )
    for recognised_by, name in given:
        if name:
            return SessionName(recognised_by, name, digest)
    return SessionName(derived, "", digest)


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def _digest(fields: Iterable[bytes]) -> bytes:
    """Return a digest of the fields. Each is hashed with its length, so that different lists never have the same
    bytes."""
    digest = blake3(derive_key_context=CONTEXT)
    for field in fields:
        digest.update(len(field).to_bytes(8, "little") + field)
    return digest.digest()


Text = Callable[[Sequence[int]], str]  # text of token ids


@dataclass(frozen=True, eq=False)
class SessionVisit:
    """A request of a session, while it is being served."""

    key: str
    salt: str
    name: SessionName
    session: Session | None  # as it was looked up; None: this is its first request
    text: Text
    sessions: SessionRegistry

    def describe_divergence(self, divergence: PromptDivergence | None) -> SessionDivergence | None:
        """Return the texts at which the prompt diverged from the session's last one, or None."""
        if divergence is None:
            return None
        before, was, now = (self.text(ids)[:MAX_CHARS] for ids in (divergence.before, divergence.was, divergence.now))
        number = self.sessions.num_requests(self.key) + 1
        return SessionDivergence(divergence.at, divergence.where, before, was, now, number)

    def record_reply(self, usage: TokenUsage, divergence: SessionDivergence | None) -> None:
        """Count the request, after its reply has ended successfully."""
        self.sessions.record_reply(self, usage, divergence)


class SessionRegistry:
    """Sessions by key, bounded. Sessions of different salts are independent, even with the same name."""

    def __init__(self, max_sessions: int = MAX_SESSIONS, clock: Callable[[], float] = time.time) -> None:
        self._max_sessions = max_sessions
        self._clock = clock
        self._lock = threading.Lock()
        self._by_key: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self._keys: dict[str, dict[str, str]] = {}  # by id and owner
        self._num_owned = Counter[str]()  # sessions by owner
        self._last_s = 0.0

    def __len__(self) -> int:
        return len(self._by_key)

    def visit_session(self, salt: str, name: SessionName, text: Text) -> SessionVisit:
        """Look up a request's session, without changing anything."""
        key = name.key(salt)
        with self._lock:
            return SessionVisit(key, salt, name, self._by_key.get(key), text, self)

    def num_requests(self, key: str) -> int:
        """Return the number of counted requests of a session."""
        with self._lock:
            session = self._by_key.get(key)
        return 0 if session is None else session.num_requests

    def record_reply(self, visit: SessionVisit, usage: TokenUsage, divergence: SessionDivergence | None) -> None:
        """Count a request, after its reply has ended successfully."""
        with self._lock:
            session = self._by_key.get(visit.key) or self._new(visit)
            number = session.num_requests + 1
            self._put(
                replace(
                    session,
                    last_use_s=self._now(),
                    num_requests=number,
                    prompt_tokens=session.prompt_tokens + usage.prompt_tokens,
                    cached_tokens=session.cached_tokens + usage.cached_tokens,
                    divergence=replace(divergence, request=number) if divergence else session.divergence,
                )
            )
            self._bound()

    def adopt_session(self, salt: str, name: SessionName) -> Session:
        """Add an imported session, of which no request was served here."""
        with self._lock:
            visit = SessionVisit(name.key(salt), salt, name, None, lambda _: "", self)
            session = self._by_key.get(visit.key) or self._new(visit)
            session = replace(session, last_use_s=self._now())
            self._put(session)
            self._bound()
        return session

    def find_session(self, id: str, owner: str | None) -> Session | None:
        """Return a session by id or key, or None. `owner`: the required owner; None: any. Raises InvalidRequest if
        several owners have a session with this id."""
        with self._lock:
            keys = [key for whose, key in self._keys.get(id, {}).items() if owner in (None, whose)]
            if len(keys) > 1:
                raise InvalidRequest(
                    f"session: {len(keys)} keys have a session '{id[:80]}'. Ask for it by its key, one of: "
                    f"{', '.join(sorted(keys)[:5])}.",
                    param="session",
                )
            found = self._by_key.get(keys[0] if keys else id)
            return found if found is not None and owner in (None, found.owner) else None

    def newest_sessions(self, owner: str | None, limit: int, before_s: float | None = None) -> list[Session]:
        """Return sessions of one owner or of all, last used first. `before_s`: only sessions that were last used before
        it. Sleeps regularly so that the engine's thread does not wait long for the interpreter lock; must not run on
        the event loop."""
        with self._lock:
            sessions = list(self._by_key.values())
        found: list[Session] = []
        for place, session in enumerate(reversed(sessions)):
            if len(found) == limit:
                break
            if owner in (None, session.owner) and (before_s is None or session.last_use_s < before_s):
                found.append(session)
            if place % STRIDE == STRIDE - 1:
                time.sleep(REST_S)
        return found

    def num_sessions(self, owner: str | None) -> int:
        """Return the number of sessions of one owner or of all."""
        if owner is None:
            return len(self._by_key)
        with self._lock:
            return self._num_owned.get(owner, 0)

    def forget_texts(self, salt: str | None, owner: str | None) -> None:
        """Remove the texts of sessions under a salt, of an owner, or of all; the counters stay."""
        with self._lock:
            for session in list(self._by_key.values()):
                if salt == session.salt or (salt is None and owner in (None, session.owner)):
                    self._forget_text(session)

    def expire_texts(self, before_s: float) -> None:
        """Remove the texts of sessions that were last used before a time."""
        with self._lock:
            for session in list(self._by_key.values()):
                if session.last_use_s >= before_s:
                    break
                self._forget_text(session)

    # The methods below require the lock.

    def _new(self, visit: SessionVisit) -> Session:
        id = self._free_id(visit)
        self._keys.setdefault(id, {})[owner_of(visit.salt)] = visit.key
        self._num_owned[owner_of(visit.salt)] += 1
        now_s = self._now()
        return Session(visit.key, id, visit.salt, visit.name.recognised_by, now_s, now_s)

    def _free_id(self, visit: SessionVisit) -> str:
        """Return an id that the owner does not use yet: one owner may use a name under several salts."""
        given, owner = visit.name.given, owner_of(visit.salt)
        is_shown = SHOWN.fullmatch(given) and not LIKE_A_KEY.fullmatch(given)
        choices = (given if is_shown else visit.key[:SHORT], visit.key[:SHORT])
        return next((choice for choice in choices if owner not in self._keys.get(choice, {})), visit.key)

    def _put(self, session: Session) -> None:
        self._by_key.pop(session.key, None)
        self._by_key[session.key] = session

    def _bound(self) -> None:
        while len(self._by_key) > self._max_sessions:
            gone = self._by_key.pop(next(iter(self._by_key)))
            self._num_owned[gone.owner] -= 1
            if not self._num_owned[gone.owner]:
                del self._num_owned[gone.owner]
            del self._keys[gone.id][gone.owner]
            if not self._keys[gone.id]:
                del self._keys[gone.id]

    def _forget_text(self, session: Session) -> None:
        if session.divergence is not None:
            self._by_key[session.key] = replace(session, divergence=None)

    def _now(self) -> float:
        """Return the time, later than any before, so that a paged list can continue where it ended."""
        self._last_s = max(self._clock(), self._last_s + APART_S)
        return self._last_s
