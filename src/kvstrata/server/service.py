"""What the endpoints share: the model, the engine, and the limits that they answer by."""

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

# Of a list in a body, however short the context is.
MIN_ITEMS = 1 << 14
# Bodies that become requests at once, each on a worker thread. They have threads of their own: a body may wait 12 s for
# its grammar, and the ends of streams, which use the other 40 threads, must not wait for that.
MAX_LARGE_BODIES = 2
MAX_SMALL_BODIES = 40


@dataclass(frozen=True)
class Service:
    loaded: LoadedModel
    engine: Engine
    metrics: Metrics
    template: ChatTemplate
    form: ReplyFormat  # how replies are taken apart
    thinking: ThinkingSwitch
    grammars: GrammarCompiler
    name: str  # what answers call the model
    names: frozenset[str]  # what requests may call it, beside claude-*
    paths: frozenset[str]  # where it was loaded from: requests may name these too, and no answer does
    context_tokens: int
    max_prompts: int  # replies in one request: other requests find places beside it
    longest_token_chars: int
    pin_quota: Size  # of the memory for stored KV, for each key that is no admin's
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)  # of requests that leave it out
    hygiene: Hygiene = field(default_factory=Hygiene)
    replies: ReplyMemory | None = None  # None: earlier replies are not put back as they were sampled
    any_model_name: bool = False
    keys: tuple[ApiKey, ...] = ()
    hosts: frozenset[str] = frozenset()  # names that it may be called by where there are no keys
    keep_alive_s: float = 10.0  # longest silence on a stream
    bounds: Bounds = field(default_factory=Bounds)  # of connections and what comes on them
    publisher: EventPublisher | None = None  # of KV events
    at_end: tuple[Callable[[], None], ...] = ()  # called when the engine has stopped
    started: int = 0  # seconds since the epoch
    door: Door = field(default_factory=Door)
    sessions: Sessions = field(default_factory=Sessions)
    responses: StoredResponses = field(default_factory=StoredResponses)
    cache_ttl_s: float | None = None  # for what is remembered beside the KV; None: it stays while there is room
    carriers: tuple[Carrier, ...] = ()  # what goes along when a session is exported
    imports: Places = field(default_factory=Places)
    large_bodies: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(MAX_LARGE_BODIES))
    small_bodies: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(MAX_SMALL_BODIES))
    origins: tuple[str, ...] = ()  # of web pages that may use it from a browser; * is every one
    journal: Journal = field(default_factory=Journal)

    @property
    def max_items(self) -> int:
        """Most items of a list in a body. Messages and ids take a token of the context each; a prompt that is not much
        too long is told by how much."""
        return max(MIN_ITEMS, 2 * self.context_tokens)

    @property
    def ending_ids(self) -> frozenset[int]:
        """The tokens that end a reply."""
        return self.loaded.eos_ids | self.form.ending_ids

    def answers_to(self, name: str) -> bool:
        """Claude Code asks for models of that name wherever it is pointed to."""
        return self.any_model_name or name in self.names | self.paths or name.startswith("claude-")


def service_of(request: Request) -> Service:
    return request.app.state.service
