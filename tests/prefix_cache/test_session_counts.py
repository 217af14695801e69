"""Counts of conversations in slices: the length of a slice changes no sum."""

from __future__ import annotations

import itertools

import pytest

from kvstrata.engine.cache_api import as_ids
from kvstrata.prefix_cache.conversation_list import (
    MAX_COUNTED,
    CachedConversation,
    RememberedConversation,
    SessionCounts,
)
from tests.engine.drive import Drive
from tests.engine.test_loop import prompt
from tests.tiny import tiny_loaded

LONGER = prompt(300, seed=1)


def drive_with_turns(architecture: str = "llama") -> Drive:
    """Return a drive with a chat of three turns and a branch of it: several spans on one path."""
    drive = Drive(tiny_loaded(architecture))
    for tokens in (LONGER[:100], LONGER[:200], LONGER, [*LONGER[:150], 3, 4, 5]):
        drive.submit(tokens, 2)
        drive.run()
    return drive


def count(
    drive: Drive, conversations: list[RememberedConversation], seconds: float, clock: float = 0.0
) -> list[CachedConversation]:
    """Count in slices of `seconds`. `clock`: seconds that pass with each reading of the clock."""
    ticks = itertools.count()
    counts = SessionCounts(conversations, clock=lambda: clock * next(ticks))
    counted: list[CachedConversation] = []
    for _ in range(10_000):
        part = counts.advance(drive.prefix_cache.matcher, drive.prefix_cache.disk, seconds)
        counted += part.conversations
        if part.is_last:
            return counted
    raise AssertionError("the counts never end")


def conversations() -> list[RememberedConversation]:
    prompts = [LONGER, LONGER[:150], [*LONGER[:150], 3, 4, 5], [9, 9], LONGER[:1], []]
    return [RememberedConversation(salt, as_ids(tokens)) for tokens in prompts for salt in ("", "other")]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_session_counts_in_short_slices_equal_one_long_slice(architecture: str) -> None:
    drive = drive_with_turns(architecture)
    whole = count(drive, conversations(), seconds=1e9)
    # Each reading of the clock ends the slice.
    assert count(drive, conversations(), seconds=0.0, clock=1.0) == whole
    for cached, conversation in zip(whole, conversations(), strict=True):
        prefix = drive.prefix_cache.matcher.find(conversation.ids, conversation.salt)
        assert cached.tokens == sum(cached.k.values()) == sum(cached.v.values()) == prefix.num_tokens
    assert whole[0].tokens >= 290
    assert [cached.tokens for cached in whole[1::2]] == [0] * 6  # another salt


def test_session_counts_end_a_slice_after_the_maximum() -> None:
    drive = drive_with_turns()
    counts = SessionCounts([RememberedConversation("", as_ids(LONGER))] * (MAX_COUNTED + 1))
    first = counts.advance(drive.prefix_cache.matcher, drive.prefix_cache.disk, 1e9)
    assert (len(first.conversations), first.is_last) == (MAX_COUNTED, False)
    assert counts.advance(drive.prefix_cache.matcher, drive.prefix_cache.disk, 1e9).is_last


def test_session_counts_include_precision_and_pins() -> None:
    drive = drive_with_turns()
    drive.prefix_cache.pins.pin(as_ids(LONGER), "")
    [cached] = count(drive, [RememberedConversation("", as_ids(LONGER))], seconds=1e9)
    assert cached.is_pinned
    assert set(cached.k) == {"raw"}


def test_session_counts_without_disk_answer_at_once() -> None:
    drive = drive_with_turns()
    counted = SessionCounts(conversations()).advance(drive.prefix_cache.matcher, drive.prefix_cache.disk, 1e9)
    assert counted.on_disk.is_done
    assert counted.on_disk.answer == ()
