"""What sequences find in the store and leave there, through the loop."""

from __future__ import annotations

import pytest

from kvstrata.engine.limits import Limits, Storage
from tests.engine.drive import Client, Drive
from tests.engine.test_loop import prompt
from tests.tiny import tiny_loaded


def settle(drive: Drive) -> None:
    while drive.loop.has_chores:
        drive.loop.do_chores(1.0)


def test_a_long_chat_of_many_turns_has_few_spans() -> None:
    drive = Drive(tiny_loaded("llama"))
    tokens = prompt(60)
    for turn in range(20):
        client = drive.submit(tokens, 8)
        drive.run()
        settle(drive)
        # The last token of a reply is never computed, so it is not stored.
        assert client.finished.usage.cached_tokens == (len(tokens) - 7 - 1 if turn else 0)
        tokens = [*tokens, *client.ids, *prompt(7, seed=turn)]
    assert len(drive.store.entries) <= 9
    assert drive.store.held_bytes == pytest.approx(len(tokens) * drive.budget.token_bytes, rel=0.05)
