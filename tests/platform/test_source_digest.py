"""Digest of source code."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.platform.source_digest import source_digest


@pytest.mark.parametrize("name", ["module.py", "cpu/module.py", "cuda/source/body.cuh", "metal/source/body.h"])
def test_changed_source_in_any_folder_changes_the_digest(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("1")
    first = source_digest(tmp_path)
    path.write_text("2")
    source_digest.cache_clear()
    assert source_digest(tmp_path) != first


def test_compiled_files_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("1")
    first = source_digest(tmp_path)
    (tmp_path / "module.pyc").write_text("2")
    source_digest.cache_clear()
    assert source_digest(tmp_path) == first
