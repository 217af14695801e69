"""Calls in forms that no template asked for, and text that only looks like them."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstrata.text.reply_events import ReplyEvent, ReplyText, ToolCallArguments, ToolCallEnd, ToolCallStart
from kvstrata.text.tool_calls.native_calls import NativeCallFormat
from kvstrata.text.tool_calls.tagged_calls import glm_tags
from tests.text.read import HERMES, call, cut, known, parses, read, reader, said, tool, well_formed

CALL = '{"name": "f", "parameters": {"x": "}\\\\\\";{"}}'
ONE = call("f", '{"x": "}\\\\\\";{"}')
MISTRAL = NativeCallFormat("[TOOL_CALLS]", "", "headers")
GLM = NativeCallFormat("<tool_call>", "</tool_call>", "tagged", glm_tags("", "</tool_call>"))
FORMS = [None, HERMES, MISTRAL, GLM]


def both(text: str, native: NativeCallFormat | None = None, *, cut_off: bool = False) -> list[ReplyEvent]:
    whole = read(reader(native), [text], cut_off=cut_off)
    assert read(reader(native), list(text), cut_off=cut_off) == whole
    assert read(reader(native), cut(text, range(0, len(text), 7)), cut_off=cut_off) == whole
    return whole


@pytest.mark.parametrize("native", FORMS)
@pytest.mark.parametrize(
    ("text", "events"),
    [
        (CALL, ONE),
        (f"<|python_tag|>{CALL}", ONE),
        (f" \n{CALL}; {CALL}\n", ONE + ONE),
        (f"{CALL}{CALL}", ONE + ONE),
        ('{"type": "function", "name": "find", "arguments": {}}', call("find", "{}")),
        ('{"parameters": {"x": [{}]}, "name": "f"}', call("f", '{"x": [{}]}')),
        ('{"name": "f", "args": {}}', call("f", "{}")),
        ('{"name": "f", "parameters": {"type": "objects"}}', call("f", '{"type": "objects"}')),
        ('{"tool": "f", "input": {"x": 1}}', call("f", '{"x": 1}')),
        ('{"function": "f", "arguments": {"x": 1}}', call("f", '{"x": 1}')),
        ('{"function": {"name": "f", "arguments": {"x": 1}}}', call("f", '{"x": 1}')),
        ('{"id": "c7", "type": "function", "function": {"name": "f", "arguments": "{}"}}', call("f", "{}", id="c7")),
        ('{"n\\u0061me": "f", "arguments": {}}', call("f", "{}")),
        (f'{{"tool_calls": [{CALL}, {CALL}]}}', ONE + ONE),
        (f"[{CALL},\n {CALL}]", ONE + ONE),
        (f"```json\n{CALL}\n```", ONE),
        (f"```json {CALL} ```", ONE),
        (f"````\n[{CALL}]\n````\n", ONE),
        (f"```tool_call\n{CALL}\n{CALL}\n```\n\n```json\n{CALL}\n```", ONE * 3),
        (f"```xml\n<tool_call>\n{CALL}\n</tool_call>\n```", ONE),
        (f"<tool_call>\n```json\n{CALL}\n```\n</tool_call>", ONE),
        (f"<tool_call>{CALL}", ONE),
        (f"<tool_call>{CALL[:-1]}\n</tool_call>", ONE),
        (f"{CALL}\n</tool_call>", ONE),
        (f"<function_call> {CALL} </function_call>", ONE),
        (f"<tools>\n{CALL}\n</tools>\n<tools>\n{CALL}\n</tools>", ONE + ONE),
        (f"Let me look.\n{CALL}", [ReplyText("Let me look.\n"), *ONE]),
        (f"Let me look.\n\n  {CALL}\n\nDone.", [ReplyText("Let me look.\n\n  "), *ONE, ReplyText("\n\nDone.")]),
        (f"So:\n```json\n{CALL}\n```\nDone.", [ReplyText("So:\n"), *ONE, ReplyText("\nDone.")]),
        (f"{CALL} That is it.", [*ONE, ReplyText(" That is it.")]),
        (f"{CALL};x", [*ONE, ReplyText(";x")]),
        ('{"name": "f", "arguments": {}, "id": "abc", "type": "function"}!', [*call("f", "{}"), ReplyText("!")]),
        ('{"name": "f", "arguments": {}, "why": 1}', [*call("f", "{}"), ReplyText(', "why": 1}')]),
        ("<function=f>\n<parameter=x>\n1\n</parameter>\n</function>", call("f", '{"x": 1}')),
    ],
)
def test_calls_are_found_in_any_form(native: NativeCallFormat | None, text: str, events: list[ReplyEvent]) -> None:
    if native is GLM and "<tool_call>\n```" in text:
        pytest.skip("its mark means GLM's own form")
    assert both(text, native) == events


@pytest.mark.parametrize("native", FORMS)
@pytest.mark.parametrize(
    "text",
    [
        f"Sure: {CALL}",
        f"`{CALL}`",
        f"- {CALL}",
        f"> <tools>{CALL}</tools>",
        '{"name": "g", "parameters": {}}',
        '{"name": "f"}',
        '{"name": "f", "parameters": [1]}',
        '{"name": "f", "parameters": "f"}',
        '{"name": "f", "parameters": null}',
        '{"parameters": {]}, "name": "f"}',
        '{"parameters": {}, "name": ["f"]}',
        '{"parameters": {}, "name": "f',
        '{"parameters": {"x": ',
        '{"name": "f", "description": "d", "parameters": {}}',
        '{"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}',
        '{"type": "object", "name": "f", "parameters": {}}',
        '{"name": "f", "name": "f", "parameters": {}}',
        '{"arguments": {}, "parameters": {}, "name": "f"}',
        '{"function": {"function": {"name": "f", "parameters": {}}}}',
        '{"tool_calls": []}',
        '{"title": "f"}\n{"title": "g"}',
        "[1, 2]",
        "[]",
        "{",
        "",
        " ",
        "\n\n",
        "```",
        "```json\n```",
        '```json\n{"name": "g", "arguments": {}}\n```\n',
        f"```python\nprint(1)\n{CALL}\n```",
        f"```\n\n# {CALL}\n\n{CALL}\n```\nEnd.",
        f"````\n```json\n{CALL}\n```\n````",
        f"```this_is_not_the_name_of_any_language\n{CALL}\n```",
        "<tools>\nf\n</tools>",
        "<function=g>\n</function>",
        "<function=f> is how\n",
        "a < b\n<b",
        "see <think>this</think>",
    ],
)
def test_anything_else_is_text(native: NativeCallFormat | None, text: str) -> None:
    assert said(both(text, native)) == text
    assert both(text, native) == ([ReplyText(text)] if text else [])
    assert both(text, native, cut_off=True) == ([ReplyText(text)] if text else [])


def test_a_call_follows_a_fence_that_holds_none() -> None:
    fence = '```json\n{"a": 1}\n```\n'
    assert both(fence + CALL) == [ReplyText(fence), *ONE]
    inline = '```{"a": 1}``` is code\n'
    assert both(inline + CALL) == [ReplyText(inline), *ONE]


def test_a_call_that_is_cut_off_is_not_ended() -> None:
    assert both('{"name": "f", "arguments": {"x": [1, ', cut_off=True) == call("f", '{"x": [1, ', ended=False)
    assert both('{"name": "f", "arguments": {"x": [1, ') == call("f", '{"x": [1, ')
    # It was whole: nothing that is still to come would change it.
    assert both('{"name": "f", "arguments": {}', cut_off=True) == call("f", "{}")
    xml = "<function=find><parameter=x>ab"
    assert both(xml, cut_off=True) == call("find", '{"x": "ab', ended=False)


def test_the_rest_of_a_broken_call_is_given_as_it_was_written() -> None:
    broken = '{"name": "f", "arguments": {"x": oops}}'
    assert both(f"{broken}\nand so on") == call("f", '{"x": oops}}\nand so on')
    assert both(f"<tool_call>{broken}</tool_call>b") == [*call("f", '{"x": oops}}'), ReplyText("b")]
    assert both(f"```json\n{broken}\n```\nb") == [*call("f", '{"x": oops}}\n'), ReplyText("\nb")]
    assert (
        both(f"<tool_call>{broken}</tool_call>\n<tool_call>{CALL}</tool_call>", HERMES)
        == call("f", '{"x": oops}}') + ONE
    )


def test_line_breaks_in_strings_become_json() -> None:
    assert both('{"name": "f", "arguments": {"x": "a\n\tb"}}') == call("f", '{"x": "a\\n\\tb"}')


def test_arguments_in_a_string_come_out_as_the_object() -> None:
    text = '{"name": "f", "arguments": " {\\"x\\": \\"\\u00fc\\\\n\\ud83d\\ude42 \\ud83d\\"} "}'
    assert both(text) == call("f", '{"x": "ü\\n🙂 \\ud83d"}')
    assert both('{"name": "f", "arguments": "{\\"x\\": 1"}') == call("f", '{"x": 1"}')


def test_pieces_come_as_they_are_written() -> None:
    one = reader(HERMES)
    assert one.add("hello ") == [ReplyText("hello ")]
    assert one.add("world<tool_") == [ReplyText("world")]
    assert one.add("box>") == [ReplyText("<tool_box>")]
    assert one.add('<tool_call>\n{"name": "find", "argum') == []
    assert known(one.add('ents": {')) == [ToolCallStart("", "find"), ToolCallArguments("{")]
    assert one.add('"x": "ab') == [ToolCallArguments('"x": "ab')]
    assert one.add("c") == [ToolCallArguments("c")]
    assert one.add('"}') == [ToolCallArguments('"}'), ToolCallEnd()]
    assert one.add("}\n</tool_call>x") == [ReplyText("x")]


def test_what_cannot_be_a_call_is_not_held_back() -> None:
    one = reader(tags=None)
    assert one.add('{"na') == []
    assert one.add('me": "fa') == [ReplyText('{"name": "fa')]
    assert reader().add("Hello") == [ReplyText("Hello")]
    fence = reader()
    assert fence.add("```json\n") == []
    assert fence.add('{"title": 1') == [ReplyText('```json\n{"title": 1')]


def test_a_string_parameter_streams() -> None:
    one = reader()
    one.add("<function=find>\n<parameter=x>\n")
    assert one.add('say "hi"\nand') == [ToolCallArguments('"say \\"hi\\"\\nand')]
    assert one.add("\n") == []
    assert one.add("</parameter></function>") == [ToolCallArguments('"}'), ToolCallEnd()]


def test_ids_are_the_models_own_once() -> None:
    text = '{"id": "a1", "name": "f", "arguments": {}}'
    events = reader().add(f"{text}\n{text}\n")
    ids = [event.id for event in events if isinstance(event, ToolCallStart)]
    assert ids[0] == "a1"
    assert len(ids[1]) == 9
    assert ids[1].isalnum()


def test_without_tools_nothing_is_a_call() -> None:
    assert read(reader(HERMES, tools=()), [f"<tool_call>{CALL}</tool_call>"]) == [
        ReplyText(f"<tool_call>{CALL}</tool_call>")
    ]


def test_names_of_any_letters() -> None:
    tools = [tool("größe"), tool("a-b.c")]
    for name in ("größe", "a-b.c"):
        assert read(reader(tools=tools), [f'{{"name": "{name}", "arguments": {{}}}}']) == call(name, "{}")
    assert read(reader(tools=tools), ['{"name": "gr\\u00f6\\u00dfe", "arguments": {}}']) == call("größe", "{}")


SCRAPS = ["{", "}", '"', ":", ",", ";", "\\", " ", '{"name": "f"', '"parameters": {', "<|python_tag|>", CALL, "[", "]"]
SCRAPS += ["\n", "```", "```json\n", "<tool_call>", "</tool_call>", "<tools>", "<function=f>", "<parameter=x>", "1"]
SCRAPS += ["</parameter>", "</function>", "<think>", "</think>", "[TOOL_CALLS]", "f[ARGS]", '"arguments": "{', "f", "`"]
SCRAPS += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", '{"name": "find", "arguments": {"x": ']
soup = st.lists(st.sampled_from(SCRAPS) | st.text(max_size=3), max_size=14).map("".join)


@given(
    text=soup,
    cuts=st.sets(st.integers(0, 120)),
    native=st.sampled_from(FORMS),
    cut_off=st.booleans(),
    open=st.booleans(),
)
@example(text=f"{CALL};{CALL}", cuts=set(range(80)), native=None, cut_off=False, open=False)
def test_the_cut_does_not_matter_and_nothing_is_lost(
    text: str, cuts: set[int], native: NativeCallFormat | None, cut_off: bool, open: bool
) -> None:
    whole = read(reader(native, is_open=open), [text], cut_off=cut_off)
    assert read(reader(native, is_open=open), cut(text, cuts), cut_off=cut_off) == whole
    assert well_formed(whole, cut_off=cut_off)
    if not any(isinstance(event, ToolCallStart) for event in whole) and not open and "think>" not in text:
        assert said(whole) == text


arguments = st.dictionaries(
    st.text(max_size=4),
    st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    max_size=3,
)


@given(
    values=arguments,
    wrap=st.sampled_from(
        ["{}", "<tool_call>{}</tool_call>", "```json\n{}\n```", "[{}]", "so\n<tools>{}", '{{"function": {}}}']
    ),
    first=st.booleans(),
    cuts=st.sets(st.integers(0, 120)),
)
def test_every_call_that_ended_parses(values: dict[str, object], wrap: str, first: bool, cuts: set[int]) -> None:
    body = json.dumps({"name": "f", "arguments": values} if first else {"arguments": values, "name": "f"})
    text = wrap.format(body)
    events = read(reader(), cut(text, cuts))
    given_text = "".join(event.text for event in events if isinstance(event, ToolCallArguments))
    assert parses(given_text)
    assert json.loads(given_text) == values
    assert said(events) == ("so\n" if text.startswith("so") else "")


@pytest.mark.parametrize(
    ("unit", "num_characters"),
    [
        ("{", 200_000),
        ("<", 200_000),
        ("{\n", 50_000),
        ("<\n", 50_000),
        ("```\n", 50_000),
        ("<tool_call>", 50_000),
        ("<tool_call>\n", 50_000),
        ('{"arguments": {"a":\n', 50_000),
        ('{"name": "f\n', 50_000),
        (" ", 50_000),
    ],
)
def test_time_is_linear(unit: str, num_characters: int) -> None:
    text = (unit * num_characters)[:num_characters]
    one = reader(HERMES)
    began = time.process_time()
    events = one.add(text) + one.finish()
    assert time.process_time() - began < 10  # some 2 s; a quadratic reader takes hours
    assert said(events) == text
