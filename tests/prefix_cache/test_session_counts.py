"""Counts of conversations in slices: the length of a slice changes no sum."""

from __future__ import annotations

import itertools

import pytest

from kvstrata.engine.cache_api import as_ids
from kvstrata.prefix_cache.conversation_list import MAX_COUNTED, CachedConversation, CountedSlice, SessionCounts
from tests.engine.drive import Drive
from tests.engine.test_loop import prompt
from tests.support.models import tiny_loaded

LONGER = prompt(300, seed=1)


def drive_with_rotations(architecture: str = "llama") -> Drive:
    """Return a drive with a chat of three turns and a branch of it: several spans on one path."""
    drive = Drive(tiny_loaded(architecture))
    for tokens in (LONGER[:100], LONGER[:200], LONGER, [*LONGER[:150], 3, 4, 5]):
        drive.submit(tokens, 2)
        drive.run()
    return drive


def track(drive: Drive) -> list[tuple[str, str]]:
    """Have conversations tracked, in sessions of two salts. Return salt and name of each session."""
    prompts = [LONGER, LONGER[:150], [*LONGER[:150], 3, 4, 5], [9, 9], LONGER[:1], []]
    sessions = [(salt, str(number)) for number in range(len(prompts)) for salt in ("", "other")]
    for salt, name in sessions:
        drive.cache.adopt_conversation(salt, name, b"", as_ids(prompts[int(name)]), 0)
    return sessions


def advance(drive: Drive, counts: SessionCounts, seconds: float = 1e9) -> CountedSlice:
    return drive.cache.count_sessions(counts, seconds)


def count(
    drive: Drive, sessions: list[tuple[str, str]], seconds: float, clock: float = 0.0
) -> list[CachedConversation]:
    """Count in slices of `seconds`. `clock`: seconds that pass with each reading of the clock."""
    ticks = itertools.count()
    counts = SessionCounts(sessions, clock=lambda: clock * next(ticks))
    counted: list[CachedConversation] = []
    for _ in range(10_000):
        part = advance(drive, counts, seconds)
        counted += part.conversations
        if part.is_last:
            return counted
    raise AssertionError("the counts never end")


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_session_counts_in_short_slices_equal_one_long_slice(architecture: str) -> None:
    drive = drive_with_rotations(architecture)
    sessions = track(drive)
    whole = count(drive, sessions, seconds=1e9)
    # Each reading of the clock ends the slice.
    assert count(drive, sessions, seconds=0.0, clock=1.0) == whole
    for cached, (salt, name) in zip(whole, sessions, strict=True):
        longest = drive.cache.longest_conversation(salt, name)
        assert longest is not None
        prefix = drive.prefix_cache.matcher.find(longest.ids, salt)
        assert cached.num_ids == len(longest.ids)
        assert cached.tokens == sum(cached.k.values()) == sum(cached.v.values()) == prefix.num_tokens
    assert whole[0].tokens >= 290
    assert [cached.tokens for cached in whole[1::2]] == [0] * 6  # another salt


def test_session_counts_end_a_slice_after_the_maximum() -> None:
    drive = drive_with_rotations()
    counts = SessionCounts(track(drive)[:1] * (MAX_COUNTED + 1))
    first = advance(drive, counts)
    assert (len(first.conversations), first.is_last) == (MAX_COUNTED, False)
    assert advance(drive, counts).is_last


def test_session_counts_of_forgotten_session_are_empty() -> None:
    drive = drive_with_rotations()
    sessions = track(drive)
    drive.prefix_cache.conversations.forget(None, None)
    assert count(drive, sessions[:1], seconds=1e9) == [CachedConversation(0, 0, {}, {}, is_pinned=False)]


def test_session_counts_include_precision_and_pins() -> None:
    drive = drive_with_rotations()
    drive.prefix_cache.pins.pin(as_ids(LONGER), "")
    [cached] = count(drive, track(drive)[:1], seconds=1e9)
    assert cached.is_pinned
    assert set(cached.k) == {"raw"}


def test_session_counts_without_disk_answer_at_once() -> None:
    drive = drive_with_rotations()
    counted = advance(drive, SessionCounts(track(drive)))
    assert counted.on_disk.is_done
    assert counted.on_disk.answer == ()
