"""Tools with templates that know none, and system messages where templates do not take them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from kvstrata.text.reply_parser import ReplyFormat
from kvstrata.text.tools_in_prompt import tools_to_text
from tests.text.read import call, read
from tests.text.test_template import ALTERNATING, PLAIN, TOOLS, WITH_TOOLS, chat_template, text_of, user

# As Gemma 2's: no system messages, and turns alternate.
NO_SYSTEM = """{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate') }}{% endif %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# As DeepSeek's: whatever is said by the system goes to the front.
HOISTING = """{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}
{% endif %}{% endfor %}{% for message in messages %}{% if message.role != 'system' %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}"""


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def calling(*ids: str, content: str | None = None) -> dict[str, Any]:
    calls = [{"id": id, "type": "function", "function": {"name": "look_up", "arguments": '{"q": "ü"}'}} for id in ids]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


WRITTEN = '{"name": "look_up", "arguments": {"q": "ü"}}'


def test_tools_are_told_behind_the_system_message(wrap_byte_level) -> None:
    template = chat_template(wrap_byte_level, PLAIN)
    shown = text_of(template, [system("be brief"), user("hi")], tools=TOOLS)
    told = shown.partition("<|im_end|>")[0]
    assert told.startswith("<|im_start|>system\nbe brief\n\nYou can call tools.")
    assert json.dumps(TOOLS[0]["function"]) in told
    assert '"arguments"' in told
    assert shown.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    alone = text_of(template, [user("hi")], tools=TOOLS)
    assert alone.startswith("<|im_start|>system\nYou can call tools.")


def test_tools_are_told_to_the_user_where_there_is_no_system(wrap_byte_level) -> None:
    template = chat_template(wrap_byte_level, NO_SYSTEM)
    shown = text_of(template, [system("be brief"), user("hi")], tools=TOOLS)
    assert shown.startswith("<|im_start|>user\nbe brief\n\nYou can call tools.")
    assert "\n\nhi<|im_end|>" in shown
    assert text_of(template, [system("be brief"), user("hi")]).startswith("<|im_start|>user\nbe brief\n\nhi<|im_end|>")


@pytest.mark.parametrize("source", [PLAIN, NO_SYSTEM])
@pytest.mark.parametrize("tools", [TOOLS, None])
def test_calls_and_results_are_text(wrap_byte_level, source: str, tools: list[dict[str, Any]] | None) -> None:
    chat = [user("hi"), calling("1", "2", content="I look."), result("1", "one"), result("2", "two"), assistant("done")]
    chat += [user("more"), calling("3"), result("3", "three"), user("and?")]
    shown = text_of(chat_template(wrap_byte_level, source), chat, tools=tools)
    assert f"<|im_start|>assistant\nI look.\n{WRITTEN}\n{WRITTEN}<|im_end|>" in shown
    results = "Result of look_up:\none\n\nResult of look_up:\ntwo"
    assert f"<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\ndone<|im_end|>" in shown
    assert "<|im_start|>user\nResult of look_up:\nthree\n\nand?<|im_end|>" in shown
    assert "kvstrata" not in shown
    assert ("You can call tools" in shown) is bool(tools)


def test_a_result_without_its_call_and_arguments_that_are_no_json(wrap_byte_level) -> None:
    template = chat_template(wrap_byte_level, PLAIN)
    assert "Result of the tool:\nx" in text_of(template, [user("a"), result("9", "x")])
    asks = calling("1")
    asks["tool_calls"][0]["function"]["arguments"] = '{"q": '
    assert '"arguments": {"q": }' in text_of(template, [user("a"), asks])


def test_prompts_of_one_chat_begin_alike(wrap_byte_level) -> None:
    template = chat_template(wrap_byte_level, NO_SYSTEM)
    first = [system("be brief"), user("hi")]
    later = [*first, calling("1"), result("1", "one")]
    prompt = template.render(first, tools=TOOLS)
    system_end, reply_start = template.resume_points(first, TOOLS, prompt=prompt)
    assert template.render(later, tools=TOOLS)[:reply_start] == prompt[:reply_start]
    other = template.render([first[0], user("other")], tools=TOOLS)
    assert other[:system_end] == prompt[:system_end]
    assert "plain text." in template._tokenizer.decode(prompt[:system_end])


def test_what_was_told_is_read(wrap_byte_level) -> None:
    template = chat_template(wrap_byte_level, ALTERNATING)
    form = ReplyFormat(template._tokenizer, template, None)
    assert form.calls == "described in the system text"
    assert not form.shows_tools
    around = form.call_text("look_up")
    assert around is not None
    prompt = template.render([user("a")], tools=TOOLS)
    assert read(form.parser(prompt, TOOLS), list(around[0] + '{"q": 1}' + around[1])) == call("look_up", '{"q": 1}')


MIDDLE = [user("a"), assistant("b"), system("note"), user("c")]


def test_system_messages_stay_where_the_template_takes_them(wrap_byte_level) -> None:
    shown = text_of(chat_template(wrap_byte_level, PLAIN), MIDDLE)
    assert "b<|im_end|>\n<|im_start|>system\nnote<|im_end|>\n<|im_start|>user\nc<|im_end|>" in shown


@pytest.mark.parametrize("source", [NO_SYSTEM, HOISTING, WITH_TOOLS])
def test_system_messages_in_the_middle_are_marked_text(wrap_byte_level, source: str) -> None:
    template = chat_template(wrap_byte_level, source)
    shown = text_of(template, MIDDLE)
    assert "b<|im_end|>\n<|im_start|>user\n<system>\nnote\n</system>\n\nc<|im_end|>" in shown
    # None follows: it stays behind what the user said last.
    shown = text_of(template, [user("a"), system("note"), system("more")])
    assert "<|im_start|>user\na\n\n<system>\nnote\n</system>\n\n<system>\nmore\n</system><|im_end|>" in shown
    shown = text_of(template, [user("a"), assistant("b"), system("note")])
    assert "b<|im_end|>\n<|im_start|>user\n<system>\nnote\n</system><|im_end|>" in shown
    before = template.render(MIDDLE[:2])
    shared = len(template._tokenizer.decode(before).partition("b<|im_end|>")[0])
    assert text_of(template, MIDDLE)[:shared] == template._tokenizer.decode(before)[:shared]


def test_a_second_system_message_joins_the_first(wrap_byte_level) -> None:
    shown = text_of(chat_template(wrap_byte_level, WITH_TOOLS), [system("one"), system("two"), user("a")])
    assert shown.startswith("<|im_start|>system\none\n\ntwo<|im_end|>\n<|im_start|>user\na")
    asks, answer = calling("call00001"), result("call00001", "one")
    shown = text_of(
        chat_template(wrap_byte_level, WITH_TOOLS), [user("a"), asks, answer, system("note"), assistant("b")]
    )
    assert "one\n\n<system>\nnote\n</system><|im_end|>" in shown


def test_many_results_take_time_in_proportion() -> None:
    """Joining each to all before it takes the square of that: several times the limit."""
    asks = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}]}
    results = [{"role": "tool", "tool_call_id": "a", "content": "x" * 100} for _ in range(40_000)]
    began_s = time.process_time()
    chat = tools_to_text([user("Hi"), asks, *results, user("Go on.")], None)
    assert time.process_time() - began_s < 4
    assert [message["role"] for message in chat] == ["user", "assistant", "user"]
    assert chat[-1]["content"].count("Result of f:\n") == 40_000
    assert chat[-1]["content"].endswith("x\n\nGo on.")
