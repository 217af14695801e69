"""Reply assembly between engine events and a response writer: parses replies, collects usage and notes for headers,
and maps failures to errors. Handles no JSON.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from anyio import to_thread

from kvstrata.engine.request import Event, Failed, Finished, PrefillProgress, TextDelta, TokenLogprob, TokenUsage
from kvstrata.errors import InvalidRequest, MemoryPinned, ReplyFailed, RequestError
from kvstrata.server.chat.engine_client import RequestEvent
from kvstrata.server.chat.generation import Generation
from kvstrata.server.chat.writer import ChoiceEnd, JsonEvent, ResponseWriter, StreamStart
from kvstrata.server.request_log import RequestTrace
from kvstrata.server.sessions import SessionDivergence
from kvstrata.text.reply_events import ReplyEvent, ToolCallEnd

MISS = "x-kvstrata-miss"
MAX_NOTE_CHARS = 120
CACHED = "x-kvstrata-cached-tokens"
CANCELLED = "The server cancelled this reply. Send the request again."


def miss_value(miss: str, notes: Mapping[str, str]) -> str:
    """Return the header that says why no more of a prompt was cached, and how the prompt was changed.

    x-kvstrata-miss: diverged; at=1204; was="12:31"; now="12:32"; replayed=3
    """
    return "; ".join([miss, *(f"{name}={_header_value(value)}" for name, value in notes.items())])


def _header_value(value: str) -> str:
    """Return a value for the header: words and numbers unchanged, other text quoted and escaped to printable ASCII."""
    if value and value.isascii() and value.replace("+", "").replace("_", "").isalnum():
        return value
    text = value[:MAX_NOTE_CHARS].encode("unicode_escape").decode("ascii")
    return '"' + text.replace('"', "'") + '"'


class ReplyAssembler:
    """Assembles the replies of one generation. `finish_early`: ends the request at an index, whose reply needs no more
    tokens. `trace`: the trace of the request; None: nothing is traced."""

    def __init__(
        self,
        generation: Generation,
        writer: ResponseWriter,
        finish_early: Callable[[int], None],
        trace: RequestTrace | None = None,
    ) -> None:
        self._generation = generation
        self._trace = trace or RequestTrace("")
        self.writer = writer
        self._finish_early = finish_early
        self._complete: set[int] = set()  # replies that this class ended early
        self._usages: dict[int, TokenUsage] = {}
        self._shown: dict[int, list[int]] = defaultdict(list)  # token ids of the visible reply, by index
        self._events: dict[int, list[ReplyEvent]] = defaultdict(list)
        self._ended: list[int] = []  # ended replies that are not recorded yet
        self._misses: dict[int, str] = {}  # reason of the cache miss, by index
        self._unpinned = ""  # why the requested pin was refused
        self._divergences: dict[int, SessionDivergence | None] = {}  # by prompt: divergence from its session's last one

    def feed(self, arrival: RequestEvent) -> list[JsonEvent]:
        index, event = arrival.index, arrival.event
        self._trace.record_event(index, event)
        if isinstance(event, PrefillProgress):
            self._misses.setdefault(index, event.miss_reason)
            self._record_divergence(index, event)
            self._unpinned = event.unpinned_reason or self._unpinned
        elif isinstance(event, TextDelta) and index not in self._complete:
            if self._generation.record_reply is not None:
                self._shown[index] += event.ids
            return self._add(index, self._generation.parsers[index].add(event.text, event.ids), event.logprobs)
        elif isinstance(event, Finished) and event.reason != "cancelled":  # a cancelled reply is a failure
            return self._finish_choice(index, event)
        return []

    async def record_replies(self) -> None:
        """Record the replies that have ended. Must finish before the client learns of the end, because it may send a
        reply back at once. Runs on a worker thread, because a long reply takes a while."""
        ended, self._ended = self._ended, []
        if (record_reply := self._generation.record_reply) is not None:
            for index in ended:
                await to_thread.run_sync(record_reply, self._shown[index], self._events[index])

    def failure(self, arrivals: Sequence[RequestEvent]) -> RequestError | None:
        """Return the error of a reply that ended without a result, or None."""
        error = next((error for arrival in arrivals if (error := _failure(arrival.event))), None)
        if error is not None:
            self._trace.record_error(error)
        return error

    def stream_start(self, arrivals: Sequence[RequestEvent]) -> StreamStart:
        first = arrivals[0].event if arrivals else None
        cached_tokens = first.num_cached if isinstance(first, PrefillProgress) else None
        return StreamStart(len(self._generation.requests[0].prompt), cached_tokens)

    def headers(self, arrivals: Sequence[RequestEvent]) -> dict[str, str]:
        """Return the cache headers of a stream. They are known only with a single request whose first event has
        arrived; otherwise the usage at the end has the numbers."""
        first = arrivals[0].event if arrivals else None
        if isinstance(first, PrefillProgress) and len(self._generation.requests) == 1:
            self._record_divergence(0, first)
            return {
                CACHED: str(first.num_cached),
                MISS: miss_value(first.miss_reason, self._notes(first.unpinned_reason)),
            }
        return {}

    def whole_headers(self) -> dict[str, str]:
        firsts = [miss for index, miss in sorted(self._misses.items()) if index % self._generation.n == 0]
        return {
            CACHED: str(self.usage().cached_tokens),
            MISS: miss_value(",".join(dict.fromkeys(firsts)), self._notes(self._unpinned)),
        }

    def _record_divergence(self, index: int, progress: PrefillProgress) -> None:
        """Record where a prompt diverged, from the first event of its first choice."""
        place, choice = divmod(index, self._generation.n)
        if not self._generation.visits or choice or place in self._divergences:
            return
        self._divergences[place] = self._generation.visits[place].describe_divergence(progress.divergence)
        if len(self._generation.visits) == 1 and self._trace.generation is not None:
            self._trace.generation.divergence = self._divergences[place]

    def _notes(self, unpinned: str) -> dict[str, str]:
        divergence = self._divergences.get(0) if len(self._generation.visits) == 1 else None
        prompt = self._generation.prompt
        return {
            **(divergence.notes if divergence else {}),
            **(prompt.notes if prompt else {}),
            **({"pin": unpinned} if unpinned else {}),
        }

    def usage(self) -> TokenUsage:
        """Return the total usage of all replies. A prompt counts once, even with several choices."""
        firsts = [usage for index, usage in self._usages.items() if index % self._generation.n == 0]
        return TokenUsage(
            prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
            cached_tokens=sum(usage.cached_tokens for usage in firsts),
            completion_tokens=sum(usage.completion_tokens for usage in self._usages.values()),
        )

    def _add(self, index: int, events: Sequence[ReplyEvent], logprobs: Sequence[TokenLogprob] = ()) -> list[JsonEvent]:
        if self._generation.one_call:
            last = next((place for place, event in enumerate(events) if isinstance(event, ToolCallEnd)), None)
            if last is not None:
                events = events[: last + 1]
                self._complete.add(index)
                self._finish_early(index)
        if self._generation.record_reply is not None:
            self._events[index] += events
        return self.writer.add(index, events, logprobs) if events or logprobs else []

    def _finish_choice(self, index: int, finished: Finished) -> list[JsonEvent]:
        self._usages[index] = finished.usage
        if self._generation.visits and index % self._generation.n == 0:
            place = index // self._generation.n
            self._generation.visits[place].record_reply(finished.usage, self._divergences.get(place))
        if index in self._complete:
            # Ignore what the model wrote before the engine stopped it.
            self._ended.append(index)
            return self.writer.finish_choice(index, ChoiceEnd("stop", finished.usage))
        reason = "length" if finished.reason == "length" else "stop"
        cut_off = reason == "length" or bool(finished.stop)
        rest = self._add(index, self._generation.parsers[index].finish(cut_off=cut_off))
        self._ended.append(index)
        return [*rest, *self.writer.finish_choice(index, ChoiceEnd(reason, finished.usage, finished.stop))]


def _failure(event: Event) -> RequestError | None:
    if isinstance(event, Failed):
        errors = {"pinned": MemoryPinned, "grammar": InvalidRequest}
        return errors.get(event.reason, ReplyFailed)(event.message)
    is_cancelled = isinstance(event, Finished) and event.reason == "cancelled"
    return ReplyFailed(CANCELLED) if is_cancelled else None
