from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstrata.text.bare_calls import BareCallSplitter
from kvstrata.text.tools import Split, ToolCall, join

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in ("f", "find")]
CALL = '{"name": "f", "parameters": {"x": "}\\\\\\";{"}}'
ONE = ToolCall("f", '{"x": "}\\\\\\";{"}')


def split(pieces: list[str], *, cut_off: bool = False) -> Split:
    splitter = BareCallSplitter(TOOLS)
    return join([*(splitter.add(piece) for piece in pieces), splitter.finish(cut_off=cut_off)])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (CALL, (ONE,)),
        (f"<|python_tag|>{CALL}", (ONE,)),
        (f" \n{CALL}; {CALL}\n", (ONE, ONE)),
        ('{"type": "function", "name": "find", "arguments": {}}', (ToolCall("find", "{}"),)),
        ('{"parameters": {"x": [{}]}, "name": "f"}', (ToolCall("f", '{"x": [{}]}'),)),
    ],
)
def test_a_reply_that_is_nothing_but_calls(text: str, calls: tuple[ToolCall, ...]) -> None:
    assert split([text]) == split(list(text)) == Split("", calls)


@pytest.mark.parametrize(
    "text",
    [
        f"Sure: {CALL}",
        f"{CALL} That is it.",
        f"{CALL}{CALL}",
        f"{CALL};x",
        CALL[:-1],
        f"{CALL};{CALL[:-1]}",
        '{"name": "g", "parameters": {}}',
        '{"name": "f"}',
        '{"name": "f", "parameters": [1]}',
        '{"name": "f", "parameters": {]}',
        '{"parameters": {}, "name": ["f"]}',
        "[1, 2]",
        "{",
        "",
        " ",
    ],
)
def test_anything_else_is_content(text: str) -> None:
    assert split([text]) == split(list(text)) == Split(text)


def test_a_reply_that_was_cut_off_is_content() -> None:
    assert split([CALL], cut_off=True) == Split(CALL)


def test_what_cannot_be_a_call_is_not_held_back() -> None:
    splitter = BareCallSplitter(TOOLS)
    assert splitter.add('{"na') == Split("")
    assert splitter.add('me": "fa') == Split('{"name": "fa')
    assert splitter.add(CALL) == Split(CALL)
    assert BareCallSplitter(TOOLS).add("Hello") == Split("Hello")
    talks_on = BareCallSplitter(TOOLS)
    assert talks_on.add(CALL) == Split("")
    assert talks_on.add(" and") == Split(CALL + " and")


SCRAPS = ["{", "}", '"', ":", ",", ";", "\\", " ", '{"name": "f"', '"parameters": {', "<|python_tag|>", CALL, "[", "]"]
soup = st.lists(st.sampled_from(SCRAPS) | st.text(max_size=3), max_size=10).map("".join)


@given(text=soup, cuts=st.sets(st.integers(0, 80)))
@example(text=f"{CALL};{CALL}", cuts=set(range(80)))
def test_the_cut_does_not_matter_and_nothing_is_lost(text: str, cuts: set[int]) -> None:
    places = sorted({cut for cut in cuts if cut < len(text)} | {0, len(text)})
    whole = split([text])
    assert split([text[start:end] for start, end in pairwise(places)]) == whole
    assert whole.calls or whole.content == text
