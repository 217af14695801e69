"""Settings become what the engine is made with."""

from __future__ import annotations

import dataclasses

import pytest

from kvstrata.config import Settings
from kvstrata.errors import ConfigError
from kvstrata.platform.device import Device
from kvstrata.server.options import memory_limit_bytes, server_options
from kvstrata.sizes import Size

GIB = 1 << 30
MACHINE = Device("cpu", "x", 64 * GIB, 2, 64 * GIB)
# As a Mac with 16 GB: Metal recommends two thirds of it.
MAC = Device("metal", "Apple M2", 16 * GIB, 8, int(10.7 * GIB))


def test_the_time_for_chores_is_a_setting() -> None:
    assert server_options(Settings(), MACHINE).engine.slice_s == 0.005
    assert server_options(Settings(cache_slice_ms=2), MACHINE).engine.slice_s == 0.002


def test_a_share_of_the_memory_is_at_most_what_metal_recommends() -> None:
    assert memory_limit_bytes(Settings(), MACHINE) == 48 * GIB
    assert memory_limit_bytes(Settings(), MAC) == MAC.working_set_bytes
    assert memory_limit_bytes(Settings(memory_limit=Size(percent=50.0)), MAC) == 8 * GIB
    # A user who gives a number means it.
    assert memory_limit_bytes(Settings(memory_limit=Size(num_bytes=14 * GIB)), MAC) == 14 * GIB


def test_memory_is_wired_only_when_asked_for_and_on_a_mac() -> None:
    assert server_options(Settings(), MAC).engine.wired_bytes == 0
    assert server_options(Settings(wired_limit=4 * GIB), MAC).engine.wired_bytes == 4 * GIB
    with pytest.raises(ConfigError, match="Metal recommends"):
        server_options(Settings(wired_limit=12 * GIB), MAC)
    with pytest.raises(ConfigError, match="is for Macs"):
        server_options(Settings(wired_limit=4 * GIB), dataclasses.replace(MAC, backend="cuda"))
