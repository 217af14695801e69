"""Folders of a cache, and folders of other programs, which are refused and left unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.errors import ConfigError
from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.block import Block
from kvstrata.tiers.disk.inspect import collect_garbage, find_garbage, list_blocks, verify
from tests.tiers.disk.blocks import ROOT, is_same, make_block, make_chain, open_tier, read_now


def contents_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else b"a folder"
        for path in sorted(directory.rglob("*"))
    }


def make_home(directory: Path) -> None:
    (directory / "tmp").mkdir()
    (directory / "tmp" / "thesis.tex").write_text("years of work")
    (directory / "tmp" / "7.tmp").write_text("somebody's")
    (directory / "notes").write_text("mine")


def make_same_names(directory: Path) -> None:
    for name in ("tmp", "quarantine", "blocks"):
        (directory / name).mkdir()
        for number in range(40):
            (directory / name / f"sample{number}").write_text("mine")
    (directory / "lock").write_text("somebody else's")


def make_database(directory: Path) -> None:
    (directory / "catalogue.sqlite").write_text("of a library")
    (directory / "lock").write_text("1234\n")
    (directory / "books").mkdir()


def make_tmp_folder(directory: Path) -> None:
    (directory / "tmp").mkdir()
    (directory / "tmp" / "thesis.tex").write_text("years of work")


OTHERS: list[Callable[[Path], None]] = [make_home, make_same_names, make_database, make_tmp_folder]


@pytest.mark.parametrize("others", OTHERS)
def test_folder_of_another_program_is_refused_and_unchanged(tmp_path: Path, others: Callable[[Path], None]) -> None:
    others(tmp_path)
    before = contents_of(tmp_path)
    with pytest.raises(ConfigError, match=r"holds other things than a disk cache.*an empty or a new folder"):
        open_tier(tmp_path)
    for look in (collect_garbage, find_garbage, list_blocks, lambda path: verify(path, chain=chain)):
        with pytest.raises(ConfigError, match="holds other things"):
            look(tmp_path)
    assert contents_of(tmp_path) == before


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    directory = tmp_path / "cache"
    write(directory, make_block())
    return directory


def write(directory: Path, block: Block) -> None:
    tier = open_tier(directory)
    tier.put(block)
    assert tier.flush(10).is_empty
    tier.close()


@pytest.mark.parametrize("lost", [["catalogue.sqlite"], ["lock"], ["lock", "catalogue.sqlite"]])
def test_folder_without_lock_or_catalogue_is_still_a_cache(cache: Path, lost: list[str]) -> None:
    for name in lost:
        (cache / name).unlink()
    (cache / "README").write_text("put here by somebody")
    tier = open_tier(cache)
    assert is_same(read_now(tier, make_block().id, root=ROOT), make_block())
    tier.close()
    assert collect_garbage(cache).paths() == ()
    assert (cache / "README").exists()


def test_folder_with_system_files_only_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "volume" / "lost+found").mkdir(parents=True)
    (tmp_path / "volume" / ".DS_Store").touch()
    open_tier(tmp_path / "volume").close()


@pytest.mark.parametrize("left", [["lock"], ["lock", "blocks"], ["lock", "blocks", "tmp", "quarantine", ".DS_Store"]])
def test_folder_of_an_interrupted_first_start_is_accepted(tmp_path: Path, left: list[str]) -> None:
    for name in left:
        path = tmp_path / name
        path.touch() if name in ("lock", ".DS_Store") else path.mkdir()
    write(tmp_path, make_block())
    assert len(list_blocks(tmp_path).rows) == 1


def test_start_and_gc_delete_only_files_with_names_of_the_cache(cache: Path) -> None:
    name = f"{bytes(32).hex()}.base.safetensors"
    others = [cache / "tmp" / "thesis.tex", cache / "tmp" / "7.tmp.bak", cache / "quarantine" / f"{name}.mine"]
    others += [cache / "quarantine" / f"sample{number}" for number in range(40)]
    for path in others:
        path.write_text("mine")
    ours = [cache / "tmp" / "7.tmp", cache / "quarantine" / f"{name}.tensor"]
    for path in ours:
        path.write_text("left")
    tier = open_tier(cache)
    assert tier.flush(10).is_empty
    assert tier.quarantined_keys == {bytes(32)}
    tier.close()
    assert not ours[0].exists()
    ours[0].write_text("left")
    assert collect_garbage(cache).paths() == tuple(ours)
    assert not any(path.exists() for path in ours)
    assert all(path.exists() for path in others)


def test_start_with_folders_and_links_in_tmp_and_quarantine_succeeds(cache: Path) -> None:
    damaged = f"{bytes(32).hex()}.base.safetensors.tensor"
    (cache / "tmp" / "1.tmp").mkdir()
    (cache / "tmp" / "2.tmp").symlink_to(cache / "nowhere")
    (cache / "quarantine" / damaged).symlink_to(cache / "nowhere")
    (cache / "quarantine" / "folder").mkdir()
    write(cache, make_block(1))
    assert find_garbage(cache).paths() == ()
    assert collect_garbage(cache).paths() == ()
    assert (cache / "quarantine" / damaged).is_symlink()


@pytest.mark.parametrize("name", ["lock", "blocks", "tmp", "quarantine", "catalogue.sqlite", "catalogue.sqlite-wal"])
def test_link_inside_the_folder_is_refused_and_not_followed(cache: Path, tmp_path: Path, name: str) -> None:
    if (cache / name).exists():
        (cache / name).rename(cache / "aside")
    target = tmp_path / "target"
    if name in ("blocks", "tmp", "quarantine"):
        target.mkdir()
        (target / "1.tmp").write_text("precious")
    else:
        target.write_text("precious")
    (cache / name).symlink_to(target)
    before = contents_of(tmp_path)
    with pytest.raises(ConfigError, match=rf"{name} is a link.*Remove it"):
        open_tier(cache)
    with pytest.raises(ConfigError, match="is a link"):
        collect_garbage(cache)
    assert contents_of(tmp_path) == before


def test_link_to_the_folder_itself_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "volume")
    write(tmp_path / "cache", make_block())
    assert len(list_blocks(tmp_path / "volume").rows) == 1


def test_shard_behind_a_link_is_not_listed_or_changed(cache: Path, tmp_path: Path) -> None:
    shard = next((cache / "blocks").iterdir())
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    assert list_blocks(cache).rows == ()
    tier = open_tier(cache)
    assert tier.flush(10).is_empty
    assert tier.usage().num_blocks == 0
    tier.put(make_chain(1)[0])
    assert tier.flush(10).is_empty
    tier.close()
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1
