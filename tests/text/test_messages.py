"""Histories with calls, as templates of several models want them."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.errors import InvalidRequest
from kvstrata.text.messages import arguments_as_object
from kvstrata.text.template import ChatTemplate
from tests.text.chat_templates import GPT_OSS, MISTRAL
from tests.text.test_template import PLAIN, TOOLS, WITH_TOOLS, chat_template, text_of, user


def calling(id: str, **fields: Any) -> list[dict[str, Any]]:
    """A question, a call with this id, its result."""
    call = {"id": id, "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Rome"}'}}
    asks = {"role": "assistant", "content": None, "tool_calls": [call], **fields}
    return [user("a"), asks, {"role": "tool", "tool_call_id": id, "content": "sunny"}]


@pytest.mark.parametrize("id", ["call_0123456789abcdef01234567", "1", "toolu_01", "call-0001", ""])
def test_ids_that_the_template_refuses_become_short_and_stay_the_same(wrap_byte_level, id: str) -> None:
    shown = text_of(chat_template(wrap_byte_level, MISTRAL), calling(id), tools=TOOLS)
    short = shown.partition('"id": "')[2][:9]
    assert short.isalnum()
    assert shown.count(f'"{short}"') == 2


def test_other_ids_stay(wrap_byte_level) -> None:
    assert shown_id(chat_template(wrap_byte_level, MISTRAL), "aZ3456789") == "aZ3456789"
    # A template that takes any id gets the client's.
    shows_ids = WITH_TOOLS.replace("{{ message.content }}", "{{ message.content }}{{ message.tool_call_id }}")
    assert "call_17" in text_of(chat_template(wrap_byte_level, shows_ids), calling("call_17"), tools=TOOLS)


def shown_id(template: ChatTemplate, id: str) -> str:
    return text_of(template, calling(id), tools=TOOLS).partition('"id": "')[2][:9]


def test_different_ids_stay_different(wrap_byte_level) -> None:
    template = chat_template(wrap_byte_level, MISTRAL)
    assert shown_id(template, "call_1") != shown_id(template, "call_2")


def test_an_empty_list_of_calls_is_no_list_of_calls(wrap_byte_level) -> None:
    chat = [user("a"), {"role": "assistant", "content": "important", "tool_calls": []}, user("b")]
    assert "important" in text_of(chat_template(wrap_byte_level, MISTRAL), chat)


def test_a_refusal_is_text(wrap_byte_level) -> None:
    parts = [{"type": "text", "text": "sorry, "}, {"type": "refusal", "refusal": "I will not"}]
    chat = [user("a"), {"role": "assistant", "content": parts}, user("b")]
    assert "sorry, I will not" in text_of(chat_template(wrap_byte_level, PLAIN), chat)


def test_reasoning_is_called_as_the_template_calls_it(wrap_byte_level) -> None:
    chat = calling("1", reasoning_content="mulling")
    assert "analysis<|message|>mulling<|end|>" in text_of(chat_template(wrap_byte_level, GPT_OSS), chat, tools=TOOLS)
    usual = WITH_TOOLS.replace("{{ message.content }}", "{{ message.content }}{{ message.reasoning_content }}")
    assert "mulling" in text_of(chat_template(wrap_byte_level, usual), chat, tools=TOOLS)
    assert "mulling" not in text_of(chat_template(wrap_byte_level, WITH_TOOLS), chat, tools=TOOLS)


def test_reasoning_and_content_beside_a_call_are_one_where_both_are_refused(wrap_byte_level) -> None:
    chat = calling("1", reasoning_content="mulling", content="I look.")
    shown = text_of(chat_template(wrap_byte_level, GPT_OSS), chat, tools=TOOLS)
    assert "analysis<|message|>mulling\n\nI look.<|end|><|start|>assistant to=functions.look_up" in shown


# It shows tools and results, but nobody's calls.
DROPS_CALLS = "{{ tools | tojson if tools else '' }}" + PLAIN


@pytest.mark.parametrize(
    ("source", "with_call", "with_result"),
    [(PLAIN, True, True), (DROPS_CALLS, False, True), (WITH_TOOLS, True, True), (MISTRAL, True, True)],
)
def test_what_the_template_cannot_show_is_refused(
    wrap_byte_level, source: str, with_call: bool, with_result: bool
) -> None:
    template = chat_template(wrap_byte_level, source)
    asks, result = calling("call00001")[1:]
    for chat, shown in (([user("a"), asks], with_call), ([user("a"), result], with_result)):
        if shown:
            template.render(chat)
            continue
        with pytest.raises(InvalidRequest, match=r"messages\[1\].*cannot show") as refused:
            template.render(chat)
        assert refused.value.param == "messages"


@pytest.mark.parametrize("source", [WITH_TOOLS, GPT_OSS])
def test_reasoning_is_text(wrap_byte_level, source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[1\].*reasoning_content"):
        chat_template(wrap_byte_level, source).render(calling("a", content="b", reasoning_content=[1]), tools=TOOLS)


def test_arguments_that_are_nested_too_deeply_stay_text() -> None:
    assert arguments_as_object("[" * 100_000) == "[" * 100_000
