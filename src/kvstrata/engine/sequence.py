"""A request while it is served, and the table of all. Only the engine thread touches either."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.prefix_cache.conversations import PromptDivergence
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.text.detokenizer import Detokenizer
from kvstrata.text.stop import StopMatcher

log = logging.getLogger(__name__)

ENGINE_FAILED = "The engine failed while it worked on this request. See the server's log."


class Sequence:
    """A request while it is served: tokens, text, sampler, matcher, and its KV cache while it runs."""

    def __init__(self, request: Request, sink: Sink, max_tokens: int, id_: int) -> None:
        self.request = request
        self.id = id_  # inside the engine: grows with arrival and is never used again, unlike the id of a request
        self.max_tokens = max_tokens  # as requested, or fewer where memory has no space for them
        self.tokens = list(request.prompt)  # prompt and reply
        self.cache: SequenceCache | None = None  # None: waiting
        self.kv_format = FULL_PRECISION  # precision of its KV while it runs
        self.num_launched = 0  # tokens of the reply, with those of a pending step
        self.cached_tokens: int | None = (
            None  # cached tokens of the prompt at the first start; None: it has not started yet
        )
        self.miss_reason = ""  # why no more of the prompt is cached
        self.unpinned_reason = ""  # why the prompt is not pinned as requested
        self.divergence: PromptDivergence | None = None  # from the last turn of its conversation
        self._ids = np.empty(0, np.int32) if request.prompt_ids is None else request.prompt_ids
        self._sampler: Sampler | None = None
        self._matcher: Matcher | None = None
        self.submitted_s = time.monotonic()
        self.last_token_s: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_found = ""  # the stop string that ended the reply
        self.failure: Failed | None = None  # why it cannot continue; None: it can
        self._sink = sink
        self._detokenizer: Detokenizer | None = None  # made with the first token
        self._stop = StopMatcher(request.stop)
        self._unshown: list[tuple[int, TokenLogprob | None]] = []  # tokens whose text may be part of a stop string

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def ids(self) -> TokenIds:
        """Return prompt and reply so far, as the prefix cache takes them."""
        if len(self._ids) < len(self.tokens):
            self._ids = np.concatenate([self._ids, np.array(self.tokens[len(self._ids) :], np.int32)])
        return self._ids

    @property
    def lookup_ids(self) -> TokenIds:
        """Tokens that a lookup may find cached: all but the last, which is computed in any case."""
        return self.ids()[:-1]

    @property
    def reply_ids(self) -> tuple[int, ...]:
        """Tokens of the reply as they were sampled, with those of a stop string and of the end."""
        return tuple(self.tokens[len(self.request.prompt) :])

    @property
    def num_computed(self) -> int:
        return self.cache.num_tokens if self.cache is not None else 0

    @property
    def prefill_left(self) -> int:
        """Tokens to compute before decoding: all but the last, which is the first input of the batch."""
        assert self.cache is not None
        return max(0, len(self.tokens) - 1 - self.cache.num_tokens)

    @property
    def tokens_wanted(self) -> int:
        """Limit of the tokens whose KV is still to come: the last token of a reply is never fed."""
        return self.max_tokens - self.num_launched

    def sampler(self, vocab_size: int) -> Sampler:
        """Return the sampler, made at the first decode step: a waiting request holds no arrays."""
        if self._sampler is None:
            self._sampler = Sampler(self.request.sampling, self.request.prompt, vocab_size)
        return self._sampler

    def matcher(self) -> Matcher | None:
        """Return the matcher of the grammar, advanced by all known tokens of the reply. It survives preemption."""
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
        """Send the progress of prefill, unless the reply has begun: a preempted sequence has sent it before."""
        if not self.num_generated:
            self.emit(
                PrefillProgress(
                    self.num_computed,
                    len(self.request.prompt),
                    self.cached_tokens or 0,
                    self.miss_reason,
                    self.unpinned_reason,
                    self.divergence,
                )
            )

    def end(self, event: Finished | Failed) -> None:
        """Send the last event, and drop all that the sequence holds."""
        self.cache = None
        self._sampler = None
        self._matcher = None
        self._sink(event)

    def preempt(self) -> None:
        """Give up the KV cache. The generated tokens stay: they are computed again with the prompt when the sequence is
        resumed, unless memory or a tier has them."""
        self.cache = None
        self.num_launched = self.num_generated

    def accept_token(
        self, token: int, logprob: TokenLogprob | None, detokenizer: Callable[[Request], Detokenizer]
    ) -> None:
        """Append a token to the reply, emit the text that it completes, and decide whether the reply ends."""
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
            # Neither the tokens nor the text of the stop string are emitted.
            self.stop_found = shown.stop
            self._end("stop", shown.text)
            return
        self.emit(TextDelta(shown.text) if self._stop.holds else self._with_tokens(shown.text))
        if self.num_generated >= self.max_tokens:
            self._end("length", self._rest())

    def end_at_memory_limit(self) -> None:
        """End the reply with the tokens that it has: memory has no space for more."""
        self._end("length", self._rest())

    def _break(self, token: int, logprob: TokenLogprob | None) -> None:
        if (text := self._rest()) or self._unshown:
            self.emit(self._with_tokens(text))
        self._detokenizer = None  # half a character before the break must not join what follows
        ends = token in self.request.stop_ids
        self._unshown.append((token, None if ends else logprob))  # the end of a reply has no logprob
        self.emit(self._with_tokens(""))
        if ends:
            self._end("stop", "")
        elif self.num_generated >= self.max_tokens:
            self._end("length", "")

    def _rest(self) -> str:
        """Return the text that was held back for a character or a stop string that did not come."""
        if self._detokenizer is None:
            return ""
        shown = self._stop.add(self._detokenizer.finish())
        return shown.text if shown.stopped else shown.text + self._stop.finish()

    def _with_tokens(self, text: str) -> TextDelta:
        tokens, self._unshown = self._unshown, []
        logprobs = tuple(logprob for _, logprob in tokens if logprob is not None)
        return TextDelta(text, tuple(token for token, _ in tokens), logprobs)

    def _end(self, reason: FinishReason, text: str) -> None:
        """End the reply. `text` is the rest; its tokens are emitted with it, unless they belong to a stop string."""
        stopped_by_text = reason == "stop" and self.tokens[-1] not in self.request.stop_ids
        if not stopped_by_text and self._unshown:
            self.emit(self._with_tokens(text))
        elif text:
            self.emit(TextDelta(text))
        self.finish_reason = reason


class SequenceTable:
    """Waiting and running sequences, each in order of arrival."""

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: dict[int, Sequence] = {}  # by id

    @property
    def all(self) -> list[Sequence]:
        return [*self.waiting, *self.running.values()]

    @property
    def has_prompts(self) -> bool:
        """Whether a running sequence still computes its prompt."""
        return any(sequence.prefill_left for sequence in self.running.values())

    @property
    def has_streams(self) -> bool:
        """Whether a running sequence decodes."""
        return any(not sequence.prefill_left for sequence in self.running.values())

    @property
    def num_streams(self) -> int:
        """Number of decoding sequences that have a token to come."""
        return sum(not s.prefill_left and s.tokens_wanted > 0 for s in self.running.values())

    def waiting_with_id(self, id_: int) -> Sequence:
        return next(s for s in self.waiting if s.id == id_)

    def start_sequence(self, sequence: Sequence) -> None:
        """Move a waiting sequence to the running ones, in order of arrival: a preempted sequence is older than those
        admitted since, and the youngest is preempted first."""
        self.waiting.remove(sequence)
        running = sorted([*self.running.values(), sequence], key=lambda s: s.id)
        self.running.clear()
        self.running.update({s.id: s for s in running})

    def preempt_sequence(self, sequence: Sequence) -> None:
        """Move a running sequence back to the waiting ones."""
        del self.running[sequence.id]
        self.waiting = sorted([*self.waiting, sequence], key=lambda s: s.id)

    def drop_replaced_spans(self) -> None:
        """Have running sequences drop spans that the cache has replaced: a sequence that is not part of the next step
        would keep their memory."""
        for sequence in self.running.values():
            if sequence.cache is not None:
                sequence.cache.drop_replaced_segments()
