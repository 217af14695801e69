"""Conversation listings of random trees: each token once, parts against an oracle, ids, order and tier lookups."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.prefix_cache.conversation_list import (
    MAX_LISTING_LOOKUP_TOKENS,
    MAX_LOOKUP_TOKENS,
    MAX_SHARED_LOOKUPS,
    ConversationListing,
    ConversationRun,
    ConversationSnapshot,
    ListedConversation,
    TrackedConversation,
)
from kvstrata.prefix_cache.keys import as_ids
from kvstrata.prefix_cache.radix_tree import RadixTree
from kvstrata.prefix_cache.tier_client import TierRun
from kvstrata.prefix_cache.usage import PrecisionRun

SALT = "someone"
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


def make_run(
    tokens: Sequence[int],
    parent: int | None = None,
    start: int = 0,
    *,
    precisions: Sequence[tuple[int, str]] = (),
    shared_end: int = 0,
    unused_s: float = 0.0,
    is_superseded: bool = False,
) -> ConversationRun:
    end = start + len(tokens)
    return ConversationRun(
        parent=parent,
        salt=SALT,
        start=start,
        ids=as_ids(tokens),
        precisions=tuple(PrecisionRun(at, name, name) for at, name in precisions or [(end, "raw")]),
        nbytes=10 * len(tokens),
        shared_end=shared_end,
        session="",
        unused_s=unused_s,
        is_pinned=False,
        is_running=False,
        is_superseded=is_superseded,
    )


def list_runs(runs: Iterable[ConversationRun], tracked: Iterable[TrackedConversation] = ()) -> ConversationListing:
    snapshot = ConversationSnapshot(None)
    snapshot.runs += runs
    return ConversationListing(snapshot, tracked)


def runs_of(tree: RadixTree[str]) -> list[ConversationRun]:
    """Return the runs that a snapshot of a tree has."""
    nodes = sorted(tree, key=lambda node: node.start)
    indices = {node: index for index, node in enumerate(nodes)}
    return [
        make_run(
            node.tokens.tolist(),
            indices[node.parent] if node.parent else None,
            node.start,
            precisions=[(node.end, node.payload)],
            unused_s=100.0 - index,
        )
        for node, index in indices.items()
    ]


def tree_of(prompts: Iterable[Sequence[int]]) -> RadixTree[str]:
    tree: RadixTree[str] = RadixTree()
    for number, prompt in enumerate(prompts):
        tree.insert(b"root", prompt, f"planes:{2 + number % 3}")
    return tree


def track(ids: Sequence[int], session: str = "", unused_s: float = 0.0, salt: str = SALT) -> TrackedConversation:
    return TrackedConversation(salt, session, as_ids(ids), unused_s)


def ids_of(conversation: ListedConversation) -> list[int]:
    return conversation.prompt().ids.tolist()


def num_listed(listing: ConversationListing) -> int:
    return sum(part.tokens for each in listing.conversations() for part in listing.parts_of(each))


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


@given(PROMPTS)
def test_listing_of_memory_has_each_token_once_and_a_conversation_per_leaf(prompts: list[list[int]]) -> None:
    tree = tree_of(prompts)
    listing = list_runs(runs_of(tree))
    conversations = listing.conversations()
    leaves = [np.concatenate([each.tokens for each in node.path()]).tolist() for node in tree if node.is_leaf]
    assert sorted(map(ids_of, conversations)) == sorted(leaves)
    assert num_listed(listing) == tree.num_tokens
    for each in conversations:
        assert sum(part.tokens for part in listing.parts_of(each)) == each.num_tokens - each.start
        assert sum(part.nbytes for part in listing.parts_of(each)) == 10 * (each.num_tokens - each.start)


@given(PROMPTS, PROMPTS)
def test_conversation_starts_where_it_diverges_from_its_parent(
    cached: list[list[int]], tracked: list[list[int]]
) -> None:
    listing = list_runs(runs_of(tree_of(cached)), map(track, tracked))
    conversations = listing.conversations()
    for number, each in enumerate(conversations):
        if each.parent is None:
            assert each.start == 0
        else:
            assert conversations.index(each.parent) < number
            assert num_common(ids_of(each), ids_of(each.parent)) == each.start
    assert len({each.id for each in conversations}) == len(conversations)


@given(PROMPTS, PROMPTS)
def test_find_returns_the_conversation_of_an_id(cached: list[list[int]], tracked: list[list[int]]) -> None:
    listing = list_runs(runs_of(tree_of(cached)), map(track, tracked))
    for each in listing.conversations():
        found = listing.find(each.id)
        assert found is not None
        assert (found.salt, found.ids.tolist()) == (SALT, ids_of(each))
    assert listing.find("0" * 32) is None


@given(PROMPTS, PROMPTS)
def test_find_returns_a_conversation_in_memory_that_was_continued(
    cached: list[list[int]], others: list[list[int]]
) -> None:
    runs = runs_of(tree_of(cached))
    continued = list_runs(runs, map(track, [*([*ids, 7, 8] for ids in cached), *others]))
    for each in list_runs(runs).conversations():
        found = continued.find(each.id)
        assert found is not None
        assert found.ids.tolist() == ids_of(each)


@given(PROMPTS, PROMPTS)
def test_tracked_tokens_have_parts_only_where_a_tier_has_them(
    cached: list[list[int]], tracked: list[list[int]]
) -> None:
    tree = tree_of(cached)
    listing = list_runs(runs_of(tree), map(track, tracked))
    assert num_listed(listing) == tree.num_tokens
    (batch,) = listing.disk_batches()
    listing.record_on_disk(batch, [(TierRun(each.num_tokens, "planes:8", 100),) for each in batch])
    everything = tree_of([*cached, *tracked])
    computed = tree_of([*cached, *(ids[:-1] for ids in tracked if len(ids) > 1)])
    assert computed.num_tokens <= num_listed(listing) <= everything.num_tokens
    for each in listing.conversations():
        parts = listing.parts_of(each)
        assert sum(part.tokens for part in parts) == each.num_tokens - each.start
        assert [part.tier for part in parts] == sorted((part.tier for part in parts), reverse=True)  # memory first
        assert all(part.also == (("disk",) if part.tier == "hot" else ()) for part in parts)
    before = [each.id for each in listing.conversations()]
    listing.remove_unavailable()
    assert [each.id for each in listing.conversations()] == before


@given(
    st.integers(0, 6),
    st.integers(1, 6),
    st.integers(2, 8),
    *[st.integers(0, 14) for _ in range(3)],
    st.integers(0, 12),
)
def test_parts_of_a_conversation_equal_a_table_of_its_tokens(
    first: int, second: int, num_tracked: int, disk_middle: int, disk_end: int, shared_end: int, sent_end: int
) -> None:
    in_memory = first + second
    total = in_memory + num_tracked
    runs = [make_run(range(in_memory), precisions=[(first, "planes:4"), (in_memory, "raw")], shared_end=sent_end)]
    listing = list_runs(runs, [track(range(total))])
    on_disk = [TierRun(end, name, 0) for end, name in ((disk_middle, "planes:8"), (disk_end, "raw")) if end]
    on_disk = [run for run in on_disk if run.end <= disk_end]
    conversations = listing.conversations()
    listing.record_on_disk(conversations, [tuple(on_disk)])
    listing.record_in_shared(conversations, [shared_end], "planes:2")
    expected: list[tuple[str, str, tuple[str, ...]]] = []
    for at in range(total):
        if at < in_memory:
            copies = {"disk": at < disk_end, "remote": at < max(shared_end, sent_end)}
            also = tuple(tier for tier, has_copy in copies.items() if has_copy)
            expected.append(("hot", "planes:4" if at < first else "raw", also))
        elif at < disk_end:
            expected.append(("disk", next(run.precision for run in on_disk if at < run.end), ()))
        elif at < shared_end:
            expected.append(("remote", "planes:2", ()))
    parts = listing.parts_of(conversations[0])
    assert [(part.tier, part.k, part.also) for part in parts for _ in range(part.tokens)] == expected
    looks = [(part.tier, part.k, part.also) for part in parts]
    assert all(one != other for one, other in pairwise(looks))


@given(PROMPTS, PROMPTS, st.randoms(use_true_random=False))
def test_listing_does_not_depend_on_the_order_of_tracked_conversations(
    cached: list[list[int]], tracked: list[list[int]], choose: random.Random
) -> None:
    # None is the beginning of another one, because the last token of a tracked conversation may be left out.
    conversations = [
        track([*ids, 10 + number, 10 + number], f"session {number}", number) for number, ids in enumerate(tracked)
    ]
    runs = runs_of(tree_of(cached))
    listed = [describe(list_runs(runs, conversations))]
    choose.shuffle(conversations)
    listed.append(describe(list_runs(runs, conversations)))
    assert listed[0] == listed[1]


def describe(listing: ConversationListing) -> list[object]:
    """Return all values of a listing, as if the disk had all tokens."""
    batches = listing.disk_batches()
    for batch in batches:
        listing.record_on_disk(batch, [(TierRun(each.num_tokens, "planes:8", 1000),) for each in batch])
    order = [each.id for batch in batches for each in batch]
    return [
        order,
        *(
            (each.id, each.parent and each.parent.id, each.start, each.session, each.unused_s, listing.parts_of(each))
            for each in listing.conversations()
        ),
    ]


def test_siblings_are_sorted_by_last_use_with_superseded_ones_last() -> None:
    runs = [
        make_run([1, 2]),
        make_run([3], 0, 2, unused_s=1.0),
        make_run([4], 0, 2, unused_s=3.0, is_superseded=True),
        make_run([5], 0, 2, unused_s=2.0),
        make_run([6], unused_s=5.0),
        make_run([7], unused_s=0.5),
    ]
    listing = list_runs(runs)
    assert list(map(ids_of, listing.conversations())) == [[6], [1, 2, 5], [1, 2, 3], [1, 2, 4], [7]]
    assert [each.start for each in listing.conversations()] == [0, 0, 2, 2, 0]
    assert [ids_of(each)[-1] for each in listing.disk_batches()[0]] == [7, 3, 5, 4, 6]


def test_remove_unavailable_keeps_memory_and_tiers_only() -> None:
    listing = list_runs(
        runs_of(tree_of([[1, 2, 3, 4]])),
        [track([1, 2, 9, 9, 9, 9], "lost"), track([1, 2, 3, 4, 5, 5, 5], "shared")],
    )
    assert [each.start for each in listing.conversations()] == [0, 2]
    batch = listing.shared_batch()
    assert {each.session for each in batch} == {"lost", "shared"}
    listing.record_in_shared(batch, [6 if each.session == "shared" else 0 for each in batch], "planes:4")
    listing.remove_unavailable()
    (left,) = listing.conversations()
    assert left.session == "shared"
    assert [(part.tokens, part.tier, part.k) for part in listing.parts_of(left)] == [
        (4, "hot", "planes:2"), (2, "remote", "planes:4"),
    ]  # fmt: skip


def test_tracked_conversation_that_adds_its_last_token_only_is_not_inserted() -> None:
    runs = runs_of(tree_of([[1, 2, 3, 4]]))
    listing = list_runs(runs, [track([1, 2, 3, 4, 5]), track([1, 2, 5]), track([9]), track([])])
    assert list(map(ids_of, listing.conversations())) == [[1, 2, 3, 4]]
    assert list(map(ids_of, list_runs(runs, [track([1, 2, 5, 5])]).conversations())) == [[1, 2, 3, 4], [1, 2, 5, 5]]


def test_runs_that_changed_between_two_slices_are_left_out() -> None:
    begin = make_run([1, 2])
    without_parent = make_run([4], None, 2)
    after_removed = [make_run([]), make_run([5], 0)]
    moved = make_run([6], 0, 1)
    merged = make_run([1, 2, 7])
    for runs in ([begin, without_parent], [begin, moved], [begin, merged], [*after_removed, begin]):
        (conversation,) = list_runs(runs).conversations()
        assert ids_of(conversation) == [1, 2]


def test_id_is_a_stable_digest_of_salt_and_tokens() -> None:
    ids = {salt: list_runs([], [track([1, 2, 3], salt=salt)]).conversations()[0].id for salt in ("a", "b", "\ud800")}
    assert len(set(ids.values())) == 3
    assert ids["a"] == "b5a5d2a24834414dc462c587927b6869"  # clients may have noted it
    split = list_runs([], [track([1, 2, 3], salt="a"), track([1, 2, 4, 4], salt="a")])
    assert ids["a"] in {each.id for each in split.conversations()}


def test_disk_batches_are_bounded_and_begin_with_the_last_used() -> None:
    size = MAX_LOOKUP_TOKENS * 2 // 3
    listing = list_runs([], [track([number] * size, unused_s=number) for number in range(6)])
    batches = listing.disk_batches()
    assert [len(batch) for batch in batches] == [1] * (-(-MAX_LISTING_LOOKUP_TOKENS // size))
    assert [batch[0].unused_s for batch in batches] == list(range(len(batches)))


def test_shared_batch_is_bounded_and_has_conversations_that_memory_and_disk_lack() -> None:
    tracked = [track([number] * 8, unused_s=-number) for number in range(MAX_SHARED_LOOKUPS + 4)]
    listing = list_runs([make_run([200, 201], unused_s=-100.0)], tracked)
    (batch,) = listing.disk_batches()
    assert len(batch) == MAX_SHARED_LOOKUPS + 5
    # The last token of a tracked conversation is never computed.
    on_disk = [(), (TierRun(7, "raw", 0),), (TierRun(8, "raw", 0),), (TierRun(6, "raw", 0),)]
    listing.record_on_disk(batch, on_disk)
    assert [each.id for each in listing.shared_batch()] == [each.id for each in batch[3:-2]]
