"""Models that are resumed at marks, under a template that rewrites earlier turns as Qwen3's does.

The thinking of a tool loop is shown while the loop runs, and goes when the user writes again.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from openai import OpenAI

from kvstrata.models.load import LoadedModel
from kvstrata.text.template import ChatTemplate
from tests.agents.forced import BEGIN, TEMPLATE, Forced, Form, Prompt, call_text, forced_tokenizer, model_with, serving

QWEN3 = (
    "{% set last = namespace(user=-1) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    + TEMPLATE.replace("if message.reasoning_content", "if message.reasoning_content and loop.index0 > last.user")
)
SYSTEM = {"role": "system", "content": "You count bridges. " + "A bridge has two ends. " * 20}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"x": {}}}},
}


@functools.cache
def model(architecture: str) -> LoadedModel:
    return model_with(forced_tokenizer(Form(QWEN3)), architecture, num_hidden_layers=2)


def script_of(num_calls: int) -> Any:
    def script(prompt: Prompt) -> str:
        turn = len(prompt.turns)
        thought = f"<think>\nTurn {turn}.\n</think>\n\n"
        num_results = sum(turn.role == "tool" for turn in prompt.turns)
        if prompt.turns[-1].text == "Enough?" or num_results == num_calls:
            return f"{thought}There are {turn}."
        return thought + call_text("add", {"x": turn})

    return script


class ChatRequest:
    def __init__(self, forced: Forced, client: OpenAI) -> None:
        self.messages: list[Any] = [SYSTEM]
        self._forced = forced
        self._client = client

    def ask(self, *messages: dict[str, Any]) -> tuple[int, bool]:
        """How much of the prompt was cached, and whether the model calls."""
        self.messages += messages
        answer = self._client.chat.completions.create(
            model=self._forced.served.name,
            messages=self.messages,
            tools=[TOOL],  # pyright: ignore
            max_tokens=200,
        )
        message = answer.choices[0].message
        self.messages.append(message.model_dump(exclude_none=True))
        assert answer.usage
        assert answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens_details.cached_tokens or 0, bool(message.tool_calls)

    def result(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.messages[-1]["tool_calls"][0]["id"], "content": "one more"}


def turn_starts(forced: Forced, ids: tuple[int, ...]) -> list[int]:
    begin = forced.served.server.state.loaded.tokenizer.encode(BEGIN)[0]
    return [place for place, id in enumerate(ids) if id == begin]


@pytest.mark.parametrize("architecture", ["qwen3_next", "gemma3_text"])
@pytest.mark.parametrize("num_calls", [12, 30])
def test_after_a_tool_loop_only_the_rewritten_turns_are_computed(architecture: str, num_calls: int) -> None:
    with serving(script_of(num_calls), loaded=model(architecture)) as forced, forced.served.openai() as client:
        chat = ChatRequest(forced, client)
        chat.ask({"role": "user", "content": "How many are there in Bergen?"})
        calls, num_results = True, 0
        while calls:
            known = len(forced.said[-1].ids)
            cached, calls = chat.ask(chat.result())
            num_results += 1
            # In the loop nothing is rewritten.
            assert cached >= known
        assert num_results == num_calls
        loop = forced.said[-1].ids
        cached, _ = chat.ask({"role": "user", "content": "Enough?"})
        ids = forced.said[-1].ids
        # tools, system, user: then comes the first reply, which has lost its thinking.
        rewritten = turn_starts(forced, ids)[3]
        assert ids[: rewritten + 2] == loop[: rewritten + 2]
        assert ids[: rewritten + 8] != loop[: rewritten + 8]
        assert rewritten <= cached < rewritten + 8

        # Another chat with the same system message begins behind it.
        other = ChatRequest(forced, client)
        cached, _ = other.ask({"role": "user", "content": "And in Porto?"})
        assert cached >= turn_starts(forced, forced.said[-1].ids)[2]


def test_positions_do_not_depend_on_how_replies_are_tokenized() -> None:
    """A reply may stand in the prompt as the model wrote it."""
    loaded = model("gemma3_text")
    template = ChatTemplate(loaded.tokenizer)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    reply = {"role": "assistant", "content": "", "reasoning_content": "So be it", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "one more"}
    messages = [SYSTEM, {"role": "user", "content": "first"}, {"role": "assistant", "content": "Bergen has bridges"}]
    messages += [{"role": "user", "content": "second"}, reply, result]
    prompt = template.render(messages, tools=[TOOL])
    system_end, rewritten, reply_start = template.resume_points(messages, [TOOL], prompt=prompt)
    text = loaded.tokenizer.decode(prompt[:rewritten], skip_special_tokens=False)
    assert text.endswith("second<|im_end|>\n<|im_start|>assistant\n")
    later = template.render(
        [*messages, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}], tools=[TOOL]
    )
    assert later[:rewritten] == prompt[:rewritten]
    assert later[rewritten] != prompt[rewritten]

    # The same text, letter by letter, in both replies.
    def spelt(ids: tuple[int, ...], words: str) -> tuple[int, ...]:
        whole = tuple(loaded.tokenizer.encode(words, add_special_tokens=False))
        letters = tuple(id for letter in words for id in loaded.tokenizer.encode(letter, add_special_tokens=False))
        place = next(at for at in range(len(ids)) if ids[at : at + len(whole)] == whole)
        return ids[:place] + letters + ids[place + len(whole) :]

    replayed = spelt(spelt(prompt, "Bergen"), "So")
    longer = len(spelt(prompt, "Bergen")) - len(prompt)
    assert longer > 0
    assert template.resume_points(messages, [TOOL], prompt=replayed) == (
        system_end,
        rewritten + longer,
        reply_start + len(replayed) - len(prompt),
    )
