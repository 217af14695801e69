"""Turns of conversations through the engine: their beginning, their end, and a failed forward pass between them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstrata.engine.cache_api import PromptDivergence, as_ids
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.request import Failed, PrefillProgress, Request
from tests.engine.drive import Client, Drive
from tests.engine.test_engine import GREEDY, Brittle, Reply, running
from tests.engine.test_loop import prompt
from tests.support.models import FOREIGN, tiny_loaded, tiny_module

CHAT = prompt(80)


def submit(drive: Drive, tokens: list[int], max_tokens: int = 20, **fields: object) -> Client:
    return drive.submit(tokens, max_tokens, GREEDY, session="one", conversation_digest=b"chat", **fields)


def tracked(drive: Drive) -> list[list[int]]:
    return [each.ids.tolist() for each in drive.prefix_cache.conversations.conversations_of("", "one")]


def superseded_tokens(core: EngineCore) -> int:
    return sum(node.num_tokens for node in core.prefix_cache.candidates.superseded())


def first_divergence(client: Client) -> PromptDivergence | None:
    first = client.events[0]
    assert isinstance(first, PrefillProgress)
    return first.divergence


@pytest.mark.parametrize("architecture", ["llama", FOREIGN])
def test_first_event_reports_divergence_from_last_turn(architecture: str) -> None:
    drive = Drive(tiny_loaded(architecture))
    first = submit(drive, CHAT)
    drive.run()
    assert first_divergence(first) is None
    assert tracked(drive) == [[*CHAT, *first.finished.ids]]
    changed = submit(drive, [*CHAT[:50], CHAT[50] + 1, *CHAT[51:]])
    drive.run()
    divergence = first_divergence(changed)
    assert divergence is not None
    assert (divergence.at, divergence.where, divergence.was[0]) == (50, "prompt", CHAT[50])


def test_cancelled_request_ends_its_turn() -> None:
    drive = Drive(tiny_loaded("llama"))
    client = submit(drive, CHAT, 100)
    while len(client.ids) < 10:
        drive.core.executor.step()
    drive.core.executor.end_request(client.request.id)
    (ids,) = tracked(drive)
    assert ids[: len(CHAT)] == CHAT
    assert len(ids) >= len(CHAT) + 10
    submit(drive, [*CHAT, ids[len(CHAT)] + 1])
    drive.core.executor.step()
    assert superseded_tokens(drive.core) >= 9


def test_request_that_never_started_leaves_no_trace() -> None:
    drive = Drive(tiny_loaded("llama"), EngineLimits(max_running=1))
    drive.submit(prompt(20, seed=5), 50)
    drive.core.executor.step()
    client = submit(drive, CHAT)
    drive.core.executor.end_request(client.request.id)
    assert tracked(drive) == []


def test_only_the_first_choice_is_a_turn() -> None:
    drive = Drive(tiny_loaded("llama"), EngineLimits(max_running=1))
    first = submit(drive, CHAT)
    other = submit(drive, CHAT, 25, is_first_choice=False)
    drive.run()
    assert tracked(drive) == [[*CHAT, *first.finished.ids]]
    assert first_divergence(other) is None
    assert superseded_tokens(drive.core) == 0  # the second choice began when the first one had ended


def test_preempted_request_ends_one_turn() -> None:
    loaded = tiny_loaded("llama")
    # Memory for both to begin, not for both to end.
    kv_bytes = 150 * Drive(loaded).budget.token_bytes
    drive = Drive(loaded, EngineLimits(buffer_step_tokens=16), kv_bytes=kv_bytes)
    clients = [
        drive.submit(prompt(30, seed=seed), 70, GREEDY, session="one", conversation_digest=bytes([seed]))
        for seed in (1, 2)
    ]
    drive.run()
    assert drive.num_preempted() >= 1
    expected = [[*client.request.prompt, *client.finished.ids] for client in clients]
    assert sorted(tracked(drive)) == sorted(expected)


def test_conversations_survive_a_failed_forward_pass() -> None:
    loaded = replace(tiny_loaded("llama"), module=Brittle(tiny_module("llama")))
    with running(loaded) as engine:

        def serve(id_: str, tokens: list[int]) -> tuple[int, ...]:
            asked = Request(id_, tuple(tokens), 20, GREEDY, session="one", conversation_digest=b"chat")
            engine.submit(asked, (reply := Reply()).sink)
            ended = reply.wait()
            return () if isinstance(ended, Failed) else ended.ids

        chat = [token % 70 for token in CHAT]
        first = serve("first", chat)
        assert serve("bad", [77, 1, 2]) == ()
        assert engine.ask(lambda core: len(core.prefix_cache.table.entries)).result(60) == 0
        before = engine.ask_cache(lambda cache: cache.longest_conversation("", "one")).result(60)
        assert before is not None
        assert before.ids.tolist() == [*chat, *first]
        # The new core supersedes as the old one did, and from where the conversation began.
        again = serve("again", [*chat, *first, 5])
        other = [*chat, first[0] + 1]
        changed = engine.ask_cache(lambda cache: cache.divergence("", "one", b"chat", as_ids(other))).result(60)
        assert changed is not None
        assert (changed.at, changed.where) == (len(chat), "prompt")
        assert engine.ask(superseded_tokens).result(60) == 0
        serve("other", other)
        assert engine.ask(superseded_tokens).result(60) == len([*first, 5, *again]) - 1


def test_resting_engine_forgets_conversations_after_the_ttl() -> None:
    drive = Drive(tiny_loaded("llama"), storage=KvConfig(ttl_s=1e-6))
    submit(drive, CHAT)
    drive.run()
    assert len(drive.prefix_cache.conversations) == 1
    assert drive.core.pacer.seconds_to_expiry() == 0
    drive.core.pacer.expire()
    assert len(drive.prefix_cache.conversations) == 0


def test_clear_forgets_conversations_unless_only_the_disk_is_cleared() -> None:
    drive = Drive(tiny_loaded("llama"))
    submit(drive, CHAT)
    drive.run()
    drive.cache.clear("other", "hot", owner=None)
    assert len(tracked(drive)) == 1
    drive.cache.clear("", "hot", owner=None)
    assert tracked(drive) == []
