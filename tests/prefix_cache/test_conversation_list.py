"""Snapshots of conversations in slices: the length of a slice changes no run, and the size is bounded."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvstrata.prefix_cache import conversation_list as module
from kvstrata.prefix_cache.conversation_list import ConversationSnapshot
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.prefix_cache.usage import PrecisionRun
from tests.engine.drive import Drive
from tests.engine.test_loop import prompt
from tests.prefix_cache.test_session_counts import LONGER, drive_with_rotations
from tests.support.models import tiny_loaded


def take_snapshot(
    drive: Drive, seconds: float = 1e9, clock: float = 0.0, owner: str | None = None
) -> ConversationSnapshot:
    """Collect in slices of `seconds`. `clock`: seconds that pass with each reading of the clock."""
    ticks = itertools.count()
    snapshot = ConversationSnapshot(owner, clock=lambda: clock * next(ticks))
    for _ in range(10_000):
        snapshot.advance(drive.prefix_cache.table, drive.prefix_cache.candidates, drive.prefix_cache.matcher, seconds)
        if snapshot.is_done:
            return snapshot
    raise AssertionError("the snapshot never ends")


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_snapshot_equals_the_tree_for_any_slice(architecture: str) -> None:
    drive = drive_with_rotations(architecture)
    whole = take_snapshot(drive)
    tree = drive.prefix_cache.table.tree
    runs = sorted((each.start, each.ids.tolist()) for each in whole.runs)
    assert runs == sorted((node.start, node.tokens.tolist()) for node in tree)
    assert sum(len(each.ids) for each in whole.runs) == tree.num_tokens
    for each in whole.runs:
        parent = None if each.parent is None else whole.runs[each.parent]
        assert each.start == (0 if parent is None else parent.start + len(parent.ids))
        assert each.precisions == (PrecisionRun(each.start + len(each.ids), "raw", "raw"),)
        assert (each.is_running, each.is_pinned) == (False, False)
    # Each reading of the clock ends the slice.
    short = take_snapshot(drive, seconds=0.0, clock=1.0)
    assert [(each.parent, each.start) for each in short.runs] == [(each.parent, each.start) for each in whole.runs]
    assert not whole.has_more
    assert take_snapshot(drive, owner="another").runs == []


def test_snapshot_of_many_conversations_has_the_last_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONVERSATIONS", 3)
    drive = Drive(tiny_loaded("llama"))
    prompts = [[seed, *prompt(20, seed=seed)] for seed in range(6)]
    for tokens in (*prompts, prompts[1]):
        drive.submit(tokens, 2)
        drive.run()
    snapshot = take_snapshot(drive)
    assert snapshot.has_more
    begin = {tuple(each.ids[:5].tolist()) for each in snapshot.runs if each.parent is None}
    assert begin == {tuple(tokens[:5]) for tokens in (prompts[4], prompts[5], prompts[1])}


def test_snapshot_keeps_nodes_removed_between_slices_as_empty_runs() -> None:
    drive = drive_with_rotations()
    snapshot = ConversationSnapshot(None, clock=iter(range(1000)).__next__)
    snapshot.advance(drive.prefix_cache.table, drive.prefix_cache.candidates, drive.prefix_cache.matcher, 0.0)
    assert not snapshot.is_done
    drive.prefix_cache.evictor.clear(tier="hot")
    while not snapshot.is_done:
        snapshot.advance(drive.prefix_cache.table, drive.prefix_cache.candidates, drive.prefix_cache.matcher, 0.0)
    assert [len(each.ids) for each in snapshot.runs[1:]] == [0] * (len(snapshot.runs) - 1)


def with_reply(drive: Drive, ids: list[int]) -> TokenIds:
    """Return a prompt with the cached tokens of its reply."""
    last = drive.prefix_cache.table.tree.match(drive.prefix_cache.matcher.root_of(""), ids).path[-1]
    return np.concatenate([node.tokens for node in last.path()])


def test_drop_keeps_shared_and_leased_tokens() -> None:
    drive = drive_with_rotations()
    other, longer = (with_reply(drive, ids) for ids in ([*LONGER[:150], 3, 4, 5], LONGER))
    dry = drive.prefix_cache.evictor.drop_conversation(other, "", is_dry=True)
    assert drive.prefix_cache.matcher.find(other, "").num_tokens == len(other)
    dropped = drive.prefix_cache.evictor.drop_conversation(other, "", is_dry=False)
    assert (dry.tokens, dry.nbytes) == (dropped.tokens, dropped.nbytes) == (len(other) - 150, dropped.nbytes)
    assert drive.prefix_cache.matcher.find(other, "").num_tokens == 150
    assert drive.prefix_cache.matcher.find(longer, "").num_tokens == len(longer)
    lease = drive.prefix_cache.lease(longer, "")
    kept = drive.prefix_cache.evictor.drop_conversation(longer, "", is_dry=False)
    assert (kept.tokens, kept.kept_because) == (0, "running")
    drive.prefix_cache.leases.release(lease)
    # Earlier turns ended in replies that the last prompt does not contain: they stay, with all tokens before them.
    assert drive.prefix_cache.evictor.drop_conversation(longer, "", is_dry=False).tokens == len(longer) - 200
    assert drive.prefix_cache.matcher.find(longer, "").num_tokens == 200
