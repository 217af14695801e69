"""Pipes, sockets, links and folders under names of files are never opened; files of the cache are private."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvstrata.errors import ConfigError
from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.disk.errors import DiskFault, DropReason
from kvstrata.tiers.disk.filesystem import FileStatus, Filesystem
from kvstrata.tiers.disk.inspect import collect_garbage, find_garbage, list_blocks, verify
from kvstrata.tiers.interface import Accepted
from kvstrata.tiers.read_pool import LoadedBlock, MissingBlock
from tests.tiers.disk.blocks import (
    ROOT,
    delete_catalogue,
    is_same,
    make_chain,
    open_tier,
    path_of,
    put_all,
    read_now,
    real_bytes,
    write_blocks,
)
from tests.tiers.disk.faults import FaultyFiles, fail
from tests.tiers.timing import in_time

# More than a busy machine needs to start an interpreter. Opening a pipe would wait without end.
TIMEOUT_S = 120


def make_socket(path: Path) -> None:
    """Make a socket in its folder and rename it, because paths of sockets have a short limit."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("s")
    finally:
        os.chdir(before)
    (path.parent / "s").rename(path)


def make_link_to_pipe(path: Path) -> None:
    pipe = path.parent.parent.parent / "pipe"
    os.mkfifo(pipe)
    path.symlink_to(pipe)


FOREIGN_FILES: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": make_socket,
    "folder": os.mkdir,
    "link": make_link_to_pipe,
}


@pytest.fixture(params=FOREIGN_FILES)
def foreign_file(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list]:
    """A folder with three blocks, of which the second is replaced by something that is no plain file."""
    directory = tmp_path / "cache"
    blocks = make_chain(3)
    write_blocks(directory, blocks)
    path = path_of(directory, blocks[1])
    path.unlink()
    FOREIGN_FILES[request.param](path)
    return directory, blocks


def test_inspect_foreign_file_under_a_block_name_reports_it_without_hanging(foreign_file: tuple[Path, list]) -> None:
    directory, blocks = foreign_file
    path = path_of(directory, blocks[1])
    listing = in_time(lambda: list_blocks(directory))
    assert len(listing.rows) == 2
    assert [(unread.path, unread.reason) for unread in listing.unread] == [(path, DiskFault.NOT_A_FILE)]
    verified = in_time(lambda: verify(directory, chain=chain))
    assert verified.num_blocks == 2
    assert [unread.reason for unread in verified.unread] == [DiskFault.NOT_A_FILE]
    assert in_time(lambda: find_garbage(directory)).orphans == (path_of(directory, blocks[2]),)
    in_time(lambda: collect_garbage(directory))
    assert path.is_symlink() or path.exists()  # foreign files are kept


@pytest.mark.parametrize("command", ["ls", "verify", "gc"])
def test_cache_command_pipe_under_a_block_name_does_not_hang(tmp_path: Path, command: str) -> None:
    tier = open_tier(tmp_path / "cache")
    blocks = make_chain(2)
    put_all(tier, blocks)
    tier.close()
    path = path_of(tmp_path / "cache", blocks[1])
    path.unlink()
    os.mkfifo(path)
    done = subprocess.run(
        [sys.executable, "-c", "from kvstrata.cli import main; main()", "cache", command, str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == (0 if command == "gc" else 1), done.stderr
    assert "not_a_file" in done.stdout or command == "gc"


@pytest.mark.parametrize("is_catalogue_lost", [True, False])
def test_tier_foreign_file_under_a_block_name_is_a_miss(
    foreign_file: tuple[Path, list], is_catalogue_lost: bool
) -> None:
    directory, blocks = foreign_file
    if is_catalogue_lost:
        delete_catalogue(directory)
    tier = in_time(lambda: open_tier(directory))
    assert tier.flush(20).is_empty
    assert bool(tier.blocks.find(blocks[1].key)) == (not is_catalogue_lost)
    results: list[LoadedBlock | MissingBlock] = []
    ids = [block.id for block in blocks]
    assert tier.read([*ids, *ids], results.append, root=ROOT).wait(20)
    assert [isinstance(result, LoadedBlock) for result in results] == [True, False, True] * 2
    assert results[1] == MissingBlock(blocks[1].id, DiskFault.NOT_A_FILE)
    assert not tier.blocks.find(blocks[1].key)
    assert tier.usage().num_blocks == 2
    tier.close()


def test_put_replaces_a_foreign_file_and_drops_the_block_for_a_folder(foreign_file: tuple[Path, list]) -> None:
    directory, blocks = foreign_file
    is_folder = path_of(directory, blocks[1]).is_dir()
    delete_catalogue(directory)
    tier = open_tier(directory, first_pause_s=60)
    assert tier.flush(20).is_empty
    assert tier.put(blocks[1]) == Accepted()
    assert tier.flush(20).is_empty
    if is_folder:
        assert tier.usage().counters["dropped"] == {DropReason.UNWRITABLE: 1}
        assert path_of(directory, blocks[1]).is_dir()
    else:
        assert is_same(read_now(tier, blocks[1].id, root=ROOT), blocks[1])
        assert tier.usage().disk_bytes == real_bytes(directory)
    # Other blocks can be written.
    assert not tier.usage().paused_because
    assert tier.put(make_chain(1, seed=9)[0]) == Accepted()
    tier.close()


@pytest.mark.parametrize("name", ["lock", "catalogue.sqlite", "catalogue.sqlite-wal", "blocks", "tmp", "quarantine"])
def test_pipe_under_a_name_of_the_cache_is_refused(tmp_path: Path, name: str) -> None:
    write_blocks(tmp_path / "cache", make_chain(1))
    path = tmp_path / "cache" / name
    if path.exists():
        path.rename(tmp_path / "aside")
    os.mkfifo(path)
    for look in (open_tier, list_blocks, find_garbage, collect_garbage):
        with pytest.raises(ConfigError, match=rf"{name} is no (plain file|folder).*Remove it"):
            in_time(lambda look=look: look(tmp_path / "cache"))


def modes(directory: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in (directory, *directory.rglob("*"))}


def test_open_existing_folder_makes_it_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "cache"
    directory.mkdir()
    directory.chmod(0o755)
    write_blocks(directory, make_chain(2))
    assert modes(directory) == {0o700, 0o600}
    # A copy of a folder gets such modes.
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    open_tier(directory).close()
    opened = [directory, *(directory / name for name in ("blocks", "tmp", "quarantine", "lock", "catalogue.sqlite"))]
    assert all(stat.S_IMODE(path.stat().st_mode) in (0o700, 0o600) for path in opened)
    assert "Others on this machine" not in caplog.text


@pytest.mark.parametrize("step", ["refused", "without effect"])
def test_open_folder_that_cannot_be_made_private_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "cache"
    directory.mkdir()
    directory.chmod(0o755)
    files = FaultyFiles(before={"set_mode": fail(errno.EPERM)} if step == "refused" else {})
    monkeypatch.setattr(Filesystem, "set_mode", lambda *_: None)  # as on volumes without modes
    open_tier(directory, files=files).close()
    # Its content was created private.
    assert "Others on this machine" not in caplog.text
    (directory / "blocks").chmod(0o755)
    open_tier(directory, files=files).close()
    assert caplog.text.count("Others on this machine may read the disk cache") == 1
    assert str(directory / "blocks") in caplog.text


class FilesOfAnotherUser(Filesystem):
    """A filesystem on which entries called `name` belong to another user."""

    def __init__(self, name: str) -> None:
        self._name = name

    def status(self, place: int | Path) -> FileStatus:
        status = super().status(place)
        is_theirs = isinstance(place, Path) and place.name == self._name
        return replace(status, owner=os.geteuid() + 4711) if is_theirs else status


@pytest.mark.parametrize("name", ["cache", "lock", "blocks", "tmp", "quarantine", "catalogue.sqlite"])
def test_open_entry_of_another_user_is_refused_and_unchanged(tmp_path: Path, name: str) -> None:
    open_tier(tmp_path / "cache").close()
    before = sorted(path.name for path in (tmp_path / "cache").iterdir())
    with pytest.raises(ConfigError, match=rf"{name} belongs to another user \(user id {os.geteuid() + 4711}\)"):
        open_tier(tmp_path / "cache", files=FilesOfAnotherUser(name))
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == before
