"""List, verify and clean a folder without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.errors import CacheDirectoryBusy, ConfigError
from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.block import Block
from kvstrata.tiers.block_file import Damage
from kvstrata.tiers.disk.inspect import collect_garbage, find_garbage, list_blocks, orphans, verify
from tests.tiers.disk.blocks import ROOT, delete_catalogue, is_same, make_chain, open_tier, path_of, put_all, read_now
from tests.tiers.disk.faults import flip


@pytest.fixture
def blocks(tmp_path: Path) -> list[Block]:
    """A chain of five blocks, and another part of the first."""
    blocks = make_chain(5)
    first = blocks[0]
    blocks.append(Block(first.key, ROOT, ROOT, 0, first.token_ids, first.tensors, {}, part="mark"))
    tier = open_tier(tmp_path / "cache", clock=lambda: 1234.0)
    put_all(tier, blocks)
    read_now(tier, blocks[1].id, root=ROOT)
    tier.close()
    return blocks


def test_list_blocks_orders_records_and_reports_progress(tmp_path: Path, blocks: list[Block]) -> None:
    calls: list[tuple[int, int]] = []
    listing = list_blocks(tmp_path / "cache", progress=lambda done, total: calls.append((done, total)))
    assert [row.id for row in listing.rows] == [blocks[0].id, blocks[5].id, *(block.id for block in blocks[1:5])]
    assert [row.start for row in listing.rows] == [0, 0, 4, 8, 12, 16]
    assert {row.last_use for row in listing.rows} == {1234.0}
    assert [row.uses for row in listing.rows] == [0, 0, 1, 0, 0, 0]
    assert listing.disk_bytes == sum(path_of(tmp_path / "cache", block).stat().st_blocks * 512 for block in blocks)
    assert calls[-1] == (6, 6)


def test_list_and_verify_beside_a_running_tier_work_and_gc_is_refused(tmp_path: Path, blocks: list[Block]) -> None:
    delete_catalogue(tmp_path / "cache")
    assert len(list_blocks(tmp_path / "cache").rows) == 6
    tier = open_tier(tmp_path / "cache")
    assert len(list_blocks(tmp_path / "cache").rows) == 6
    assert verify(tmp_path / "cache", chain=chain).num_blocks == 6
    with pytest.raises(CacheDirectoryBusy):
        collect_garbage(tmp_path / "cache")
    assert is_same(read_now(tier, blocks[2].id, root=ROOT), blocks[2])
    tier.close()


def test_verify_damaged_folder_reports_each_damage_and_changes_nothing(tmp_path: Path, blocks: list[Block]) -> None:
    directory = tmp_path / "cache"
    flip(path_of(directory, blocks[1]), 4100)
    flip(path_of(directory, blocks[2]), 600)
    path_of(directory, blocks[3]).write_bytes(path_of(directory, blocks[4]).read_bytes())
    calls: list[tuple[int, int]] = []
    verified = verify(directory, chain=chain, progress=lambda done, total: calls.append((done, total)))
    assert verified.num_blocks == 3
    assert verified.num_bytes == sum(blocks[index].nbytes for index in (0, 4, 5))
    assert {entry.path: entry.reason for entry in verified.damaged} == {
        path_of(directory, blocks[1]): Damage.TENSOR,
        path_of(directory, blocks[2]): Damage.HEADER,
        path_of(directory, blocks[3]): Damage.KEY,
    }
    assert calls == [(number, 6) for number in range(1, 7)]
    assert all(path_of(directory, block).exists() for block in blocks)


def test_collect_garbage_deletes_what_find_garbage_reports_and_keeps_valid_blocks(
    tmp_path: Path, blocks: list[Block]
) -> None:
    directory = tmp_path / "cache"
    path_of(directory, blocks[2]).unlink()  # orphans 3 and 4
    other = path_of(directory, blocks[1])
    other.write_bytes(other.read_bytes().replace(b"kvstrata.block.1", b"kvstrata.block.9", 1))
    (directory / "tmp" / "7.tmp").write_bytes(bytes(5000))
    quarantined = directory / "quarantine" / f"{path_of(directory, blocks[2]).name}.tensor"
    quarantined.write_bytes(bytes(5000))
    garbage = find_garbage(directory)
    assert garbage.temporaries == (directory / "tmp" / "7.tmp",)
    assert garbage.quarantined == (quarantined,)
    assert garbage.damaged == (other,)
    assert set(garbage.orphans) == {path_of(directory, blocks[3]), path_of(directory, blocks[4])}
    assert garbage.freed_bytes == sum(path.stat().st_blocks * 512 for path in garbage.paths())
    assert all(path.exists() for path in garbage.paths())
    assert collect_garbage(directory) == garbage
    assert not any(path.exists() for path in garbage.paths())
    assert find_garbage(directory).paths() == ()
    tier = open_tier(directory)
    assert tier.flush(10).is_empty
    assert tier.usage().num_blocks == 1
    assert is_same(read_now(tier, blocks[0].id, root=ROOT), blocks[0])
    assert is_same(read_now(tier, blocks[5].id, root=ROOT), blocks[5])
    tier.close()


def test_orphans_missing_base_includes_its_parts_and_descendants(tmp_path: Path, blocks: list[Block]) -> None:
    path_of(tmp_path / "cache", blocks[0]).unlink()
    left = orphans(list_blocks(tmp_path / "cache").rows)
    assert set(left) == {block.id for block in blocks[1:]}


def test_inspect_missing_folder_is_refused_and_creates_nothing(tmp_path: Path) -> None:
    for look in (list_blocks, find_garbage, collect_garbage):
        with pytest.raises(ConfigError, match="no disk cache at"):
            look(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
