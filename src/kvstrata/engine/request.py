"""Values that cross between server and engine: requests to the engine, events and state from it.

The module knows nothing of HTTP, text templates or MLX arrays. All values are immutable, so any thread may hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvstrata.grammar.compiler import Grammar
from kvstrata.prefix_cache.conversations import PromptDivergence
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.sizes import Size

# Ids of a prompt that are compared with the prompt's array.
COMPARED_IDS = 64

FinishReason = Literal["stop", "length", "cancelled"]

# broken: the engine failed. pinned: pins hold the memory that the request needs, so a retry would fail, too.
# grammar: the grammar cannot be followed further.
FailReason = Literal["broken", "pinned", "grammar"]


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of a request."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and reply
    presence_penalty: float = 0.0  # over the reply
    frequency_penalty: float = 0.0  # over the reply
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    num_logprobs: int | None = None  # None: no logprobs; 0: of the sampled token; n: also of the n most likely


@dataclass(frozen=True)
class PinRequest:
    """Beginning of a prompt that the client wants pinned for some time, within a quota."""

    ttl_s: float
    num_tokens: int
    quota: Size  # most memory for cached KV that all pins of the salt's owner may take


@dataclass(frozen=True)
class Request:
    """A generation request: prompt, sampling settings, and the conditions that end the reply."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()  # end the reply and are not shown (the model's end-of-sequence ids)
    # Ids that separate the reply's text: no character or stop string spans them, and their own delta has no text.
    break_ids: frozenset[int] = frozenset()
    continues_prompt: bool = False  # plain completion: the reply's text continues that of the prompt
    open_ended: bool = False  # the client gave no max_tokens: memory may allow fewer
    salt: str = ""  # requests with different salts never share KV
    session: str = ""  # requests of one session and salt belong together; empty: none
    conversation_digest: bytes = b""  # of how the session's conversation began; empty: not known
    is_first_choice: bool = True  # False: another reply to a prompt; only the first is its conversation's turn
    resume_at: tuple[int, ...] = ()  # positions in the prompt where later requests are likely to diverge
    pin: PinRequest | None = None
    grammar: Grammar | None = None  # of the reply; the id that ends it must be in `stop_ids`
    grammar_after: tuple[int, ...] = ()  # the grammar begins after these ids in a row (end of thinking); empty: at once
    # The prompt as an array, made on a worker thread: it would take the engine's thread 5 ms for 100,000 ids.
    prompt_ids: TokenIds | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        ids = self.prompt_ids
        if ids is None:
            return
        # Compare a sample: a comparison of every id would take as long as making the array.
        step = max(1, len(ids) // COMPARED_IDS)
        if len(ids) != len(self.prompt) or tuple(ids[::step]) != self.prompt[::step]:
            raise ValueError("prompt_ids are those of another prompt")


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a sampled token, and of the most likely tokens in its place."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), most likely first


@dataclass(frozen=True)
class PrefillProgress:
    """Progress of a prompt's prefill: `num_done` of `num_total` tokens, cached tokens included."""

    num_done: int
    num_total: int
    num_cached: int = 0  # of `num_done`: not computed for this request
    miss_reason: str = ""  # why no more tokens were cached; empty: all that can be cached were
    unpinned_reason: str = ""  # why the prompt will not be pinned; empty: it will be, or no pin was requested
    divergence: PromptDivergence | None = None  # from its conversation's last turn; None: it continues that turn


@dataclass(frozen=True)
class TextDelta:
    """Text that is ready to show. `text` may be empty while a character or a stop string is incomplete."""

    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class TokenUsage:
    """Token counts of a request, for the client."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were not computed
    completion_tokens: int = 0


@dataclass(frozen=True)
class Finished:
    """Last event of a request that ended as intended."""

    reason: FinishReason
    usage: TokenUsage
    stop: str = ""  # stop string that ended the reply; empty: none
    ids: tuple[int, ...] = ()  # all sampled ids, with the id that ended the reply


@dataclass(frozen=True)
class Failed:
    """Last event of a request that failed. `message` is fit for a client."""

    message: str
    reason: FailReason = "broken"


Event = PrefillProgress | TextDelta | Finished | Failed

# Receives the events of a request on the engine's thread. Must not block and must not raise.
Sink = Callable[[Event], None]


@dataclass(frozen=True)
class EngineState:
    """Snapshot of the engine between two steps."""

    waiting: int = 0
    prefilling: int = 0
    running: int = 0  # sequences that prefill or decode
    kv_bytes: int = 0  # of running sequences and cached entries
    cached_bytes: int = 0
    kv_budget_bytes: int = 0
    active_bytes: int = 0
    peak_bytes: int = 0
    decode_tokens_s: float = 0.0
    prefill_tokens_s: float = 0.0
