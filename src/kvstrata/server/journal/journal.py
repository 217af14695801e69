"""The journal: logs each finished request, keeps recent requests and events, and counts requests per slot.

Belongs to the event loop's thread. Bounded to MAX_REQUESTS, MAX_EVENTS and an hour of slots.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import time

from kvstrata.engine.cache_api import owner_of
from kvstrata.errors import ReplyFailed
from kvstrata.server import dashboard
from kvstrata.server.journal.events import Happened
from kvstrata.server.journal.slots import Slots
from kvstrata.server.journal.trace import CLIENT_GONE, Trace
from kvstrata.server.journal.words import fields, line

logger = logging.getLogger("kvstrata.requests")

MAX_REQUESTS = 500
MAX_EVENTS = 500
MODEL_PATHS = "/v1/"
COUNT_TOKENS = "/count_tokens"
# Paths that monitoring polls, logged only at level debug.
QUIET_PATHS = dashboard.OPEN_PATHS | {
    "/health", "/metrics", "/props", "/cache/usage", "/cache/sessions", "/cache/history", "/cache/requantize",
    "/cache/conversations",
}  # fmt: skip


@dataclass(frozen=True)
class Recent:
    trace: Trace
    owner: str | None  # the salt of the request's key; None: it had none


class Journal:
    def __init__(self, slot_s: float = 10.0, clock: Callable[[], float] = time) -> None:
        self.slots = Slots(slot_s, clock)
        self.requests: deque[Recent] = deque(maxlen=MAX_REQUESTS)
        self.events: deque[Happened] = deque(maxlen=MAX_EVENTS)

    def on_first_token(self, seconds: float) -> None:
        self.slots.current.note_first_token(seconds)

    def add(self, trace: Trace, owner: str | None) -> None:
        if logger.isEnabledFor(level := _level(trace)):
            logger.log(level, "%s", line(trace), extra={"fields": fields(trace)})
        if not _is_for_the_model(trace):
            return
        self.requests.append(Recent(trace, owner))
        self.slots.current.count(trace)

    def forget(self, salt: str | None, owner: str | None) -> None:
        """Remove the texts of requests under a salt, under all salts of an owner, or all; their figures stay."""
        for recent in self.requests:
            asked = recent.trace.asked
            if asked and salt in (None, asked.salt) and owner in (None, owner_of(asked.salt)):
                asked.parted = None

    def expire(self, before_s: float) -> None:
        """Remove the texts of requests that ended before a time."""
        for recent in self.requests:
            if recent.trace.asked and recent.trace.ended_s < before_s:
                recent.trace.asked.parted = None


def _is_for_the_model(trace: Trace) -> bool:
    """Return whether a request belongs to the recent ones. Token counting computes nothing, so only its failures do."""
    if trace.method != "POST" or not trace.path.startswith(MODEL_PATHS):
        return False
    return not trace.path.endswith(COUNT_TOKENS) or trace.status >= 400


def _level(trace: Trace) -> int:
    if trace.status >= 500 or trace.error == ReplyFailed.code:
        return logging.WARNING
    is_quiet = trace.method in ("GET", "HEAD") and trace.path in QUIET_PATHS
    return logging.DEBUG if is_quiet and (trace.status < 400 or trace.status == CLIENT_GONE) else logging.INFO
