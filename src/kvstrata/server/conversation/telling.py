"""Conversion of engine events to wire events: parses replies, collects usage and notes, and maps failures to errors.
Handles no JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from anyio import to_thread

from kvstrata.engine.request import Event, Failed, Finished, PrefillProgress, TextDelta, TokenLogprob, TokenUsage
from kvstrata.errors import InvalidRequest, MemoryPinned, ReplyFailed, RequestError
from kvstrata.server.bridge import Arrival
from kvstrata.server.conversation.job import Job
from kvstrata.server.conversation.miss import MISS, miss_value
from kvstrata.server.conversation.wire import Begun, Ended, ServerEvent, Wire
from kvstrata.server.journal.trace import Trace
from kvstrata.server.sessions.session import Parted
from kvstrata.text.reply_events import ReplyEvent, ToolCallEnd

CACHED = "x-kvstrata-cached-tokens"
CANCELLED = "The server cancelled this reply. Send the request again."


class Telling:
    """The conversion of one job's events. `enough`: ends the request at an index, whose reply needs no more tokens."""

    def __init__(self, job: Job, wire: Wire, enough: Callable[[int], None], trace: Trace | None = None) -> None:
        """`trace`: the trace of the request; None: nothing is traced."""
        self._job = job
        self._trace = trace or Trace("")
        self.wire = wire
        self._enough = enough
        self._complete: set[int] = set()  # replies that this class ended early
        self._usages: dict[int, TokenUsage] = {}
        self._shown: dict[int, list[int]] = defaultdict(list)  # token ids of the visible reply, by index
        self._events: dict[int, list[ReplyEvent]] = defaultdict(list)
        self._ended: list[int] = []  # ended replies that are not recorded yet
        self._misses: dict[int, str] = {}  # reason of the cache miss, by index
        self._unpinned = ""  # why the requested pin was refused
        self._parted: dict[int, Parted | None] = {}  # by prompt: divergence from its session's last one

    def told(self, arrival: Arrival) -> list[ServerEvent]:
        index, event = arrival.index, arrival.event
        self._trace.note(index, event)
        if isinstance(event, PrefillProgress):
            self._misses.setdefault(index, event.miss_reason)
            self._note_divergence(index, event)
            self._unpinned = event.unpinned_reason or self._unpinned
        elif isinstance(event, TextDelta) and index not in self._complete:
            if self._job.noting is not None:
                self._shown[index] += event.ids
            return self._add(index, self._job.readers[index].add(event.text, event.ids), event.logprobs)
        elif isinstance(event, Finished) and event.reason != "cancelled":  # a cancelled reply is a failure
            return self._end(index, event)
        return []

    async def remember(self) -> None:
        """Record the replies that have ended. Must finish before the client learns of the end, because it may send a
        reply back at once. Runs on a worker thread, because a long reply takes a while."""
        ended, self._ended = self._ended, []
        if (noting := self._job.noting) is not None:
            for index in ended:
                await to_thread.run_sync(noting.note, self._shown[index], self._events[index])

    def failure(self, arrivals: Sequence[Arrival]) -> RequestError | None:
        """Return the error of a reply that ended without a result, or None."""
        error = next((error for arrival in arrivals if (error := _failure(arrival.event))), None)
        if error is not None:
            self._trace.fail(error)
        return error

    def begun(self, arrivals: Sequence[Arrival]) -> Begun:
        first = arrivals[0].event if arrivals else None
        cached_tokens = first.num_cached if isinstance(first, PrefillProgress) else None
        return Begun(len(self._job.requests[0].prompt), cached_tokens)

    def headers(self, arrivals: Sequence[Arrival]) -> dict[str, str]:
        """Return the cache headers of a stream. They are known only with a single request whose first event has
        arrived; otherwise the usage at the end has the numbers."""
        first = arrivals[0].event if arrivals else None
        if isinstance(first, PrefillProgress) and len(self._job.requests) == 1:
            self._note_divergence(0, first)
            return {
                CACHED: str(first.num_cached),
                MISS: miss_value(first.miss_reason, self._notes(first.unpinned_reason)),
            }
        return {}

    def whole_headers(self) -> dict[str, str]:
        firsts = [miss for index, miss in sorted(self._misses.items()) if index % self._job.n == 0]
        return {
            CACHED: str(self.usage().cached_tokens),
            MISS: miss_value(",".join(dict.fromkeys(firsts)), self._notes(self._unpinned)),
        }

    def _note_divergence(self, index: int, progress: PrefillProgress) -> None:
        """Record where a prompt diverged, from the first event of its first choice."""
        place, choice = divmod(index, self._job.n)
        if not self._job.visits or choice or place in self._parted:
            return
        self._parted[place] = self._job.visits[place].parted(progress.divergence)
        if len(self._job.visits) == 1 and self._trace.asked is not None:
            self._trace.asked.parted = self._parted[place]

    def _notes(self, unpinned: str) -> dict[str, str]:
        parted = self._parted.get(0) if len(self._job.visits) == 1 else None
        return {**(parted.notes if parted else {}), **self._job.notes, **({"pin": unpinned} if unpinned else {})}

    def usage(self) -> TokenUsage:
        """Return the total usage of all replies. A prompt counts once, even with several choices."""
        firsts = [usage for index, usage in self._usages.items() if index % self._job.n == 0]
        return TokenUsage(
            prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
            cached_tokens=sum(usage.cached_tokens for usage in firsts),
            completion_tokens=sum(usage.completion_tokens for usage in self._usages.values()),
        )

    def _add(
        self, index: int, events: Sequence[ReplyEvent], logprobs: Sequence[TokenLogprob] = ()
    ) -> list[ServerEvent]:
        if self._job.one_call:
            last = next((place for place, event in enumerate(events) if isinstance(event, ToolCallEnd)), None)
            if last is not None:
                events = events[: last + 1]
                self._complete.add(index)
                self._enough(index)
        if self._job.noting is not None:
            self._events[index] += events
        return self.wire.add(index, events, logprobs) if events or logprobs else []

    def _end(self, index: int, finished: Finished) -> list[ServerEvent]:
        self._usages[index] = finished.usage
        if self._job.visits and index % self._job.n == 0:
            place = index // self._job.n
            self._job.visits[place].learn(finished.usage, self._parted.get(place))
        if index in self._complete:
            # Ignore what the model wrote before the engine stopped it.
            self._ended.append(index)
            return self.wire.end(index, Ended("stop", finished.usage))
        reason = "length" if finished.reason == "length" else "stop"
        cut_off = reason == "length" or bool(finished.stop)
        rest = self._add(index, self._job.readers[index].finish(cut_off=cut_off))
        self._ended.append(index)
        return [*rest, *self.wire.end(index, Ended(reason, finished.usage, finished.stop))]


def _failure(event: Event) -> RequestError | None:
    if isinstance(event, Failed):
        errors = {"pinned": MemoryPinned, "grammar": InvalidRequest}
        return errors.get(event.reason, ReplyFailed)(event.message)
    is_cancelled = isinstance(event, Finished) and event.reason == "cancelled"
    return ReplyFailed(CANCELLED) if is_cancelled else None
