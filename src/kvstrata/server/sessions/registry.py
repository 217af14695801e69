"""The sessions that a server knows: bounded, the least recently used go first. Safe from any thread.

A request looks at its session when its prompt is known (`visit`), and the session learns of it when its reply has ended
well (`Visit.learn`): what was refused, cancelled or only explained leaves no trace. Sessions of different salts have
nothing in common, whatever their names.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvstrata.engine.cache_api import TokenIds, owner_of
from kvstrata.engine.request import TokenUsage
from kvstrata.errors import InvalidRequest
from kvstrata.server.sessions.names import KEY_CHARS, Name
from kvstrata.server.sessions.session import Line, Parted, Session, parts_at

MAX_SESSIONS = 10_000
MAX_TOKENS = 16 << 20  # ids that are remembered, of all sessions: 64 MiB
MAX_LINES = 4  # conversations of one session
AROUND_TOKENS = 12  # on each side of the place where a prompt parts
MAX_CHARS = 200  # of the text of those
SHOWN = re.compile(r"[A-Za-z0-9._:-]{1,80}")
SHORT = 12  # characters of a key that stand for it
LIKE_A_KEY = re.compile(f"[0-9a-f]{{{SHORT}}}|[0-9a-f]{{{KEY_CHARS}}}")  # no client's name is shown that is
STRIDE, REST_S = 1000, 50e-6  # sessions that are looked at in about half a millisecond, and the rest after that
APART_S = 1e-6  # at least, between two uses

Text = Callable[[Sequence[int]], str]  # of token ids


@dataclass(frozen=True, eq=False)
class Visit:
    """One request of a session, while it is being served."""

    key: str
    salt: str
    name: Name
    ids: TokenIds  # its prompt
    session: Session | None  # as it was found; None: this is its first request
    parted: Parted | None
    sessions: Sessions

    def learn(self, usage: TokenUsage, reply: Sequence[int]) -> None:
        self.sessions.learn(self, usage, reply)


class Sessions:
    def __init__(
        self,
        max_sessions: int = MAX_SESSIONS,
        max_tokens: int = MAX_TOKENS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._clock = clock
        self._lock = threading.Lock()
        self._by_key: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self._remembering: OrderedDict[str, None] = OrderedDict()  # keys of those that have ids, in the same order
        self._keys: dict[str, dict[str, str]] = {}  # by id and owner
        self._num_owned = Counter[str]()  # sessions by owner
        self._num_tokens = 0
        self._last_s = 0.0

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def num_tokens(self) -> int:
        """Ids that are remembered."""
        return self._num_tokens

    def visit(self, salt: str, name: Name, ids: TokenIds, text: Text) -> Visit:
        """What a request finds. Changes nothing."""
        key = name.key(salt)
        with self._lock:
            session = self._by_key.get(key)
        parted = None if session is None else _parted(session, name, ids, text)
        return Visit(key, salt, name, ids, session, parted, self)

    def learn(self, visit: Visit, usage: TokenUsage, reply: Sequence[int]) -> None:
        """Its reply has ended well."""
        ids = np.concatenate([visit.ids, np.array(reply, np.int32)])
        ids.flags.writeable = False
        line = Line(visit.name.digest, ids, len(visit.ids))
        with self._lock:
            session = self._by_key.get(visit.key) or self._new(visit)
            number = session.num_requests + 1
            others = [each for each in session.lines if each.digest != line.digest]
            self._put(
                replace(
                    session,
                    last_use_s=self._now(),
                    num_requests=number,
                    prompt_tokens=session.prompt_tokens + usage.prompt_tokens,
                    cached_tokens=session.cached_tokens + usage.cached_tokens,
                    lines=(line, *others)[:MAX_LINES],
                    parted=replace(visit.parted, request=number) if visit.parted else session.parted,
                )
            )
            self._bound()

    def adopt(self, salt: str, name: Name, ids: TokenIds, num_prompt: int) -> Session:
        """A conversation that came from elsewhere: no request of it was served here."""
        visit = Visit(name.key(salt), salt, name, ids, None, None, self)
        line = Line(name.digest, ids, num_prompt)
        with self._lock:
            session = self._by_key.get(visit.key) or self._new(visit)
            others = [each for each in session.lines if each.digest != line.digest]
            session = replace(session, last_use_s=self._now(), lines=(line, *others)[:MAX_LINES])
            self._put(session)
            self._bound()
        return session

    def find(self, id: str, owner: str | None) -> Session | None:
        """By its id, or by its key. `owner`: whose it must be; None: anyone's. Raises InvalidRequest where several
        owners have one of that id."""
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
        """Of one owner or of all, the last used first. `before_s`: only those that were last used before that. Rests
        now and then, so that the engine's thread does not wait long for the interpreter: not for the event loop."""
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
        """Of one owner or of all."""
        if owner is None:
            return len(self._by_key)
        with self._lock:
            return self._num_owned.get(owner, 0)

    def forget(self, salt: str | None, owner: str | None) -> None:
        """The ids and texts of what is under a salt, an owner, or all; what was counted stays."""
        with self._lock:
            for session in list(self._by_key.values()):
                if salt == session.salt or (salt is None and owner in (None, session.owner)):
                    self._forget_texts(session)

    def expire(self, before_s: float) -> None:
        """Likewise of sessions that were last used before that."""
        with self._lock:
            for session in list(self._by_key.values()):
                if session.last_use_s >= before_s:
                    break
                self._forget_texts(session)

    # With the lock held.

    def _new(self, visit: Visit) -> Session:
        id = self._free_id(visit)
        self._keys.setdefault(id, {})[owner_of(visit.salt)] = visit.key
        self._num_owned[owner_of(visit.salt)] += 1
        now_s = self._now()
        return Session(visit.key, id, visit.salt, visit.name.recognised_by, now_s, now_s)

    def _free_id(self, visit: Visit) -> str:
        """One owner may use a name under several salts."""
        given, owner = visit.name.given, owner_of(visit.salt)
        is_shown = SHOWN.fullmatch(given) and not LIKE_A_KEY.fullmatch(given)
        choices = (given if is_shown else visit.key[:SHORT], visit.key[:SHORT])
        return next((choice for choice in choices if owner not in self._keys.get(choice, {})), visit.key)

    def _put(self, session: Session) -> None:
        before = self._by_key.pop(session.key, None)
        self._by_key[session.key] = session
        self._remembering.pop(session.key, None)
        if session.lines:
            self._remembering[session.key] = None
        self._num_tokens += session.num_ids - (before.num_ids if before else 0)

    def _bound(self) -> None:
        while self._num_tokens > self._max_tokens:
            self._forget_ids(self._by_key[next(iter(self._remembering))])
        while len(self._by_key) > self._max_sessions:
            gone = self._by_key.pop(next(iter(self._by_key)))
            self._remembering.pop(gone.key, None)
            self._num_tokens -= gone.num_ids
            self._num_owned[gone.owner] -= 1
            if not self._num_owned[gone.owner]:
                del self._num_owned[gone.owner]
            del self._keys[gone.id][gone.owner]
            if not self._keys[gone.id]:
                del self._keys[gone.id]

    def _forget_texts(self, session: Session) -> None:
        if session.lines:
            self._forget_ids(session)
        if session.parted is not None:
            self._by_key[session.key] = replace(self._by_key[session.key], parted=None)

    def _forget_ids(self, session: Session) -> None:
        self._num_tokens -= session.num_ids
        self._remembering.pop(session.key)
        self._by_key[session.key] = replace(session, lines=())

    def _now(self) -> float:
        """Later than any before: so a list can go on where it ended."""
        self._last_s = max(self._clock(), self._last_s + APART_S)
        return self._last_s


def _parted(session: Session, name: Name, ids: TokenIds, text: Text) -> Parted | None:
    line = session.line_before(name.digest)
    found = None if line is None else parts_at(line, ids)
    if line is None or found is None:
        return None
    at, where = found
    runs = (ids[max(0, at - AROUND_TOKENS) : at], line.ids[at : at + AROUND_TOKENS], ids[at : at + AROUND_TOKENS])
    before, was, now = (text(run.tolist())[:MAX_CHARS] for run in runs)
    return Parted(at, where, before, was, now, session.num_requests + 1)
