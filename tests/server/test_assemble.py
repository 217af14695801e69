"""Settings become what the engine is made with."""

from __future__ import annotations

from kvstrata.config import Settings
from kvstrata.server.assemble import _limits


def test_the_time_for_chores_is_a_setting() -> None:
    assert _limits(Settings(), 1 << 30).slice_s == 0.005
    assert _limits(Settings(cache_slice_ms=2), 1 << 30).slice_s == 0.002
