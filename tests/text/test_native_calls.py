"""Calls as models' own templates ask for them."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvstrata.text.reply_events import ReplyEvent, ReplyText, ToolCallArguments, ToolCallEnd, ToolCallStart
from kvstrata.text.reply_parser import PlainParser
from kvstrata.text.tool_calls.answer_text import OfferedTools
from kvstrata.text.tool_calls.native_calls import native_call_format
from tests.text.read import call, cut, parses, read, said, tool, well_formed

TOOLS = [tool("f", x={"type": "integer"}, s={"type": "string"}), tool("g")]
PARSERS = ["function_gemma", "gemma4", "glm47", "json_tools", "kimi_k2", "kimi_k3", "laguna", "longcat", "minicpm5"]
PARSERS += ["minimax_m2", "mistral", "muse_spark", "pythonic", "qwen3_coder"]
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
ONE = call("f", '{"x": 1}')


def marks_of(parser: str) -> dict[str, Any]:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    marks = {"tool_call_start": module.tool_call_start, "tool_call_end": module.tool_call_end}
    return marks | {"tool_parser": module.parse_tool_call}


@pytest.fixture(scope="session", params=PARSERS)
def any_parser(request: pytest.FixtureRequest, wrap_byte_level) -> TokenizerWrapper:
    return wrap_byte_level(**marks_of(request.param))


@pytest.fixture(scope="session")
def json_tools(wrap_byte_level) -> TokenizerWrapper:
    return wrap_byte_level(**marks_of("json_tools"))


@pytest.fixture(scope="session")
def mistral(wrap_byte_level) -> TokenizerWrapper:
    return wrap_byte_level(**marks_of("mistral"))


def reader(tokenizer: TokenizerWrapper, tools: list[dict[str, Any]] = TOOLS) -> PlainParser:
    return PlainParser(OfferedTools(tools), native_call_format(tokenizer))


def both(tokenizer: TokenizerWrapper, text: str, *, cut_off: bool = False) -> list[ReplyEvent]:
    whole = read(reader(tokenizer), [text], cut_off=cut_off)
    assert read(reader(tokenizer), list(text), cut_off=cut_off) == whole
    assert read(reader(tokenizer), cut(text, range(0, len(text), 5)), cut_off=cut_off) == whole
    return whole


@given(cuts=st.sets(st.integers(0, 200)))
@example(cuts=set(range(200)))
def test_calls_are_found_however_the_text_is_cut(json_tools: TokenizerWrapper, cuts: set[int]) -> None:
    text = f"before <tool {CALL}\n{CALL} after"
    events = read(reader(json_tools), cut(text, cuts))
    # What is only space between two calls is no text.
    assert events == [ReplyText("before <tool "), *ONE, *ONE, ReplyText(" after")]


@pytest.mark.parametrize(
    "body",
    [
        "nonsense",
        "",
        '{"arguments": {}}',
        '{"name": 3}',
        "[]",
        "17",
        '{"name": ""}',
        '{"name": "h", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "no json"}',
    ],
)
def test_a_malformed_call_is_text(json_tools: TokenizerWrapper, body: str) -> None:
    text = f"a<tool_call>{body}</tool_call>b"
    assert both(json_tools, text) == [ReplyText(text)]


def test_a_call_that_breaks_after_it_began_shows_it(json_tools: TokenizerWrapper) -> None:
    text = 'a<tool_call>{"name": "f", "arguments": {"x": </tool_call>b'
    assert both(json_tools, text) == [ReplyText("a"), *call("f", '{"x": '), ReplyText("b")]
    text = 'a<tool_call>[{"name": "f"}, {"nam": "f"}]</tool_call>b'
    assert both(json_tools, text) == [ReplyText("a"), *call("f", "{}"), ReplyText(', {"nam": "f"}]</tool_call>b')]


def test_a_call_without_its_end_counts_as_far_as_it_is_whole(json_tools: TokenizerWrapper) -> None:
    open_call = CALL.removesuffix("</tool_call>")
    for cut_off in (False, True):
        assert both(json_tools, open_call, cut_off=cut_off) == ONE
        assert both(json_tools, open_call + "</tool_c", cut_off=cut_off) == ONE
    assert both(json_tools, open_call[:-2], cut_off=True) == call("f", '{"x": 1', ended=False)
    assert both(json_tools, "<tool_call>{", cut_off=True) == [ReplyText("<tool_call>{")]


def test_a_mark_in_a_string_is_part_of_it(json_tools: TokenizerWrapper) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>"}}</tool_call>'
    assert both(json_tools, text) == call("f", '{"s": "</tool_call>"}')


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ('well [TOOL_CALLS]f[ARGS]{"x": 1}g[ARGS]{"y": "ü"}', [ReplyText("well "), *ONE, *call("g", '{"y": "ü"}')]),
        ('[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g [ARGS] {}', ONE + call("g", "{}")),
        ('[TOOL_CALLS]f[CALL_ID]aB3456789x[ARGS]{"x": 1}', call("f", '{"x": 1}', id="aB3456789x")),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}]', ONE),
        ('[TOOL_CALLS][{"id": "own", "name": "f", "arguments": {"x": 1}}]', call("f", '{"x": 1}', id="own")),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]', ONE + call("g", "{}")),
        ("[TOOL_CALLS]h[ARGS]{}", [ReplyText("[TOOL_CALLS]h[ARGS]{}")]),
        ("[TOOL_CALLS]f[ARGS]17", [ReplyText("[TOOL_CALLS]f[ARGS]17")]),
        ('[TOOL_CALLS]f[ARGS]{"x": 1} and so on', [*ONE, ReplyText(" and so on")]),
        ('[TOOL_CALLS]f[ARGS]{"x": 1, oops', call("f", '{"x": 1, oops')),
    ],
)
def test_mistrals_calls(mistral: TokenizerWrapper, text: str, events: list[ReplyEvent]) -> None:
    assert both(mistral, text) == events


def test_the_models_own_ids_are_kept(wrap_byte_level) -> None:
    tokenizer = wrap_byte_level(**marks_of("kimi_k2"))
    body = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>'
    text = f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"
    assert both(tokenizer, text) == call("f", '{"x": 1}', id="functions.f:0")


TYPED = tool(
    "t",
    s={"type": "string"},
    i={"type": "integer"},
    n={"type": "number"},
    b={"type": "boolean"},
    o={"type": "object"},
    a={"type": "array"},
    u={},
    v={"description": "anything"},
)
VALUES = {
    "s": ["a", "", "null", "nul", "a\nb\n", ' "x" \\ ', "17", "NULL", "nullx", "\n", "é🙂"],
    "i": ["7", "-3", "7.0", "null"],
    "n": ["7", "1.5", "1e3"],
    "b": ["true", "False", "maybe"],
    "o": ['{"k": [1]}', "{'k': None}", "no object"],
    "a": ["[1, 2]", "['a']", "a\nb"],
    "v": ['{"k": 1}', "17", "text"],
    "u": ['{"k": 1}', "17", "text"],
    "other": ["17", "text"],
}
PAIRS = [(key, value) for key, values in VALUES.items() for value in values]


@pytest.mark.parametrize(("key", "value"), PAIRS)
@pytest.mark.parametrize(
    ("parser", "form"),
    [
        ("qwen3_coder", "<tool_call>\n<function=t>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>"),
        ("glm47", "<tool_call>t\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
        (
            "longcat",
            "<longcat_tool_call>t\n<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>{}</longcat_arg_value>\n"
            "</longcat_tool_call>",
        ),
    ],
)
def test_values_between_tags_are_what_mlx_lm_makes_of_them(
    wrap_byte_level, parser: str, form: str, key: str, value: str
) -> None:
    marks = marks_of(parser)
    text = form.format(key, value)
    body = text.removeprefix(marks["tool_call_start"]).removesuffix(marks["tool_call_end"])
    expected = marks["tool_parser"](body.strip(), [TYPED])["arguments"]
    tokenizer = wrap_byte_level(**marks)
    for pieces in ([text], list(text)):
        begun, given_text, ended = read(reader(tokenizer, [TYPED]), pieces)
        assert begun == ToolCallStart("", "t")
        assert isinstance(given_text, ToolCallArguments)
        assert json.loads(given_text.text) == expected
        assert ended == ToolCallEnd()


def test_several_parameters_and_none(wrap_byte_level) -> None:
    coder, glm47 = (wrap_byte_level(**marks_of(name)) for name in ("qwen3_coder", "glm47"))
    two = "<tool_call><function=f><parameter=x>1</parameter> <parameter=s>a</parameter></function></tool_call>"
    assert both(coder, f"{two}\n{two}") == call("f", '{"x": 1, "s": "a"}') * 2
    assert both(coder, "<tool_call><function=g></function></tool_call>") == call("g", "{}")
    assert both(coder, CALL) == ONE
    assert both(glm47, "<tool_call>g</tool_call>") == call("g", "{}")
    assert both(glm47, '<tool_call>f\n{"x": 1}</tool_call>') == ONE
    assert both(glm47, CALL) == ONE
    assert both(glm47, "<tool_call>h\n<arg_key>x</arg_key></tool_call>")[0] == ReplyText(
        "<tool_call>h\n<arg_key>x</arg_key></tool_call>"
    )


def test_tags_that_break(wrap_byte_level) -> None:
    coder = wrap_byte_level(**marks_of("qwen3_coder"))
    begun = "<tool_call><function=f><parameter=s>ab</parameter>"
    assert both(coder, begun) == call("f", '{"s": "ab"}')
    assert both(coder, begun, cut_off=True) == call("f", '{"s": "ab"', ended=False)
    assert both(coder, begun + "</tool_call>c") == [*call("f", '{"s": "ab"}'), ReplyText("c")]
    assert both(coder, begun + "oops</function>c") == [*call("f", '{"s": "ab"oops</function>c')]
    assert both(coder, begun + "oops</tool_call>c") == [*call("f", '{"s": "ab"oops'), ReplyText("c")]


def test_half_a_surrogate_pair_stays_an_escape(wrap_byte_level) -> None:
    """No wire carries it."""
    glm47 = wrap_byte_level(**marks_of("glm47"))
    text = '<tool_call>g<arg_key>a</arg_key><arg_value>["\\ud83d ü"]</arg_value></tool_call>'
    assert both(glm47, text) == call("g", '{"a": ["\\ud83d \\u00fc"]}')
    kimi = wrap_byte_level(**marks_of("kimi_k2"))
    body = '<|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{"a": "\\ud83d"}<|tool_call_end|>'
    text = f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"
    assert both(kimi, text) == call("g", '{"a": "\\ud83d"}', id="functions.g:0")


WRITTEN = {
    "function_gemma": "<start_function_call>call:f{x:1}<end_function_call>",
    "gemma4": "<|tool_call>call:f{x:1}<tool_call|>",
    "longcat": '<longcat_tool_call>{"name": "f", "arguments": {"x": 1}}</longcat_tool_call>',
    "minicpm5": '<function name="f"><param name="x">1</param></function>',
    "minimax_m2": '<minimax:tool_call><invoke name="f"><parameter name="x">1</parameter></invoke></minimax:tool_call>',
    "muse_spark": '<atem:function_calls><atem:invoke name="f"><atem:parameter name="x">1</atem:parameter></atem:invoke>'
    "</atem:function_calls>",
    "pythonic": "<|tool_call_start|>[f(x=1)]<|tool_call_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="x" type="number"'
    "<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
}


@pytest.mark.parametrize("parser", WRITTEN)
def test_forms_that_only_mlx_lm_reads_come_whole(wrap_byte_level, parser: str) -> None:
    tokenizer = wrap_byte_level(**marks_of(parser))
    text = WRITTEN[parser]
    assert both(tokenizer, f"a {text} b") == [ReplyText("a "), *ONE, ReplyText(" b")]
    unknown = text.replace("f", "q")
    assert not any(isinstance(event, ToolCallStart) for event in both(tokenizer, unknown))
    # And the forms that nobody asked for.
    assert both(tokenizer, f"```json\n{CALL}\n```") == ONE


def test_without_a_parser_its_marks_are_found_where_a_line_begins(byte_level: TokenizerWrapper) -> None:
    assert both(byte_level, CALL) == ONE
    assert both(byte_level, f"a {CALL}") == [ReplyText(f"a {CALL}")]


SCRAPS = ["{", "}", '"', ":", "f", "x", "1", "call:f{", "<function=f>", "</function>", "<arg_key>", "[f(", ")]"]
soup = st.lists(st.sampled_from(SCRAPS) | st.text(max_size=3), max_size=12).map("".join)


@settings(max_examples=40)
@given(before=soup, body=soup, after=soup)
def test_no_parser_raises_and_text_without_calls_comes_through(
    any_parser: TokenizerWrapper, before: str, body: str, after: str
) -> None:
    text = before + str(any_parser.tool_call_start) + body + str(any_parser.tool_call_end) + after
    events = both(any_parser, text)
    assert well_formed(events)
    if not any(isinstance(event, ToolCallStart) for event in events):
        assert said(events) == text


@settings(max_examples=40)
@given(values=st.dictionaries(st.text(max_size=3), st.text(max_size=8) | st.integers(), max_size=3))
def test_arguments_of_json_come_through(json_tools: TokenizerWrapper, values: dict[str, Any]) -> None:
    body = json.dumps({"name": "f", "arguments": values}, ensure_ascii=False)
    _, given_text, _ = both(json_tools, f"<tool_call>\n{body}\n</tool_call>")
    assert isinstance(given_text, ToolCallArguments)
    assert parses(given_text.text)
    assert json.loads(given_text.text) == values
