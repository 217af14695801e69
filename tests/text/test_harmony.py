from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvstrata.text.harmony import HarmonyParser, HarmonyTokens, harmony_tokens
from kvstrata.text.reply_events import (
    ReplyEvent,
    ReplyText,
    ReplyThinking,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    join_events,
)
from kvstrata.text.tokenizer import encode_rendered
from kvstrata.text.tool_calls.answer_text import OfferedTools
from tests.text.chat_templates import HARMONY
from tests.text.read import call, known, said, tool, well_formed

ANALYSIS = ["<|channel|>", "analysis", "<|message|>", "User says hi.", "<|end|>", "<|start|>", "assistant"]
FINAL = ["<|channel|>", "final", "<|message|>", "Hello!"]
ARGUMENTS = '{"x": 1}'
ONE_CALL = call("f", ARGUMENTS)
HI = ReplyThinking("User says hi.")
TOOLS = [tool("f")]


@pytest.fixture(scope="session")
def tokenizer(wrap_byte_level) -> TokenizerWrapper:
    wrapped: TokenizerWrapper = wrap_byte_level()
    wrapped.add_special_tokens({"additional_special_tokens": HARMONY})
    return wrapped


@pytest.fixture(scope="session")
def marks(tokenizer: TokenizerWrapper) -> HarmonyTokens:
    found = harmony_tokens(tokenizer)
    assert found is not None
    return found


def split(
    tokenizer: TokenizerWrapper,
    parts: list[str],
    *,
    opening: str = "<|start|>assistant",
    cut_off: bool = False,
    takes_calls: bool = True,
) -> list[ReplyEvent]:
    """Parts are marks, or text."""
    marks = harmony_tokens(tokenizer)
    assert marks is not None
    ids = {name: id for id, name in marks.names.items()}
    offered = OfferedTools(TOOLS if takes_calls else ())
    reader = HarmonyParser(tokenizer, marks, encode_rendered(tokenizer, opening), offered)
    events = [
        event for part in parts for event in (reader.add("", (ids[part],)) if part in ids else reader.add(part, (5,)))
    ]
    return known(join_events(events + reader.finish(cut_off=cut_off)))


def test_only_a_tokenizer_with_all_marks_has_this_form(byte_level: TokenizerWrapper, marks: HarmonyTokens) -> None:
    assert harmony_tokens(byte_level) is None
    assert set(marks.names.values()) == set(HARMONY)
    assert {marks.names[id] for id in marks.ending} == {"<|call|>", "<|return|>"}


def test_channels_are_thinking_and_text(tokenizer: TokenizerWrapper) -> None:
    assert split(tokenizer, [*ANALYSIS, *FINAL, "<|return|>"]) == [HI, ReplyText("Hello!")]
    # An end that is no mark, or none at all.
    assert split(tokenizer, ANALYSIS + FINAL, cut_off=True) == [HI, ReplyText("Hello!")]


@pytest.mark.parametrize(
    "header",
    [
        ["<|channel|>", "commentary to=functions.f ", "<|constrain|>", "json"],
        ["<|channel|>", "commentary to=functions.f", "<|constrain|>", "json"],
        ["<|channel|>", "commentary to=functions.f code"],
        [" to=functions.f", "<|channel|>", "commentary ", "<|constrain|>", "json"],
        [" to=functions.f", "<|channel|>", "commentary"],
        ["<|channel|>", "analysis to=functions.f"],
        [" to=functions.f"],
    ],
)
def test_a_call_is_found_wherever_its_recipient_stands(tokenizer: TokenizerWrapper, header: list[str]) -> None:
    parts = [*header, "<|message|>", ARGUMENTS, "<|call|>"]
    assert split(tokenizer, parts) == ONE_CALL
    assert split(tokenizer, ANALYSIS + parts) == [HI, *ONE_CALL]
    assert split(tokenizer, parts[:-1]) == ONE_CALL


def test_a_call_keeps_what_the_model_wrote(tokenizer: TokenizerWrapper) -> None:
    header = ["<|channel|>", "commentary to=functions.f", "<|message|>"]
    assert split(tokenizer, [*header, '{"x": ', "<|call|>"]) == call("f", '{"x":')
    assert split(tokenizer, [*header, "<|call|>"]) == call("f", "{}")


def test_a_call_that_did_not_come_to_its_end(tokenizer: TokenizerWrapper) -> None:
    header = ["<|channel|>", "commentary to=functions.f", "<|message|>"]
    assert split(tokenizer, [*header, ARGUMENTS], cut_off=True) == ONE_CALL
    assert split(tokenizer, [*header, '{"x": '], cut_off=True) == call("f", '{"x":', ended=False)
    assert split(tokenizer, [*header, '{"x": ']) == call("f", '{"x":')


def test_what_was_not_offered_or_is_no_json_is_text(tokenizer: TokenizerWrapper) -> None:
    for function, arguments in (("g", ARGUMENTS), ("f", "please")):
        parts = ["<|channel|>", f"commentary to=functions.{function}", "<|message|>", arguments, "<|call|>"]
        assert split(tokenizer, parts) == [ReplyText(arguments)]


def test_a_call_streams(tokenizer: TokenizerWrapper, marks: HarmonyTokens) -> None:
    opening = encode_rendered(tokenizer, "<|start|>assistant<|channel|>commentary to=functions.f<|message|>")
    reader = HarmonyParser(tokenizer, marks, opening, OfferedTools(TOOLS))
    assert reader.add(" ") == []
    assert known(reader.add('{"x')) == [ToolCallStart("", "f"), ToolCallArguments('{"x')]
    assert reader.add('": "\n') == [ToolCallArguments('": "')]
    assert reader.add('"}') == [ToolCallArguments('\\n"}')]
    assert reader.finish() == [ToolCallEnd()]


def test_a_message_may_hold_calls_in_other_forms(tokenizer: TokenizerWrapper) -> None:
    parts = ["<|channel|>", "final", "<|message|>", f'{{"name": "f", "arguments": {ARGUMENTS}}}', "<|return|>"]
    assert split(tokenizer, parts) == ONE_CALL


def test_without_tools_nothing_is_a_call(tokenizer: TokenizerWrapper) -> None:
    parts = ["<|channel|>", "commentary to=functions.f", "<|message|>", ARGUMENTS, "<|call|>"]
    assert split(tokenizer, parts, takes_calls=False) == [ReplyText(ARGUMENTS)]


@pytest.mark.parametrize(
    "channel", ["commentary", "confession", "commentary to=python", "commentary to=functions.", ""]
)
def test_what_is_neither_thought_nor_call_is_text(tokenizer: TokenizerWrapper, channel: str) -> None:
    preamble = ["<|channel|>", channel, "<|message|>", "I look.", "<|end|>", "<|start|>", "assistant"]
    assert split(tokenizer, [*preamble, *FINAL, "<|return|>"]) == [ReplyText("I look.Hello!")]


def test_a_reply_without_headers_is_text(tokenizer: TokenizerWrapper) -> None:
    assert split(tokenizer, ["Hello!"]) == [ReplyText("Hello!")]
    assert split(tokenizer, ["Hello!", "<|end|>", " More."]) == [ReplyText("Hello! More.")]
    assert split(tokenizer, ["Hello!"], opening="the cat") == [ReplyText("Hello!")]


def test_a_header_without_a_message_is_nothing(tokenizer: TokenizerWrapper) -> None:
    assert split(tokenizer, ANALYSIS, cut_off=True) == [HI]
    assert split(tokenizer, ["<|channel|>", "commentary to=func"], cut_off=True) == []


def test_a_template_may_begin_the_message(tokenizer: TokenizerWrapper) -> None:
    opening = "<|start|>user<|message|>a<|end|><|start|>assistant<|channel|>"
    assert split(tokenizer, ["Hm."], opening=opening + "analysis<|message|>") == [ReplyThinking("Hm.")]
    assert split(tokenizer, ["lysis", "<|message|>", "Hm."], opening=opening + "ana") == [ReplyThinking("Hm.")]
    assert split(tokenizer, ["Hello!"], opening=opening + "final<|message|>") == [ReplyText("Hello!")]


def test_text_that_looks_like_a_mark_is_text(tokenizer: TokenizerWrapper, marks: HarmonyTokens) -> None:
    reader = HarmonyParser(tokenizer, marks, (), OfferedTools(TOOLS))
    assert reader.add("<|channel|>analysis<|message|>", (5, 6)) == [ReplyText("<|channel|>analysis<|message|>")]


def test_text_is_not_held_back(tokenizer: TokenizerWrapper, marks: HarmonyTokens) -> None:
    opening = encode_rendered(tokenizer, "<|start|>assistant<|channel|>final<|message|>")
    reader = HarmonyParser(tokenizer, marks, opening, OfferedTools(TOOLS))
    assert [reader.add(letter) for letter in "Hello"] == [[ReplyText(letter)] for letter in "Hello"]


WORDS = ["analysis", "final", "commentary", "assistant", " to=functions.f", ARGUMENTS, "hi", " ", "é🙂"]
parts = st.lists(st.sampled_from(HARMONY) | st.sampled_from(WORDS) | st.text(max_size=4), max_size=20)


@given(parts=parts, cuts=st.sets(st.integers(0, 60)), cut_off=st.booleans())
@example(parts=ANALYSIS + FINAL, cuts=set(range(60)), cut_off=False)
def test_the_cut_of_the_text_does_not_matter(
    tokenizer: TokenizerWrapper, parts: list[str], cuts: set[int], cut_off: bool
) -> None:
    whole = split(tokenizer, parts, cut_off=cut_off)
    assert split(tokenizer, _cut(parts, cuts), cut_off=cut_off) == whole
    assert well_formed(whole, cut_off=cut_off)


def _cut(parts: list[str], cuts: set[int]) -> list[str]:
    """Marks stay whole: they are single tokens."""
    pieces: list[str] = []
    begin = 0
    for part in parts:
        end = begin + len(part)
        places = [begin, *sorted(cut for cut in cuts if begin < cut < end), end]
        pieces += [part] if part in HARMONY else [part[a - begin : b - begin] for a, b in pairwise(places)]
        begin = end
    return pieces


# Without marks: one of them would be another end of the message.
words = st.text(max_size=8).filter(lambda text: not any(mark in text for mark in HARMONY))


@given(messages=st.lists(st.tuples(st.sampled_from(["analysis", "final", "commentary", "other"]), words)))
def test_no_message_is_lost(tokenizer: TokenizerWrapper, messages: list[tuple[str, str]]) -> None:
    next_message = ["<|end|>", "<|start|>", "assistant"]
    parts = [
        part for channel, text in messages for part in ("<|channel|>", channel, "<|message|>", text, *next_message)
    ]
    thoughts = "".join(text for channel, text in messages if channel == "analysis")
    rest = "".join(text for channel, text in messages if channel != "analysis")
    events = split(tokenizer, parts)
    assert said(events) == rest
    assert "".join(event.text for event in events if isinstance(event, ReplyThinking)) == thoughts
