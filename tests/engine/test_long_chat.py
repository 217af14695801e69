"""What the disk gets of a chat of many turns, and how an engine rests when it gets nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvstrata.engine.config import KvConfig
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.request import Request
from kvstrata.prefix_cache.transcode import MAX_SPANS
from kvstrata.tiers.interface import Usage
from tests.engine.drive import GREEDY
from tests.engine.test_disk import engine_on, flush_tier, settle
from tests.engine.test_engine import Reply
from tests.support.models import VOCAB, tiny_loaded

NUM_TURNS = 2 * MAX_SPANS


def disk_usage(core: EngineCore) -> Usage:
    return core.prefix_cache.disk.tier.usage()


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
def test_each_token_of_a_chat_is_written_once(architecture: str, tmp_path: Path) -> None:
    source = random.Random(0)
    ids: list[int] = []
    with engine_on(tmp_path, tiny_loaded(architecture), KvConfig()) as engine:
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


def test_an_idle_engine_rests_while_the_disk_takes_nothing(tmp_path: Path) -> None:
    loaded = tiny_loaded("llama", 4)
    with engine_on(tmp_path, loaded, KvConfig(hot_bytes=2000 * 1024), daily_write_bytes=1000) as engine:
        for turn in range(2):
            reply = Reply()
            prompt = tuple((i * (turn + 3) + turn) % VOCAB for i in range(800))
            engine.submit(Request(f"turn {turn}", prompt, 4, GREEDY), reply.sink)
            reply.wait()
        # Ends when there is nothing left to do.
        settle(engine)
        before = engine.ask(refused_spills).result(60)
        assert before > 0
        settle(engine)
        assert engine.ask(refused_spills).result(60) == before


def refused_spills(core: EngineCore) -> int:
    return core.prefix_cache.counters["refused_spills"]
