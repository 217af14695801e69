"""Memory account: growth of running sequences."""

from __future__ import annotations

from kvstrata.engine.config import EngineLimits
from tests.engine.drive import Drive
from tests.tiny import tiny_loaded

PROMPT = [5, 6, 7, 8] * 10


def test_sequence_with_sufficient_buffer_has_no_growth() -> None:
    drive = Drive(tiny_loaded("llama"))
    drive.submit(PROMPT, 4)
    while not drive.loop.memory.running_bytes:
        drive.loop.executor.step()
    assert drive.loop.memory.largest_growth_bytes() == 0
    drive.run()


def test_sequence_that_outgrows_its_buffer_has_growth() -> None:
    drive = Drive(tiny_loaded("llama"), EngineLimits(buffer_step_tokens=256))
    drive.submit(PROMPT, 2000)
    while not drive.loop.memory.running_bytes:
        drive.loop.executor.step()
    assert drive.loop.memory.largest_growth_bytes() > 0
