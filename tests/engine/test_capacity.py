"""The memory account: what those that run may still take."""

from __future__ import annotations

from kvstrata.engine.config import EngineLimits
from tests.engine.drive import Drive
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
