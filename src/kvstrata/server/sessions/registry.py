"""The registry of sessions: bounded, evicts the least recently used. Safe from any thread.

A request looks up its session when its prompt is known (`visit`), and is counted when its reply has ended successfully
(`Visit.learn`): refused, cancelled and explained requests are not counted. The engine has the tokens of conversations
(`prefix_cache/conversations.py`). Sessions of different salts are independent, even with the same name.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvstrata.engine.cache_api import PromptDivergence, owner_of
from kvstrata.engine.request import TokenUsage
from kvstrata.errors import InvalidRequest
from kvstrata.server.sessions.names import KEY_CHARS, Name
from kvstrata.server.sessions.session import Parted, Session

MAX_SESSIONS = 10_000
MAX_CHARS = 200  # for each text of a divergence
SHOWN = re.compile(r"[A-Za-z0-9._:-]{1,80}")
SHORT = 12  # length of a key's short form
LIKE_A_KEY = re.compile(f"[0-9a-f]{{{SHORT}}}|[0-9a-f]{{{KEY_CHARS}}}")  # a client's name of this form is not shown
STRIDE, REST_S = 1000, 50e-6  # sessions that take about half a millisecond to scan, and the pause after them
APART_S = 1e-6  # least difference of two times of use

Text = Callable[[Sequence[int]], str]  # text of token ids


@dataclass(frozen=True, eq=False)
class Visit:
    """A request of a session, while it is being served."""

    key: str
    salt: str
    name: Name
    session: Session | None  # as it was looked up; None: this is its first request
    text: Text
    sessions: Sessions

    def parted(self, divergence: PromptDivergence | None) -> Parted | None:
        """Return the texts at which the prompt diverged from the session's last one, or None."""
        if divergence is None:
            return None
        before, was, now = (self.text(ids)[:MAX_CHARS] for ids in (divergence.before, divergence.was, divergence.now))
        number = self.sessions.num_requests(self.key) + 1
        return Parted(divergence.at, divergence.where, before, was, now, number)

    def learn(self, usage: TokenUsage, parted: Parted | None) -> None:
        """Count the request, after its reply has ended successfully."""
        self.sessions.learn(self, usage, parted)


class Sessions:
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

    def visit(self, salt: str, name: Name, text: Text) -> Visit:
        """Look up a request's session, without changing anything."""
        key = name.key(salt)
        with self._lock:
            return Visit(key, salt, name, self._by_key.get(key), text, self)

    def num_requests(self, key: str) -> int:
        """Return the number of counted requests of a session."""
        with self._lock:
            session = self._by_key.get(key)
        return 0 if session is None else session.num_requests

    def learn(self, visit: Visit, usage: TokenUsage, parted: Parted | None) -> None:
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
                    parted=replace(parted, request=number) if parted else session.parted,
                )
            )
            self._bound()

    def adopt(self, salt: str, name: Name) -> Session:
        """Add an imported session, of which no request was served here."""
        with self._lock:
            visit = Visit(name.key(salt), salt, name, None, lambda _: "", self)
            session = self._by_key.get(visit.key) or self._new(visit)
            session = replace(session, last_use_s=self._now())
            self._put(session)
            self._bound()
        return session

    def find(self, id: str, owner: str | None) -> Session | None:
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

    def newest(self, owner: str | None, limit: int, before_s: float | None = None) -> list[Session]:
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

    def count(self, owner: str | None) -> int:
        """Return the number of sessions of one owner or of all."""
        if owner is None:
            return len(self._by_key)
        with self._lock:
            return self._num_owned.get(owner, 0)

    def forget(self, salt: str | None, owner: str | None) -> None:
        """Remove the texts of sessions under a salt, of an owner, or of all; the counters stay."""
        with self._lock:
            for session in list(self._by_key.values()):
                if salt == session.salt or (salt is None and owner in (None, session.owner)):
                    self._forget_text(session)

    def expire(self, before_s: float) -> None:
        """Remove the texts of sessions that were last used before a time."""
        with self._lock:
            for session in list(self._by_key.values()):
                if session.last_use_s >= before_s:
                    break
                self._forget_text(session)

    # The methods below require the lock.

    def _new(self, visit: Visit) -> Session:
        id = self._free_id(visit)
        self._keys.setdefault(id, {})[owner_of(visit.salt)] = visit.key
        self._num_owned[owner_of(visit.salt)] += 1
        now_s = self._now()
        return Session(visit.key, id, visit.salt, visit.name.recognised_by, now_s, now_s)

    def _free_id(self, visit: Visit) -> str:
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
        if session.parted is not None:
            self._by_key[session.key] = replace(session, parted=None)

    def _now(self) -> float:
        """Return the time, later than any before, so that a paged list can continue where it ended."""
        self._last_s = max(self._clock(), self._last_s + APART_S)
        return self._last_s
