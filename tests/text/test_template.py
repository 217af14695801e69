from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvstrata.errors import InvalidRequest
from kvstrata.text.template import ChatTemplate
from kvstrata.text.tokenizer import encode_rendered

PLAIN = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

WITH_TOOLS = """{% if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}{% for message in messages %}{% if message.role != 'system' %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}{% for key, value \
in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"""

# Joins the arguments to text, as DeepSeek's templates do.
WITH_TEXT_ARGUMENTS = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}\
{{ message.content }}{% for call in message.tool_calls or [] %}\
{{ '<tool_call>' + call.function.name + call.function.arguments + '</tool_call>' }}{% endfor %}{% endfor %}"""

ALTERNATING = """{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{{ message.content }}{% endfor %}"""

NAMES_TOOLS_ONLY = "{# tools are not supported #}{% set unused = tools %}" + PLAIN

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
]


def chat_template(wrap, source: str | None) -> ChatTemplate:
    return ChatTemplate(wrap(chat_template=source))


def text_of(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> str:
    return template._tokenizer.decode(template.render(messages, **options))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_renders_what_the_tokenizer_renders(wrap_byte_level) -> None:
    tokenizer: TokenizerWrapper = wrap_byte_level(chat_template=PLAIN)
    messages = [{"role": "system", "content": "be brief"}, user("hello 🙂")]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert list(ChatTemplate(tokenizer).render(messages)) == ids


def test_a_reply_follows_even_after_the_assistant(wrap_byte_level) -> None:
    messages = [user("hello"), {"role": "assistant", "content": "hi"}]
    assert text_of(chat_template(wrap_byte_level, PLAIN), messages).endswith("hi<|im_end|>\n<|im_start|>assistant\n")


def test_parts_are_joined_developer_is_system_and_null_is_empty(wrap_byte_level) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "rules"}, user(parts), {"role": "assistant", "content": None}]
    shown = text_of(chat_template(wrap_byte_level, PLAIN), messages)
    assert shown.startswith("<|im_start|>system\nrules<|im_end|>\n<|im_start|>user\none two<|im_end|>\n")
    assert "None" not in shown


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "empty"),
        ([user([{"type": "image_url", "image_url": {"url": "x"}}])], r"messages\[0\].*'image_url'.*only text"),
        ([user("a"), user(["text"])], r"messages\[1\].*only text"),
        ([user([{"type": "text"}])], "without its text"),
        ([user(17)], "string or a list"),
        ([{"content": "a"}], "no role"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "function.name"),
        ([{"role": "assistant", "tool_calls": {"id": "1"}}], "list"),
        ([user("\ud83d")], "not valid Unicode"),
    ],
)
def test_bad_messages_are_named(wrap_byte_level, messages: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        chat_template(wrap_byte_level, PLAIN).render(messages)
    assert refused.value.param == "messages"


def test_the_templates_own_words_reach_the_client(wrap_byte_level) -> None:
    template = chat_template(wrap_byte_level, ALTERNATING)
    with pytest.raises(InvalidRequest, match="Roles must alternate user/assistant") as refused:
        template.render([user("a"), user("b")])
    assert refused.value.param == "messages"


def test_without_a_template_completions_are_named(wrap_byte_level) -> None:
    template = chat_template(wrap_byte_level, None)
    assert not template.exists
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        template.render([user("a")])


@pytest.mark.parametrize(
    ("source", "has_tools"),
    [(PLAIN, False), (ALTERNATING, False), (NAMES_TOOLS_ONLY, False), (WITH_TOOLS, True), (WITH_TEXT_ARGUMENTS, True)],
)
def test_whether_the_template_shows_tools(wrap_byte_level, source: str, has_tools: bool) -> None:
    template = chat_template(wrap_byte_level, source)
    assert template.has_tools is has_tools
    shown = text_of(template, [user("a")], tools=TOOLS)
    assert "look_up" in shown
    assert ("You can call tools" in shown) is not has_tools


@pytest.mark.parametrize("source", [WITH_TOOLS, WITH_TEXT_ARGUMENTS])
@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', {"city": "Rome"}])
def test_arguments_come_as_the_template_wants_them(wrap_byte_level, source: str, arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    chat = [user("a"), asks, {"role": "tool", "tool_call_id": "1", "content": "sunny"}]
    shown = text_of(chat_template(wrap_byte_level, source), chat, tools=TOOLS)
    assert ("look_up city=Rome" if source == WITH_TOOLS else 'look_up{"city": "Rome"}') in shown
    assert "sunny" in shown


def test_arguments_that_are_no_json_are_not_lost(wrap_byte_level) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": '}}
    asks = {"role": "assistant", "tool_calls": [call]}
    assert 'look_up{"city": ' in text_of(chat_template(wrap_byte_level, WITH_TEXT_ARGUMENTS), [user("a"), asks])


def test_the_clients_messages_are_left_as_they_were(wrap_byte_level) -> None:
    function = {"name": "look_up", "arguments": "{}"}
    asks = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}
    chat_template(wrap_byte_level, WITH_TOOLS).render([user([{"type": "text", "text": "a"}]), asks])
    assert asks["content"] is None
    assert function["arguments"] == "{}"


def test_template_variables_pass_and_reserved_names_do_not(wrap_byte_level) -> None:
    template = chat_template(wrap_byte_level, WITH_TOOLS)
    shown = text_of(template, [user("a")], template_kwargs={"enable_thinking": False})
    assert shown.endswith("<think></think>")
    with pytest.raises(InvalidRequest, match="chat_template") as refused:
        template.render([user("a")], template_kwargs={"chat_template": "{{ 1 }}"})
    assert refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("wrap", ["wrap_byte_level", "wrap_sentencepiece"])
def test_boundaries_are_where_chats_part(request: pytest.FixtureRequest, wrap: str) -> None:
    tokenizer: TokenizerWrapper = request.getfixturevalue(wrap)(chat_template=WITH_TOOLS)
    template = ChatTemplate(tokenizer)
    system = {"role": "system", "content": "be brief"}
    messages = [system, user("hello there")]
    prompt = template.render(messages, tools=TOOLS)
    system_end, reply_start = template.resume_points(messages, TOOLS, prompt=prompt)
    assert template.resume_points(messages, TOOLS) == (system_end, reply_start)
    assert "look_up" in tokenizer.decode(prompt[:system_end])
    assert "hello" not in tokenizer.decode(prompt[:system_end])
    assert tokenizer.decode(prompt[:reply_start]).rstrip().endswith("hello there<|im_end|>")
    other = template.render([system, user("something else"), *messages], tools=TOOLS)
    assert other[:system_end] == prompt[:system_end]
    later = template.render([*messages, {"role": "assistant", "content": "x"}, user("more")], tools=TOOLS)
    assert later[:reply_start] == prompt[:reply_start]


def test_a_boundary_that_does_not_exist_is_left_out(wrap_byte_level) -> None:
    # Nothing comes before the first message, and this template adds nothing for the reply.
    template = chat_template(wrap_byte_level, ALTERNATING)
    assert template.resume_points([user("hello")]) == ()


def test_many_threads_render_the_same(wrap_byte_level) -> None:
    template = chat_template(wrap_byte_level, WITH_TOOLS)
    chats = [[user(f"question {number} " * 50)] for number in range(40)]
    expected = [template.render(chat, tools=TOOLS) for chat in chats]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda chat: template.render(chat, tools=TOOLS), chats * 5)) == expected * 5


def test_special_tokens_of_the_template_are_single_ids(wrap_byte_level) -> None:
    tokenizer: TokenizerWrapper = wrap_byte_level(chat_template=PLAIN)
    start = encode_rendered(tokenizer, "<|im_start|>")
    assert len(start) == 1
    assert ChatTemplate(tokenizer).render([user("a")]).count(start[0]) == 2


def test_a_tokenizer_saved_with_truncation_renders_the_whole_chat(wrap_byte_level) -> None:
    tokenizer: TokenizerWrapper = wrap_byte_level(chat_template=PLAIN)
    tokenizer.backend_tokenizer.enable_truncation(4)
    template = ChatTemplate(tokenizer)
    assert tokenizer.backend_tokenizer.truncation is None
    assert "the end" in text_of(template, [user("the cat " * 50 + "the end")])
