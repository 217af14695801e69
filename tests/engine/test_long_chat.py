"""A chat of many turns on the disk: what is written is what is new."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvstrata.engine.limits import Storage
from kvstrata.engine.loop import Loop
from kvstrata.engine.request import Request
from kvstrata.store.store import MAX_SPANS
from kvstrata.tiers.usage import Usage
from tests.engine.drive import GREEDY
from tests.engine.test_disk import engine_on, flush_tier, settle
from tests.engine.test_engine import Reply
from tests.tiny import VOCAB, tiny_loaded

NUM_TURNS = 2 * MAX_SPANS


def disk_usage(loop: Loop) -> Usage:
    assert loop.store is not None
    assert loop.store.cold is not None
    return loop.store.cold.tier.usage()


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
def test_each_token_of_a_chat_is_written_once(architecture: str, tmp_path: Path) -> None:
    source = random.Random(0)
    ids: list[int] = []
    with engine_on(tmp_path, tiny_loaded(architecture), Storage(write_through=True)) as engine:
        for turn in range(NUM_TURNS):
            ids += [source.randrange(VOCAB) for _ in range(30)]
            reply = Reply()
            engine.submit(Request(f"turn {turn}", tuple(ids), 4, GREEDY), reply.sink)
            reply.wait()
            ids += reply.ids
            settle(engine)
        assert engine.ask(flush_tier).result(60)
        # The last token of a reply is never computed.
        assert engine.ask(disk_usage).result(60).num_tokens == len(ids) - 1
