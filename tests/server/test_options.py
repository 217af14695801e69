"""Settings become what the engine is made with."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from kvstrata.config import Settings
from kvstrata.engine.config import EngineLimits
from kvstrata.platform.device import Device
from kvstrata.server.http.body_limit import HttpLimits
from kvstrata.server.options import memory_limit_bytes, server_options
from kvstrata.sizes import Size

GIB = 1 << 30
MACHINE = Device("cpu", "x", 64 * GIB, 2, 64 * GIB)
# As a Mac with 16 GB: Metal recommends two thirds of it.
MAC = Device("metal", "Apple M2", 16 * GIB, 8, int(10.7 * GIB))


def test_a_share_of_the_memory_is_at_most_what_metal_recommends() -> None:
    assert memory_limit_bytes(Settings(), MACHINE) == 48 * GIB
    assert memory_limit_bytes(Settings(), MAC) == MAC.working_set_bytes
    assert memory_limit_bytes(Settings(memory_limit=Size(percent=50.0)), MAC) == 8 * GIB
    # A user who gives a number means it.
    assert memory_limit_bytes(Settings(memory_limit=Size(num_bytes=14 * GIB)), MAC) == 14 * GIB


def test_waiting_requests_follow_from_running_ones() -> None:
    assert server_options(Settings(), MACHINE).engine == EngineLimits(memory_bytes=48 * GIB)
    engine = server_options(Settings(max_num_seqs=3), MACHINE).engine
    assert (engine.max_running, engine.max_waiting) == (3, 48)


@pytest.mark.parametrize(("max_files", "connections"), [(resource.RLIM_INFINITY, 512), (704, 512), (256, 64), (100, 1)])
def test_connections_leave_open_files_to_others(
    max_files: int, connections: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (max_files, max_files))
    assert server_options(Settings(), MACHINE).http.max_connections == connections
    assert ("ulimit -n 704" in caplog.text) == (connections < 512)


def test_options_have_the_constants_of_their_dataclasses(tmp_path: Path) -> None:
    options = server_options(Settings(disk_cache_dir=tmp_path), MAC)
    engine, cache, disk, http = options.engine, options.cache, options.tiers.disk, options.http
    assert disk is not None
    assert (engine.wired_bytes, engine.buffer_step_tokens, engine.slice_s) == (0, 2048, 0.005)
    assert (disk.reserve_bytes, disk.queue_bytes, disk.wait_s, cache.archives_planes) == (1 << 30, 256 << 20, 5, True)
    assert (cache.first_raw_tokens, cache.recent_raw_tokens) == (4, 128)
    assert (cache.max_checkpoints, cache.checkpoint_every_tokens) == (8, 4096)
    assert (http.max_body_bytes, http.body_timeout_s) == (32 << 20, 30)
    assert http.body_memory_bytes == HttpLimits().body_memory_bytes
    assert (http.max_header_bytes, http.header_timeout_s, http.send_timeout_s) == (32 << 10, 20, 60)
