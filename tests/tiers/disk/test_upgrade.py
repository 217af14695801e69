"""Folders of other versions: blocks are read, or removed with one line in the log."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from kvstrata.tiers.block import Block
from kvstrata.tiers.block_file import FORMAT_VERSION
from kvstrata.tiers.disk.catalogue import BLOCK_FORMAT
from tests.tiers.disk.blocks import (
    ROOT,
    delete_catalogue,
    is_same,
    make_block,
    make_chain,
    open_tier,
    path_of,
    put_all,
    read_now,
    real_bytes,
    records_of,
)
from tests.tiers.disk.faults import FaultyFiles


def write_used_blocks(directory: Path, num_blocks: int = 6) -> list[Block]:
    """Write blocks at time 1000; block number n has n uses."""
    blocks = make_chain(num_blocks)
    tier = open_tier(directory, clock=lambda: 1000.0)
    put_all(tier, blocks)
    for number, block in enumerate(blocks):
        for _ in range(number):
            tier.touch([block.id])
    tier.close()
    return blocks


def uses(directory: Path, files: FaultyFiles | None = None, **settings) -> list[tuple[int, float]]:
    tier = open_tier(directory, files=files, **settings)
    assert tier.flush(20).is_empty
    assert tier.usage().disk_bytes == real_bytes(directory)
    found = [(row.uses, row.last_use) for row in records_of(tier)]
    tier.close()
    return found


def test_catalogue_of_another_schema_is_rebuilt_from_the_headers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Counts of uses are lost; the times of the files stand for the last uses."""
    directory = tmp_path / "cache"
    blocks = write_used_blocks(directory)
    with sqlite3.connect(directory / "catalogue.sqlite") as connection:
        connection.execute("PRAGMA user_version = 3")
    connection.close()
    files = FaultyFiles()
    caplog.set_level("INFO")
    assert uses(directory, files) == [(0, 1000.0)] * 6
    assert files.steps.count("open") == 6
    assert caplog.text.count("catalogue is rebuilt from the blocks: its schema is 3") == 1
    files = FaultyFiles()
    assert uses(directory, files) == [(0, 1000.0)] * 6
    assert "open" not in files.steps
    tier = open_tier(directory)
    assert all(is_same(read_now(tier, block.id, root=ROOT), block) for block in blocks)
    assert tier.usage().counters["failed"] == {}
    tier.close()


def set_format(path: Path, version: str) -> int:
    path.write_bytes(path.read_bytes().replace(b"kvstrata.block.1", f"kvstrata.block.{version}".encode(), 1))
    return path.stat().st_blocks * 512


@pytest.mark.parametrize("is_catalogue_lost", [False, True])
@pytest.mark.parametrize("version", ["0", "2", "x"])
def test_blocks_of_another_format_are_removed_with_one_line(
    tmp_path: Path, version: str, is_catalogue_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "cache"
    blocks = write_used_blocks(directory)
    num_bytes = sum(set_format(path_of(directory, block), version) for block in blocks[3:])
    if is_catalogue_lost:
        delete_catalogue(directory)
    else:
        with sqlite3.connect(directory / "catalogue.sqlite") as connection:
            connection.execute("UPDATE properties SET value = 0 WHERE name = ?", (BLOCK_FORMAT,))
        connection.close()
    tier = open_tier(directory)
    assert tier.flush(20).is_empty
    assert [bool(tier.blocks.find(block.key)) for block in blocks] == [True] * 3 + [False] * 3
    assert [path_of(directory, block).exists() for block in blocks] == [True] * 3 + [False] * 3
    assert all(is_same(read_now(tier, block.id, root=ROOT), block) for block in blocks[:3])
    usage = tier.usage()
    assert usage.counters["evicted"] == {"outdated": 3}
    assert usage.counters["quarantined"] == {}
    assert usage.disk_bytes == real_bytes(directory)
    tier.close()
    lines = [record.getMessage() for record in caplog.records if "another version" in record.getMessage()]
    said = "unknown" if version == "x" else version
    assert lines == [
        f"Removed 3 blocks of the disk cache ({num_bytes / 2**20:.1f} MiB): another version of kvstrata wrote them "
        f"(format {said}), and this one reads format {FORMAT_VERSION}"
    ]
    # The line appears once.
    files = FaultyFiles()
    uses(directory, files)
    assert "open" not in files.steps


def test_upgrade_interrupted_keeps_readable_blocks(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    blocks = write_used_blocks(directory)
    for _ in range(2):
        with sqlite3.connect(directory / "catalogue.sqlite") as connection:
            connection.execute("UPDATE properties SET value = 0 WHERE name = ?", (BLOCK_FORMAT,))
        connection.close()
        tier = open_tier(directory)  # and at once
        tier.close()
    assert uses(directory) == [(0, 1000.0)] * 6
    tier = open_tier(directory)
    assert all(tier.blocks.find(block.key) for block in blocks)
    tier.put(make_block(99))
    assert tier.flush(20).is_empty
    tier.close()
