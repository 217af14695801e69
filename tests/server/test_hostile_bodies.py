"""Bodies that are small on the wire and millions of values in memory: refused at little cost to other clients."""

from __future__ import annotations

import gzip
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvstrata.errors import BodyTooLarge, InvalidRequest
from kvstrata.server import tokenize
from kvstrata.server.http import body_limit as bodies
from kvstrata.server.http import json_body
from kvstrata.server.http.body_limit import MAX_OBJECTS, MIN_VALUES, require_few_values
from kvstrata.server.http.json_body import parse_json, validated
from kvstrata.server.openai.schema import ChatCompletionRequest, CompletionRequest
from kvstrata.server.state import MAX_SMALL_BODIES
from tests.models.conftest import write_model
from tests.server.test_process import serving
from tests.support.models import tiny_config, tiny_module
from tests.support.servers import Served

MIB = 1 << 20
MAX_HEALTH_S = 0.5
MAX_GROWN_BYTES = 64 * MIB
MESSAGE = b'{"role":"user","content":""}'
CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"


def listing(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


def hostile(count: int) -> dict[str, tuple[str, bytes]]:
    """Path and body, by what there are too many of."""
    few = min(count, 1_000_000)  # of those that are so long that no more go into one body
    biases = b",".join(b'"%d":"x"' % place for place in range(few))
    call = json.dumps({"function": {"name": "f", "arguments": listing(b"[]", count).decode()}, "id": "c"}).encode()
    return {
        "numbers for messages": (CHAT, b'{"messages":' + listing(b"0", count) + b"}"),
        "ids of a prompt": (TEXT, b'{"prompt":' + listing(b"5", count) + b"}"),
        "empty messages": (CHAT, b'{"messages":' + listing(MESSAGE, few) + b"}"),
        "empty parts": (CHAT, b'{"messages":[{"role":"user","content":' + listing(b"{}", count) + b"}]}"),
        "empty tools": (CHAT, b'{"messages":[' + MESSAGE + b'],"tools":' + listing(b"{}", count) + b"}"),
        "biases": (TEXT, b'{"prompt":"a","logit_bias":{' + biases + b"}}"),
        "values in arguments": (
            CHAT,
            b'{"messages":[' + MESSAGE + b',{"role":"assistant","tool_calls":[' + call + b"]}]}",
        ),
        "empty turns": (MESSAGES, b'{"max_tokens":1,"messages":' + listing(b"{}", count) + b"}"),
        "turns to count": (f"{MESSAGES}/count_tokens", b'{"messages":' + listing(MESSAGE, few) + b"}"),
        "lists for items": (RESPONSES, b'{"input":' + listing(b"[]", count) + b"}"),
        "messages to tokenize": ("/tokenize", b'{"messages":' + listing(MESSAGE, few) + b"}"),
        "ids to detokenize": ("/detokenize", b'{"tokens":' + listing(b"-1", count) + b"}"),
        "texts to explain": ("/cache/explain", b'{"tokens":' + listing(b'"x"', count) + b"}"),
        "precisions": ("/cache/requantize", b'{"k":' + listing(b"{}", count) + b"}"),
    }


def post(url: str, path: str, body: bytes) -> httpx.Response:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    with httpx.Client(base_url=url, timeout=300, verify=False) as http:
        return http.post(path, content=gzip.compress(body, 1), headers=headers)


@pytest.mark.parametrize("what", list(hostile(1)))
def test_too_many_values_are_refused_by_every_path(served: Served, what: str) -> None:
    """More than are parsed, and just as many as are, which then are too many for a list or wrong."""
    for count in (MIN_VALUES + 1, MIN_VALUES // 8):
        path, body = hostile(count)[what]
        answer = post(served.url, path, body)
        assert answer.status_code in (400, 413), answer.text
        assert len(answer.text) < 400
    with served.http() as http:
        assert http.get("/health").status_code == 200


def test_a_list_is_as_long_as_the_context_at_most() -> None:
    def ask(count: int) -> CompletionRequest:
        return parse_json(CompletionRequest, b'{"prompt":' + listing(b"5", count) + b"}", 2000)

    assert ask(2000).prompt == [5] * 2000
    with pytest.raises(InvalidRequest, match="prompt: List should have at most 2000 items here, not 2001"):
        ask(2001)


def test_ids_are_tried_as_one_kind_only() -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_json(CompletionRequest, b'{"prompt":' + listing(b"5", 1000) + b',"n":"x"}', 1000)
    assert error.value.param == "n"
    with pytest.raises(InvalidRequest, match=re.escape("prompt.1: Input should be a valid integer.")):
        parse_json(CompletionRequest, b'{"prompt":[5,"a","b"]}')


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": [0] * 1000},
        {"messages": [{"role": "user", "content": [0] * 1000}]},
        {"messages": [{"role": "user", "content": "a"}], "logit_bias": {str(place): "x" for place in range(1000)}},
    ],
    ids=["messages", "parts", "biases"],
)
def test_validation_ends_at_the_first_wrong_item(asked: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        ChatCompletionRequest.model_validate(asked)
    assert error.value.error_count() <= 2  # one for each kind that a field may be of


@pytest.mark.parametrize("item", [MESSAGE, b"{}"], ids=["messages", "ignored"])
def test_a_long_context_allows_no_more_objects(item: bytes) -> None:
    """A body of 4 MiB with 175,000 empty messages held the interpreter's lock for seconds."""
    body = b'{"messages":[' + MESSAGE + b'],"more":' + listing(item, MAX_OBJECTS - 2) + b"}"
    assert len(parse_json(ChatCompletionRequest, body, 1 << 21).messages) == 1
    with pytest.raises(BodyTooLarge, match=f"more than the {MAX_OBJECTS} JSON objects"):
        parse_json(ChatCompletionRequest, body.replace(b"[{", b"[{},{", 1), 1 << 21)


def test_validation_lets_other_threads_run() -> None:
    asked = {"messages": [{"role": "user", "content": ""}] * 30_000}
    has_begun, has_ended = threading.Event(), threading.Event()

    def validate() -> None:
        has_begun.set()
        validated(ChatCompletionRequest, asked)
        has_ended.set()

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        thread = threading.Thread(target=validate)
        thread.start()
        has_begun.wait()
        num_turns = 0
        while not has_ended.is_set():
            time.sleep(0)
            num_turns += 1
        thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert num_turns > 10


def test_large_bodies_are_parsed_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the event loop waits for one of them at most."""
    parse, running, most = json_body.from_json, threading.Semaphore(0), []

    def counted(body: bytes, **options: Any) -> Any:
        running.release()
        time.sleep(0.01)
        most.append(running._value)
        running.acquire()
        return parse(body, **options)

    monkeypatch.setattr(json_body, "from_json", counted)
    body = b'{"prompt":"' + b"a" * json_body.SMALL_BYTES + b'"}'
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: parse_json(CompletionRequest, body), range(8)))
    assert most == [1] * 8


def test_bodies_that_wait_leave_threads_to_others(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the ends of streams: a body may wait for its grammar for 12 s."""
    response = served.ask("/v1/responses", input="Hi", max_output_tokens=1).json()["id"]
    waiting, over = threading.Semaphore(0), threading.Event()

    def wait(*_: Any) -> tuple[int, ...]:
        waiting.release()
        over.wait(60)
        return (1,)

    monkeypatch.setattr(tokenize, "_ids", wait)
    with ThreadPoolExecutor(MAX_SMALL_BODIES) as threads, served.http() as http:
        asked = [threads.submit(served.ask, "/tokenize", prompt="a") for _ in range(MAX_SMALL_BODIES)]
        try:
            assert all(waiting.acquire(timeout=30) for _ in asked)
            assert http.get(f"/v1/responses/{response}/input_items", timeout=20).status_code == 200
        finally:
            over.set()
        assert {each.result().status_code for each in asked} == {200}


def test_the_count_leaves_strings_out() -> None:
    marks = ',[{"\\' * (MIN_VALUES // 2)
    require_few_values(json.dumps({"prompt": marks}).encode(), 0)
    many = json.dumps({"prompt": [marks[:9]] * MIN_VALUES, "n": 1}).encode()
    with pytest.raises(BodyTooLarge, match=f"more than the {MIN_VALUES} JSON values"):
        require_few_values(many, 0)
    require_few_values(many, MIN_VALUES)


@given(
    st.recursive(st.text(',[{"\\a'), lambda inner: st.lists(inner) | st.dictionaries(st.text('",[{'), inner)),
    st.integers(1, 20),
)
def test_the_count_is_that_of_the_body_without_strings(value: Any, piece_bytes: int) -> None:
    body = json.dumps(value).encode()
    outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", body)
    num_values = sum(map(outside.count, (b",", b"[", b"{")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "PIECE_BYTES", piece_bytes)
        patch.setattr(bodies, "MIN_VALUES", num_values)
        patch.setattr(bodies, "MAX_OBJECTS", outside.count(b"{"))
        require_few_values(body, 0)
        if num_values:
            patch.setattr(bodies, "MIN_VALUES", num_values - 1)
            with pytest.raises(BodyTooLarge):
                require_few_values(body, 0)


@contextmanager
def asking_health(url: str) -> Iterator[list[float]]:
    """How long each answer takes, one question after the other."""
    waits: list[float] = []
    is_over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=300, verify=False) as http:
            while not is_over.wait(0.01):
                began_s = time.perf_counter()
                http.get("/health").raise_for_status()
                waits.append(time.perf_counter() - began_s)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield waits
    finally:
        is_over.set()
        asking.join()


@pytest.mark.slow
def test_bodies_of_3_million_items_stop_nobody_and_leave_no_memory(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", tiny_module("llama"), tiny_config("llama"))
    bodies_of = hostile(3_000_000)
    with serving(tmp_path / "log", str(folder)) as (process, url, _):
        for path, body in hostile(10).values():
            post(url, path, body)
        server = psutil.Process(process.pid)
        before_bytes = server.memory_info().rss
        for what, (path, body) in bodies_of.items():
            with asking_health(url) as waits:
                answer = post(url, path, body)
            grown_bytes = server.memory_info().rss - before_bytes
            told = f"{what}: {answer.status_code}, /health {max(waits):.3f} s, {grown_bytes / MIB:.0f} MiB more"
            print(told)
            assert answer.status_code in (400, 413), answer.text
            assert max(waits) < MAX_HEALTH_S, told
            assert grown_bytes < MAX_GROWN_BYTES, told
