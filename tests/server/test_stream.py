"""How a stream breaks its silence, and that clients do not take that for an event."""

from __future__ import annotations

import asyncio
import re

from starlette.types import Message

from kvstrata.engine.request import Finished, PrefillProgress, Request, Sink, TextDelta, TokenUsage
from kvstrata.server.chat.assembler import ReplyAssembler
from kvstrata.server.chat.engine_client import RunningRequests
from kvstrata.server.chat.generation import Generation
from kvstrata.server.chat.serving import Heartbeat, send_stream
from kvstrata.server.openai.response import CompletionChoice, OpenAIWriter
from kvstrata.text.reply_parser import PlainParser
from kvstrata.text.tool_calls.answer_text import OfferedTools
from tests.support.models import tiny_loaded
from tests.support.servers import running


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_pings_are_a_second_apart() -> None:
    clock = Clock()
    heartbeat = Heartbeat(10.0, clock)
    said = []
    for step in range(41):  # a chunk every quarter of a second, for ten seconds
        clock.now_s = 100.0 + step / 4
        heartbeat.record_event(PrefillProgress(step, 41))
        said.append(heartbeat.due())
        if said[-1]:
            heartbeat.on_sent()
    assert [line for line in said if line] == [f"prefill {step}/41" for step in range(0, 41, 4)]


def test_news_that_came_too_soon_is_told_when_it_is_time() -> None:
    clock = Clock()
    heartbeat = Heartbeat(10.0, clock)
    heartbeat.record_event(PrefillProgress(1, 9))
    assert heartbeat.due() == "prefill 1/9"
    heartbeat.on_sent()
    clock.now_s += 0.25
    heartbeat.record_event(PrefillProgress(2, 9))
    assert heartbeat.due() == ""
    assert heartbeat.left_s() == 0.75
    clock.now_s += 0.75
    assert heartbeat.due() == "prefill 2/9"


def test_silence_is_what_the_client_hears() -> None:
    clock = Clock()
    heartbeat = Heartbeat(10.0, clock)
    for _ in range(19):  # tokens come all the time
        clock.now_s += 0.5
        heartbeat.record_event(TextDelta(""))
        assert heartbeat.due() == ""
    clock.now_s += 0.5
    assert heartbeat.due() == "writing"
    heartbeat.on_sent()
    assert heartbeat.left_s() == 10.0
    clock.now_s += 9.5
    assert heartbeat.due() == ""


class CallWriter:
    """Stands in for an engine whose model writes a tool call: a token now and then, and nothing to show."""

    def __init__(self, num_tokens: int, gap_s: float) -> None:
        self._num_tokens = num_tokens
        self._gap_s = gap_s
        self._task: asyncio.Task[None] | None = None

    def submit(self, request: Request, sink: Sink) -> None:
        del request
        self._task = asyncio.get_running_loop().create_task(self._write(sink))

    def cancel(self, request_id: str) -> None:
        raise AssertionError(f"{request_id} has ended by itself")

    def finish_early(self, request_id: str) -> None:
        raise AssertionError(f"{request_id} ends by itself")

    async def _write(self, sink: Sink) -> None:
        sink(PrefillProgress(0, 5))
        for _ in range(self._num_tokens):
            await asyncio.sleep(self._gap_s)
            sink(TextDelta(""))
        sink(Finished("stop", TokenUsage(5, 0, self._num_tokens)))


def test_a_long_tool_call_is_not_silent() -> None:
    sent: list[bytes] = []
    ends: list[int] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    async def stream() -> None:
        request = Request("one", (1, 2), 100)
        with RunningRequests(CallWriter(num_tokens=40, gap_s=0.02), [request]) as replies:
            replies.submit()
            wire = OpenAIWriter({}, [CompletionChoice(0, tiny_loaded("llama").tokenizer)])
            telling = ReplyAssembler(
                Generation("one", (request,), (PlainParser(OfferedTools(())),)), wire, replies.finish_early
            )
            await send_stream(replies, telling, send, keep_alive_s=0.1, headers={}, on_end=lambda: ends.append(1))

    asyncio.run(stream())
    assert ends == [1]
    # 0.8 s at least. The first comment tells of the prefill.
    assert sent.count(b": writing\n") >= 4


def test_the_openai_client_skips_heartbeat_before_events() -> None:
    with (
        running(tiny_loaded("llama"), keep_alive_s=0.0001, options={"engine": {"prefill_chunk_tokens": 1}}) as served,
        served.openai() as client,
    ):
        asked = {"model": served.name, "prompt": [9] * 40, "max_tokens": 20, "temperature": 0}
        with served.http() as http, http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as raw:
            text = "".join(raw.iter_text())
        assert re.search(r"^: prefill \d+/40\n(: .*\n)*data: \{", text, re.MULTILINE)
        assert "\n\n:" not in text.partition("data:")[0]  # no comment is an event by itself
        fresh = {**asked, "extra_body": {"cache_salt": "another"}}
        streamed = list(client.completions.create(**fresh, stream=True))
        whole = client.completions.create(**asked)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
    assert all(chunk.choices for chunk in streamed)
