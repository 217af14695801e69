"""A folder written by format version 1: every block is found, with and without its catalogue."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvstrata.tiers.block import CHECKPOINT, Block
from tests.tiers.disk.blocks import OTHER_ROOT, is_same, make_chain, open_tier, read_now

GOLDEN = Path(__file__).parent / "golden" / "folder-1.tar.xz"


def golden_blocks() -> list[Block]:
    chains = [*make_chain(5), *make_chain(3, seed=1, root=OTHER_ROOT)]
    return [*chains, replace(chains[2], description={}, part=CHECKPOINT)]


def unpack(folder: Path) -> Path:
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(folder, filter="data")
    folder.chmod(0o700)
    return folder


@pytest.mark.parametrize("has_catalogue", [True, False])
def test_golden_folder_has_every_block(has_catalogue: bool, tmp_path: Path) -> None:
    folder = unpack(tmp_path / "cache")
    if not has_catalogue:
        (folder / "catalogue.sqlite").unlink()
    tier = open_tier(folder)
    assert tier.flush(20).is_empty
    assert tier.usage().num_blocks == len({block.key for block in golden_blocks()})
    for block in golden_blocks():
        assert is_same(read_now(tier, block.id, root=block.root), block)
    tier.close()
