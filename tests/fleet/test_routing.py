"""Requests go where their prefix is, unless that replica is full; and all that is remembered is bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.fleet import routing
from kvstrata.fleet.prompt_keys import PromptKeys, ReplicaSummary, keys_from_bytes
from kvstrata.fleet.routing import ReplicaReport, RoutedRequest, RoutingPolicy
from kvstrata.prefix_cache.keys import TokenIds

ROOT = bytes(32)


def prompt(seed: int, num_tokens: int) -> TokenIds:
    return np.random.default_rng(seed).integers(0, 1000, num_tokens).astype(np.int32)


def asked(ids: TokenIds, session: str = "") -> RoutedRequest:
    return RoutedRequest(len(ids), PromptKeys().of(ROOT, ids), session)


def fleet(*names: str, capacity: int = 8) -> RoutingPolicy:
    router = RoutingPolicy()
    for name in names:
        router.report(name, ReplicaReport(capacity=capacity))
    return router


def report_of(*prompts: TokenIds, capacity: int = 8) -> ReplicaReport:
    summary = ReplicaSummary()
    for ids in prompts:
        summary.stored(ROOT, ids, 0)
    return ReplicaReport(keys_from_bytes(summary.to_bytes()), capacity)


def sent(router: RoutingPolicy, request: RoutedRequest, now_s: float = 0.0) -> str:
    """One request that has ended."""
    choice = router.choose(request, now_s)
    assert choice is not None
    router.ended(choice.replica)
    return choice.replica


def test_a_request_goes_where_its_prefix_is() -> None:
    router = fleet("a", "b", "c")
    router.report("b", report_of(prompt(1, 600)))
    router.report("c", report_of(prompt(1, 600)[:300]))
    choice = router.choose(asked(np.concatenate([prompt(1, 600), prompt(2, 40)])), 0.0)
    assert choice is not None
    assert (choice.replica, choice.num_cached, choice.why) == ("b", 576, "prefix")


def test_a_full_replica_is_passed_over_while_another_is_free() -> None:
    router = fleet("a", "b", capacity=1)
    router.report("a", report_of(prompt(1, 2000), capacity=1))
    request = asked(prompt(1, 2000))
    assert [router.choose(request, 0.0).replica for _ in range(2)] == ["a", "b"]  # type: ignore[union-attr]
    assert router.choose(request, 0.0).replica == "a"  # type: ignore[union-attr]


def test_the_same_new_prefix_goes_to_one_replica() -> None:
    router = fleet("a", "b", "c")
    request = asked(prompt(3, 400))
    assert len({router.choose(request, 0.0).replica for _ in range(4)}) == 1  # type: ignore[union-attr]


def test_a_short_prefix_does_not_draw_all_requests_to_one_replica() -> None:
    router = fleet("a", "b")
    shared = prompt(1, 96)
    router.report("a", report_of(shared))
    chosen = [router.choose(asked(np.concatenate([shared, prompt(seed, 200)])), 0.0) for seed in range(2, 10)]
    assert {choice.replica for choice in chosen if choice} == {"a", "b"}


def test_a_system_prompt_that_all_begin_with_does_not_draw_new_conversations_to_one_replica() -> None:
    router = fleet("a", "b", "c", "d")
    system = prompt(1, 480)
    router.report("a", report_of(system))
    # One after the other, so that nobody is ever busy.
    chosen = [sent(router, asked(np.concatenate([system, prompt(seed, 3000)]))) for seed in range(2, 10)]
    assert sorted(chosen) == ["a", "a", "b", "b", "c", "c", "d", "d"]
    choice = router.choose(asked(np.concatenate([system, prompt(2, 3000), prompt(1, 200)])), 0.0)
    assert choice is not None
    assert (choice.replica, choice.why) == (chosen[0], "prefix")


def test_a_session_goes_where_it_was_though_its_keys_tell_nothing() -> None:
    router = fleet("a", "b", "c")
    first = sent(router, asked(prompt(1, 20), "s"))
    for seed in range(2, 7):
        sent(router, asked(prompt(seed, 20)))
    assert sent(router, asked(prompt(9, 30), "s")) == first
    router.keep([name for name in ("a", "b", "c") if name != first])
    assert sent(router, asked(prompt(9, 40), "s")) != first


def test_new_conversations_go_round() -> None:
    router = fleet("a", "b", "c")
    assert sorted(sent(router, asked(prompt(seed, 100))) for seed in range(6)) == ["a", "a", "b", "b", "c", "c"]


def test_what_was_only_expected_is_forgotten() -> None:
    router = fleet("a", "b")
    request = asked(prompt(1, 400))
    sent(router, request)
    later = routing.EXPECTED_S + 1
    choice = router.choose(request, later)
    assert choice is not None
    assert choice.num_cached == 0


def test_without_replicas_nothing_is_chosen() -> None:
    assert RoutingPolicy().choose(asked(prompt(1, 100)), 0.0) is None
    assert fleet("a").choose(asked(prompt(1, 100)), 0.0, among=["other"]) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 700), st.booleans()), max_size=60), st.data())
def test_counts_come_back_to_zero_and_no_replica_is_over_its_places(
    requests: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    router = fleet("a", "b", "c", capacity=3)
    running: list[str] = []
    for seed, num_tokens, ends in requests:
        choice = router.choose(asked(prompt(seed, num_tokens), str(seed)), 0.0)
        assert choice is not None
        assert 0 <= choice.num_cached <= num_tokens
        running.append(choice.replica)
        if len(running) <= 9:
            assert all(router.in_flight(name) <= 3 for name in router.replicas)
        if ends:
            router.ended(running.pop(data.draw(st.integers(0, len(running) - 1))))
    for replica in running:
        router.ended(replica)
    assert not any(router.in_flight(name) for name in router.replicas)


def test_all_that_is_remembered_is_bounded() -> None:
    router = fleet("a")
    for seed in range(300):
        sent(router, asked(prompt(seed, 4000), str(seed)))
    router._sessions._visits.clear()
    assert len(router._replicas["a"].expected._until_s) == routing.MAX_EXPECTED
    summary = ReplicaSummary(max_keys=100)
    for seed in range(50):
        summary.stored(ROOT, prompt(seed, 1000), 0)
    held = keys_from_bytes(summary.to_bytes())
    assert len(held) == 100
    assert {key for _, key in PromptKeys().of(ROOT, prompt(49, 1000))} <= held


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300), st.integers(0, 300)), max_size=40))
def test_a_summary_is_what_is_held(changes: list[tuple[int, int, int]]) -> None:
    """Prompts that share nothing: each is longer or shorter from change to change."""
    summary, lengths = ReplicaSummary(), dict.fromkeys(range(4), 0)
    for seed, first, second in changes:
        for num_tokens in (first, second):
            was, ids = lengths[seed], prompt(seed, 300)
            if num_tokens > was:
                summary.stored(ROOT, ids[:num_tokens], was)
            elif num_tokens < was:
                summary.removed(ROOT, ids[:was], num_tokens)
            lengths[seed] = num_tokens
    expected = {key for seed, length in lengths.items() for _, key in PromptKeys().of(ROOT, prompt(seed, 300)[:length])}
    assert keys_from_bytes(summary.to_bytes()) == expected


def test_an_unknown_replica_has_no_request_in_flight() -> None:
    assert RoutingPolicy().in_flight("nobody") == 0


def test_as_many_sessions_as_are_allowed_are_remembered_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_SESSIONS", 2)
    router = fleet("a", "b", "c")

    def why(session: str) -> str:
        choice = router.choose(RoutedRequest(20, (), session), 0.0)
        assert choice is not None
        router.ended(choice.replica)
        return choice.why

    assert [why("first"), why("second")] == ["load", "load"]
    assert why("first") == "session"
    assert why("third") == "load"
    assert why("second") == "load"  # it was used longest ago
