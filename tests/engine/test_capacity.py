"""The memory account: what those that run may still take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstrata.engine.budget import FULL_PRECISION, KvFormat
from kvstrata.engine.config import EngineLimits
from kvstrata.engine.request import Request
from kvstrata.engine.sequence import Sequence
from tests.engine.drive import GREEDY, Drive
from tests.tiny import tiny_loaded

PROMPT = [5, 6, 7, 8] * 10


def test_a_sequence_whose_buffer_holds_all_that_it_wants_takes_no_more() -> None:
    drive = Drive(tiny_loaded("llama"))
    drive.submit(PROMPT, 4)
    while not drive.loop.capacity.running_bytes:
        drive.loop.step()
    assert drive.loop.capacity.largest_growth_bytes() == 0
    drive.run()


def test_a_sequence_that_will_outgrow_its_buffer_is_counted() -> None:
    drive = Drive(tiny_loaded("llama"), EngineLimits(buffer_step_tokens=256))
    drive.submit(PROMPT, 2000)
    while not drive.loop.capacity.running_bytes:
        drive.loop.step()
    assert drive.loop.capacity.largest_growth_bytes() > 0


@pytest.mark.parametrize("kv_format", [FULL_PRECISION, KvFormat(None, 100.0, 512)], ids=["raw", "encoded"])
def test_a_sequence_that_is_alone_begins_with_what_there_is_and_no_more(kv_format: KvFormat) -> None:
    drive = Drive(tiny_loaded("llama"), EngineLimits(buffer_step_tokens=1 << 20))
    tokens_that_fit = 3000
    budget = replace(drive.budget, total_bytes=drive.budget.bytes_for(tokens_that_fit, kv_format))
    drive.loop.capacity.budget = budget
    sequence = Sequence(Request("r", tuple(PROMPT), 5000, GREEDY), lambda _: None, 5000, 0)
    sequence.kv_format = kv_format
    assert drive.loop.capacity.tokens_at_start(sequence, 0) == tokens_that_fit
