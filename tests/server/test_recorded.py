"""Recorded responses of all APIs: status, headers and body, byte for byte but for ids and times.

The model is scripted (`tests/agents/forced.py`): the last user message names its reply. KVSTRATA_RECORD=1 writes the
files in `recorded/` anew; a difference is a change of what clients get.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvstrata.models.load import LoadedModel
from kvstrata.server.chat import serving as serving_module
from tests.agents.forced import BEGIN, CHATML, END, Prompt, call_text, from_files, model_with, serving
from tests.support.servers import Served

FOLDER = Path(__file__).parent / "recorded"
IS_RECORDING = bool(os.environ.get("KVSTRATA_RECORD"))

WORDS = ("Paris", " is", " the", " capital", " of", " France", "weather", "city", "think", "name", "arguments")
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
OPENAI_TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Get the {name}", "parameters": WEATHER}}
    for name in ("weather", "forecast")
]
ANTHROPIC_TOOLS = [{"name": "weather", "description": "Get the weather", "input_schema": WEATHER}]
RESPONSES_TOOLS = [
    {"type": "function", "name": "weather", "description": "Get the weather", "parameters": WEATHER},
    {"type": "custom", "name": "patch", "description": "Apply a patch"},
]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}

ONE_CALL = call_text("weather", {"city": "Paris", "days": 2})
REPLIES: dict[str, str] = {
    "plain": "Paris is the capital of France. é 🙂",
    "call": ONE_CALL,
    "text and call": f"Paris is...\n{ONE_CALL}",
    "two calls": f"{ONE_CALL}\n{call_text('forecast', {'city': 'é', 'days': 1})}",
    "unknown tool": call_text("unheard", {"city": "Paris"}),
    "patch": call_text("patch", {"input": "+ Paris\n- é"}),
    "thinking": "<think>\nthink of Paris\n</think>\n\nParis",
    "thinking and call": f"<think>\nthink\n</think>\n\n{ONE_CALL}",
    "json": '{"city": "Paris"}',
}


@dataclass(frozen=True)
class Case:
    name: str
    path: str
    body: dict[str, Any] | str | None = None  # None: GET
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def is_streamable(self) -> bool:
        return isinstance(self.body, dict) and "stream" not in self.body and not self.path.endswith("tokens")


def chat(name: str, says: str = "plain", **body: Any) -> Case:
    messages = body.pop("messages", None) or [{"role": "user", "content": says}]
    return Case(f"chat-{name}", "/v1/chat/completions", {"model": "forced", "messages": messages, **body})


def completion(name: str, prompt: Any = "plain", **body: Any) -> Case:
    return Case(f"completions-{name}", "/v1/completions", {"model": "forced", "prompt": prompt, **body})


def messages(name: str, says: str = "plain", **body: Any) -> Case:
    given = body.pop("messages", None) or [{"role": "user", "content": says}]
    return Case(f"messages-{name}", "/v1/messages", {"model": "forced", "max_tokens": 200, "messages": given, **body})


def responses(name: str, says: Any = "plain", **body: Any) -> Case:
    return Case(f"responses-{name}", "/v1/responses", {"model": "forced", "input": says, **body})


TOOL_HISTORY = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "call"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
    {"role": "user", "content": "plain"},
]
ANTHROPIC_HISTORY = [
    {"role": "user", "content": "call"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}]},
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "12 degrees"},
            {"type": "text", "text": "plain"},
        ],
    },
]
RESPONSES_HISTORY = [
    {"role": "user", "content": "call"},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "12 degrees"},
    {"role": "user", "content": [{"type": "input_text", "text": "plain"}]},
]

CASES = [
    chat("plain"),
    chat("length", max_tokens=4),
    chat("stop", stop=["capital"]),
    chat("two-choices", n=2, temperature=1, seed=1),
    chat("logprobs", logprobs=True, max_tokens=3),
    chat("usage", stream_options={"include_usage": True}),
    chat("call", "call", tools=OPENAI_TOOLS),
    chat("text-and-call", "text and call", tools=OPENAI_TOOLS),
    chat("two-calls", "two calls", tools=OPENAI_TOOLS),
    chat("cut-call", "call", tools=OPENAI_TOOLS, max_tokens=40),
    chat("unknown-tool", "unknown tool", tools=OPENAI_TOOLS),
    chat("required-call", "call", tools=OPENAI_TOOLS, tool_choice="required"),
    chat("named-call", "call", tools=OPENAI_TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}),
    chat("no-call", "plain", tools=OPENAI_TOOLS, tool_choice="none"),
    chat("tool-history", messages=TOOL_HISTORY, tools=OPENAI_TOOLS),
    chat("thinking", "thinking"),
    chat("thinking-and-call", "thinking and call", tools=OPENAI_TOOLS),
    chat("cut-thinking", "thinking", max_tokens=6),
    chat("json-object", "json", response_format={"type": "json_object"}),
    chat(
        "json-schema",
        "json",
        response_format={"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": SCHEMA}},
    ),
    chat("too-long", "plain " * 30_000),
    chat("other-model", model="other"),
    chat("bad-temperature", temperature="hot"),
    chat("unknown-role", messages=[{"role": "robot", "content": "plain"}]),
    completion("plain"),
    completion("length", max_tokens=4),
    completion("two-choices", n=2, max_tokens=4),
    completion("two-prompts", ["plain", "json"]),
    completion("logprobs", logprobs=0, max_tokens=3),
    completion("ids", [5, 6, 7], max_tokens=3),
    completion("echo", echo=True, max_tokens=3),
    completion("empty", ""),
    messages("plain"),
    messages("length", max_tokens=4),
    messages("stop", stop_sequences=["capital"]),
    messages("system", system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]),
    messages("call", "call", tools=ANTHROPIC_TOOLS),
    messages("text-and-call", "text and call", tools=ANTHROPIC_TOOLS),
    messages("cut-call", "call", tools=ANTHROPIC_TOOLS, max_tokens=40),
    messages("any-call", "call", tools=ANTHROPIC_TOOLS, tool_choice={"type": "any"}),
    messages("tool-history", messages=ANTHROPIC_HISTORY, tools=ANTHROPIC_TOOLS),
    messages("thinking", "thinking", thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000),
    messages("thinking-and-call", "thinking and call", tools=ANTHROPIC_TOOLS),
    messages("bad-role", messages=[{"role": "robot", "content": "plain"}]),
    messages("no-limit", max_tokens=0),
    Case("messages-count", "/v1/messages/count_tokens", {"model": "forced", "messages": ANTHROPIC_HISTORY}),
    responses("plain"),
    responses("instructions", instructions="Be short.", store=False),
    responses("length", max_output_tokens=16),
    responses("call", "call", tools=RESPONSES_TOOLS),
    responses("text-and-call", "text and call", tools=RESPONSES_TOOLS),
    responses("custom-call", "patch", tools=RESPONSES_TOOLS),
    responses("cut-call", "call", tools=RESPONSES_TOOLS, max_output_tokens=40),
    responses("tool-history", RESPONSES_HISTORY, tools=RESPONSES_TOOLS),
    responses("thinking", "thinking"),
    responses("thinking-and-call", "thinking and call", tools=RESPONSES_TOOLS),
    responses(
        "json-schema", "json", text={"format": {"type": "json_schema", "name": "c", "strict": True, "schema": SCHEMA}}
    ),
    responses("unknown-previous", previous_response_id="resp_unknown"),
    responses("bad-input", 5),
    Case("malformed", "/v1/chat/completions", '{"messages": ['),
    Case("malformed-messages", "/v1/messages", '{"messages": ['),
    Case("malformed-responses", "/v1/responses", "[]"),
    Case("models", "/v1/models"),
    Case("model", "/v1/models/forced"),
    Case("unknown-model", "/v1/models/other"),
    Case("unknown-response", "/v1/responses/resp_unknown"),
    Case("unknown-path", "/v1/unknown"),
    Case("tokenize", "/tokenize", {"prompt": "Paris is é", "stream": False}),
    Case("wrong-method", "/v1/chat/completions"),
    Case("wrong-host", "/v1/models", headers={"Host": "elsewhere.example"}),
]


def script(prompt: Prompt) -> str | Sequence[str]:
    text = prompt.turns[-1].text if prompt.turns else ""
    return REPLIES.get(text.strip(), REPLIES["plain"])


@cache
def scripted_model() -> LoadedModel:
    """Return a model whose tokens are bytes, some words and tags: no file of the repository decides what a token is."""
    vocab = {token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in (BEGIN, END)])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in (*TAGS, *WORDS)])
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    hf.chat_template = CHATML.template
    return model_with(from_files(hf), "llama", CHATML, **SIZES)


@pytest.fixture(scope="module")
def scripted() -> Iterator[Served]:
    """A server whose headers wait for the first event and whose pings come once, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch, serving(script, loaded=scripted_model()) as forced:
        patch.setattr(serving_module, "PING_S", 60.0)
        yield forced.served


# In the order of their use: ids with a prefix, digests, ids of calls, times, logarithms of probabilities.
REPLACED = (
    (re.compile(r"\b(chatcmpl|cmpl|msg|resp|call|toolu|fc|rs|ctc|req)([-_])[0-9A-Za-z_-]{8,}"), r"\1\2ID"),
    (re.compile(r"\b[0-9a-f]{24,}\b"), "ID"),
    (re.compile(r'("(?:id|call_id|item_id)": ?")[0-9A-Za-z]{9}"'), r'\1ID"'),
    (re.compile(r'("(?:created|created_at|completed_at)": ?)[0-9.]+'), r"\1TIME"),
    (re.compile(r"\d{4}-\d\d-\d\dT[0-9:.]+(\+00:00|Z)"), "TIME"),
    (re.compile(r"-?\d+\.\d{3,}(?:e-?\d+)?"), "NUMBER"),
    # Pings depend on the time that the prompt takes.
    (re.compile(r"(?:: prefill \d+/(\d+)\n)+"), r": prefill N/\1\n"),
    (re.compile(r'(?:event: ping\ndata: {"type":"ping"}\n\n)+'), 'event: ping\ndata: {"type":"ping"}\n\n'),
)
CHANGING_HEADERS = {"date", "server-timing", "x-request-id", "request-id", "content-length"}


def text_of(response: httpx.Response) -> str:
    """Write a response as text, without what differs from run to run."""
    headers = [f"{name}: {value}" for name, value in response.headers.items() if name not in CHANGING_HEADERS]
    names = sorted(CHANGING_HEADERS & set(response.headers))
    body = response.text
    for pattern, text in REPLACED:
        body = pattern.sub(text, body)
    return "\n".join([str(response.status_code), *sorted(headers), f"and {', '.join(names)}", "", body])


def by_choice(text: str) -> list[str]:
    """Return the events of a stream, each choice's together: how choices alternate depends on the time."""
    index = re.compile(r'"choices":\[{"index":(\d+)')
    events = text.split("\n\n")
    places = [int(found[1]) if (found := index.search(event)) else None for event in events]
    ordered = iter(sorted((place, number) for number, place in enumerate(places) if place is not None))
    return [event if place is None else events[next(ordered)[1]] for event, place in zip(events, places, strict=True)]


def ask(served: Served, case: Case, stream: bool) -> httpx.Response:
    with served.http() as client:
        client.post("/cache/clear", json={"tier": "all"}).raise_for_status()
        if case.body is None:
            return client.get(case.path, headers=case.headers)
        if isinstance(case.body, str):
            return client.post(case.path, content=case.body, headers={"Content-Type": "application/json"})
        return client.post(case.path, json={**case.body, "stream": True} if stream else case.body)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_response_is_as_recorded(scripted: Served, case: Case) -> None:
    for stream in (False, True) if case.is_streamable else (False,):
        response = ask(scripted, case, stream)
        path = FOLDER / f"{case.name}{'-stream' if stream else ''}.txt"
        found = text_of(response)
        if IS_RECORDING:
            path.write_text(found, encoding="utf-8", newline="\n")
        assert by_choice(found) == by_choice(path.read_text(encoding="utf-8"))
