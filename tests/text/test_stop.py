from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstrata.text.stop import StopMatcher, Stopped

# Two letters: stop strings overlap with themselves, with one another and with what nearly was one.
texts = st.text(alphabet="ab", max_size=30)
stop_strings = st.lists(st.text(alphabet="ab", max_size=9), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str]:
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, ""


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(places)]


@settings(max_examples=300)
@given(texts, stop_strings, st.lists(st.integers(0, 100)))
@example("aaab", ["aab"], [1, 2, 3])
@example("aabaaabaaac", ["aabaaac"], [])
@example("xabcdef", ["abcdef", "cd"], [])
def test_any_pieces_give_what_the_whole_text_gives(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(tuple(stops))
    shown, stop, rest = "", "", ""
    for piece in pieces_of(text, cuts):
        found = matcher.add(piece)
        shown += found.text
        stop = found.stop
        rest += found.rest
    assert (shown + matcher.finish(), stop) == naive(text, stops)
    assert not stop or shown + stop + rest == text


@settings(max_examples=300)
@given(texts, stop_strings.map(lambda stops: [*filter(None, stops), "abaab"]))
def test_holds_back_only_what_a_stop_string_could_begin_with(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    shown = ""
    for end, character in enumerate(text, start=1):
        found = matcher.add(character)
        if found.stopped:
            return
        shown += found.text
        held = text[len(shown) : end]
        starts = [stop[:n] for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n])]
        assert len(held) == max(len(start) for start in starts)


def test_after_the_stop_nothing_more_is_shown() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.add("text END more").text == "text "
    later = matcher.add("even more")
    assert (later.text, later.stopped) == ("", True)
    assert matcher.finish() == ""


@pytest.mark.parametrize("stops", [(), ("",)])
def test_without_stop_strings_everything_passes(stops: tuple[str, ...]) -> None:
    found = StopMatcher(stops).add("all of it")
    assert (found.text, found.stopped) == ("all of it", False)


def test_time_grows_with_the_text_and_not_with_its_square() -> None:
    # Every character of this text begins a near match of 20,000.
    matcher = StopMatcher(("a" * 20_000 + "b",))
    began = time.thread_time()
    for _ in range(150):
        matcher.add("a" * 501)
    assert time.thread_time() - began < 2.0
    assert matcher.finish() == "a" * 20_000


def test_after_the_end_a_text_begins_anew() -> None:
    matcher = StopMatcher(("aab",))
    assert matcher.add("xa") == Stopped("x")
    assert matcher.finish() == "a"
    assert matcher.add("ab") == Stopped("ab")
