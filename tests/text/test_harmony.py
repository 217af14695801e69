from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kvstrata.text.tools import Split, ToolCall, join
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvstrata.text.harmony import HarmonyMarks, HarmonySplitter, harmony_marks
from kvstrata.text.tokens import encode_rendered
from tests.text.chat_templates import HARMONY

ANALYSIS = ["<|channel|>", "analysis", "<|message|>", "User says hi.", "<|end|>", "<|start|>", "assistant"]
FINAL = ["<|channel|>", "final", "<|message|>", "Hello!"]
ARGUMENTS = '{"x": 1}'
ONE_CALL = Split("", (ToolCall("f", ARGUMENTS),))


@pytest.fixture(scope="session")
def tokenizer(wrap_byte_level) -> TokenizerWrapper:
    wrapped: TokenizerWrapper = wrap_byte_level()
    wrapped.add_special_tokens({"additional_special_tokens": HARMONY})
    return wrapped


@pytest.fixture(scope="session")
def marks(tokenizer: TokenizerWrapper) -> HarmonyMarks:
    found = harmony_marks(tokenizer)
    assert found is not None
    return found


def split(
    tokenizer: TokenizerWrapper,
    parts: list[str],
    *,
    opening: str = "<|start|>assistant",
    cut_off: bool = False,
    takes_calls: bool = True,
) -> Split:
    """Parts are marks, or text."""
    marks = harmony_marks(tokenizer)
    assert marks is not None
    ids = {name: id for id, name in marks.names.items()}
    splitter = HarmonySplitter(tokenizer, marks, encode_rendered(tokenizer, opening), takes_calls=takes_calls)
    splits = [splitter.add("", (ids[part],)) if part in ids else splitter.add(part, (5,)) for part in parts]
    return join([*splits, splitter.finish(cut_off=cut_off)])


def test_only_a_tokenizer_with_all_marks_has_this_form(byte_level: TokenizerWrapper, marks: HarmonyMarks) -> None:
    assert harmony_marks(byte_level) is None
    assert set(marks.names.values()) == set(HARMONY)
    assert {marks.names[id] for id in marks.ending} == {"<|call|>", "<|return|>"}


def test_channels_are_reasoning_and_content(tokenizer: TokenizerWrapper) -> None:
    assert split(tokenizer, [*ANALYSIS, *FINAL, "<|return|>"]) == Split("Hello!", (), "User says hi.")
    # An end that is no mark, or none at all.
    assert split(tokenizer, ANALYSIS + FINAL, cut_off=True) == Split("Hello!", (), "User says hi.")


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
    call = [*header, "<|message|>", ARGUMENTS, "<|call|>"]
    assert split(tokenizer, call) == ONE_CALL
    assert split(tokenizer, ANALYSIS + call) == Split("", ONE_CALL.calls, "User says hi.")
    assert split(tokenizer, call[:-1]) == ONE_CALL


def test_a_call_keeps_what_the_model_wrote(tokenizer: TokenizerWrapper) -> None:
    header = ["<|channel|>", "commentary to=functions.f", "<|message|>"]
    assert split(tokenizer, [*header, '{"x": ', "<|call|>"]).calls == (ToolCall("f", '{"x":'),)
    assert split(tokenizer, [*header, "<|call|>"]).calls == (ToolCall("f", "{}"),)


def test_a_call_that_did_not_come_to_its_end_is_content(tokenizer: TokenizerWrapper) -> None:
    call = ["<|channel|>", "commentary to=functions.f", "<|message|>", ARGUMENTS]
    assert split(tokenizer, call, cut_off=True) == Split(ARGUMENTS)
    assert split(tokenizer, [*call[:-1], '{"x": ']) == Split('{"x": ')


def test_without_tools_nothing_is_a_call(tokenizer: TokenizerWrapper) -> None:
    call = ["<|channel|>", "commentary to=functions.f", "<|message|>", ARGUMENTS, "<|call|>"]
    assert split(tokenizer, call, takes_calls=False) == Split(ARGUMENTS)


@pytest.mark.parametrize(
    "channel", ["commentary", "confession", "commentary to=python", "commentary to=functions.", ""]
)
def test_what_is_neither_thought_nor_call_is_content(tokenizer: TokenizerWrapper, channel: str) -> None:
    preamble = ["<|channel|>", channel, "<|message|>", "I look.", "<|end|>", "<|start|>", "assistant"]
    assert split(tokenizer, [*preamble, *FINAL, "<|return|>"]) == Split("I look.Hello!")


def test_a_reply_without_headers_is_content(tokenizer: TokenizerWrapper) -> None:
    assert split(tokenizer, ["Hello!"]) == Split("Hello!")
    assert split(tokenizer, ["Hello!", "<|end|>", " More."]) == Split("Hello! More.")
    assert split(tokenizer, ["Hello!"], opening="the cat") == Split("Hello!")


def test_a_header_without_a_message_is_nothing(tokenizer: TokenizerWrapper) -> None:
    assert split(tokenizer, ANALYSIS, cut_off=True) == Split("", (), "User says hi.")
    assert split(tokenizer, ["<|channel|>", "commentary to=func"], cut_off=True) == Split("")


def test_a_template_may_begin_the_message(tokenizer: TokenizerWrapper) -> None:
    opening = "<|start|>user<|message|>a<|end|><|start|>assistant<|channel|>"
    assert split(tokenizer, ["Hm."], opening=opening + "analysis<|message|>") == Split("", (), "Hm.")
    assert split(tokenizer, ["lysis", "<|message|>", "Hm."], opening=opening + "ana") == Split("", (), "Hm.")
    assert split(tokenizer, ["Hello!"], opening=opening + "final<|message|>") == Split("Hello!")


def test_text_that_looks_like_a_mark_is_text(tokenizer: TokenizerWrapper, marks: HarmonyMarks) -> None:
    splitter = HarmonySplitter(tokenizer, marks, (), takes_calls=True)
    assert splitter.add("<|channel|>analysis<|message|>", (5, 6)) == Split("<|channel|>analysis<|message|>")


def test_content_is_not_held_back(tokenizer: TokenizerWrapper, marks: HarmonyMarks) -> None:
    opening = encode_rendered(tokenizer, "<|start|>assistant<|channel|>final<|message|>")
    splitter = HarmonySplitter(tokenizer, marks, opening, takes_calls=True)
    assert [splitter.add(letter).content for letter in "Hello"] == list("Hello")


WORDS = ["analysis", "final", "commentary", "assistant", " to=functions.f", ARGUMENTS, "hi", " ", "é🙂"]
parts = st.lists(st.sampled_from(HARMONY) | st.sampled_from(WORDS) | st.text(max_size=4), max_size=20)


@given(parts=parts, cuts=st.sets(st.integers(0, 60)), cut_off=st.booleans())
@example(parts=ANALYSIS + FINAL, cuts=set(range(60)), cut_off=False)
def test_the_cut_of_the_text_does_not_matter(
    tokenizer: TokenizerWrapper, parts: list[str], cuts: set[int], cut_off: bool
) -> None:
    whole = split(tokenizer, parts, cut_off=cut_off)
    assert split(tokenizer, _cut(parts, cuts), cut_off=cut_off) == whole


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


@given(messages=st.lists(st.tuples(st.sampled_from(["analysis", "final", "commentary", "other"]), st.text(max_size=8))))
def test_no_message_is_lost(tokenizer: TokenizerWrapper, messages: list[tuple[str, str]]) -> None:
    next_message = ["<|end|>", "<|start|>", "assistant"]
    parts = [
        part for channel, text in messages for part in ("<|channel|>", channel, "<|message|>", text, *next_message)
    ]
    thoughts = "".join(text for channel, text in messages if channel == "analysis")
    said = "".join(text for channel, text in messages if channel != "analysis")
    assert split(tokenizer, parts) == Split(said, (), thoughts)
