"""Conversations as they are drawn, as values: every token once, each conversation from where it parts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine.cache_api import ConversationRun, PrecisionRun, RememberedConversation, TierRun, as_ids
from kvstrata.prefix_cache.radix_tree import Node, RadixTree
from kvstrata.server.sessions.session import num_common
from kvstrata.server.strata import Drawing, Row, note_disk, note_shared, parts_of

SALT = "someone"
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


def stratum_of(node: Node[str], above: int | None, unused_s: float = 0.0) -> ConversationRun:
    return ConversationRun(
        parent=above,
        root=node.root_key,
        salt=SALT,
        start=node.start,
        ids=node.tokens,
        precisions=(PrecisionRun(node.end, node.payload, node.payload),),
        nbytes=10 * node.num_tokens,
        shared_end=0,
        session="",
        unused_s=unused_s,
        is_pinned=False,
        is_running=False,
        is_superseded=False,
    )


def drawn(tree: RadixTree[str]) -> Drawing:
    """As memory tells a tree."""
    nodes = sorted(tree, key=lambda node: node.start)
    places = {node: place for place, node in enumerate(nodes)}
    return Drawing(
        [stratum_of(node, places[node.parent] if node.parent else None, 9.0 - places[node]) for node in nodes]
    )


def tree_of(prompts: list[list[int]]) -> RadixTree[str]:
    tree: RadixTree[str] = RadixTree()
    for number, prompt in enumerate(prompts):
        tree.insert(b"root", prompt, f"planes:{2 + number % 3}")
    return tree


def num_drawn(rows: list[Row]) -> int:
    return sum(part.tokens for row in rows for part in parts_of(row, ""))


@given(PROMPTS)
def test_every_token_is_drawn_once_and_every_conversation_from_where_it_parts(prompts: list[list[int]]) -> None:
    tree = tree_of(prompts)
    drawing = drawn(tree)
    rows = drawing.rows()
    ends = [tuple(np.concatenate([each.tokens for each in node.path()]).tolist()) for node in tree if node.is_leaf]
    assert sorted(tuple(row.conversation().ids.tolist()) for row in rows) == sorted(ends)
    assert num_drawn(rows) == tree.num_tokens
    for row in rows:
        ids = row.conversation().ids
        assert (row.above is None) == (row.starts_at == 0)
        if row.above is not None:
            assert num_common(row.above.conversation().ids, ids) == row.starts_at
            assert rows.index(row.above) < rows.index(row)
        found = drawing.find(row.id)
        assert found is not None
        assert (found.salt, found.ids.tolist()) == (SALT, ids.tolist())
    assert len({row.id for row in rows}) == len(rows)


@given(PROMPTS, PROMPTS)
def test_what_is_remembered_is_drawn_where_another_tier_has_it(held: list[list[int]], said: list[list[int]]) -> None:
    tree = tree_of(held)
    drawing = drawn(tree)
    for ids in said:
        drawing.add(RememberedConversation(SALT, as_ids(ids)), "session", 0.0)
    memory = num_drawn(drawing.rows())
    assert memory == tree.num_tokens  # no other tier was asked yet
    for row in drawing.rows():
        note_disk(row, (TierRun(row.last.end, "planes:8", 100),))
    rows = drawing.rows()
    everything = tree_of([*held, *(ids[:-1] for ids in said if len(ids) > 1), *held])
    assert num_drawn(rows) >= everything.num_tokens
    for row in rows:
        tiers = [part.tier for part in parts_of(row, "")]
        assert tiers == sorted(tiers, reverse=True)  # memory first, then the disk
        assert all(part.also == ("disk",) for part in parts_of(row, "") if part.tier == "hot")


def test_what_is_nowhere_is_not_drawn() -> None:
    drawing = drawn(tree_of([[1, 2, 3, 4]]))
    before = drawing.rows()[0].id
    drawing.add(RememberedConversation(SALT, as_ids([1, 2, 9, 9, 9, 9])), "gone", 0.0)
    drawing.add(RememberedConversation(SALT, as_ids([1, 2, 3, 4, 5, 5, 5])), "half", 0.0)
    assert [row.starts_at for row in drawing.rows()] == [0, 2]
    half = next(row for row in drawing.rows() if row.last.session == "half")
    note_shared(half, 6)
    drawing.forget_what_is_nowhere()
    (row,) = drawing.rows()
    assert [(part.tokens, part.tier, part.k) for part in parts_of(row, "planes:4")] == [
        (4, "hot", "planes:2"), (2, "remote", "planes:4"),
    ]  # fmt: skip
    # An id stays good as long as its tokens are there, whatever hangs on them.
    found = drawing.find(before)
    assert found is not None
    assert found.ids.tolist() == [1, 2, 3, 4]


def test_a_run_that_lost_what_it_hangs_on_is_left_out() -> None:
    tree = tree_of([[1, 2, 3], [1, 2, 4]])
    nodes = sorted(tree, key=lambda node: (node.start, node.tokens.tolist()))
    told = [stratum_of(nodes[0], None), stratum_of(nodes[1], 0), stratum_of(nodes[2], None)]
    (row,) = Drawing(told).rows()
    assert row.conversation().ids.tolist() == [1, 2, 3]


def test_ids_of_different_callers_differ() -> None:
    ids = as_ids([1, 2, 3])
    one, other = Drawing([]), Drawing([])
    one.add(RememberedConversation("a", ids), "", 0.0)
    other.add(RememberedConversation("b", ids), "", 0.0)
    assert one.rows()[0].id != other.rows()[0].id
