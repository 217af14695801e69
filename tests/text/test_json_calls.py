from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstrata.text.tool_calls.json_calls import MAX_DEPTH, JsonScanner, JsonStringDecoder
from tests.text.read import cut

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(max_size=3), values, max_size=3)


def scan(pieces: list[str]) -> tuple[JsonScanner, str]:
    """The scanner, and what it took."""
    scanner = JsonScanner()
    taken = ""
    for piece in pieces:
        end, text = scanner.add(piece)
        taken += text
        if scanner.done or scanner.failed or end < len(piece):
            break
    return scanner, taken


@given(value=objects, rest=st.text(max_size=3), cuts=st.sets(st.integers(0, 60)), indent=st.sampled_from([None, 1]))
def test_an_object_is_taken_up_to_its_end(
    value: dict[str, object], rest: str, cuts: set[int], indent: int | None
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=indent is None)
    scanner, taken = scan(cut(text + rest, cuts))
    assert scanner.done
    assert taken == text


LETTERS = [*'{}[]",:\\ \n0123456789+-.eEtrufalsn', '"a"', "null", "{}", "\\u00fc", '{"a": ']
soup = st.lists(st.sampled_from(LETTERS), max_size=14).map("".join)


@given(text=soup.map(lambda text: '{"k": ' + text) | soup, cuts=st.sets(st.integers(0, 20)))
@example(text='{"k": 01}', cuts=set())
@example(text='{"k": 1.}', cuts=set())
@example(text='{"k": -0.5e-7, "l": [1, {}]}', cuts=set())
def test_it_takes_what_json_takes(text: str, cuts: set[int]) -> None:
    scanner, taken = scan(cut(text, cuts))
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text)
    except ValueError:
        value, end = None, 0
    is_object = text.startswith("{") and isinstance(value, dict)
    assert scanner.done is is_object
    if is_object:
        assert json.loads(taken) == value
        assert len(taken) >= end


@pytest.mark.parametrize(
    "bad", ['{"a": 1,}', "{'a': 1}", '{"a": True}', '{"a": .5}', '{"a" 1}', "{]", '{"a": "\\x"}', "[1]"]
)
def test_the_first_wrong_character_is_found(bad: str) -> None:
    scanner, taken = scan(list(bad))
    assert scanner.failed
    assert bad.startswith(taken)
    assert len(taken) < len(bad)


def test_depth_is_bounded() -> None:
    inside = MAX_DEPTH - 1
    assert scan(['{"a":' + "[" * inside + "]" * inside + "}"])[0].done
    assert scan(['{"a":' + "[" * (inside + 1)])[0].failed


@given(text=st.text())
def test_a_string_is_decoded(text: str) -> None:
    for ascii_only in (True, False):
        decoder = JsonStringDecoder()
        inside = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        assert "".join(map(decoder.add, inside)) + decoder.finish() == text


def test_half_a_pair_stays_an_escape() -> None:
    decoder = JsonStringDecoder()
    assert "".join(map(decoder.add, "\\ud83dx\\ude42\\ud83d")) + decoder.finish() == "\\ud83dx\\ude42\\ud83d"
    with pytest.raises(ValueError, match="escape"):
        list(map(JsonStringDecoder().add, "\\x"))
    with pytest.raises(ValueError, match="escape"):
        list(map(JsonStringDecoder().add, "\\u00zz"))
