"""Conversations counted a slice at a time: however short the slices are, the sums are the same."""

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
    """A chat of three turns, and one that parts from it: several spans on one path."""
    drive = Drive(tiny_loaded(architecture))
    for tokens in (LONGER[:100], LONGER[:200], LONGER, [*LONGER[:150], 3, 4, 5]):
        drive.submit(tokens, 2)
        drive.run()
    return drive


def count(
    drive: Drive, conversations: list[RememberedConversation], seconds: float, clock: float = 0.0
) -> list[CachedConversation]:
    """`clock`: how far it goes with each look at it."""
    ticks = itertools.count()
    census = SessionCounts(conversations, clock=lambda: clock * next(ticks))
    holdings: list[CachedConversation] = []
    for _ in range(10_000):
        counted = census.advance(drive.stock.matcher, drive.stock.disk, seconds)
        holdings += counted.holdings
        if counted.is_last:
            return holdings
    raise AssertionError("it never ends")


def conversations() -> list[RememberedConversation]:
    asked = [LONGER, LONGER[:150], [*LONGER[:150], 3, 4, 5], [9, 9], LONGER[:1], []]
    return [RememberedConversation(salt, as_ids(tokens)) for tokens in asked for salt in ("", "other")]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_short_slices_count_what_one_long_one_counts(architecture: str) -> None:
    drive = drive_with_turns(architecture)
    whole = count(drive, conversations(), seconds=1e9)
    # Time is over whenever the clock is looked at.
    assert count(drive, conversations(), seconds=0.0, clock=1.0) == whole
    for holding, asked in zip(whole, conversations(), strict=True):
        found = drive.stock.matcher.find(asked.ids, asked.salt)
        assert holding.tokens == sum(holding.k.values()) == sum(holding.v.values()) == found.num_tokens
    assert whole[0].tokens >= 290
    assert [holding.tokens for holding in whole[1::2]] == [0] * 6  # another salt


def test_a_slice_counts_no_more_than_can_be_written_down() -> None:
    drive = drive_with_turns()
    census = SessionCounts([RememberedConversation("", as_ids(LONGER))] * (MAX_COUNTED + 1))
    first = census.advance(drive.stock.matcher, drive.stock.disk, 1e9)
    assert (len(first.holdings), first.is_last) == (MAX_COUNTED, False)
    assert census.advance(drive.stock.matcher, drive.stock.disk, 1e9).is_last


def test_precision_and_pins_are_told() -> None:
    drive = drive_with_turns()
    drive.stock.pins.pin(as_ids(LONGER), "")
    [holding] = count(drive, [RememberedConversation("", as_ids(LONGER))], seconds=1e9)
    assert holding.is_pinned
    assert set(holding.k) == {"raw"}


def test_without_a_disk_nothing_is_said_of_it() -> None:
    drive = drive_with_turns()
    counted = SessionCounts(conversations()).advance(drive.stock.matcher, drive.stock.disk, 1e9)
    assert counted.on_disk.is_done
    assert counted.on_disk.answer == ()
