"""Memory account: growth of running sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstrata.engine.budget import FULL_PRECISION, KvFormat
from kvstrata.engine.config import EngineLimits
from kvstrata.engine.request import Request
from kvstrata.engine.sequence import Sequence
from tests.engine.drive import GREEDY, Drive
from tests.support.models import tiny_loaded

PROMPT = [5, 6, 7, 8] * 10


def test_sequence_with_sufficient_buffer_has_no_growth() -> None:
    drive = Drive(tiny_loaded("llama"))
    drive.submit(PROMPT, 4)
    while not drive.core.memory.running_bytes:
        drive.core.executor.step()
    assert drive.core.memory.largest_growth_bytes() == 0
    drive.run()


def test_sequence_that_outgrows_its_buffer_has_growth() -> None:
    drive = Drive(tiny_loaded("llama"), EngineLimits(buffer_step_tokens=256))
    drive.submit(PROMPT, 2000)
    while not drive.core.memory.running_bytes:
        drive.core.executor.step()
    assert drive.core.memory.largest_growth_bytes() > 0


@pytest.mark.parametrize("kv_format", [FULL_PRECISION, KvFormat(None, 100.0, 512)], ids=["raw", "encoded"])
def test_a_sequence_that_is_alone_begins_with_what_there_is_and_no_more(kv_format: KvFormat) -> None:
    drive = Drive(tiny_loaded("llama"), EngineLimits(buffer_step_tokens=1 << 20))
    tokens_that_fit = 3000
    budget = replace(drive.budget, total_bytes=drive.budget.bytes_for(tokens_that_fit, kv_format))
    drive.core.memory.budget = budget
    sequence = Sequence(Request("r", tuple(PROMPT), 5000, GREEDY), lambda _: None, 5000, 0)
    sequence.kv_format = kv_format
    assert drive.core.memory.tokens_at_start(sequence, 0) == tokens_that_fit
