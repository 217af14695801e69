"""Run of one scenario on a running server: sends the requests and computes the figures.

The comparison may restart the server on the way. A failed request, a server that ends and a timeout give an outcome
that says so, with the answers until then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from kvstrata.bench.chat_client import Answer, PrefillTime
from kvstrata.bench.figures import Figure
from kvstrata.bench.load import LoadClient, SentRequest
from kvstrata.bench.peers.base import KnownBy
from kvstrata.bench.scenarios import ConcurrentRequests, Restart, Scenario, ScenarioRequest, StreamBesidePrompt

SETTLE_S = 0.3  # time for a server to log and count its last response


@dataclass(frozen=True)
class Outcome(Figure):
    """Figures of one scenario, one server and one round. Token counts cover the requests that count."""

    side: str
    scenario: int
    round: int
    requests: int
    answered: int
    prompt_tokens: int
    prefilled_reported: int | None
    prefilled_logged: int | None
    prefilled_inferred: int | None
    known_by: KnownBy  # the one of the three that is used
    first_token_s: list[float]  # of timed requests
    slowest_gap_s: float | None  # between two tokens of the stream, where there is one
    reply_tokens: int
    took_s: float
    peak_bytes: int | None
    held_bytes: int | None
    failure: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass
class ScenarioRun:
    """State of a running scenario; it is read even when the scenario is aborted."""

    client: LoadClient
    restart: Callable[[], None]
    mark_log: Callable[[], None]  # called before the first request that counts
    sent: list[tuple[ScenarioRequest, SentRequest]] = field(default_factory=list)
    together_s: list[tuple[float, list[SentRequest]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    slowest_gap_s: float | None = None
    is_marked: bool = False

    async def walk(self, scenario: Scenario) -> None:
        for step in scenario.steps:
            if isinstance(step, Restart):
                await asyncio.to_thread(self.restart)
            elif isinstance(step, StreamBesidePrompt):
                self._mark()
                await self._beside(step)
            else:
                if any(request.part != "setup" for request in step.requests):
                    self._mark()
                await self._together(step)
        await asyncio.sleep(SETTLE_S)

    def _mark(self) -> None:
        if not self.is_marked:
            self.is_marked = True
            self.mark_log()

    async def _together(self, step: ConcurrentRequests) -> None:
        began_s = time.perf_counter()
        found = await asyncio.gather(*(self._send(request) for request in step.requests))
        if len(found) > 1:
            last_s = max(each.answer.began_s + each.answer.first_token_s for each in found)
            self.together_s.append((last_s - began_s, list(found)))

    async def _send(self, request: ScenarioRequest, on_piece: Callable[[int], None] = lambda _: None) -> SentRequest:
        found = await self.client.send(request.ask, on_piece)
        self.sent.append((request, found))
        return found

    async def _beside(self, step: StreamBesidePrompt) -> None:
        under_way = asyncio.Event()

        def heard(num_pieces: int) -> None:
            if num_pieces >= step.after_tokens:
                under_way.set()

        stream = asyncio.create_task(self._send(step.stream, heard))
        stream.add_done_callback(lambda _: under_way.set())
        await under_way.wait()
        comes = await self._send(step.comes)
        streamed = await stream
        self.slowest_gap_s, note = pause(streamed.answer, comes.answer)
        self.notes += [note] if note else []


def pause(stream: Answer, comes: Answer) -> tuple[float | None, str]:
    """Return the longest gap of the stream between the other request's arrival and its first token, and a note."""
    until_s = comes.began_s + comes.first_token_s
    ends = stream.times
    pairs = list(pairwise(ends))
    gaps = [later - earlier for earlier, later in pairs if later > comes.began_s and earlier < until_s]
    if not gaps:
        return None, "the stream had ended before the prompt came"
    if ends[-1] < until_s:
        return max(gaps), "the stream ended before the prompt had its first token"
    return max(gaps), ""


def tokens_of(run: ScenarioRun, known: PrefillTime | None) -> tuple[int, int | None, int | None]:
    """Return, for the requests that count: prompt tokens, computed tokens as reported, and as inferred from time."""
    counted = [sent for request, sent in run.sent if request.part != "setup" and not sent.answer.failure]
    if not counted:
        return 0, None, None
    total = sum(sent.prompt_tokens for sent in counted)
    cached = [sent.answer.cached_tokens for sent in counted]
    reported = None if None in cached else total - sum(each for each in cached if each is not None)
    return total, reported, _inferred(run, counted, known)


def _inferred(run: ScenarioRun, counted: list[SentRequest], known: PrefillTime | None) -> int | None:
    if known is None or run.slowest_gap_s is not None:
        return None  # a stream beside it took some of the time
    together = {id(sent) for _, group in run.together_s for sent in group}
    alone = [sent for sent in counted if id(sent) not in together]
    found = sum(known.computed_tokens(sent.prompt_tokens, sent.answer.first_token_s) for sent in alone)
    return found + sum(_of_group(known, took_s, group) for took_s, group in run.together_s)


def _of_group(known: PrefillTime, took_s: float, group: list[SentRequest]) -> int:
    """Estimate the computed tokens of concurrent requests as if they ran one after the other until the last first
    token."""
    total = sum(sent.prompt_tokens for sent in group)
    each_s = known.seconds(total // len(group), total // len(group)) - known.fixed_s
    token_s = each_s * len(group) / total
    return min(total, round(max(0.0, took_s - known.fixed_s) / token_s)) if token_s else total
