"""Values that cross between server and engine: a request one way, events the other.

They know nothing of HTTP, text or MLX arrays. All are immutable, so any thread may hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvstrata.grammar.grammars import Grammar
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.sizes import Size

COMPARED_IDS = 64

FinishReason = Literal["stop", "length", "cancelled"]

# broken: the engine could not go on. pinned: what it needs is pinned, and another try would find it so. grammar: it
# asks for more than can be followed
FailReason = Literal["broken", "pinned", "grammar"]


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and reply
    presence_penalty: float = 0.0  # over the reply
    frequency_penalty: float = 0.0  # over the reply
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    num_logprobs: int | None = None  # None: no logprobs; 0: the chosen token's only; n: and the n most likely


@dataclass(frozen=True)
class PinRequest:
    """What of a prompt is to stay for some time, within a quota."""

    ttl_s: float
    num_tokens: int
    quota: Size  # of the memory for stored KV: what all pins of the salt's owner may take


@dataclass(frozen=True)
class Request:
    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()  # end the reply and are not shown (the model's end-of-sequence ids)
    # Part the reply's text: no character or stop string reaches across, and each comes as a piece without text.
    break_ids: frozenset[int] = frozenset()
    continues_prompt: bool = False  # a plain completion: the reply's text goes on where the prompt's ends
    open_ended: bool = False  # the client named no max_tokens: as much of it as memory allows will do
    salt: str = ""  # requests with different salts never share cached state
    session: str = ""  # requests of one name belong together, under one salt; empty: it belongs to none
    resume_at: tuple[int, ...] = ()  # positions in the prompt where later requests are likely to part from it
    pin: PinRequest | None = None
    grammar: Grammar | None = None  # what the reply is held to; its end must be among the `stop_ids`
    grammar_after: tuple[int, ...] = ()  # it begins after these ids in a row (the end of thinking); none: at once
    # The prompt as the index wants it, if the caller has made that: it takes the engine's thread 5 ms for 100,000 ids.
    prompt_ids: TokenIds | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        ids = self.prompt_ids
        if ids is None:
            return
        # Of one that is as long, some tokens across all of it: comparing every one would take as long as making it.
        step = max(1, len(ids) // COMPARED_IDS)
        if len(ids) != len(self.prompt) or tuple(ids[::step]) != self.prompt[::step]:
            raise ValueError("prompt_ids are those of another prompt")


@dataclass(frozen=True)
class TokenLogprob:
    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), most likely first


@dataclass(frozen=True)
class PrefillProgress:
    """Progress of a prompt: `done` of `total` tokens, those found in the cache included."""

    num_done: int
    num_total: int
    num_cached: int = 0  # of those that are done: not computed for this request
    miss_reason: str = ""  # why not more was cached; empty: all that can be was
    unpinned_reason: str = ""  # why it will not be pinned as asked; empty: it will be, or the request asks for no pin


@dataclass(frozen=True)
class TextDelta:
    """Text that is ready to show. `text` may be empty while a character or a stop string is incomplete."""

    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class TokenUsage:
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were really not computed
    completion_tokens: int = 0


@dataclass(frozen=True)
class Finished:
    reason: FinishReason
    usage: TokenUsage
    stop: str = ""  # the stop string that ended the reply; empty: none did
    ids: tuple[int, ...] = ()  # the reply as it was sampled, with the id that ended it


@dataclass(frozen=True)
class Failed:
    """The request ended without a result. `message` is fit for a client."""

    message: str
    reason: FailReason = "broken"


Event = PrefillProgress | TextDelta | Finished | Failed

# Called on the engine's thread: must not block and must not raise.
Sink = Callable[[Event], None]


@dataclass(frozen=True)
class EngineState:
    """A picture of the engine, taken between two steps."""

    waiting: int = 0
    prefilling: int = 0
    running: int = 0  # those that decode, and those that prefill
    kv_bytes: int = 0  # of running sequences, and stored
    cached_bytes: int = 0
    kv_budget_bytes: int = 0
    active_bytes: int = 0
    peak_bytes: int = 0
    decode_tokens_s: float = 0.0
    prefill_tokens_s: float = 0.0
