"""Free text comes out of the JSON that a model writes, however the pieces are cut."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.server.responses.tools import FreeTextInput


def read(pieces: list[str]) -> list[str]:
    reader = FreeTextInput()
    return [*(reader.add(piece) for piece in pieces), reader.finish()]


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(['"', "\\", "\n", "🙂", "}"]), max_size=40)
CUTS = st.lists(st.integers(0, 200), max_size=8)


@given(text=TEXT, ascii=st.booleans(), indent=st.sampled_from([None, 1]), places=CUTS)
def test_any_cut_gives_the_text(text: str, ascii: bool, indent: int | None, places: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii, indent=indent)
    given = read(cut(arguments, places))
    assert "".join(given) == text
    assert given[-1] == ""  # nothing waits for the end


@given(text=TEXT, places=CUTS)
def test_nothing_is_lost_of_another_shape(text: str, places: list[int]) -> None:
    for arguments in (json.dumps({"patch": text}), json.dumps({"why": 1, "input": text}), json.dumps({"input": text})):
        assert "".join(read(cut(arguments, places))) == text
    for arguments in (json.dumps({"a": text, "b": text}), json.dumps({"input": [text]}), json.dumps([text])):
        assert "".join(read(cut(arguments, places))) == arguments


def test_letter_by_letter_it_streams() -> None:
    arguments = '{"input": "a\\n\\ud83d\\ude42b"}'
    given = read(list(arguments))
    assert [piece for piece in given if piece] == ["a", "\n", "🙂", "b"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\nb"}', "a\nb"),  # a raw line break, which JSON forbids
        ('{"input": "a\\qb\\u12x"}', "aqb\\u12x"),
        ('{"input": "\\ud83d!"}', "\ufffd!"),  # half a pair
        ('{"input": "\\ud83d\\n"}', "\ufffd\n"),
        ('{"input": "cut o', "cut o"),
        ('{"inp', '{"inp'),
        ("", ""),
        ('{"input": "a", "more": 1}', "a"),
    ],
)
def test_what_is_not_as_it_should_be(arguments: str, text: str) -> None:
    assert "".join(read([arguments])) == text
    assert "".join(read(list(arguments))) == text


def test_long_inputs_take_time_by_their_length() -> None:
    began = time.monotonic()
    for arguments in ('{"input": "' + "\\n" * 100_000, " " * 200_000, '{"x' * 50_000):
        read(list(arguments))
    assert time.monotonic() - began < 10
