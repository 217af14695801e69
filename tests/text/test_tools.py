from __future__ import annotations

import importlib
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvstrata.text.tokens import encode_rendered
from kvstrata.text.tools import Split, ToolCall, ToolCallSplitter, opens_thinking

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    }
]
PARSERS = ["function_gemma", "gemma4", "glm47", "json_tools", "kimi_k2", "kimi_k3", "laguna", "longcat", "minicpm5"]
PARSERS += ["minimax_m2", "mistral", "muse_spark", "pythonic", "qwen3_coder"]
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


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


def split(tokenizer: TokenizerWrapper, pieces: list[str], *, cut_off: bool = False, thinking: bool = False) -> Split:
    splitter = ToolCallSplitter(tokenizer, TOOLS, thinking=thinking)
    splits = [*(splitter.add(piece) for piece in pieces), splitter.finish(cut_off=cut_off)]
    return Split("".join(part.content for part in splits), tuple(call for part in splits for call in part.calls))


@given(cuts=st.sets(st.integers(0, 200)))
@example(cuts=set(range(200)))
def test_calls_are_found_however_the_text_is_cut(json_tools: TokenizerWrapper, cuts: set[int]) -> None:
    text = f"before <tool {CALL}\n{CALL} after"
    places = sorted({cut for cut in cuts if cut < len(text)} | {0, len(text)})
    pieces = [text[start:end] for start, end in pairwise(places)]
    one = ToolCall("f", '{"x": 1}')
    assert split(json_tools, pieces) == Split("before <tool \n after", (one, one))


def test_content_flows_and_a_call_comes_when_it_is_complete(json_tools: TokenizerWrapper) -> None:
    splitter = ToolCallSplitter(json_tools, TOOLS)
    assert splitter.add("hello ") == Split("hello ")
    assert splitter.add("world<tool_") == Split("world")
    assert splitter.add("box>") == Split("<tool_box>")
    assert splitter.add(CALL[:-1]) == Split("")
    assert splitter.add(CALL[-1] + "x") == Split("x", (ToolCall("f", '{"x": 1}'),))


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "arguments": {"x": ',
        "nonsense",
        "",
        '{"arguments": {}}',
        '{"name": 3}',
        "[]",
        "17",
        '{"name": ""}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "no json"}',
        '[{"name": "f"}, {"nam": "f"}]',
    ],
)
def test_a_malformed_call_is_content(json_tools: TokenizerWrapper, body: str) -> None:
    text = f"a<tool_call>{body}</tool_call>b"
    assert split(json_tools, [text]) == Split(text)
    assert split(json_tools, list(text)) == Split(text)


def test_a_call_without_its_end_counts_unless_it_was_cut_off(json_tools: TokenizerWrapper) -> None:
    open_call = CALL.removesuffix("</tool_call>")
    assert split(json_tools, [open_call]).calls == (ToolCall("f", '{"x": 1}'),)
    assert split(json_tools, [open_call], cut_off=True) == Split(open_call)
    assert split(json_tools, [open_call + "</tool_c"], cut_off=True) == Split(open_call + "</tool_c")


def test_a_parser_without_an_end_mark_reads_to_the_end(mistral: TokenizerWrapper) -> None:
    text = 'well [TOOL_CALLS]f[ARGS]{"x": 1}g[ARGS]{"y": "ü"}'
    expected = (ToolCall("f", '{"x": 1}'), ToolCall("g", '{"y": "ü"}'))
    assert split(mistral, list(text)) == Split("well ", expected)


def test_the_models_own_ids_are_kept(wrap_byte_level) -> None:
    tokenizer = wrap_byte_level(**marks_of("kimi_k2"))
    body = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>'
    text = f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"
    assert split(tokenizer, [text]).calls == (ToolCall("f", '{"x": 1}', id="functions.f:0"),)


def test_arguments_follow_the_tools_types(wrap_byte_level) -> None:
    tokenizer = wrap_byte_level(**marks_of("qwen3_coder"))
    text = "<tool_call>\n<function=f>\n<parameter=x>\n7\n</parameter>\n</function>\n</tool_call>"
    assert json.loads(split(tokenizer, [text]).calls[0].arguments) == {"x": 7}


def test_without_a_parser_everything_is_content(byte_level: TokenizerWrapper) -> None:
    assert split(byte_level, [CALL]) == Split(CALL)


def test_marks_inside_thinking_are_talk(json_tools: TokenizerWrapper) -> None:
    thought = f"<think>maybe {CALL}?</think>"
    assert split(json_tools, list(thought + CALL)) == Split(thought, (ToolCall("f", '{"x": 1}'),))
    opened = thought.removeprefix("<think>")
    assert split(json_tools, [opened + CALL], thinking=True) == Split(opened, (ToolCall("f", '{"x": 1}'),))


def test_whether_a_prompt_opens_thinking(json_tools: TokenizerWrapper) -> None:
    assert opens_thinking(json_tools, encode_rendered(json_tools, "the cat<think>\n"))
    assert not opens_thinking(json_tools, encode_rendered(json_tools, "the cat<think>\n\n</think>\n"))
    assert not opens_thinking(json_tools, encode_rendered(json_tools, "the cat"))


SCRAPS = ["{", "}", '"', ":", "f", "x", "1", "call:f{", "<function=f>", "</function>", "<arg_key>", "[f(", ")]"]
soup = st.lists(st.sampled_from(SCRAPS) | st.text(max_size=3), max_size=12).map("".join)


@settings(max_examples=40)
@given(before=soup, body=soup, after=soup)
def test_no_parser_raises_and_text_without_calls_comes_through(
    any_parser: TokenizerWrapper, before: str, body: str, after: str
) -> None:
    text = before + str(any_parser.tool_call_start) + body + str(any_parser.tool_call_end) + after
    result = split(any_parser, list(text))
    assert result == split(any_parser, [text])
    if result.calls:
        assert all(isinstance(json.loads(call.arguments), dict) for call in result.calls)
    else:
        assert result.content == text
