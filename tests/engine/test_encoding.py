"""A request waits until its prefix is encoded; streams do not wait."""

from __future__ import annotations

import pytest

from kvstrata.codecs.registry import parse
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.kv.span import Span
from kvstrata.kv.transcode import LayerTranscoder
from tests.engine.drive import Drive, do_one_step
from tests.engine.test_loop import prompt
from tests.engine.test_prefixes import cached, steady_loaded

CHAT_TOKENS = 1500
NUM_LAYERS = 2  # at least one small step of encoding each


def test_next_turn_waits_for_encoding_of_previous_one_while_stream_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = KvConfig(k=parse("planes:8"), v=parse("planes:8"))
    drive = Drive(steady_loaded("llama"), EngineLimits(prefill_chunk_tokens=256), storage=storage)
    do_one_step(drive.core.pacer)
    advance, num_advanced = LayerTranscoder.advance, 0

    def counting(self: LayerTranscoder, span: Span, *, upward: bool = False) -> bool:
        nonlocal num_advanced
        num_advanced += 1
        return advance(self, span, upward=upward)

    monkeypatch.setattr(LayerTranscoder, "advance", counting)
    stream, chat = drive.submit(prompt(20, seed=2), 1000), drive.submit(prompt(CHAT_TOKENS, seed=1), 2)
    while chat.end is None:
        drive.core.executor.step()
    turn = drive.submit([*chat.request.prompt, *chat.ids, *prompt(20, seed=3)], 2)
    num_waited, most_advanced = 0, 0
    while not turn.events:
        before, num_tokens = num_advanced, len(stream.ids)
        drive.core.executor.step()
        num_waited += 1
        most_advanced = max(most_advanced, num_advanced - before)
        assert turn.events or len(stream.ids) == num_tokens + 1
    assert most_advanced == 1
    assert num_waited > NUM_LAYERS
    assert set(drive.cache.usage().tiers["hot"].by_precision) == {"planes:8"}  # only the chat is cached yet
    drive.core.executor.end_request(stream.request.id)
    drive.run()
    assert cached(turn) == CHAT_TOKENS + 1
