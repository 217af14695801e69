"""The server that agents are tried against says what its script says, over the real wire."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.agents.forced import Prompt, call_text, forced_tokenizer, read_prompt, serving
from tests.support.servers import Served

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds. ü", "parameters": {"type": "object", "properties": {"x": {}}}},
}
USER = {"role": "user", "content": "Add\n<tools>, please."}


def script(prompt: Prompt) -> str:
    last = prompt.turns[-1]
    if last.role == "tool":
        return f"It is {last.text}. ü🙂"
    if prompt.tools:
        return "I add." + call_text(prompt.tool_names[0], {"x": [1, "ü"]})
    return last.text.upper()


@pytest.fixture(scope="module")
def forced() -> Iterator[Served]:
    with serving(script) as one:
        yield one.served


def test_a_call_its_result_and_the_end(forced: Served) -> None:
    with forced.openai() as client:
        asked: dict[str, Any] = {"model": forced.name, "tools": [TOOL], "temperature": 1.5, "top_p": 0.5}
        messages: list[Any] = [USER]
        first = client.chat.completions.create(messages=messages, **asked).choices[0]
        assert first.finish_reason == "tool_calls"
        assert (first.message.content or "").strip() == "I add."
        [call] = first.message.tool_calls or []
        assert call.function.name == "add"
        assert json.loads(call.function.arguments) == {"x": [1, "ü"]}
        result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
        messages += [first.message.model_dump(exclude_none=True), result]
        second = client.chat.completions.create(messages=messages, **asked).choices[0]
        assert (second.message.content, second.finish_reason) == ("It is 42. ü🙂", "stop")


def test_rows_of_a_batch_have_scripts_of_their_own(forced: Served) -> None:
    texts = [f"text number {number} " * (40 + number) for number in range(8)]

    def ask(text: str) -> str:
        answer = forced.ask("/v1/chat/completions", messages=[{"role": "user", "content": text}])
        return answer.json()["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(len(texts)) as pool:
        assert list(pool.map(ask, texts)) == [text.upper() for text in texts]


def test_a_prompt_is_read_as_it_was_sent() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    chat = [
        {"role": "system", "content": "S"},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
    ]
    text = forced_tokenizer().apply_chat_template(chat, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    prompt = read_prompt(str(text))
    assert prompt.tools == (TOOL["function"],)
    assert [turn.role for turn in prompt.turns] == ["system", "user", "assistant", "tool"]
    assert prompt.turns[1].text == USER["content"]
    assert prompt.turns[2].text.strip() == call_text("add", {"x": 1})
    assert prompt.turns[3].text == "42"
