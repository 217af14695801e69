from __future__ import annotations

from typing import Any

import pytest

from kvstrata.text.harmony import harmony_tokens
from kvstrata.text.reply_events import ReplyText, ReplyThinking
from kvstrata.text.reply_parser import ReplyFormat
from kvstrata.text.template import ChatTemplate
from kvstrata.text.thinking import ThinkingSwitch
from tests.text.chat_templates import GPT_OSS, HARMONY, LLAMA, MISTRAL
from tests.text.read import call, read
from tests.text.test_native_calls import marks_of
from tests.text.test_template import PLAIN, TOOLS, WITH_TOOLS, user

HERMES = """{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
THINK{% endif %}"""
OPENS = (
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)
OTHER_MARKS = HERMES.replace("<tool_call>", "<|call|>[").replace("</tool_call>", "]<|/call|>").replace("THINK", "")
FUNCTOOLS = HERMES.replace("<tool_call>\n", "functools[").replace("\n</tool_call>", "]").replace("THINK", "")
CODER = """{{ tools | tojson if tools else '' }}{% for message in messages %}<|im_start|>{{ message.content }}\
{% for call in message.tool_calls or [] %}<tool_call>
<function={{ call.function.name }}>{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\
{{ value }}</parameter>{% endfor %}</function></tool_call>{% endfor %}{% endfor %}"""


def form_of(
    wrap: Any, source: str, parser: str = "", *, added: list[str] | None = None
) -> tuple[ReplyFormat, ChatTemplate]:
    tokenizer = wrap(chat_template=source, **(marks_of(parser) if parser else {}))
    if added:
        tokenizer.add_special_tokens({"additional_special_tokens": added})
    template = ChatTemplate(tokenizer)
    return ReplyFormat(tokenizer, template, harmony_tokens(tokenizer)), template


@pytest.mark.parametrize(
    ("source", "parser", "word", "around"),
    [
        (
            HERMES.replace("THINK", ""),
            "json_tools",
            "json in <tool_call>",
            ('<tool_call>\n{"name": "look_up", "arguments": ', "}\n</tool_call>"),
        ),
        (
            HERMES.replace("THINK", OPENS),
            "json_tools",
            "json in <tool_call>",
            ('<tool_call>\n{"name": "look_up", "arguments": ', "}\n</tool_call>"),
        ),
        (LLAMA, "", "bare json", ('{"name": "look_up", "parameters": ', "}")),
        (MISTRAL, "mistral", "json behind [TOOL_CALLS]", ('[TOOL_CALLS] [{"name": "look_up", "arguments": ', "}]")),
        (OTHER_MARKS, "", "json in <|call|>", ('<|call|>[\n{"name": "look_up", "arguments": ', "}\n]<|/call|>")),
        (FUNCTOOLS, "", "json in functools", ('functools[{"name": "look_up", "arguments": ', "}]")),
        (CODER, "qwen3_coder", "xml in <tool_call>", None),
        (WITH_TOOLS, "", "bare json", None),
        (PLAIN, "", "described in the system text", ('{"name": "look_up", "arguments": ', "}")),
    ],
)
def test_how_calls_are_written(
    wrap_byte_level, source: str, parser: str, word: str, around: tuple[str, str] | None
) -> None:
    form, _ = form_of(wrap_byte_level, source, parser)
    assert form.calls == word
    assert form.call_text("look_up") == around
    if around:
        text = around[0] + '{"q": 1}' + around[1]
        assert read(form.parser((), TOOLS), list(text)) == call("look_up", '{"q": 1}')
        assert read(form.parser((), TOOLS), [f"So: {text}"])[0] == ReplyText(
            "So: " if around[0][0] != "{" else f"So: {text}"
        )


def test_how_harmony_writes_calls(wrap_byte_level) -> None:
    form, template = form_of(wrap_byte_level, GPT_OSS, added=HARMONY)
    assert form.calls == "harmony"
    before, after = form.call_text("look_up") or ("", "")
    assert before == "to=functions.look_up<|channel|>commentary json<|message|>"
    assert after == "<|call|>"
    assert form.think_end_ids == ()
    assert form.thinks
    assert not form.opens_thinking(template.render([user("a")]))


def test_the_prompt_may_open_thinking(wrap_byte_level) -> None:
    form, template = form_of(wrap_byte_level, HERMES.replace("THINK", OPENS), "json_tools")
    opened = template.render([user("a")])
    closed = template.render([user("a")], template_kwargs={"enable_thinking": False})
    for tools in (TOOLS, []):
        assert read(form.parser(opened, tools), ["Hm.\n</think>\n\nHi"]) == [ReplyThinking("Hm."), ReplyText("Hi")]
        assert read(form.parser(closed, tools), ["Hi"]) == [ReplyText("Hi")]
    assert form.opens_thinking(opened)
    assert not form.opens_thinking(closed)
    assert len(form.think_end_ids) == 1
    assert form.thinks


def test_marks_that_frame_the_answer_are_no_text(wrap_byte_level) -> None:
    marks = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]
    tokenizer = wrap_byte_level(chat_template=PLAIN)
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    rewrapped = type(tokenizer)(tokenizer._tokenizer, **marks_of("kimi_k3"))
    form = ReplyFormat(rewrapped, ChatTemplate(rewrapped), None)
    text = "<|open|>response<|sep|>Hi <|open|> there<|close|>response<|sep|><|close|>message<|sep|>"
    for pieces in ([text], list(text)):
        assert read(form.parser((), TOOLS), pieces) == [ReplyText("Hi <|open|> there")]


SWITCH = PLAIN + "{% if NAME is defined and not NAME %}<think></think>{% endif %}"
ANY_EFFORT = "Reasoning: {{ reasoning_effort | default('medium') }}" + PLAIN
SOME_EFFORTS = (
    """{% if reasoning_effort is defined and reasoning_effort not in ['none', 'high'] %}\
{{ raise_exception('no') }}{% endif %}{{ reasoning_effort }}"""
    + PLAIN
)


@pytest.mark.parametrize(
    ("source", "effort", "enabled", "variables"),
    [
        (PLAIN, "high", True, {}),
        (SWITCH.replace("NAME", "enable_thinking"), None, None, {}),
        (SWITCH.replace("NAME", "enable_thinking"), None, False, {"enable_thinking": False}),
        (SWITCH.replace("NAME", "enable_thinking"), None, True, {"enable_thinking": True}),
        (SWITCH.replace("NAME", "enable_thinking"), "none", None, {"enable_thinking": False}),
        (SWITCH.replace("NAME", "enable_thinking"), "low", None, {"enable_thinking": True}),
        (SWITCH.replace("NAME", "thinking"), "none", None, {"thinking": False}),
        (SWITCH.replace("NAME", "thinking"), "high", False, {"thinking": False}),
        (ANY_EFFORT, "minimal", None, {"reasoning_effort": "low"}),
        (ANY_EFFORT, "none", None, {"reasoning_effort": "low"}),
        (ANY_EFFORT, None, False, {"reasoning_effort": "low"}),
        (ANY_EFFORT, None, True, {}),
        (ANY_EFFORT, "xhigh", None, {"reasoning_effort": "high"}),
        (ANY_EFFORT, "medium", None, {"reasoning_effort": "medium"}),
        (SOME_EFFORTS, "none", None, {"reasoning_effort": "none"}),
        (SOME_EFFORTS, "low", None, {"reasoning_effort": "high"}),
        (SOME_EFFORTS, "nonsense", None, {}),
    ],
)
def test_thinking_is_switched_as_the_template_does(
    wrap_byte_level, source: str, effort: str | None, enabled: bool | None, variables: dict[str, Any]
) -> None:
    switch = ThinkingSwitch(ChatTemplate(wrap_byte_level(chat_template=source)))
    assert switch.switch(effort, enabled) == variables
