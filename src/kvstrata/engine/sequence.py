"""A request while it is served, and the table of all. Only the engine thread touches either."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvstrata.engine.budget import FULL_PRECISION
from kvstrata.engine.request import (
    Event,
    Failed,
    Finished,
    FinishReason,
    PrefillProgress,
    Request,
    Sink,
    TextDelta,
    TokenLogprob,
    TokenUsage,
)
from kvstrata.engine.sampling import Sampler
from kvstrata.grammar.matcher import Matcher
from kvstrata.layers.sequence import SequenceCache
from kvstrata.prefix_cache.entries import CachedPrefix
from kvstrata.prefix_cache.insertion import Insertion
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.prefix_cache.prefetch import TierOffer, TierOffers
from kvstrata.prefix_cache.tier_client import BlockLoad
from kvstrata.spans.span import Span
from kvstrata.text.detokenizer import Detokenizer
from kvstrata.text.stop import StopMatcher

log = logging.getLogger(__name__)

ENGINE_FAILED = "The engine failed while it worked on this request. See the server's log."


@dataclass
class Stored:
    """What a sequence has in the store, and what it waits for from there. `Resume` sees to it."""

    stops: set[int]  # where others will resume: prefill pauses there if the model needs it
    filing: Insertion | None = None  # its way into the store, while it runs
    found: CachedPrefix | None = None  # what the store had for it, when last asked
    found_version: int = 0
    asked_twice: int | None = None  # how far an earlier request had its prompt; None: it has not begun yet
    shared: dict[int, int] = field(default_factory=dict)  # tokens that it has in common with another, by arrival
    has_asked: bool = False  # the tiers, for what memory did not have
    most_found: int = 0  # tokens that memory had for it since, at most
    refused_end: int = 0  # end of a load that lacked space; 0: none did
    refused_space_bytes: int = 0  # space that there was for it then
    num_asked: int = 0  # times since it last began
    lookup: TierOffers | None = None  # what the tiers were asked for it
    offers: tuple[TierOffer, ...] = ()  # what they have, and what was not loaded yet
    load: BlockLoad | None = None  # what is on its way from one of them for it
    orphans: tuple[Span, ...] = ()  # that it reads, and no table counts any more: that table has failed
    awaits_room_s: float | None = None  # since when it waits for the disk to take what has to go; None: it does not

    def without_cache(self) -> Stored:
        """What is left of it when the table has failed: the sequence goes on, and leaves nothing in a cache."""
        spans = [run.span for run in self.filing.lease.ranges] if self.filing is not None else []
        return Stored(self.stops, asked_twice=self.asked_twice, orphans=(*self.orphans, *spans))

    def ask_again(self) -> None:
        """Have the tiers asked anew before it begins: memory has less of its prefix than it had, or soon may have."""
        self.withdraw_lookup()
        self.has_asked, self.most_found, self.refused_end = False, 0, 0

    def withdraw_lookup(self) -> None:
        """The answer is of no use any more."""
        if self.lookup is not None:
            self.lookup.withdraw()
            self.lookup = None
        self.offers = ()


class Sequence:
    def __init__(self, request: Request, sink: Sink, max_tokens: int, arrival: int) -> None:
        self.request = request
        self.arrival = arrival  # its name inside the engine: never used again, unlike a request's id
        self.max_tokens = max_tokens  # what was asked for, or less where memory does not reach so far
        self.tokens = list(request.prompt)  # prompt and reply
        self.cache: SequenceCache | None = None  # None: waiting
        self.kv_format = FULL_PRECISION  # how it is held while it runs
        self.num_launched = 0  # tokens of the reply, those in flight included
        self.cached_tokens: int | None = None  # of the prompt, when it first began; None: it has not yet
        self.stored = Stored(set(request.resume_at))
        self.miss_reason = ""  # why not more of the prompt was found
        self.unpinned_reason = ""  # why the prompt is not pinned as asked
        self._ids = np.empty(0, np.int32) if request.prompt_ids is None else request.prompt_ids
        self._sampler: Sampler | None = None
        self._matcher: Matcher | None = None
        self.submitted_s = time.monotonic()
        self.last_token_s: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_found = ""  # the stop string that ended the reply
        self.failure: Failed | None = None  # why it cannot go on; None: it can
        self._sink = sink
        self._detokenizer: Detokenizer | None = None  # made with the first token
        self._stop = StopMatcher(request.stop)
        self._unshown: list[tuple[int, TokenLogprob | None]] = []  # tokens whose text may be part of a stop string

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def ids(self) -> TokenIds:
        """Prompt and reply so far, as the index wants them."""
        if len(self._ids) < len(self.tokens):
            self._ids = np.concatenate([self._ids, np.array(self.tokens[len(self._ids) :], np.int32)])
        return self._ids

    @property
    def reply_ids(self) -> tuple[int, ...]:
        """As they were sampled, those of a stop string and of the end included."""
        return tuple(self.tokens[len(self.request.prompt) :])

    @property
    def num_computed(self) -> int:
        return self.cache.num_tokens if self.cache is not None else 0

    @property
    def prefill_left(self) -> int:
        """Tokens to compute before it can decode: all but the last, which is the first input of the batch."""
        assert self.cache is not None
        return max(0, len(self.tokens) - 1 - self.cache.num_tokens)

    @property
    def tokens_wanted(self) -> int:
        """KV still to come, at most: the last token of a reply is never fed."""
        return self.max_tokens - self.num_launched

    def sampler(self, vocab_size: int) -> Sampler:
        """Made when it first decodes: a request that waits holds no arrays."""
        if self._sampler is None:
            self._sampler = Sampler(self.request.sampling, self.request.prompt, vocab_size)
        return self._sampler

    def matcher(self) -> Matcher | None:
        """Where the reply stands in its grammar, as far as its tokens are known. It outlives being set aside."""
        grammar = self.request.grammar
        if grammar is None:
            return None
        if self._matcher is None:
            self._matcher = grammar.matcher(self.request.grammar_after)
        for place in range(self._matcher.num_consumed, self.num_generated):
            self._matcher.consume(place, self.tokens[len(self.request.prompt) + place])
        return self._matcher

    @property
    def usage(self) -> TokenUsage:
        return TokenUsage(len(self.request.prompt), self.cached_tokens or 0, self.num_generated)

    @contextmanager
    def contain_failure(self) -> Iterator[None]:
        """An exception in work for this request ends this request, and no other."""
        try:
            yield
        except Exception:
            log.exception("Work for request %s failed", self.request.id)
            self.failure = Failed(ENGINE_FAILED)

    def emit(self, event: Event) -> None:
        self._sink(event)

    def report_prefill(self) -> None:
        """How far its prompt is; one that was set aside has said so before."""
        if not self.num_generated:
            prompt_tokens, cached_tokens = len(self.request.prompt), self.cached_tokens or 0
            self.emit(
                PrefillProgress(self.num_computed, prompt_tokens, cached_tokens, self.miss_reason, self.unpinned_reason)
            )

    def end(self, event: Finished | Failed) -> None:
        """The last event. Nothing that the sequence held outlives it."""
        self.cache = None
        self._sampler = None
        self._matcher = None
        self._sink(event)

    def preempt(self) -> None:
        """Give up the cache. What was generated stays: it is computed again as part of the prompt, as far as neither
        memory nor a tier has it when the sequence is resumed."""
        self.cache = None
        self.stored.ask_again()
        self.num_launched = self.num_generated

    def accept_token(
        self, token: int, logprob: TokenLogprob | None, detokenizer: Callable[[Request], Detokenizer]
    ) -> None:
        """One more token of the reply: show what it makes showable, and decide whether the reply ends."""
        self.tokens.append(token)
        self.last_token_s = time.monotonic()
        if token in self.request.break_ids:
            self._break(token, logprob)
            return
        if token in self.request.stop_ids:
            self._end("stop", self._rest())
            return
        if self._detokenizer is None:
            self._detokenizer = detokenizer(self.request)
        shown = self._stop.add(self._detokenizer.add(token))
        self._unshown.append((token, logprob))
        if shown.stopped:
            # Tokens of the stop string are as little shown as its text.
            self.stop_found = shown.stop
            self._end("stop", shown.text)
            return
        self.emit(TextDelta(shown.text) if self._stop.holds else self._with_tokens(shown.text))
        if self.num_generated >= self.max_tokens:
            self._end("length", self._rest())

    def end_at_memory_limit(self) -> None:
        """The reply ends with what it has: there is no memory for more of it."""
        self._end("length", self._rest())

    def _break(self, token: int, logprob: TokenLogprob | None) -> None:
        if (text := self._rest()) or self._unshown:
            self.emit(self._with_tokens(text))
        self._detokenizer = None  # half a character before the break must not join what follows
        ends = token in self.request.stop_ids
        self._unshown.append((token, None if ends else logprob))  # no end of a reply has one
        self.emit(self._with_tokens(""))
        if ends:
            self._end("stop", "")
        elif self.num_generated >= self.max_tokens:
            self._end("length", "")

    def _rest(self) -> str:
        """Text that was held back for a character or a stop string that did not come."""
        if self._detokenizer is None:
            return ""
        shown = self._stop.add(self._detokenizer.finish())
        return shown.text if shown.stopped else shown.text + self._stop.finish()

    def _with_tokens(self, text: str) -> TextDelta:
        tokens, self._unshown = self._unshown, []
        logprobs = tuple(logprob for _, logprob in tokens if logprob is not None)
        return TextDelta(text, tuple(token for token, _ in tokens), logprobs)

    def _end(self, reason: FinishReason, text: str) -> None:
        """`text` is the rest. Its tokens go with it, unless a stop string took them."""
        stopped_by_text = reason == "stop" and self.tokens[-1] not in self.request.stop_ids
        if not stopped_by_text and self._unshown:
            self.emit(self._with_tokens(text))
        elif text:
            self.emit(TextDelta(text))
        self.finish_reason = reason


class SequenceTable:
    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: dict[int, Sequence] = {}  # by arrival

    @property
    def all(self) -> list[Sequence]:
        return [*self.waiting, *self.running.values()]

    @property
    def has_prompts(self) -> bool:
        """Whether one that runs still computes its prompt."""
        return any(sequence.prefill_left for sequence in self.running.values())

    @property
    def has_streams(self) -> bool:
        """Whether one that runs decodes."""
        return any(not sequence.prefill_left for sequence in self.running.values())

    @property
    def num_streams(self) -> int:
        """That have a token to come."""
        return sum(not s.prefill_left and s.tokens_wanted > 0 for s in self.running.values())

    def waiting_at(self, arrival: int) -> Sequence:
        return next(s for s in self.waiting if s.arrival == arrival)

    def start_sequence(self, sequence: Sequence) -> None:
        """One that waited runs. Age decides who gives way, and one that was set aside is older than those admitted
        since."""
        self.waiting.remove(sequence)
        running = sorted([*self.running.values(), sequence], key=lambda s: s.arrival)
        self.running.clear()
        self.running.update({s.arrival: s for s in running})

    def preempt_sequence(self, sequence: Sequence) -> None:
        """One that ran waits."""
        del self.running[sequence.arrival]
        self.waiting = sorted([*self.waiting, sequence], key=lambda s: s.arrival)

    def drop_replaced_spans(self) -> None:
        """One that does not run in the next step would keep what was replaced in the store."""
        for sequence in self.running.values():
            if sequence.cache is not None:
                sequence.cache.let_go()
