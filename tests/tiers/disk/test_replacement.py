"""Replacing a block: whichever step fails, the file on the disk is counted and served."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvstrata.tiers.block import Block
from kvstrata.tiers.interface import Accepted
from tests.tiers.disk.blocks import ROOT, is_same, make_block, make_chain, open_tier, path_of, read_now, real_bytes
from tests.tiers.disk.faults import FaultyFiles, fail


def larger(block: Block) -> Block:
    """Return a block of the same tokens with more bytes."""
    return Block(
        block.key, block.parent, block.root, block.start, block.token_ids, make_block(5, num_values=9000).tensors, {}
    )


@pytest.mark.parametrize("step", ["create", "write", "sync", "rename", "sync_folder"])
def test_replacement_failing_at_any_step_keeps_usage_and_reads_true(tmp_path: Path, step: str) -> None:
    files = FaultyFiles()
    tier = open_tier(tmp_path / "cache", files=files)
    old, child = make_chain(2)
    new = larger(old)
    for block in (old, child):
        tier.put(block)
    assert tier.flush(10).is_empty
    files.before = {step: fail(errno.EIO)}
    assert tier.put(new, replace=True) == Accepted()
    assert tier.flush(10).is_empty
    there = new if step == "sync_folder" else old
    usage = tier.usage()
    assert usage.num_blocks == 2
    assert usage.disk_bytes == real_bytes(tmp_path / "cache")
    assert tier.blocks.find(old.key)
    assert is_same(read_now(tier, old.id, root=ROOT), there)
    files.before = {}
    tier.close()
    tier = open_tier(tmp_path / "cache", files=files)
    assert tier.blocks.find(old.key)
    assert tier.flush(10).is_empty
    assert tier.usage().disk_bytes == real_bytes(tmp_path / "cache")
    assert is_same(read_now(tier, old.id, root=ROOT), there)
    assert tier.put(new, replace=True) == Accepted()
    assert tier.flush(10).is_empty
    assert is_same(read_now(tier, old.id, root=ROOT), new)
    assert tier.usage().disk_bytes == real_bytes(tmp_path / "cache")
    tier.close()


def test_replacement_of_a_cleared_block_that_fails_stays_cleared(tmp_path: Path) -> None:
    """The old file still exists and must not be served after a restart."""

    class NoNewBlocks(FaultyFiles):
        def rename(self, source: Path, target: Path) -> None:
            if target.suffix == ".safetensors":
                fail(errno.EIO)()
            super().rename(source, target)

    files: FaultyFiles = NoNewBlocks()
    tier = open_tier(tmp_path / "cache")
    block = make_block()
    tier.put(block)
    assert tier.flush(10).is_empty
    tier.close()
    tier = open_tier(tmp_path / "cache", files=files, first_pause_s=60)
    assert tier.flush(10).is_empty
    files.before = {"unlink": fail(errno.EPERM)}
    tier.clear()
    tier.put(block)
    tier.flush(10)
    assert not tier.blocks.find(block.key)
    assert path_of(tmp_path / "cache", block).exists()
    assert tier.usage().leaving_bytes > 0
    tier.close()
    tier = open_tier(tmp_path / "cache")
    assert not tier.blocks.find(block.key)
    assert tier.flush(10).is_empty
    assert not path_of(tmp_path / "cache", block).exists()
    tier.close()
