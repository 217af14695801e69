"""What memory holds, told a slice at a time: however short the slices are, the tree is the same, and it is bounded."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvstrata.engine.cache_api import ConversationSnapshot, PrecisionRun, TokenIds
from kvstrata.prefix_cache import conversation_list as module
from tests.engine.drive import Drive
from tests.engine.test_loop import prompt
from tests.prefix_cache.test_census import LONGER, drive_with_turns
from tests.tiny import tiny_loaded


def tell(drive: Drive, seconds: float = 1e9, clock: float = 0.0, owner: str | None = None) -> ConversationSnapshot:
    """`clock`: how far it goes with each look at it."""
    ticks = itertools.count()
    strata = ConversationSnapshot(owner, clock=lambda: clock * next(ticks))
    for _ in range(10_000):
        strata.advance(drive.stock.table, drive.stock.candidates, drive.stock.matcher, seconds)
        if strata.is_done:
            return strata
    raise AssertionError("it never ends")


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_the_tree_is_told_whole_whatever_the_slices(architecture: str) -> None:
    drive = drive_with_turns(architecture)
    whole = tell(drive)
    tree = drive.stock.table.tree
    told = sorted((each.start, each.ids.tolist()) for each in whole.runs)
    assert told == sorted((node.start, node.tokens.tolist()) for node in tree)
    assert sum(len(each.ids) for each in whole.runs) == tree.num_tokens
    for each in whole.runs:
        above = None if each.above is None else whole.runs[each.above]
        assert each.start == (0 if above is None else above.start + len(above.ids))
        assert each.stored == (PrecisionRun(each.start + len(each.ids), "raw", "raw"),)
        assert (each.is_running, each.is_pinned) == (False, False)
    # Time is over whenever the clock is looked at.
    short = tell(drive, seconds=0.0, clock=1.0)
    assert [(each.above, each.start) for each in short.runs] == [(each.above, each.start) for each in whole.runs]
    assert not whole.has_more
    assert tell(drive, owner="another").runs == []


def test_only_the_last_used_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONVERSATIONS", 3)
    drive = Drive(tiny_loaded("llama"))
    prompts = [[seed, *prompt(20, seed=seed)] for seed in range(6)]
    for tokens in (*prompts, prompts[1]):
        drive.submit(tokens, 2)
        drive.run()
    strata = tell(drive)
    assert strata.has_more
    begin = {tuple(each.ids[:5].tolist()) for each in strata.runs if each.above is None}
    assert begin == {tuple(tokens[:5]) for tokens in (prompts[4], prompts[5], prompts[1])}


def test_a_node_that_goes_between_two_slices_is_empty() -> None:
    drive = drive_with_turns()
    strata = ConversationSnapshot(None, clock=iter(range(1000)).__next__)
    strata.advance(drive.stock.table, drive.stock.candidates, drive.stock.matcher, 0.0)
    assert not strata.is_done
    drive.stock.evictor.clear(tier="hot")
    while not strata.is_done:
        strata.advance(drive.stock.table, drive.stock.candidates, drive.stock.matcher, 0.0)
    assert [len(each.ids) for each in strata.runs[1:]] == [0] * (len(strata.runs) - 1)


def to_its_end(drive: Drive, ids: list[int]) -> TokenIds:
    """With what was stored of the reply."""
    last = drive.stock.table.tree.match(drive.stock.matcher.root_of(""), ids).path[-1]
    return np.concatenate([node.tokens for node in last.path()])


def test_a_drop_leaves_what_is_shared_and_what_is_leased() -> None:
    drive = drive_with_turns()
    other, longer = (to_its_end(drive, ids) for ids in ([*LONGER[:150], 3, 4, 5], LONGER))
    said = drive.stock.evictor.drop_conversation(other, "", is_dry=True)
    assert drive.stock.matcher.find(other, "").num_tokens == len(other)
    done = drive.stock.evictor.drop_conversation(other, "", is_dry=False)
    assert (said.tokens, said.nbytes) == (done.tokens, done.nbytes) == (len(other) - 150, done.nbytes)
    assert drive.stock.matcher.find(other, "").num_tokens == 150
    assert drive.stock.matcher.find(longer, "").num_tokens == len(longer)
    lease = drive.stock.store.lease(longer, "")
    kept = drive.stock.evictor.drop_conversation(longer, "", is_dry=False)
    assert (kept.tokens, kept.kept_because) == (0, "running")
    drive.stock.leases.release(lease)
    # The turns before it ended in replies that it did not take up: those stay, with all before them.
    assert drive.stock.evictor.drop_conversation(longer, "", is_dry=False).tokens == len(longer) - 200
    assert drive.stock.matcher.find(longer, "").num_tokens == 200
