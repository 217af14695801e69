"""The service: objects and limits that all endpoints share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anyio import CapacityLimiter
from fastapi import Request

from kvstrata.engine.engine import Engine
from kvstrata.grammar.compiler import GrammarCompiler
from kvstrata.metrics import Metrics
from kvstrata.models.generation_config import SamplingDefaults
from kvstrata.models.load import LoadedModel
from kvstrata.server.auth import ApiKey
from kvstrata.server.bridge import Door
from kvstrata.server.carriers import Carrier
from kvstrata.server.conversation.hygiene import Hygiene
from kvstrata.server.journal.journal import Journal
from kvstrata.server.places import Places
from kvstrata.server.replay.memory import ReplyMemory
from kvstrata.server.responses.stored import StoredResponses
from kvstrata.server.sessions.registry import Sessions
from kvstrata.server.wire.bounds import Bounds
from kvstrata.sizes import Size
from kvstrata.text.reply_parser import ReplyFormat
from kvstrata.text.template import ChatTemplate
from kvstrata.text.thinking import ThinkingSwitch

if TYPE_CHECKING:
    from kvstrata.events.publisher import EventPublisher

# Items of a list in a body that are allowed with any context size.
MIN_ITEMS = 1 << 14
# Bodies that are parsed concurrently, on worker threads of their own: a body may wait 12 s for its grammar, and the
# ends of streams, which use the other 40 threads, must not wait for it.
MAX_LARGE_BODIES = 2
MAX_SMALL_BODIES = 40


@dataclass(frozen=True)
class Service:
    loaded: LoadedModel
    engine: Engine
    metrics: Metrics
    template: ChatTemplate
    form: ReplyFormat  # parses replies
    thinking: ThinkingSwitch
    grammars: GrammarCompiler
    name: str  # the model's name in responses
    names: frozenset[str]  # model names that requests may use, besides claude-*
    paths: frozenset[str]  # model paths: requests may use them as names, but no response contains them
    context_tokens: int
    max_prompts: int  # replies in one request, so that other requests find places too
    longest_token_chars: int
    pin_quota: Size  # share of the KV cache memory, for each key that is not an admin key
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)  # for requests that set none
    hygiene: Hygiene = field(default_factory=Hygiene)
    replies: ReplyMemory | None = None  # None: exact replay is off
    any_model_name: bool = False
    keys: tuple[ApiKey, ...] = ()
    hosts: frozenset[str] = frozenset()  # allowed host names of a server without keys
    keep_alive_s: float = 10.0  # longest silence on a stream
    bounds: Bounds = field(default_factory=Bounds)  # limits of connections and requests
    publisher: EventPublisher | None = None  # of KV events
    at_end: tuple[Callable[[], None], ...] = ()  # called when the engine has stopped
    started: int = 0  # seconds since the epoch
    door: Door = field(default_factory=Door)
    sessions: Sessions = field(default_factory=Sessions)
    responses: StoredResponses = field(default_factory=StoredResponses)
    cache_ttl_s: float | None = None  # for texts besides the KV cache; None: kept until evicted
    carriers: tuple[Carrier, ...] = ()  # additional data of exported sessions
    imports: Places = field(default_factory=Places)
    large_bodies: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(MAX_LARGE_BODIES))
    small_bodies: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(MAX_SMALL_BODIES))
    origins: tuple[str, ...] = ()  # origins of web pages that may use the server; * allows all
    journal: Journal = field(default_factory=Journal)

    @property
    def max_items(self) -> int:
        """Most items of a list in a body. Each message or id takes at least one token of context; the factor 2 lets a
        prompt that is slightly too long get an error with its length."""
        return max(MIN_ITEMS, 2 * self.context_tokens)

    @property
    def ending_ids(self) -> frozenset[int]:
        """Token ids that end a reply."""
        return self.loaded.eos_ids | self.form.ending_ids

    def answers_to(self, name: str) -> bool:
        """Return whether a request may use this model name. Claude Code always requests models named claude-*."""
        return self.any_model_name or name in self.names | self.paths or name.startswith("claude-")


def service_of(request: Request) -> Service:
    return request.app.state.service
