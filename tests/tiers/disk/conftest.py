"""A disk tier in a folder of its own, on a filesystem with fault injection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.tiers.disk.tier import DiskTier
from tests.tiers.disk.blocks import open_tier
from tests.tiers.disk.faults import FaultyFiles


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def tier(tmp_path: Path, files: FaultyFiles) -> Iterator[DiskTier]:
    tier = open_tier(tmp_path / "cache", files=files)
    yield tier
    files.before = {}
    tier.close()
