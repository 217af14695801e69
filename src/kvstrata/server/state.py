"""Objects and limits that all handlers share, and the removal of texts that they remember.

Texts besides the KV cache (divergences of sessions, replies, stored responses, recent requests) are removed when a
caller clears the cache, and when they are unused for `--cache-ttl-s`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from anyio import CapacityLimiter, to_thread
from fastapi import Request

from kvstrata.engine.cache_api import Tier
from kvstrata.engine.engine import Engine
from kvstrata.grammar.compiler import GrammarCompiler
from kvstrata.metrics import Metrics
from kvstrata.models.generation_config import SamplingDefaults
from kvstrata.models.load import LoadedModel
from kvstrata.server.chat.engine_client import DrainGate
from kvstrata.server.chat.prompt import PromptLimits, PromptRenderer
from kvstrata.server.chat.reply_memory import SampledReplies
from kvstrata.server.history import History
from kvstrata.server.http.access import ApiKey
from kvstrata.server.http.body_limit import HttpLimits, ImportLimit
from kvstrata.server.request_log import RequestLog
from kvstrata.server.responses.store import ResponseStore
from kvstrata.server.sessions import SessionRegistry
from kvstrata.sizes import Size
from kvstrata.text.reply_parser import ReplyFormat
from kvstrata.text.template import ChatTemplate

if TYPE_CHECKING:
    from kvstrata.events.publisher import EventPublisher

# Bodies that are parsed concurrently, on worker threads of their own: a body may wait 12 s for its grammar, and the
# ends of streams, which use the other 40 threads, must not wait for it.
MAX_LARGE_BODIES = 2
MAX_SMALL_BODIES = 40
MAX_LOGGED_TOOLS = 100

logger = logging.getLogger("kvstrata.server")
# Interval between expiry runs: a tenth of the time to live, within these bounds.
LEAST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class IgnoredTools:
    """Types of offered tools that have no effect here; each is logged once, because agents send the same tools with
    every request."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log_tools(self, reasons: Mapping[str, str]) -> None:
        """Log types of tools that were not logged before, each with the reason."""
        for kind in sorted(reasons.keys() - self._logged):
            if len(self._logged) < MAX_LOGGED_TOOLS:
                self._logged.add(kind)
                logger.info(
                    "A client offers a tool of type %.80s, which %s: the model is not shown it.", kind, reasons[kind]
                )


@dataclass(frozen=True)
class ServerState:
    """Objects and limits that all handlers share."""

    loaded: LoadedModel
    engine: Engine
    metrics: Metrics
    template: ChatTemplate
    reply_format: ReplyFormat  # parses replies
    renderer: PromptRenderer
    grammars: GrammarCompiler
    name: str  # the model's name in responses
    names: frozenset[str]  # model names that requests may use, besides claude-*
    paths: frozenset[str]  # model paths: requests may use them as names, but no response contains them
    limits: PromptLimits
    max_prompts: int  # replies in one request, so that other requests find places too
    pin_quota: Size  # share of the KV cache memory, for each key that is not an admin key
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)  # for requests that set none
    replies: SampledReplies | None = None  # None: replies are not remembered
    any_model_name: bool = False
    keys: tuple[ApiKey, ...] = ()
    hosts: frozenset[str] = frozenset()  # allowed host names of a server without keys
    keep_alive_s: float = 10.0  # longest silence on a stream
    http_limits: HttpLimits = field(default_factory=HttpLimits)  # limits of connections and requests
    publisher: EventPublisher | None = None  # of KV events
    at_end: tuple[Callable[[], None], ...] = ()  # called when the engine has stopped
    started: int = 0  # seconds since the epoch
    drain_gate: DrainGate = field(default_factory=DrainGate)
    sessions: SessionRegistry = field(default_factory=SessionRegistry)
    responses: ResponseStore = field(default_factory=ResponseStore)
    cache_ttl_s: float | None = None  # for texts besides the KV cache; None: kept until evicted
    imports: ImportLimit = field(default_factory=ImportLimit)
    large_bodies: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(MAX_LARGE_BODIES))
    small_bodies: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(MAX_SMALL_BODIES))
    origins: tuple[str, ...] = ()  # origins of web pages that may use the server; * allows all
    request_log: RequestLog = field(default_factory=lambda: RequestLog(History()))
    ignored_tools: IgnoredTools = field(default_factory=IgnoredTools)

    @property
    def ending_ids(self) -> frozenset[int]:
        """Token ids that end a reply."""
        return self.loaded.eos_ids | self.reply_format.ending_ids

    def answers_to(self, name: str) -> bool:
        """Return whether a request may use this model name. Claude Code always requests models named claude-*."""
        return self.any_model_name or name in self.names | self.paths or name.startswith("claude-")


def state_of(request: Request) -> ServerState:
    return request.app.state.server


async def forget_texts(state: ServerState, salt: str | None, owner: str | None, tier: Tier) -> None:
    """Remove the texts under a salt, under all salts of an owner, or all. `hot` keeps replies and responses, because
    cached KV on the disk is found with them; `disk` keeps texts in memory."""
    if tier != "hot" and state.replies is not None:
        await to_thread.run_sync(partial(state.replies.memory.clear, salt, owner, only_files=tier == "disk"))
    if tier != "disk":
        state.sessions.forget_texts(salt, owner)
        state.request_log.forget_texts(salt, owner)
    if tier == "all":
        state.responses.clear(salt, owner)


def expire_texts(state: ServerState, before_s: float) -> None:
    """Remove the texts that were last used before a time, in seconds since the epoch."""
    state.sessions.expire_texts(before_s)
    state.request_log.expire_texts(before_s)
    state.responses.expire(before_s)
    if state.replies is not None:
        state.replies.memory.expire(before_s)


async def expire_regularly(state: ServerState, ttl_s: float) -> None:
    """Expire texts periodically until cancelled."""
    while True:
        expire_texts(state, time.time() - ttl_s)
        await asyncio.sleep(min(max(ttl_s / 10, LEAST_PAUSE_S), LONGEST_PAUSE_S))
